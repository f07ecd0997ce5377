// RoPE forward and backward, alone and behind RMSNorm of each head.
//
// A head of a token is cut into units of two reads of kVec neighbouring values (16 bytes where everything is aligned to
// that, else one value). The units of the part that turns hold kVec whole pairs: a read of each half, or two adjacent
// ones if interleaved. The rest, which is copied, follows.
//
// Without a norm a thread keeps cos and sin of its units and goes through the heads of q and k. With one, a group of
// kThreads lanes of a warp takes a head; the heads of a token follow each other, so that its row of the tables comes
// from the nearest cache after the first. Backward blocks stay and take head after head; dW is summed as RMSNorm's: by
// each block over what it took, and then over the blocks by a second kernel, always in the same order.
#include "rope.h"

#include <initializer_list>

#include "launch.cuh"

namespace foundry {
namespace cuda {
namespace {

constexpr int kBlock = 128;
constexpr int64_t kMaxBlocks = 0x7FFFFFFF;

// kVec values of a type known at run time, in float, at most 16 bytes an access.
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

  __device__ int64_t turning() const { return half / kVec; }
  __device__ int64_t count() const { return turning() + (width - 2 * half + 2 * kVec - 1) / (2 * kVec); }
  __device__ bool turns(int64_t unit) const { return unit < turning(); }
  __device__ int64_t first(int64_t unit) const {
    if (!turns(unit)) return 2 * half + (unit - turning()) * 2 * kVec;
    return kInterleaved ? 2 * unit * kVec : unit * kVec;
  }
  __device__ int64_t second(int64_t unit) const {
    return turns(unit) && !kInterleaved ? half + unit * kVec : first(unit) + kVec;
  }
  __device__ bool has_second(int64_t unit) const { return second(unit) < width; }
};

// What a unit holds, as it lies in memory.
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
__device__ __forceinline__ void turn(float (&v)[2 * kVec], const Angles<kVec>& angles, float sign) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    float& one = v[kInterleaved ? 2 * i : i];
    float& two = v[kInterleaved ? 2 * i + 1 : kVec + i];
    const float cos = angles.cos[i], sin = angles.sin[i] * sign, turned = one * cos - two * sin;
    two = two * cos + one * sin;
    one = turned;
  }
}

template <int kCount>
__device__ __forceinline__ void fill_nan(float (&v)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = nanf("");
}

// The heads of q and then of k, counted through.
template <class Heads>
__device__ __forceinline__ const Heads& heads_of(const Heads (&heads)[2], int64_t& head) {
  if (head < heads[0].n_heads) return heads[0];
  head -= heads[0].n_heads;
  return heads[1];
}

// Threads: x goes through units, y through tokens and `slots` heads of each at a time.
template <class X, int kVec, bool kInterleaved>
__global__ void __launch_bounds__(kBlock) rope_kernel(const Rope a, int slots) {
  const Units<kVec, kInterleaved> units{a.tables.half, a.width};
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (blockDim.y / slots) + threadIdx.y / slots;
  if (token >= a.all_tokens) return;
  const int64_t b = token / a.n_tokens, t = token % a.n_tokens, row = a.tables.row(b, t);
  const bool has_row = a.tables.has_row(row);
  const int64_t all_heads = a.heads[0].n_heads + a.heads[1].n_heads;
  const float sign = a.inverse ? -1.f : 1.f;
  for (int64_t unit = threadIdx.x; unit < units.count(); unit += blockDim.x) {
    Angles<kVec> angles{};
    if (has_row && units.turns(unit)) angles = load_angles<kVec>(a.tables, b, row, unit);
    for (int64_t i = threadIdx.y % slots; i < all_heads; i += slots) {
      int64_t h = i;
      const RopeHeads& heads = heads_of(a.heads, h);
      const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
      X* y = static_cast<X*>(heads.y) + heads.y_strides.offset(b, h, t);
      float v[2 * kVec];
      widen(load_unit(x, units, unit), v);
      if (units.turns(unit)) turn<kVec, kInterleaved>(v, angles, sign);
      if (!has_row) fill_nan(v);
      store_unit(y, units, unit, v);
    }
  }
}

// Units that a lane keeps in registers; a head of more is read again for the rest.
template <int kVec>
constexpr int kHeld = kVec == 1 ? 4 : 1;

