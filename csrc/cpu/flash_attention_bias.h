// Tiles of a bias that is added to scores, with any memory type and strides.
#pragma once

#include "flash_attention_mask.h"
#include "flash_attention_tile_io.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

// Reads `n` elements with this stride as floats; zeros up to the next whole register.
template <class T>
inline void read_bias_row(const T* in, int64_t stride, int64_t n, float* out) {
  if (stride == 1) return widen(in, n, out, n);
  if (stride == 0) return std::fill(out, out + round_up(n, kLanes), Part{1}.load(in)[0]);
  int64_t j = 0;
  for (; j < n; j += kLanes) {
    T row[kLanes] = {};
    for (int64_t i = 0; i < kLanes && j + i < n; ++i) row[i] = in[(j + i) * stride];
    Whole::store(out + j, Whole::load(row));
  }
}

// Reads the bias of the block's rows and keys [key, key + n): one row per `ld` floats. May write up to the next whole
// register of keys. Prefetches the bias of the next keys, because rows of a bias are too far apart for the hardware
// prefetcher.
inline void read_bias_rows(const AttentionInputs& a, const AttentionSequence& s, int64_t head, const BlockRows& b,
                           int64_t key, int64_t n, float* out, int64_t ld) {
  const PairStrides& strides = a.bias_strides;
  with_type(a.bias_type, [&](auto* type) {
    const auto* data = static_cast<decltype(type)>(const_cast<void*>(a.bias)) + s.batch * strides.batch +
                       head * strides.head + key * strides.key;
    for (int64_t r = 0; r < b.count; ++r) {
      const int64_t row = b.row + r;
      const auto* from = data + row % a.group * strides.head + row / a.group * strides.query;
      if (strides.key == 1 && key + 2 * n <= s.k_len)
        for (int64_t i = n; i < 2 * n; i += int64_t(64 / sizeof(*from))) __builtin_prefetch(from + i, 0, 2);
      read_bias_row(from, strides.key, n, out + r * ld);
    }
  });
}

// Same in the layout of a tile of scores, [keys, kAttentionRows]. by_rows has kAttentionRows rows of kAttentionKeys.
inline void read_bias_tile(const AttentionInputs& a, const AttentionSequence& s, int64_t head, const BlockRows& b,
                           int64_t key, int64_t n, float* by_rows, float* out) {
  read_bias_rows(a, s, head, b, key, n, by_rows, kAttentionKeys);
  const int64_t rows = b.vecs * kLanes;
  std::fill(by_rows + b.count * kAttentionKeys, by_rows + rows * kAttentionKeys, 0.0f);
  transpose(by_rows, kAttentionKeys, rows, round_up(n, kLanes), out, kAttentionRows);
}

// Writes the gradients of a row's bias for keys [key, key + n). `offset` is that of the row's key 0.
inline void write_bias_row(const AttentionBackward& a, int64_t offset, int64_t key, const float* row, int64_t n) {
  const int64_t stride = a.dbias_strides.key;
  with_type(a.bias_type, [&](auto* type) {
    auto* out = static_cast<decltype(type)>(a.dbias) + offset + key * stride;
    if (stride == 1) return narrow(row, n, out);
    for (int64_t j = 0; j < n; ++j) Part{1}.store(out + j * stride, splat(row[j]));
  });
}

// Writes a tile's gradients, [keys, kAttentionRows], if each pair has its own element.
inline void write_bias_tile(const AttentionBackward& a, const AttentionSequence& s, int64_t head, const BlockRows& b,
                            int64_t key, int64_t n, const float* tile, float* by_rows) {
  const PairStrides& strides = a.dbias_strides;
  transpose(tile, kAttentionRows, round_up(n, kLanes), b.vecs * kLanes, by_rows, kAttentionKeys);
  for (int64_t r = 0; r < b.count; ++r) {
    const int64_t row = b.row + r;
    const int64_t at = (head + row % a.group) * strides.head + row / a.group * strides.query;
    write_bias_row(a, s.batch * strides.batch + at, key, by_rows + r * kAttentionKeys, n);
  }
}

}  // namespace FK_ISA
}  // namespace foundry
