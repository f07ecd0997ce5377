// The forward kernel: its warpgroups, and how one of them computes a tile of rows.
#pragma once

#include "attention_forward.cuh"

namespace foundry {
namespace cuda {
namespace hopper {
namespace forward {

// A computing warpgroup: 64 rows of each tile, from `group` * 64 on.
template <class T, class S, bool kOptions>
struct Consumer {
  static constexpr int kKeys = S::kKeys, kDim = S::kDim, kDimV = S::kDimV;

  const AttentionForward& a;
  const Log2Score& score;
  const uint32_t base;
  const int group;
  Place<S::kStages> in_k{0, 0};  // V of the previous tile is one stage before; for each tile both are used or skipped
  uint32_t taken = 0;            // tiles of rows taken so far; they alternate between the buffers of Q
  float o[kDimV / 2], s[kKeys / 2];
  uint32_t p[kKeys / 4], q[S::kKeepQ ? kDim / 4 : 1];
  Rows rows;
  Work kept;
  uint32_t turn;  // the parity of the next one's barrier; the first warpgroup begins

  __device__ Consumer(const AttentionForward& a, const Log2Score& score, uint32_t base, int group)
      : a(a),
        score(score),
        base(base),
        group(group),
        turn(group == 0) {}

  __device__ static bool is_first_lane() { return threadIdx.x % 32 == 0; }
  // The thread's first row within the tile.
  __device__ int row() const {
    const int thread = kOptions ? tiles::hidden(threadIdx.x) : threadIdx.x;
    return group * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
  }

  __device__ __forceinline__ uint32_t place_of_q() const { return taken % S::kQueues; }
  __device__ __forceinline__ Work read_work() const {
    const uint32_t at = base + S::kWork + 16 * place_of_q();
    return {load_shared(at), load_shared(at + 4), load_shared(at + 8)};
  }
  __device__ __forceinline__ Work work() const {
    if constexpr (S::kKeepWork) return kept;
    else return read_work();
  }
  __device__ __forceinline__ void release_q() {
    __syncwarp();  // all lanes have read the values that belong to it
    if (is_first_lane()) mbarrier_arrive(base + S::kQEmpty + 8 * place_of_q());
  }

  __device__ __forceinline__ void wait_k() { mbarrier_wait(base + S::kKFull + 8 * in_k.stage, in_k.parity); }
  __device__ __forceinline__ void release_k() {
    if (is_first_lane()) mbarrier_arrive(base + S::kKEmpty + 8 * in_k.stage);
    in_k.next();
  }
  __device__ __forceinline__ void wait_v(const Place<S::kStages>& at) {
    mbarrier_wait(base + S::kVFull + 8 * at.stage, at.parity);
  }
  __device__ __forceinline__ void release_v(const Place<S::kStages>& at) {
    if (is_first_lane()) mbarrier_arrive(base + S::kVEmpty + 8 * at.stage);
  }

  // With as many turns as steps of the longest warpgroup, in order.
  __device__ __forceinline__ void wait_for_turn() {
    mbarrier_wait(base + S::kTurn + 8 * group, turn);
    turn ^= 1;
  }
  __device__ __forceinline__ void pass_turn() {
    if (is_first_lane()) mbarrier_arrive(base + S::kTurn + 8 * ((group + 1) % S::kGroups));
  }

  // Loads Q as left operands of matmuls; ldmatrix addresses undo the swizzle.
  __device__ __forceinline__ void keep_q(uint32_t tile) {
    const int lane = threadIdx.x % 32, r = group * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16;
    FK_UNROLL for (int k = 0; k < kDim / 16; ++k) {
      const int chunk = k % 4 * 2 + lane / 16;
      uint32_t four[4];
      load_matrices(four, tile + k / 4 * S::kQPanel + r * kPanelBytes + ((chunk ^ r % 8) << 4));
      FK_UNROLL for (int i = 0; i < 4; ++i) q[4 * k + i] = four[i];
    }
    settle(q);
  }

