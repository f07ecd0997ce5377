// The main kernel of the backward pass: dk, dv, and sums of dq.
//
// A block has one warpgroup that copies (its first thread by TMA; two more threads add dq) and two that compute, with
// 64 keys each. Scores and their gradients have keys as rows:
//   S^T  = K Q^T          from shared memory       P^T  = exp2(S^T - lse)
//   dP^T = V dO^T         from shared memory       dS^T = P^T (dP^T - delta)
//   dV  += P^T dO         P^T from registers
//   dK  += dS^T Q         dS^T from registers
//   dQ   = dS K           dS^T from shared memory, where both warpgroups put theirs; each computes half of dQ, one step
//                         later, when the other's dS^T has long arrived
// dK and dV stay in registers over all heads of the block. At width 256 a block computes 128 columns of dK, dV and dQ,
// and another block the other 128. At width 192 (of values 128) dK and dV fill so many registers that dP^T follows P^T,
// and dS^T follows dV (else ptxas serialises all matmuls). Each warpgroup computes a third of dQ and, from its own
// keys, its part of the last third.
#pragma once

#include "backward_consumer.cuh"
#include "backward_copies.cuh"

namespace foundry {
namespace cuda {
namespace hopper {

template <class S>
__global__ void __launch_bounds__(384, 1)
    attention_backward_kernel(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                              const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout,
                              const __grid_constant__ AttentionBackward a, const __grid_constant__ BackwardWork work) {
  FK_HOPPER_SHARED(base);
  launch_dependents();
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&q, &k, &v, &dout}) tma_prefetch_map(map);
    const auto init = [&](uint32_t first, int n, uint32_t arrivals) {
      for (int i = 0; i < n; ++i) mbarrier_init(base + first + 8 * i, arrivals);
    };
    init(S::kKFull, 1, 1);
    init(S::kVFull, 1, 1);
    init(S::kKeysFree, 1, 8);
    init(S::kQFull, S::kLandings, 1);
    init(S::kQFree, S::kLandings, 8);
    init(S::kDoutFull, S::kLandings, 1);
    init(S::kDoutFree, S::kLandings, 8);
    init(S::kScoresFull, 2, 8);
    init(S::kScoresFree, 2, 8);
    init(S::kSumsFull, 4, 4);
    init(S::kSumsFree, 4, 1);
    mbarrier_init_fence();
    const int index = S::kInOrder ? atomicAdd(work.ticket, 1) : static_cast<int>(blockIdx.x);
    write_words<S::kQueries, S::kColumnBlocks>(a, work, base + S::kWords, index);
  }
  __syncthreads();
  const uint32_t words = base + S::kWords;
  if (block_word(words, kParts) == 0) return;
  // By shuffle, so that the compiler knows that all lanes of a warp agree.
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0), warpgroup = warp / 4;
  const auto count_as_done = [&] {
    add_release(work.done + block_word(words, kShare) * a.n_sequences + block_word(words, kSequence));
  };
  if (warpgroup == 0) {
    fewer_registers<24>();
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0) produce<S>(a, work, {&q, &k, &v, &dout}, base);
    if (!S::kInOrder || warp == 0 || warp == 3) return;
    if constexpr (S::kStaged) add_staged<S>(a, work, base, warp - 1);
    if constexpr (S::kTold) tell_turns<S>(a, work, base, warp - 1);
    count_as_done();
  } else {
    more_registers<240>();
    consume<S>(a, work, base, warpgroup - 1);
    if constexpr (!S::kInOrder) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) count_as_done();
    }
  }
}

template <class S>
cudaError_t launch_backward(const AttentionBackward& a, const BackwardWork& work, cudaStream_t stream) {
  TensorMap q, k, v, dout;
  cudaError_t error = map_queries(q, a, a.q, a.q_strides, a.head_dim, S::kQueries);
  if (error == cudaSuccess) error = map_keys(k, a, a.k, a.k_strides, a.head_dim, kKeyTile);
  if (error == cudaSuccess) error = map_keys(v, a, a.v, a.v_strides, a.head_dim_v, kKeyTile);
  if (error == cudaSuccess) error = map_queries(dout, a, a.dout, a.dout_strides, a.head_dim_v, S::kQueries);
  if (error != cudaSuccess) return error;
  const int64_t blocks = a.n_heads / a.group * work.splits * work.units * S::kColumnBlocks;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  return launch_hopper(attention_backward_kernel<S>, dim3(static_cast<unsigned>(blocks)), dim3(384), S::kShared, stream,
                       false, q, k, v, dout, a, work);
}

template <int kWidth>
cudaError_t launch_backward_of_width(const AttentionBackward& a, const BackwardWork& work, cudaStream_t stream) {
  const auto of = [&](auto type, auto options) {
    using T = FK_TYPE(type);
    constexpr bool kOptions = decltype(options)::value;
    if constexpr (kWidth <= 128)
      if (!work.in_order) return launch_backward<BackwardShape<T, kWidth, kOptions, false>>(a, work, stream);
    return launch_backward<BackwardShape<T, kWidth, kOptions, true>>(a, work, stream);
  };
  const auto of_type = [&](auto type) {
    return has_score_options(a) ? of(type, Constant<true>{}) : of(type, Constant<false>{});
  };
  return a.type == Dtype::bf16 ? of_type(Tag<__nv_bfloat16>{}) : of_type(Tag<__half>{});
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
