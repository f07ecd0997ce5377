// RoPE of q and k, forward and backward. A thread keeps cos and sin of its units and loops over the heads of q, then of
// k.
#include "rope.cuh"

namespace foundry {
namespace cuda {
namespace {

// threadIdx.x iterates over units, threadIdx.y over tokens and, `slots` at a time, the heads of each.
template <class X, int kVec, bool kInterleaved>
__global__ void __launch_bounds__(kRopeBlock) rope_kernel(const Rope a, int slots) {
  const Units<kVec, kInterleaved> units{a.tables.half, a.width};
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (blockDim.y / slots) + threadIdx.y / slots;
  if (token >= a.all_tokens) return;
  const int64_t b = token / a.n_tokens, t = token % a.n_tokens, row = a.tables.row(b, t);
  const bool has_row = a.tables.has_row(row);
  const int64_t all_heads = a.heads[0].n_heads + a.heads[1].n_heads;
  const float sign = a.inverse ? -1.f : 1.f;
  for (int64_t unit = threadIdx.x; unit < units.count(); unit += blockDim.x) {
    Angles<kVec> angles{};
    if (has_row && units.rotates(unit)) angles = load_angles<kVec>(a.tables, b, row, unit);
    for (int64_t i = threadIdx.y % slots; i < all_heads; i += slots) {
      int64_t h = i;
      const RopeHeads& heads = heads_of(a.heads, h);
      const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
      X* y = static_cast<X*>(heads.y) + heads.y_strides.offset(b, h, t);
      float v[2 * kVec];
      widen(load_unit(x, units, unit), v);
      if (units.rotates(unit)) rotate<kVec, kInterleaved>(v, angles, sign);
      if (!has_row) fill_nan(v);
      store_unit(y, units, unit, v);
    }
  }
}

}  // namespace

cudaError_t rope(const Rope& a, cudaStream_t stream) {
  bool vectors = rope_vectors(a.tables, a.width, a.type);
  for (const RopeHeads& h : a.heads)
    vectors = vectors && aligned(h.x, a.type, h.x_strides) && aligned(h.y, a.type, h.y_strides);
  return with_rope_reads(a.type, vectors, a.interleaved, [&](auto x, auto vec, auto interleaved) {
    constexpr int kVec = decltype(vec)::value;
    const int64_t units = rope_units(a.tables, a.width, kVec), all_heads = a.heads[0].n_heads + a.heads[1].n_heads;
    unsigned lanes = 4;
    while (lanes < 32 && lanes < units) lanes *= 2;
    const unsigned rows = kRopeBlock / lanes;
    unsigned slots = 1;
    while (slots < rows && slots < all_heads) slots *= 2;
    const int64_t per_block = rows / slots, blocks = (a.all_tokens + per_block - 1) / per_block;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    const auto kernel = rope_kernel<FK_TYPE(x), kVec, decltype(interleaved)::value>;
    return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(lanes, rows), 0, stream, a,
                  static_cast<int>(slots));
  });
}

}  // namespace cuda
}  // namespace foundry