  // S = Q K^T
  __device__ __forceinline__ void issue_scores() {
    const uint64_t queries = matrix(base + S::kQ + place_of_q() * S::kQBytes + group * 64 * kPanelBytes);
    const uint64_t keys = matrix(base + S::kK + in_k.stage * S::kKBytes);
    FK_UNROLL for (int k = 0; k < kDim / 16; ++k) {
      const uint64_t right = further(keys, k / 4 * S::kKPanel + k % 4 * 32);
      if constexpr (S::kKeepQ) {
        Wgmma<kKeys>::template registers<T, false>(s, q + 4 * k, right, k != 0);
      } else {
        const uint64_t left = further(queries, k / 4 * S::kQPanel + k % 4 * 32);
        Wgmma<kKeys>::template shared<T, false, false>(s, left, right, k != 0);
      }
    }
    wgmma_commit();
  }
  // O += P V
  __device__ __forceinline__ void issue_values(const Place<S::kStages>& at) {
    const uint64_t values = matrix(base + S::kV + at.stage * S::kVBytes, S::kKPanel);
    FK_UNROLL for (int k = 0; k < kKeys / 16; ++k)
        Wgmma<kDimV>::template registers<T, true>(o, p + 4 * k, further(values, k * 16 * kPanelBytes), true);
    wgmma_commit();
  }
  __device__ __forceinline__ void pack_weights() {
    FK_UNROLL for (int i = 0; i < kKeys / 4; ++i) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
  }

  // From the numbers that weights are computed from to logits in powers of 2.
  __device__ __forceinline__ float scale() const { return kOptions && a.alibi_slopes ? 1.f : score.scale; }

  // Turns the scores of tile n into weights. kMasked: an edge of what rows see may cross the tile.
  template <bool kMasked, bool kFirst>
  __device__ __forceinline__ void weigh(int n, bool left) {
    if constexpr (kOptions)
      if (FK_BENDS(a)) score.bend(s);
    const bool has_alibi = kOptions && a.alibi_slopes;
    if (kMasked || has_alibi) {
      const Work own = work();
      const Head h(a, own.sequence, own.head);
      const int i = own.first + row();
      if (has_alibi) add_alibi<kKeys>(s, score.scale, h, i, n * kKeys + threadIdx.x % 4 * 2);
      if constexpr (kMasked) hide<kKeys>(s, h, i, n * kKeys, left);
    }
    soften<kKeys, S::kIntegerMaxima, kMasked, kFirst>(s, rows, scale());
  }

  // Computes scores and weights of tile n beside the output of the tile after it.
  template <bool kMasked>
  __device__ __forceinline__ void step(int n, bool left) {
    const Place<S::kStages> in_v = in_k.before();
    mbarrier_wait_both(base + S::kKFull + 8 * in_k.stage, in_k.parity, base + S::kVFull + 8 * in_v.stage, in_v.parity);
    if constexpr (S::kTurns) wait_for_turn();
    settle(s);
    settle(o);
    settle(p);
    wgmma_fence();
    issue_scores();
    issue_values(in_v);
    if constexpr (S::kTurns) pass_turn();
    wgmma_wait<1>();
    settle(s);
    release_k();
    weigh<kMasked, false>(n, left);
    settle(s);
    needed_before_wait(rows.sum[0] + rows.sum[1], base + S::kWork + 12);
    wgmma_wait<0>();
    settle(o);
    settle(p);
    release_v(in_v);
    if (__any_sync(0xFFFFFFFFu, rows.shrink[0] != 1.f || rows.shrink[1] != 1.f)) {
      FK_UNROLL for (int x = 0; x < kDimV / 2; ++x) o[x] *= rows.shrink[x / 2 % 2];
    }
    pack_weights();
  }

  // Zeroes values beyond the end of a packed sequence: they belong to the next one, and weights of 0 would not remove
  // NaN.
  __device__ __forceinline__ void clear_values(const Head& h, const KeyTiles& keys) {
    const int end = h.k_len - (keys.end - 1) * kKeys;
    if (!a.starts_k || end >= kKeys) return;
    wait_v(in_k);
    // Done by the last warpgroup, whose rows see at least as many keys as the others'.
    if (group == S::kGroups - 1)
      clear_rows(base + S::kV + in_k.stage * S::kVBytes, max(end, 0), kKeys, S::kPanelsV, S::kKPanel,
                 threadIdx.x % 128);
    FK_NAMED_BARRIER(1, 128 * S::kGroups);
  }

