// Attention's forward pass of a few rows, as in decoding: reading the keys and values is all the work, so they are used
// straight from memory, with the width of a head along the lanes. Compiled once per instruction set (see isa.h).
#include "flash_attention_rows.h"

namespace foundry {
namespace FK_ISA {

namespace {

constexpr int kSums = kLanes > 8 ? 16 : 8;  // registers that sums are formed in
constexpr int64_t kAhead = 8;               // keys that are fetched before they are needed

// Lane i is the sum of v[i]'s lanes.
template <int kStep = 1>
inline FK_INLINE Vec sums_of(Vec* v) {
  if constexpr (kStep < kLanes) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 2 * kStep)
      v[i] = exchanged<kStep, false>(v[i], v[i + kStep], lanes) + exchanged<kStep, true>(v[i], v[i + kStep], lanes);
    return sums_of<2 * kStep>(v);
  } else {
    return v[0];
  }
}

// scores[row][key] = query . key for kRows rows, `n` keys; `scores` has room for kSums more.
template <int kRows, class T>
void multiply_keys(const float* queries, int64_t width, const T* keys, int64_t stride, int64_t n, float* scores,
                   int64_t ld) {
  constexpr int kKeys = kSums / kRows;
  const int64_t padded = round_up(width, kAttentionPad);
  for (int64_t key = 0; key < n; key += kKeys) {
    const T* rows[kKeys];
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) rows[j] = keys + std::min(key + j, n - 1) * stride;
    Vec acc[kSums] = {};
    const auto step = [&](int64_t i, auto at) FK_INLINE {
      Vec k[kKeys];
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        k[j] = at.load(rows[j] + i);
        __builtin_prefetch(rows[j] + i + kAhead * stride);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec q = Whole::load(queries + r * padded + i);
#pragma GCC unroll 16
        for (int j = 0; j < kKeys; ++j) acc[r * kKeys + j] += q * k[j];
      }
    };
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) step(i, Whole{});
    if (i < width) step(i, Part{int(width - i)});
    float found[kSums];
#pragma GCC unroll 16
    for (int g = 0; g < kSums; g += kLanes) Whole::store(found + g, sums_of(acc + g));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * ld + key, found + r * kKeys, kKeys * sizeof(float));
  }
}

