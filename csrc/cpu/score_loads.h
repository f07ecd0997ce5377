// How score functions read captured tensors, and how their gradients are added up. Compiled once per instruction set.
#pragma once

#include <algorithm>

#include "score_math.h"
#include "score_program.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

constexpr int64_t kScoreVecs = kScoreLanes / kLanes;

// A value's numbers: step s, register v of its lanes.
struct ScoreView {
  float* data;
  int64_t step, vec;

  Vec load(int64_t s, int64_t v) const { return Whole::load(data + s * step + v * vec); }
  void store(int64_t s, int64_t v, Vec x) const { Whole::store(data + s * step + v * vec, x); }
  int32_t number(int64_t s, int64_t lane) const { return bit_cast<int32_t>(data[s * step + (vec ? lane : 0)]); }
};

struct ScoreMemories {
  float *block, *tile, *scores;
  int64_t ld;  // of scores

  // The value from step `first` of the tile on.
  ScoreView view(const ScorePlan& plan, int at, int64_t first) const {
    const ScoreRegister& r = plan.registers[at];
    float* data = (r.memory == ScoreMemory::block ? block : r.memory == ScoreMemory::tile ? tile : scores) + r.offset;
    switch (r.layout) {
      case ScoreLayout::one: return {data, 0, 0};
      case ScoreLayout::spread: return {data + first * kLanes, kLanes, 0};
      case ScoreLayout::chunk: return {data, kScoreLanes, kLanes};
      case ScoreLayout::tile: return {data + first * kScoreLanes, kScoreLanes, kLanes};
      case ScoreLayout::scores: return {data + first * ld, ld, kLanes};
      default: return {data, 0, kLanes};
    }
  }
};

// --- indices ------------------------------------------------------------------------------------------------------

inline int64_t element_of(const ScoreDimension& d, int32_t index) {
  const int64_t i = d.may_be_negative && index < 0 ? index + d.size : index;
  return std::max<int64_t>(0, std::min(i, d.size - 1));
}
inline VecI element_of(const ScoreDimension& d, VecI i) {  // of narrow loads
  const VecI last = VecI{} + int32_t(d.size - 1);
  if (d.may_be_negative) i = i < 0 ? i + int32_t(d.size) : i;
  i = i < last ? i : last;
  return i > 0 ? i : VecI{};
}

// Calls f(s, v, offsets of the lanes as int64 or, of narrow loads, int32).
template <class Views, class F>
inline void for_each_offset(const ScoreLoad& l, int64_t steps, Views&& view, F&& f) {
  ScoreView index[2];  // of the last two dimensions, which are all in most programs
  const int rank = int(l.dimensions.size());
  for (int i = 0; i < 2 && i < rank; ++i) index[i] = view(l.dimensions[rank - 1 - i].index);
  const auto view_of = [&](int d) { return d >= rank - 2 ? index[rank - 1 - d] : view(l.dimensions[d].index); };
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t v = 0; v < kScoreVecs; ++v)
      if (l.narrow) {
        VecI at{};
        for (int d = 0; d < rank; ++d)
          at += element_of(l.dimensions[d], as_int(view_of(d).load(s, v))) * int32_t(l.dimensions[d].stride);
        f(s, v, at);
      } else {
        int64_t at[kLanes] = {};
        for (int d = 0; d < rank; ++d)
          for (int i = 0; i < kLanes; ++i)
            at[i] += element_of(l.dimensions[d], view_of(d).number(s, v * kLanes + i)) * l.dimensions[d].stride;
        f(s, v, at);
      }
}

// --- elements -----------------------------------------------------------------------------------------------------

template <class F>
inline void with_score_type(ScoreType type, F&& f) {
  switch (type) {
    case ScoreType::f32:
    case ScoreType::i32: return f((float*)nullptr);  // the same bits
    case ScoreType::bf16: return f((BFloat16*)nullptr);
    case ScoreType::f16: return f((Half*)nullptr);
    case ScoreType::f64: return f((double*)nullptr);
    case ScoreType::i64: return f((int64_t*)nullptr);
    case ScoreType::boolean: return f((uint8_t*)nullptr);
  }
}

// The first `count` of the numbers f(i), as a value.
template <class T, class F> inline FK_INLINE Vec lanes_from(int count, F&& f) {
  if constexpr (std::is_same_v<T, double>) {
    Vec x{};
    for (int i = 0; i < count; ++i) x[i] = float(f(i));
    return x;
  } else if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, uint8_t>) {
    VecI x{};
    for (int i = 0; i < count; ++i) x[i] = sizeof(T) == 1 ? -int32_t(f(i) != 0) : int32_t(f(i));
    return as_float(x);
  } else {
    T x[kLanes] = {};
    for (int i = 0; i < count; ++i) x[i] = f(i);
    return Whole::load(x);
  }
}