  // Computes a tile of rows. Returns false if none is left.
  __device__ __forceinline__ bool take() {
    mbarrier_wait(base + S::kQFull + 8 * place_of_q(), taken / S::kQueues % 2);
    kept = read_work();
    if (kept.sequence < 0) return false;
    const Head h(a, kept.sequence, kept.head);
    const KeyTiles keys(h, kept.first, min(kept.first + S::kRows, h.q_len) - 1, kKeys);
    const int own = kept.first + group * 64;
    if constexpr (S::kKeepQ) {
      keep_q(base + S::kQ);
      release_q();
    }
    clear_values(h, keys);

    int n = keys.end - 1;
    const bool skips = S::kSkips && n > keys.begin && (h.end_key(own + 63) - 1) / kKeys < n;
    if (skips) {
      wait_k();
      release_k();
      --n;
    }
    // All rows see tiles [middle, right) fully.
    const int right = h.end_key(own) / kKeys, middle = (h.first_key(own + 63) + kKeys - 1) / kKeys;
    wait_k();
    settle(s);
    wgmma_fence();
    issue_scores();
    wgmma_wait<0>();
    settle(s);
    release_k();
    weigh<true, true>(n, n < middle);
    FK_UNROLL for (int x = 0; x < kDimV / 2; ++x) o[x] = 0.f;
    pack_weights();
    if (skips) {  // not before, because K arrives first
      const Place<S::kStages> last = in_k.before().before();
      if constexpr (S::kTurns) {
        wait_for_turn();
        pass_turn();
      }
      wait_v(last);
      release_v(last);
    }
    for (--n; n >= max(right, keys.begin); --n) step<true>(n, n < middle);
    for (; n >= max(middle, keys.begin); --n) step<false>(n, false);
    for (; n >= keys.begin; --n) step<true>(n, true);
    if constexpr (!S::kKeepQ && S::kKeepWork) release_q();
    const Place<S::kStages> in_v = in_k.before();
    wait_v(in_v);
    settle(o);
    settle(p);
    wgmma_fence();
    issue_values(in_v);
    FK_UNROLL for (int r = 0; r < 2; ++r) {
      FK_UNROLL for (int lanes = 1; lanes < 4; lanes *= 2) rows.sum[r] +=
          __shfl_xor_sync(0xFFFFFFFFu, rows.sum[r], lanes);
    }
    wgmma_wait<0>();
    settle(o);
    settle(p);
    release_v(in_v);
    const Work done = work();
    if constexpr (!S::kKeepWork) release_q();
    ++taken;
    write_rows(done);
    return true;
  }

  __device__ __forceinline__ void write_rows(const Work& done) {
    const Head h(a, done.sequence, done.head);
    const int i = done.first + row();
    float factor[2];
    FK_UNROLL for (int r = 0; r < 2; ++r) {
      const bool writes = threadIdx.x % 4 == 0 && i + 8 * r < h.q_len;
      const float top = __fmul_rn(rows.max[r], scale());
      factor[r] = finish(a, h, i + 8 * r, top, rows.sum[r], writes);
    }
    write<T, kDimV>(a, h, i, o, factor);
  }
};

template <class T, class S, bool kOptions>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                      const __grid_constant__ TensorMap v, const __grid_constant__ AttentionForward a,
                      const __grid_constant__ Order order) {
  FK_HOPPER_SHARED(base);
  if (threadIdx.x == 0) {
    tma_prefetch_map(&q);
    tma_prefetch_map(&k);
    tma_prefetch_map(&v);
    for (int i = 0; i < S::kQueues; ++i) {
      mbarrier_init(base + S::kQFull + 8 * i, 1);
      mbarrier_init(base + S::kQEmpty + 8 * i, 4 * S::kGroups);
    }
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(base + S::kKFull + 8 * i, 1);
      mbarrier_init(base + S::kVFull + 8 * i, 1);
      mbarrier_init(base + S::kKEmpty + 8 * i, 4 * S::kGroups);
      mbarrier_init(base + S::kVEmpty + 8 * i, 4 * S::kGroups);
    }
    for (int i = 0; S::kTurns && i < S::kGroups; ++i) mbarrier_init(base + S::kTurn + 8 * i, 4);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);  // known to be the same in all lanes
  if (warpgroup == 0) {
    if (has_order(a)) order_sequences<S::kRows>(a, base + S::kShared);
    fewer_registers<S::kProducer>();
    if (threadIdx.x == 0) produce<S>(a, &q, &k, &v, order, base);
  } else {
    more_registers<S::kConsumer>();
    Consumer<T, S, kOptions> consumer(a, order.score, base, warpgroup - 1);
    while (consumer.take()) {
    }
  }
}

}  // namespace forward
}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
