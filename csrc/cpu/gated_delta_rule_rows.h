// Rows of tiles of the gated delta rule: reading, writing, sums.
#pragma once

#include <cmath>

#include "flash_attention_tile_io.h"
#include "gated_delta_rule.h"

namespace foundry {
namespace FK_ISA {

constexpr float kL2NormEps = 1e-6f;

// Terms that a matmul of the gated delta rule sums one after another. It then adds these sums: the rounding errors of
// one long sum would be larger than those of the recurrence, whose sums PyTorch splits too.
constexpr int64_t kSumTerms = 32;

inline void multiply_in_parts(int64_t rows, int64_t vecs, Factor<float> a, const float* b, int64_t ldb, int64_t depth,
                              float* c, int64_t ldc, Start start, const float* factor = nullptr) {
  for (int64_t k = 0; k == 0 || k < depth; k += kSumTerms)
    multiply<float>(rows, vecs, {a.data + k * a.step, a.row, a.step}, b + k * ldb, ldb, std::min(kSumTerms, depth - k),
                    c, ldc, k > 0 ? Start::add : start, factor);
}

// C [rows, vecs] = A^T B for A [depth, rows], likewise, from the last rows of A and B to the first, where decays make
// the first ones the largest: what is added last is not rounded with the others.
inline void multiply_backward(int64_t rows, int64_t vecs, const float* a, int64_t lda, const float* b, int64_t ldb,
                              int64_t depth, float* c, int64_t ldc, Start start, const float* factor = nullptr) {
  multiply_in_parts(rows, vecs, {a + (depth - 1) * lda, 1, -lda}, b + (depth - 1) * ldb, -ldb, depth, c, ldc, start,
                    factor);
}

// The sum of the products; both rows have `width` floats.
inline float dot(const float* a, const float* b, int64_t width) {
  Vec acc[4] = {};
  for_each_vec(width, [&](int64_t i, auto at, int k) FK_INLINE { acc[k] += at.load(a + i) * at.load(b + i); });
  return sum(acc);
}

inline void scale_row(float* x, int64_t width, float by) {
  for_each_vec(width,
               [&](int64_t i, auto at, int) FK_INLINE { at.store(x + i, at.load(x + i) * by); });
}

// y += x * by
inline void add_scaled(float* y, const float* x, int64_t width, float by) {
  for_each_vec(width, [&](int64_t i, auto at, int) FK_INLINE { at.store(y + i, at.load(y + i) + at.load(x + i) * by); });
}

// y = x * by
inline void scaled_copy(float* y, const float* x, int64_t width, float by) {
  for_each_vec(width,
               [&](int64_t i, auto at, int) FK_INLINE { at.store(y + i, at.load(x + i) * by); });
}

// Rows [0, n) of memory, as floats; zeros up to `rows` and `ld`.
inline void read_rows(Dtype type, const void* data, int64_t offset, int64_t stride, int64_t n, int64_t width,
                      float* out, int64_t rows, int64_t ld) {
  with_type(type, [&](auto* t) {
    const auto* in = static_cast<decltype(t)>(const_cast<void*>(data)) + offset;
    for (int64_t i = 0; i < n; ++i) widen(in + i * stride, width, out + i * ld, ld);
  });
  std::fill(out + n * ld, out + rows * ld, 0.0f);
}

inline void write_rows(Dtype type, const float* in, int64_t ld, int64_t n, int64_t width, void* data, int64_t offset,
                       int64_t stride) {
  with_type(type, [&](auto* t) {
    auto* out = static_cast<decltype(t)>(data) + offset;
    for (int64_t i = 0; i < n; ++i) narrow(in + i * ld, width, out + i * stride);
  });
}

inline float read_number(const DeltaRuleNumbers& x, int64_t offset) {
  float found = 0.0f;
  with_type(x.type,
            [&](auto* t) { found = Part{1}.load(static_cast<decltype(t)>(const_cast<void*>(x.data)) + offset)[0]; });
  return found;
}

inline int64_t offset_of(const HeadStrides& s, int64_t batch, int64_t head, int64_t token) {
  return batch * s.batch + head * s.head + token * s.token;
}

// Divides a row by its length; returns what it was multiplied by.
inline float l2_normalize(float* x, int64_t width) {
  const float by = 1.0f / std::sqrt(dot(x, x, width) + kL2NormEps);
  scale_row(x, width, by);
  return by;
}

}  // namespace FK_ISA
}  // namespace foundry