// Not inlined, since it would be compiled many times.
template <class T, class Offset> __attribute__((noinline)) Vec elements_by_lane(const T* data, const Offset* at) {
  return lanes_from<T>(kLanes, [&](int i) FK_INLINE { return data[at[i]]; });
}
template <class T> inline Vec elements(const T* data, VecI at) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) return (Vec)_mm512_i32gather_ps((__m512i)at, data, 4);
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>) return (Vec)_mm256_i32gather_ps(data, (__m256i)at, 4);
#endif
  int32_t offsets[kLanes];
  std::memcpy(offsets, &at, sizeof(at));
  return elements_by_lane(data, offsets);
}
template <class T> inline Vec elements(const T* data, const int64_t* at) { return elements_by_lane(data, at); }

template <class Views>
inline void load_elements(const ScoreLoad& l, ScoreView to, int64_t steps, Views&& view) {
  with_score_type(l.type, [&](auto* type) {
    const auto* data = static_cast<const std::remove_pointer_t<decltype(type)>*>(l.data);
    if (l.is_empty) {
      for (int64_t s = 0; s < steps; ++s)
        for (int64_t v = 0; v < kScoreVecs; ++v) to.store(s, v, Vec{});
      return;
    }
    for_each_offset(l, steps, view, [&](int64_t s, int64_t v, const auto& at) FK_INLINE {
      to.store(s, v, elements(data, at));
    });
  });
}

// Loads whose offset is the same along diagonals: each element is read once. False, and nothing is done, if indices
// leave the tensor.
template <class Views>
inline bool load_diagonals(const ScoreLoad& l, ScoreView to, int64_t steps, int64_t lanes, Views&& view) {
  if (l.diagonal == 0) return false;
  int64_t first = (1 - steps) * l.diagonal;  // of the last step in lane 0
  for (const ScoreDimension& d : l.dimensions) {
    const int64_t i = view(d.index).number(0, 0), along = d.by_lane * (lanes - 1), down = d.by_step * (steps - 1);
    const int64_t least = i + std::min<int64_t>(along, 0) + std::min<int64_t>(down, 0);
    const int64_t most = i + std::max<int64_t>(along, 0) + std::max<int64_t>(down, 0);
    if (least < 0 || most >= d.size) return false;
    first += i * d.stride;
  }
  float numbers[kScoreSteps + kScoreLanes + kLanes] = {};
  with_score_type(l.type, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    const T* data = static_cast<const T*>(l.data) + first;
    for (int64_t u = 0; u < steps + lanes - 1; u += kLanes)
      Whole::store(numbers + u,
                   lanes_from<T>(int(std::min<int64_t>(kLanes, steps + lanes - 1 - u)),
                                 [&](int i) FK_INLINE { return data[(u + i) * l.diagonal]; }));
  });
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t v = 0; v < kScoreVecs; ++v) to.store(s, v, Whole::load(numbers + (steps - 1 - s) + v * kLanes));
  return true;
}

// Not inlined, since it would be compiled many times.
template <class T>
__attribute__((noinline)) Vec elements_apart(const T* row, const ScoreDimension& d, int64_t key, int64_t n) {
  return lanes_from<T>(
      int(n), [&](int i) FK_INLINE { return row[std::min(key + i, d.size - 1) * d.stride]; });
}

// Elements [key, key + n) of a row along the dimension `along`, n <= kLanes. Prefetches those of the next tile: rows
// are too far apart for the hardware prefetcher.
template <class T> inline FK_INLINE Vec row_elements(const T* row, const ScoreDimension& d,
                                                                         int64_t key, int64_t n) {
  if (d.stride == 1 && key + n <= d.size) {
    if (key + kScoreLanes < d.size) __builtin_prefetch(row + key + kScoreLanes, 0, 2);
    if constexpr (sizeof(T) <= 4 && !std::is_same_v<T, uint8_t>)
      return n == kLanes ? Whole::load(row + key) : Part{int(n)}.load(row + key);
  }
  return elements_apart(row, d, key, n);
}

// Loads along the keys, which lie in the lanes: row s is at offsets[s].
inline void load_rows(const ScoreLoad& l, const int64_t* offsets, ScoreView to, int64_t steps, int64_t key, int64_t n) {
  with_score_type(l.type, [&](auto* type) {
    const auto* data = static_cast<const std::remove_pointer_t<decltype(type)>*>(l.data);
    for (int64_t s = 0; s < steps; ++s)
      for (int64_t j = 0; j < n; j += kLanes)
        to.store(s, j / kLanes,
                 row_elements(data + offsets[s], l.dimensions[l.along], key + j, std::min<int64_t>(kLanes, n - j)));
  });
}

