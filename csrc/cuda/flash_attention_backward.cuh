// Shared by the backward kernels with tensor cores.
#pragma once

#include "flash_attention_scores.cuh"
#include "flash_attention_tiles.cuh"

namespace foundry {
namespace cuda {

// The launches of the tensor core kernels.
cudaError_t backward_tiles(const AttentionBackward& a, cudaStream_t stream);

// Writes the gradient of the bias of one score, if no other score shares the element.
__device__ __forceinline__ void write_bias_at(const AttentionBackward& a, int64_t at, float value) {
  if (a.bias_type == Dtype::f32) static_cast<float*>(a.dbias)[at] = value;
  else if (a.bias_type == Dtype::bf16) static_cast<__nv_bfloat16*>(a.dbias)[at] = from_float<__nv_bfloat16>(value);
  else static_cast<__half*>(a.dbias)[at] = from_float<__half>(value);
}

namespace tiles {

__device__ __forceinline__ void write_bias(const AttentionBackward& a, const Head& h, int i, int j, float value) {
  write_bias_at(a, pair_at(a.dbias_strides, h, i, j), value);
}

// What the weights and score gradients of a row need, see AttentionBackward.
struct RowNumbers {
  float lse, rest, delta;

  // Of the row at this place among all rows.
  template <bool kOptions>
  __device__ static __forceinline__ RowNumbers of(const AttentionBackward& a, int64_t at) {
    const float2 two = reinterpret_cast<const float2*>(a.numbers)[at];
    if (kOptions && a.bias) return {two.x, two.y, a.delta[at]};
    return {two.x, 0.f, two.y};
  }
  __device__ float weight_of(const AttentionBackward& a, float logit) const {
    return exp2_fast(a.bias ? (logit - lse) * kLog2e - rest : logit * kLog2e - lse);
  }
};

// Whether the mask's tiles hide all pairs of the owned rows [first, last] and the others [from, to]. Owned rows are
// queries or keys.
__device__ __forceinline__ bool is_hidden(const AttentionInputs& a, const Head& h, int first, int last, int from,
                                          int to, bool own_keys) {
  constexpr int kTile = static_cast<int>(kMaskTile);
  const int q0 = own_keys ? from : first, q1 = own_keys ? to : last, k0 = own_keys ? first : from;
  const int k1 = own_keys ? last : to;
  for (int i = q0 / kTile; i <= q1 / kTile; ++i)
    for (int j = k0 / kTile; j <= k1 / kTile; ++j)
      if (a.tiles.index[pair_at(a.tiles.strides, h, i, j)] != 0) return false;
  return true;
}

// results0 = 16 rows x kRead rows of another tile, both with kDim columns. With kSecond, results1 is the same for tiles
// kLeft1 and kRight1 bytes further, so the addresses differ only by constants.
template <class T, int kDim, int kRead, bool kSecond, uint32_t kLeft1, uint32_t kRight1, class Shared>
__device__ __forceinline__ void multiply(float (&results0)[kRead / 8][4], float (&results1)[kRead / 8][4],
                                         Shared& shared, uint32_t left_lane, uint32_t right_lane) {
  const auto product = [&](float (&results)[kRead / 8][4], uint32_t left_at, uint32_t right_at) {
    uint32_t left[4];
    ldmatrix(left, shared, left_at);
    FK_UNROLL for (int n = 0; n < kRead / 16; ++n) {
      uint32_t right[4];
      ldmatrix(right, shared, right_at + n * 32 * kDim);
      mma<T>(results[2 * n], left, right[0], right[1]);
      mma<T>(results[2 * n + 1], left, right[2], right[3]);
    }
  };
  FK_UNROLL for (int d = 0; d < kDim / 16; ++d) {
    const uint32_t left_at = left_lane ^ (d * 32), right_at = right_lane ^ (d * 32);
    product(results0, left_at, right_at);
    if constexpr (kSecond) product(results1, left_at + kLeft1, right_at + kRight1);
  }
}

// Results converted to the left operand of the next matmul.
template <class T, int kTilesN>
__device__ __forceinline__ void pack_left(uint32_t (&left)[kTilesN / 2][4], const float (&results)[kTilesN][4]) {
  FK_UNROLL for (int n = 0; n < kTilesN; ++n) FK_UNROLL for (int half = 0; half < 2; ++half)
      left[n / 2][n % 2 * 2 + half] = pack<T>(results[n][2 * half], results[n][2 * half + 1]);
}

}  // namespace tiles
}  // namespace cuda
}  // namespace foundry