// weight + offset of a unit; 1 where there is no weight.
template <int kVec, bool kInterleaved>
__device__ __forceinline__ void load_weight(const void* weight, Dtype type, float offset,
                                            const Units<kVec, kInterleaved>& units, int64_t unit,
                                            float (&out)[2 * kVec]) {
#pragma unroll
  for (int i = 0; i < 2 * kVec; ++i) out[i] = 1.f;
  if (weight == nullptr) return;
#pragma unroll
  for (int read = 0; read < 2; ++read) {
    if (read == 1 && !units.has_second(unit)) return;
    float values[kVec];
    load_floats<kVec>(weight, type, read == 0 ? units.first(unit) : units.second(unit), values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[read * kVec + i] = values[i] + offset;
  }
}

template <class X, int kVec, int kThreads, bool kInterleaved>
__global__ void __launch_bounds__(kBlock) norm_forward_kernel(const QkNormRopeForward a) {
  const Units<kVec, kInterleaved> units{a.tables.half, a.width};
  const int lane = threadIdx.x % kThreads;
  const int64_t all_heads = a.heads[0].n_heads + a.heads[1].n_heads, n_rows = a.all_tokens * all_heads;
  const int64_t wanted = static_cast<int64_t>(blockIdx.x) * (kBlock / kThreads) + threadIdx.x / kThreads;
  // A group past the last head repeats it, so that all lanes meet at every shuffle; it writes nothing.
  const bool live = wanted < n_rows;
  const int64_t at = live ? wanted : n_rows - 1, token = at / all_heads;
  int64_t h = at % all_heads;
  const QkNormRopeHeads& heads = heads_of(a.heads, h);
  const int64_t b = token / a.n_tokens, t = token % a.n_tokens, row = a.tables.row(b, t);
  const bool has_row = a.tables.has_row(row);
  const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
  X* y = static_cast<X*>(heads.y) + heads.y_strides.offset(b, h, t);

  float squares = 0.f;
  const auto add_squares = [&](const Raw<X, kVec>& raw) {
    float v[2 * kVec];
    widen(raw, v);
#pragma unroll
    for (int i = 0; i < 2 * kVec; ++i) squares += v[i] * v[i];
  };
  const auto unit_of = [&](int j) { return static_cast<int64_t>(j) * kThreads + lane; };
  Raw<X, kVec> held[kHeld<kVec>];
#pragma unroll
  for (int j = 0; j < kHeld<kVec>; ++j)  // all reads are issued before any is used
    if (unit_of(j) < units.count()) held[j] = load_unit(x, units, unit_of(j));
#pragma unroll
  for (int j = 0; j < kHeld<kVec>; ++j)
    if (unit_of(j) < units.count()) add_squares(held[j]);
  for (int64_t unit = unit_of(kHeld<kVec>); unit < units.count(); unit += kThreads)
    add_squares(load_unit(x, units, unit));

  const float rstd = 1.f / sqrtf(warp_sum<kThreads>(squares) / static_cast<float>(a.width) + a.eps);
  if (!live) return;
  if (heads.rstd && lane == 0) heads.rstd[(b * heads.n_heads + h) * a.n_tokens + t] = rstd;

  const auto write = [&](int64_t unit, const Raw<X, kVec>& raw) {
    float v[2 * kVec], w[2 * kVec];
    widen(raw, v);
    load_weight(heads.weight, heads.weight_type, a.weight_offset, units, unit, w);
#pragma unroll
    for (int i = 0; i < 2 * kVec; ++i) {
      v[i] *= rstd;
      if (a.round_before_weight) v[i] = to_float(from_float<X>(v[i]));
      v[i] *= w[i];
    }
    if (has_row && units.turns(unit)) turn<kVec, kInterleaved>(v, load_angles<kVec>(a.tables, b, row, unit), 1.f);
    if (!has_row) fill_nan(v);
    store_unit(y, units, unit, v);
  };
#pragma unroll
  for (int j = 0; j < kHeld<kVec>; ++j)
    if (unit_of(j) < units.count()) write(unit_of(j), held[j]);
  for (int64_t unit = unit_of(kHeld<kVec>); unit < units.count(); unit += kThreads)
    write(unit, load_unit(x, units, unit));
}

// blockIdx.y: q or k. A block whose heads have more units than are held is one group.
template <class X, int kVec, int kThreads, bool kInterleaved>
__global__ void __launch_bounds__(kBlock, 1) norm_backward_kernel(const QkNormRopeBackward a) {
  constexpr int kUnits = kHeld<kVec>;
  const QkNormRopeGradients& heads = a.heads[blockIdx.y];
  if (static_cast<int>(blockIdx.x) >= heads.n_blocks) return;
  const Units<kVec, kInterleaved> units{a.tables.half, a.width};
  const int lane = threadIdx.x % kThreads, group = threadIdx.x / kThreads, groups = blockDim.x / kThreads;
  const int64_t n_rows = a.all_tokens * heads.n_heads;
  const auto unit_of = [&](int j) { return static_cast<int64_t>(j) * kThreads + lane; };
  float* partial = heads.dw_partial ? heads.dw_partial + static_cast<int64_t>(blockIdx.x) * a.width : nullptr;
  float dw[kUnits][2 * kVec] = {};

  int turns = 0;
  const int64_t stride = static_cast<int64_t>(heads.n_blocks) * groups;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * groups; begin < n_rows; begin += stride, ++turns) {
    const bool live = begin + group < n_rows;
    const int64_t at = live ? begin + group : n_rows - 1;  // as in the forward pass
    const int64_t token = at / heads.n_heads, h = at % heads.n_heads;
    const int64_t b = token / a.n_tokens, t = token % a.n_tokens, row = a.tables.row(b, t);
    const bool has_row = a.tables.has_row(row);
    const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
    const X* dy = static_cast<const X*>(heads.dy) + heads.dy_strides.offset(b, h, t);
    X* dx = static_cast<X*>(heads.dx) + heads.dx_strides.offset(b, h, t);
    const float rstd = heads.rstd[(b * heads.n_heads + h) * a.n_tokens + t];

    // g = the gradient turned back, times the weight, and the sum of g * x * rstd; what the unit adds to dW goes to
    // `add`.
    float products = 0.f;
    const auto gather = [&](int64_t unit, const Raw<X, kVec>& raw_x, const Raw<X, kVec>& raw_dy, float (&g)[2 * kVec],
                            auto&& add) {
      float v[2 * kVec], w[2 * kVec];
      widen(raw_x, v);
      widen(raw_dy, g);
      load_weight(heads.weight, heads.weight_type, a.weight_offset, units, unit, w);
      if (has_row && units.turns(unit)) turn<kVec, kInterleaved>(g, load_angles<kVec>(a.tables, b, row, unit), -1.f);
      if (!has_row) fill_nan(g);
#pragma unroll
      for (int i = 0; i < 2 * kVec; ++i) {
        const float n = v[i] * rstd;
        add(i, g[i] * (a.round_before_weight ? to_float(from_float<X>(n)) : n));
        g[i] *= w[i];
        products += g[i] * n;
      }
    };
    Raw<X, kVec> held[kUnits];
    float held_g[kUnits][2 * kVec];
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
      if (unit_of(j) < units.count()) {
        held[j] = load_unit(x, units, unit_of(j));
        gather(unit_of(j), held[j], load_unit(dy, units, unit_of(j)), held_g[j],
               [&](int i, float v) { dw[j][i] += live ? v : 0.f; });
      }
    for (int64_t unit = unit_of(kUnits); unit < units.count(); unit += kThreads) {  // only where a block is one group
      float g[2 * kVec];
      gather(unit, load_unit(x, units, unit), load_unit(dy, units, unit), g, [&](int i, float v) {
        const int64_t col = (i < kVec ? units.first(unit) : units.second(unit)) + i % kVec;
        if (partial && col < a.width) partial[col] = turns == 0 ? v : partial[col] + v;
      });
    }

    const float mean = warp_sum<kThreads>(products) / static_cast<float>(a.width);
    if (!heads.dx || !live) continue;
    const auto write = [&](int64_t unit, const Raw<X, kVec>& raw_x, float (&g)[2 * kVec]) {
      float v[2 * kVec];
      widen(raw_x, v);
#pragma unroll
      for (int i = 0; i < 2 * kVec; ++i) v[i] = rstd * (g[i] - v[i] * rstd * mean);
      store_unit(dx, units, unit, v);
    };
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
      if (unit_of(j) < units.count()) write(unit_of(j), held[j], held_g[j]);
    for (int64_t unit = unit_of(kUnits); unit < units.count(); unit += kThreads) {
      const Raw<X, kVec> raw = load_unit(x, units, unit);
      float g[2 * kVec];
      gather(unit, raw, load_unit(dy, units, unit), g, [](int, float) {});
      write(unit, raw, g);
    }
  }
  if (!partial) return;

  // The groups of the block add up in shared memory, one after another.
  constexpr int kSums = kThreads * kUnits * 2 * kVec;
  FK_SHARED(float, sums, kSums);
  for (int turn_of = 0; turn_of < groups; ++turn_of) {
    if (group == turn_of)
#pragma unroll
      for (int j = 0; j < kUnits; ++j)
#pragma unroll
        for (int i = 0; i < 2 * kVec; ++i) {
          const int at = static_cast<int>(unit_of(j)) * 2 * kVec + i;
          sums[at] = turn_of == 0 ? dw[j][i] : sums[at] + dw[j][i];
        }
    __syncthreads();
  }
  for (int at = threadIdx.x; at < kSums; at += blockDim.x) {
    const int64_t unit = at / (2 * kVec);
    const int i = at % (2 * kVec);
    if (unit >= units.count()) continue;
    const int64_t col = (i < kVec ? units.first(unit) : units.second(unit)) + i % kVec;
    if (col < a.width) partial[col] = sums[at];
  }
}