// The same where keys [key, key + n) are the steps.
inline void load_columns(const ScoreLoad& l, const int64_t* offsets, ScoreView to, int64_t key, int64_t n) {
  with_score_type(l.type, [&](auto* type) {
    const auto* data = static_cast<const std::remove_pointer_t<decltype(type)>*>(l.data);
    for (int64_t v = 0; v < kScoreVecs; ++v)
      for (int64_t j = 0; j < n; j += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, n - j);
        Vec block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          block[i] = row_elements(data + offsets[v * kLanes + i], l.dimensions[l.along], key + j, count);
        exchange<1>(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          if (i < count) to.store(j + i, v, block[i]);
      }
  });
}

// --- gradients ----------------------------------------------------------------------------------------------------

// Adds a tile's products to elements along the keys; row r is at offsets[r].
template <class Sum>
inline void add_rows(const ScoreDimension& d, const float* products, int64_t rows, int64_t key, int64_t n,
                     const int64_t* offsets, Sum* sums) {
  for (int64_t v = 0; v * kLanes < rows; ++v)
    for (int64_t j = 0; j < n; j += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, n - j), last = std::min<int64_t>(kLanes, rows - v * kLanes);
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i)
        block[i] = i < count ? Whole::load(products + (j + i) * kScoreLanes + v * kLanes) : Vec{};
      exchange<1>(block);
      for (int64_t i = 0; i < last; ++i) {
        float row[kLanes];
        Whole::store(row, block[i]);
        Sum* to = sums + offsets[v * kLanes + i];
        if (d.stride == 1 && key + j + count <= d.size)
          for (int64_t c = 0; c < count; ++c) to[key + j + c] += row[c];
        else
          for (int64_t c = 0; c < count; ++c) to[std::min(key + j + c, d.size - 1) * d.stride] += row[c];
      }
    }
}

// Adds a tile's products [n, kScoreLanes] to the elements of `sums` that a load reads. Products of one element are
// added in float within a row or a column of the tile, and in double beyond.
inline void add_elements(const ScorePlan& plan, const ScoreMemories& memory, const ScoreGradient& g,
                         const float* products, int64_t rows, int64_t key, int64_t n, void* all_sums) {
  const ScoreLoad& l = g.load;
  auto* sums = static_cast<double*>(all_sums);
  if (l.is_empty) return;
  const int64_t vecs = (rows + kLanes - 1) / kLanes;
  const auto view = [&](int at) { return memory.view(plan, at, 0); };
  bool by_rows = false, by_keys = false;
  for (const ScoreDimension& d : l.dimensions) {
    const ScoreLayout layout = plan.registers[d.index].layout;
    by_rows |= layout == ScoreLayout::lanes || layout == ScoreLayout::tile;
    by_keys |= layout == ScoreLayout::spread || layout == ScoreLayout::tile;
  }
  const auto offset = [&](int64_t s, int64_t lane, int without) {
    int64_t at = 0;
    for (int d = 0; d < int(l.dimensions.size()); ++d)
      if (d != without)
        at += element_of(l.dimensions[d], view(l.dimensions[d].index).number(s, lane)) * l.dimensions[d].stride;
    return at;
  };
  if (!by_keys) {
    float of_rows[kScoreLanes];
    for (int64_t v = 0; v < vecs; ++v) {
      Vec sum{};
      for (int64_t s = 0; s < n; ++s) sum += Whole::load(products + s * kScoreLanes + v * kLanes);
      Whole::store(of_rows + v * kLanes, sum);
    }
    const int64_t first = offset(0, 0, -1);
    for (int64_t r = 0; r < rows; ++r) sums[by_rows ? offset(0, r, -1) : first] += of_rows[r];
  } else if (!by_rows) {
    for (int64_t s = 0; s < n; ++s) {
      Vec acc[4] = {};
      for (int64_t v = 0; v < vecs; ++v) acc[v % 4] += Whole::load(products + s * kScoreLanes + v * kLanes);
      sums[offset(s, 0, -1)] += sum(acc);
    }
  } else if (l.along >= 0) {
    int64_t offsets[kScoreLanes];
    for (int64_t r = 0; r < rows; ++r) offsets[r] = offset(0, r, l.along);
    const ScoreDimension& d = l.dimensions[l.along];
    if (g.exclusive) add_rows(d, products, rows, key, n, offsets, static_cast<float*>(all_sums));
    else add_rows(d, products, rows, key, n, offsets, sums);
  } else {
    for_each_offset(l, n, view, [&](int64_t s, int64_t v, const auto& at) FK_INLINE {
      const float* from = products + s * kScoreLanes + v * kLanes;
      const int64_t last = std::min<int64_t>(kLanes, rows - v * kLanes);  // may be below 0
      std::remove_const_t<std::remove_reference_t<decltype(at[0])>> offsets[kLanes];
      std::memcpy(offsets, &at, sizeof(offsets));
      for (int64_t i = 0; i < last; ++i) sums[offsets[i]] += from[i];
    });
  }
}

}  // namespace FK_ISA
}  // namespace foundry
