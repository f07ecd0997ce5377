// Shared by the kernels of rope.cu and qk_norm_rope.cu.
//
// A head of a token is cut into units of two reads of kVec neighbouring values (16 bytes if everything is aligned to
// that, else one value). The units of the rotated dimensions hold kVec whole pairs: one read of each half, or two
// adjacent reads if interleaved. The units of the other dimensions, which are copied, follow.
#pragma once

#include "dispatch.cuh"
#include "rope.h"

namespace foundry {
namespace cuda {

constexpr int kRopeBlock = 128;  // threads of a block

// kVec values of a type known at run time, in float, with at most 16 bytes per access.
template <class T, int kVec>
__device__ __forceinline__ void load_typed(const void* p, int64_t offset, float (&out)[kVec]) {
  constexpr int kMost = 16 / sizeof(T), kCount = kVec < kMost ? kVec : kMost;
#pragma unroll
  for (int i = 0; i < kVec; i += kCount) {
    const Pack<T, kCount> raw = load<T, kCount>(static_cast<const T*>(p) + offset + i);
#pragma unroll
    for (int j = 0; j < kCount; ++j) out[i + j] = to_float(raw.values[j]);
  }
}

template <int kVec>
__device__ __forceinline__ void load_floats(const void* p, Dtype type, int64_t offset, float (&out)[kVec]) {
  if (type == Dtype::f32) return load_typed<float, kVec>(p, offset, out);
  if (type == Dtype::bf16) return load_typed<__nv_bfloat16, kVec>(p, offset, out);
  load_typed<__half, kVec>(p, offset, out);
}

// Which columns a unit holds.
template <int kVec, bool kInterleaved>
struct Units {
  int64_t half, width;

  __device__ int64_t rotated_count() const { return half / kVec; }
  __device__ int64_t count() const { return rotated_count() + (width - 2 * half + 2 * kVec - 1) / (2 * kVec); }
  __device__ bool rotates(int64_t unit) const { return unit < rotated_count(); }
  __device__ int64_t first(int64_t unit) const {
    if (!rotates(unit)) return 2 * half + (unit - rotated_count()) * 2 * kVec;
    return kInterleaved ? 2 * unit * kVec : unit * kVec;
  }
  __device__ int64_t second(int64_t unit) const {
    return rotates(unit) && !kInterleaved ? half + unit * kVec : first(unit) + kVec;
  }
  __device__ bool has_second(int64_t unit) const { return second(unit) < width; }
};

// A unit as it lies in memory.
template <class X, int kVec>
struct Raw {
  Pack<X, kVec> reads[2];
};

template <class X, int kVec, bool kInterleaved>
__device__ __forceinline__ Raw<X, kVec> load_unit(const X* x, const Units<kVec, kInterleaved>& units, int64_t unit) {
  Raw<X, kVec> out{};
  out.reads[0] = load<X, kVec>(x + units.first(unit));
  if (units.has_second(unit)) out.reads[1] = load<X, kVec>(x + units.second(unit));
  return out;
}

template <class X, int kVec>
__device__ __forceinline__ void widen(const Raw<X, kVec>& raw, float (&out)[2 * kVec]) {
#pragma unroll
  for (int i = 0; i < 2 * kVec; ++i) out[i] = to_float(raw.reads[i / kVec].values[i % kVec]);
}

template <class X, int kVec, bool kInterleaved>
__device__ __forceinline__ void store_unit(X* y, const Units<kVec, kInterleaved>& units, int64_t unit,
                                           const float (&v)[2 * kVec]) {
  Raw<X, kVec> out;
#pragma unroll
  for (int i = 0; i < 2 * kVec; ++i) out.reads[i / kVec].values[i % kVec] = from_float<X>(v[i]);
  store(y + units.first(unit), out.reads[0]);
  if (units.has_second(unit)) store(y + units.second(unit), out.reads[1]);
}

// cos and sin of one unit of one token.
template <int kVec>
struct Angles {
  float cos[kVec], sin[kVec];
};

template <int kVec>
__device__ __forceinline__ Angles<kVec> load_angles(const RopeTables& tables, int64_t b, int64_t row, int64_t unit) {
  Angles<kVec> out;
  load_floats<kVec>(tables.cos, tables.type, tables.cos_offset(b, row) + unit * kVec, out.cos);
  load_floats<kVec>(tables.sin, tables.type, tables.sin_offset(b, row) + unit * kVec, out.sin);
  return out;
}

template <int kVec, bool kInterleaved>
__device__ __forceinline__ void rotate(float (&v)[2 * kVec], const Angles<kVec>& angles, float sign) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    float& one = v[kInterleaved ? 2 * i : i];
    float& two = v[kInterleaved ? 2 * i + 1 : kVec + i];
    const float cos = angles.cos[i], sin = angles.sin[i] * sign, rotated = one * cos - two * sin;
    two = two * cos + one * sin;
    one = rotated;
  }
}

template <int kCount>
__device__ __forceinline__ void fill_nan(float (&v)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = nanf("");
}

// Head number `head` among those of q and then k. Becomes its number within q or k.
template <class Heads>
__device__ __forceinline__ const Heads& heads_of(const Heads (&heads)[2], int64_t& head) {
  if (head < heads[0].n_heads) return heads[0];
  head -= heads[0].n_heads;
  return heads[1];
}

// On the host: which template a call needs.

inline bool aligned(const void* p, Dtype type, const RopeStrides& strides) {
  return aligned(p, type, {strides.batch, strides.head, strides.token});
}

// Whether the rotated and the other dimensions are multiples of 16-byte reads and the tables are aligned to that.
inline bool rope_vectors(const RopeTables& tables, int64_t width, Dtype type) {
  const int64_t count = 16 / size_of(type);
  return tables.half % count == 0 && width % count == 0 &&
         aligned(tables.cos, tables.type, {tables.cos_batch_stride, tables.cos_stride}) &&
         aligned(tables.sin, tables.type, {tables.sin_batch_stride, tables.sin_stride});
}

// Calls f(Tag<X>, values per read, interleaved).
template <class F>
cudaError_t with_rope_reads(Dtype type, bool vectors, bool interleaved, F&& f) {
  return with_type(type, [&](auto x) {
    constexpr int kMost = 16 / sizeof(FK_TYPE(x));
    if (vectors)
      return interleaved ? f(x, Constant<kMost>{}, Constant<true>{}) : f(x, Constant<kMost>{}, Constant<false>{});
    return interleaved ? f(x, Constant<1>{}, Constant<true>{}) : f(x, Constant<1>{}, Constant<false>{});
  });
}

inline int64_t rope_units(const RopeTables& tables, int64_t width, int vec) {
  return tables.half / vec + (width - 2 * tables.half + 2 * vec - 1) / (2 * vec);
}

}  // namespace cuda
}  // namespace foundry