int size_of(Dtype type) { return type == Dtype::f32 ? 4 : 2; }

bool aligned(const void* p, int bytes, std::initializer_list<int64_t> strides) {
  if (p == nullptr) return true;
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  for (const int64_t stride : strides)
    if (stride * bytes % 16 != 0) return false;
  return true;
}

bool aligned(const void* p, Dtype type, const HeadStrides& strides) {
  return aligned(p, size_of(type), {strides.batch, strides.head, strides.token});
}

// Whether reads of 16 bytes divide the part that turns and the rest, and the tables are aligned to that.
bool vectors(const RopeTables& tables, int64_t width, Dtype type) {
  const int64_t count = 16 / size_of(type), bytes = size_of(tables.type);
  return tables.half % count == 0 && width % count == 0 &&
         aligned(tables.cos, bytes, {tables.cos_batch_stride, tables.cos_stride}) &&
         aligned(tables.sin, bytes, {tables.sin_batch_stride, tables.sin_stride});
}

template <class T> struct Tag {
  using type = T;
};
template <int kValue> struct Int {
  static constexpr int value = kValue;
};
template <bool kValue> struct Bool {
  static constexpr bool value = kValue;
};

template <class F>
cudaError_t with_type(Dtype type, F&& f) {
  if (type == Dtype::f32) return f(Tag<float>{});
  return type == Dtype::bf16 ? f(Tag<__nv_bfloat16>{}) : f(Tag<__half>{});
}