// out[row] = out[row] * scale[row] + sum over keys of weights[row][key] values[key], for kVecs registers.
template <int kRows, int kVecs, class Access, class T>
inline void add_values(const float* weights, int64_t ld, const T* values, int64_t stride, int64_t n, const float* scale,
                       float* out, int64_t ld_out, Access at) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) acc[r][v] = Whole::load(out + r * ld_out + v * kLanes) * scale[r];
  for (int64_t key = 0; key < n; ++key) {
    Vec right[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      right[v] = at.load(values + key * stride + v * kLanes);
      __builtin_prefetch(values + (key + kAhead) * stride + v * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec left = splat(weights[r * ld + key]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) acc[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) Whole::store(out + r * ld_out + v * kLanes, acc[r][v]);
}

// The same for columns [first, width), kVecs registers at a time while there are so many.
template <int kRows, int kVecs, class T>
void add_all_values(const float* weights, int64_t ld, const T* values, int64_t stride, int64_t n, const float* scale,
                    float* out, int64_t ld_out, int64_t first, int64_t width) {
  int64_t i = first;
  for (; i + kVecs * kLanes <= width; i += kVecs * kLanes)
    add_values<kRows, kVecs>(weights, ld, values + i, stride, n, scale, out + i, ld_out, Whole{});
  if constexpr (kVecs > 1) add_all_values<kRows, kVecs / 2>(weights, ld, values, stride, n, scale, out, ld_out, i, width);
  else if (i < width)
    add_values<kRows, 1>(weights, ld, values + i, stride, n, scale, out + i, ld_out, Part{int(width - i)});
}

struct FewRows : BlockRows {
  RowSums sums[kAttentionFewRows];
  float scale[kAttentionFewRows];
};

// A row's scores of keys [key, key + n) become weights, as softmax_tile of the other kernel has it.
void softmax_row(const AttentionForward& a, FewRows& b, int row, float* scores, int64_t n, int32_t key) {
  const Vec place = splat(float(b.place[row] - key)), first = splat(float(b.first[row] - key)),
            last = splat(float(b.last[row] - key));
  const auto each = [&](auto&& f) FK_INLINE {
    Vec index;
    for (int i = 0; i < kLanes; ++i) index[i] = float(i);
    for (int64_t j = 0; j < n; j += kLanes, index += float(kLanes)) f(scores + j, index);
  };
  const Vec end = splat(float(n));
  Vec top = splat(kNone);
  each([&](float* p, Vec index) FK_INLINE {
    Vec s = capped(a, Whole::load(p));
    if (a.slopes) s -= b.slope[row] * (index > place ? index - place : place - index);
    s = (index >= first) & (index <= last) & (index < end) ? s : splat(kNone);
    Whole::store(p, s);
    top = larger(s, top);
  });
  RowSums& r = b.sums[row];
  float found[kLanes];
  Whole::store(found, top);
  const float now = std::max(r.max, *std::max_element(found, found + kLanes)), at = now == kNone ? 0.0f : now;
  Vec sum[4] = {}, entropy[4] = {};
  each([&](float* p, Vec) FK_INLINE {
    const Vec t = Whole::load(p) - at, weight = exp2(t * kLog2E);
    sum[0] += weight;
    entropy[0] += weight > Vec{} ? weight * t : Vec{};
    Whole::store(p, weight);
  });
  float unused;
  r.merge({now, foundry::FK_ISA::sum(sum), foundry::FK_ISA::sum(entropy)}, b.scale[row], unused);
}

template <int kRows, class T>
void attend(const AttentionForward& a, const AttentionTask& task, FewRows& b, const float* queries, float* out,
            float* scores) {
  constexpr int kVecs = std::min(8, kSums / kRows);
  constexpr int64_t ld = kAttentionFewKeys + kSums;
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t value_width = round_up(a.value_width, kAttentionPad);
  const T* k = static_cast<const T*>(a.k) + key_offset(a.k_strides, s, task.kv_head, 0);
  const T* v = static_cast<const T*>(a.v) + key_offset(a.v_strides, s, task.kv_head, 0);
  for (int64_t tile = b.key_begin; tile < b.key_end; tile += kAttentionFewKeys) {
    const int64_t n = std::min<int64_t>(kAttentionFewKeys, b.key_end - tile);
    multiply_keys<kRows>(queries, a.width, k + tile * a.k_strides.token, a.k_strides.token, n, scores, ld);
    for (int r = 0; r < b.count; ++r) softmax_row(a, b, r, scores + r * ld, n, int32_t(tile - task.key_begin));
    for (int r = int(b.count); r < kRows; ++r) std::fill(scores + r * ld, scores + r * ld + n, 0.0f);
    add_all_values<kRows, kVecs>(scores, ld, v + tile * a.v_strides.token, a.v_strides.token, n, b.scale, out,
                                 value_width, 0, a.value_width);
  }
}

}  // namespace

void attention_few_rows(const AttentionForward& a, const AttentionTask& task, float* scratch) {
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t head = task.kv_head * a.group;
  const int64_t width = round_up(a.width, kAttentionPad), value_width = round_up(a.value_width, kAttentionPad);
  float *queries = scratch, *out = queries + kAttentionFewRows * width, *scores = out + kAttentionFewRows * value_width;
  FewRows b;
  b.set(a, s, task.sequence, head, task.row_begin, task.row_end, task.key_begin, task.key_end);
  std::fill(queries, scores, 0.0f);
  std::fill(b.scale, b.scale + kAttentionFewRows, 0.0f);
  std::fill(b.sums, b.sums + kAttentionFewRows, RowSums{kNone, 0.0f, 0.0f});
  with_type(a.type, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for (int64_t i = 0; i < b.count; ++i)
      widen(static_cast<const T*>(a.q) + row_offset(a.q_strides, s, head, a.group, b.row + i), a.width,
            queries + i * width, width);
    if (b.count > 4) attend<8, T>(a, task, b, queries, out, scores);
    else if (b.count > 2) attend<4, T>(a, task, b, queries, out, scores);
    else if (b.count > 1) attend<2, T>(a, task, b, queries, out, scores);
    else attend<1, T>(a, task, b, queries, out, scores);
  });
  for (int64_t i = 0; i < b.count; ++i) write_row(a, task, b.row + i, b.sums[i], out + i * value_width);
}

}  // namespace FK_ISA
}  // namespace foundry