// Calls f(Tag<X>, values a read, interleaved).
template <class F>
cudaError_t with_reads(Dtype type, bool vectors, bool interleaved, F&& f) {
  return with_type(type, [&](auto x) {
    constexpr int kMost = 16 / sizeof(typename decltype(x)::type);
    if (vectors) return interleaved ? f(x, Int<kMost>{}, Bool<true>{}) : f(x, Int<kMost>{}, Bool<false>{});
    return interleaved ? f(x, Int<1>{}, Bool<true>{}) : f(x, Int<1>{}, Bool<false>{});
  });
}

// Calls f(lanes of a head).
template <int kVec, class F>
cudaError_t with_threads(int64_t units, F&& f) {
  if constexpr (kVec > 1) {
    if (units <= 8) return f(Int<8>{});
    if (units <= 16) return f(Int<16>{});
  }
  return f(Int<32>{});
}

int64_t units_of(const RopeTables& tables, int64_t width, int vec) {
  return tables.half / vec + (width - 2 * tables.half + 2 * vec - 1) / (2 * vec);
}

}  // namespace

cudaError_t rope(const Rope& a, cudaStream_t stream) {
  bool wide = vectors(a.tables, a.width, a.type);
  for (const RopeHeads& h : a.heads)
    wide = wide && aligned(h.x, a.type, h.x_strides) && aligned(h.y, a.type, h.y_strides);
  return with_reads(a.type, wide, a.interleaved, [&](auto x, auto vec, auto interleaved) {
    constexpr int kVec = decltype(vec)::value;
    const int64_t units = units_of(a.tables, a.width, kVec), all_heads = a.heads[0].n_heads + a.heads[1].n_heads;
    unsigned lanes = 4;
    while (lanes < 32 && lanes < units) lanes *= 2;
    const unsigned rows = kBlock / lanes;
    unsigned slots = 1;
    while (slots < rows && slots < all_heads) slots *= 2;
    const int64_t per_block = rows / slots, blocks = (a.all_tokens + per_block - 1) / per_block;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    const auto kernel = rope_kernel<typename decltype(x)::type, kVec, decltype(interleaved)::value>;
    return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(lanes, rows), 0, stream, a,
                  static_cast<int>(slots));
  });
}

cudaError_t qk_norm_rope_forward(const QkNormRopeForward& a, cudaStream_t stream) {
  bool wide = vectors(a.tables, a.width, a.type);
  for (const QkNormRopeHeads& h : a.heads)
    wide = wide && aligned(h.x, a.type, h.x_strides) && aligned(h.y, a.type, h.y_strides) && aligned(h.weight, 1, {});
  return with_reads(a.type, wide, a.interleaved, [&](auto x, auto vec, auto interleaved) {
    constexpr int kVec = decltype(vec)::value;
    return with_threads<kVec>(units_of(a.tables, a.width, kVec), [&](auto threads) {
      constexpr int kThreads = decltype(threads)::value;
      const int64_t per_block = kBlock / kThreads, all_heads = a.heads[0].n_heads + a.heads[1].n_heads;
      const int64_t blocks = (a.all_tokens * all_heads + per_block - 1) / per_block;
      if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
      const auto kernel = norm_forward_kernel<typename decltype(x)::type, kVec, kThreads, decltype(interleaved)::value>;
      return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kBlock), 0, stream, a);
    });
  });
}

int qk_norm_rope_backward_blocks(int64_t n_rows, int multiprocessors) {
  const int64_t useful = (n_rows + 15) / 16, resident = 4LL * multiprocessors;  // a block takes up to 16 at a time
  return static_cast<int>(useful < resident ? useful : resident);
}

cudaError_t qk_norm_rope_backward(const QkNormRopeBackward& a, cudaStream_t stream) {
  bool wide = vectors(a.tables, a.width, a.type);
  for (const QkNormRopeGradients& h : a.heads)
    wide = wide && aligned(h.x, a.type, h.x_strides) && aligned(h.dy, a.type, h.dy_strides) &&
           aligned(h.dx, a.type, h.dx_strides) && aligned(h.weight, 1, {});
  const cudaError_t error = with_reads(a.type, wide, a.interleaved, [&](auto x, auto vec, auto interleaved) {
    constexpr int kVec = decltype(vec)::value;
    const int64_t units = units_of(a.tables, a.width, kVec);
    return with_threads<kVec>(units, [&](auto threads) {
      constexpr int kThreads = decltype(threads)::value;
      const int blocks = a.heads[0].n_blocks > a.heads[1].n_blocks ? a.heads[0].n_blocks : a.heads[1].n_blocks;
      const int block = units > kThreads * kHeld<kVec> ? kThreads : kBlock;
      const auto kernel =
          norm_backward_kernel<typename decltype(x)::type, kVec, kThreads, decltype(interleaved)::value>;
      return launch(kernel, dim3(blocks, 2), dim3(block), 0, stream, a);
    });
  });
  if (error != cudaSuccess) return error;
  for (const QkNormRopeGradients& h : a.heads) {
    if (!h.dw) continue;
    const cudaError_t summed = with_type(h.weight_type, [&](auto w) {
      return sum_partials(h.dw_partial, h.n_blocks, a.width, static_cast<typename decltype(w)::type*>(h.dw), stream);
    });
    if (summed != cudaSuccess) return summed;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace foundry
