// The two computing warpgroups of the backward kernel: matmuls, weights and the contributions to dk, dv and dq.
#pragma once

#include "backward_shape.cuh"

namespace foundry {
namespace cuda {
namespace hopper {

// Computes P^T from S^T, rounded in `weights`, and the factor for dP^T - delta. The factor is in s. If those registers
// are needed it is in `factors` (as halves, the most precise 16-bit type for numbers up to 1) or, if it equals P^T,
// only in `weights`. Element 4 j + 2 half + e belongs to key `key` + 8 half of the tile and query 8 j + 2 c + e.
template <class S>
__device__ __forceinline__ void weigh(const AttentionBackward& a, const BackwardWork& work, uint32_t words,
                                      uint32_t part, int tile, int head, int key, int c, uint32_t lse,
                                      float (&s)[S::kQueries / 2], uint32_t (&weights)[S::kQueries / 4],
                                      uint32_t (&factors)[S::kQueries / 4]) {
  using T = typename S::T;
  if constexpr (S::kOptions)
    if (FK_BENDS(a)) work.score.bend(s);
  if (tile < part_word(part, kBeginWhole) || tile >= part_word(part, kEndWhole)) {
    FK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = key + 8 * half, shift = row - tile * S::kQueries - 2 * c;
      // The columns that see the key, minus 2 c.
      const int from = row < part_word(part, kKeysLeft) ? part_word(part, kLower) + shift : kFar;
      const int to = part_word(part, kUpper) + shift;
      FK_UNROLL for (int j = 0; j < S::kQueries / 8; ++j) FK_UNROLL for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * half + e];
        x = 8 * j + e < from || 8 * j + e >= to ? kNone : x;
      }
    }
  }
  if constexpr (!S::kOptions) {
    FK_UNROLL for (int j = 0; j < S::kQueries / 8; ++j) {
      const float2 numbers = load_shared_pair(lse + c * 8 + j * 32);
      FK_UNROLL for (int k = 4 * j; k < 4 * j + 4; ++k) s[k] =
          exp2_fast(fmaf(s[k], work.score.scale, -(k % 2 ? numbers.y : numbers.x)));
    }
    FK_UNROLL for (int k = 0; k < S::kQueries / 4; ++k) weights[k] = pack<T>(s[2 * k], s[2 * k + 1]);
  } else {
    float slope = 0.f;
    if (a.alibi_slopes)
      slope = kLog2e * a.alibi_slopes[block_word(words, kSequence) * a.alibi_slopes_batch_stride +
                                      block_word(words, kFirstHead) + head];
    const float distance =
        static_cast<float>(tile * S::kQueries + 2 * c + block_word(words, kOffset) - part_word(part, kTile) * kKeyTile -
                           key);  // distance of the first query from the first key
    // The derivative of a hidden score, whose t is not finite, is 0.
    FK_UNROLL for (int j = 0; j < S::kQueries / 8; ++j) {
      const float2 numbers = load_shared_pair(lse + c * 8 + j * 32);
      FK_UNROLL for (int k = 2 * j; k < 2 * j + 2; ++k) {
        float p[2];
        FK_UNROLL for (int e = 0; e < 2; ++e) {
          float& t = s[2 * k + e];
          const float far = fabsf(distance + (8 * j + e - k % 2 * 8));
          p[e] = exp2_fast(fmaf(t, work.score.scale, -(e ? numbers.y : numbers.x)) - slope * far);
          t = p[e] * fmaxf(Log2Score::slope(t, work.score.curve), 0.f);
        }
        weights[k] = pack<T>(p[0], p[1]);
        if constexpr (S::kWeightsRounded) factors[k] = pack<__half>(s[2 * k], s[2 * k + 1]);
      }
    }
  }
}

// Zeroes rows of Q and dO beyond the end of a packed sequence, for the current step of both warpgroups.
template <class S>
__device__ __forceinline__ void clear_behind(uint32_t base, int consumer, int thread, int stage, uint32_t parity,
                                             int n) {
  FK_UNROLL for (int landing = 0; landing < (S::kHalves ? 2 : 1); ++landing) mbarrier_wait_both(
      base + S::kQFull + 8 * (stage + landing), parity, base + S::kDoutFull + 8 * (stage + landing), parity);
  const int panels = consumer == 0 ? S::kPanels : S::kPanelsV;
  const uint32_t tile = base + (consumer == 0 ? S::kQ : S::kDout) + stage * (panels * S::kQueryPanel);
  clear_rows(tile, n, S::kQueries, panels, S::kQueryPanel, thread);
  FK_NAMED_BARRIER(1, 256);
}

template <class S>
__device__ __forceinline__ void consume(const AttentionBackward& a, const BackwardWork& work, uint32_t base,
                                        int consumer) {
  using T = typename S::T;
  constexpr int kQueries = S::kQueries;
  const uint32_t words = base + S::kWords;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  // The first of the thread's two keys within the tile. With options registers are scarce, so cheap values are
  // recomputed.
  const auto thread_again = [] {
    return static_cast<int>(S::kOptions || S::kThirds ? tiles::hidden(threadIdx.x) : threadIdx.x);
  };
  const auto key_again = [&] {
    const int t = thread_again() - 128;
    return t / 32 * 16 + t % 32 / 4;
  };
  const int column_block = S::kHalves ? block_word(words, kColumnBlock) : 0;
  const uint32_t own_k = base + S::kK + consumer * 64 * kPanelBytes, own_v = own_k + S::kV - S::kK;
  const uint32_t columns = S::kHalves ? column_block * 2 * S::kQueryPanel : 0;  // the block's, of Q and dO
  // For dq's matmul: the panel of K, and the panel of dS^T.
  const uint32_t dq_k = base + S::kK + (kQueries == 64 ? (2 * column_block + consumer) * S::kKeyPanel : 0);
  const uint32_t dq_scores = base + S::kScores + (kQueries == 64 ? 0 : consumer * S::kKeyPanel);
  // The same of the last columns, along the warpgroup's own keys; recomputed, because registers are scarce.
  const auto own_keys = [&] { return (thread_again() / 128 - 1) * 64 * kPanelBytes; };
  const auto third_k = [&] { return base + S::kK + 2 * S::kKeyPanel + own_keys(); };
  const auto arrive = [&](uint32_t barrier) {
    if (lane == 0) mbarrier_arrive(base + barrier);
  };
  int stage = 0, count = 0;  // steps done
  uint32_t parity = 0;

  // Adds dq's piece of step `step`, which belongs to the query tile at index `place` among those of all heads.
  // With thirds it comes in two parts, the second of which is the warpgroup's part of the last columns.
  const auto deliver = [&](const float (&dq)[32], int step, int place, bool first = true, bool last = true) {
    if constexpr (S::kStaged) {
      const int buffer = 2 * consumer + step % 2;
      mbarrier_wait(base + S::kSumsFree + 8 * buffer, (step / 2 & 1) ^ 1);
      const uint32_t at = base + S::kSums + buffer * S::kPieceBytes + thread_again() % 128 * 16;
      FK_UNROLL for (int r = 0; r < 8; ++r)
          store_shared_four(at + r * 2048, dq[4 * r], dq[4 * r + 1], dq[4 * r + 2], dq[4 * r + 3]);
      fence_proxy_async();
      __syncwarp();
      arrive(S::kSumsFull + 8 * buffer);
      return;
    }
    int64_t piece = static_cast<int64_t>(place) * S::kPieces + 2 * column_block + consumer;
    if constexpr (S::kTold) {
      if (first) mbarrier_wait(base + S::kSumsFree + 8 * consumer, step & 1);  // wait for our turn
      piece = load_shared(words + 4 * (kPiece0 + consumer));
    }
    const bool stores = S::kTold && piece < 0;
    float* const to = work.dq + ((stores ? ~piece : piece) + (first ? 0 : 2)) * kPieceFloats + thread * 4;
    if (stores) {
      FK_UNROLL for (int r = 0; r < 8; ++r)
          store_four(to + r * 512, dq[4 * r], dq[4 * r + 1], dq[4 * r + 2], dq[4 * r + 3]);
    } else {
      FK_UNROLL for (int r = 0; r < 8; ++r)
          add_four(to + r * 512, dq[4 * r], dq[4 * r + 1], dq[4 * r + 2], dq[4 * r + 3]);
    }
    if (S::kTold && last) {
      __syncwarp();
      arrive(S::kSumsFull + 8 * consumer);
    }
  };

#pragma unroll 1
  for (uint32_t part = part_words(words, 0); part != part_words(words, block_word(words, kParts));
       part += 4 * kPartWords) {
    float dk[S::kColumns / 2] = {}, dv[S::kColumnsV / 2] = {};
    int tile = part_word(part, kStart), head = 0, place = 0;
    if (tile != part_word(part, kStop)) {
      bool begun = false;
      const uint32_t keys_parity = part == part_words(words, 0) ? 0 : 1;
      mbarrier_wait_both(base + S::kKFull, keys_parity, base + S::kVFull, keys_parity);
      if (a.starts_k && part_word(part, kKeysLeft) < kKeyTile) {
        clear_rows(base + (consumer == 0 ? S::kK : S::kV), part_word(part, kKeysLeft), kKeyTile,
                   consumer == 0 ? S::kPanels : S::kPanelsV, S::kKeyPanel, thread);
        FK_NAMED_BARRIER(1, 256);
      }
#pragma unroll 1
      do {
        const uint32_t q = base + S::kQ + stage * S::kQueryBytes, dout = base + S::kDout + stage * S::kDoutBytes;
        const uint32_t landing = 8 * (S::kHalves ? column_block : stage), other = 8 * (1 - column_block);
        if (a.starts_q && block_word(words, kQueryLength) < (tile + 1) * kQueries)
          clear_behind<S>(base, consumer, thread, stage, parity, block_word(words, kQueryLength) - tile * kQueries);

        float s[kQueries / 2], dp[kQueries / 2];
        const auto multiply_dout = [&] {
          mbarrier_wait(base + S::kDoutFull + landing, parity);
          wgmma_fence();
          multiply_rows<S, S::kPanelsV>(dp, own_v, dout, false);
          wgmma_commit();
        };
        if constexpr (S::kHalves) {
          const uint32_t k0 = 2 * S::kKeyPanel - column_block * 2 * S::kKeyPanel, k1 = 2 * S::kKeyPanel - k0;
          const uint32_t q0 = 2 * S::kQueryPanel - columns;
          mbarrier_wait(base + S::kQFull + other, parity);
          wgmma_fence();
          multiply_rows<S, 2>(s, own_k + k0, q + q0, false);
          mbarrier_wait(base + S::kDoutFull + other, parity);
          wgmma_fence();
          multiply_rows<S, 2>(dp, own_v + k0, dout + q0, false);
          mbarrier_wait(base + S::kQFull + landing, parity);
          wgmma_fence();
          multiply_rows<S, 2>(s, own_k + k1, q + columns, true);
          wgmma_commit();
          mbarrier_wait(base + S::kDoutFull + landing, parity);
          wgmma_fence();
          multiply_rows<S, 2>(dp, own_v + k1, dout + columns, true);
          wgmma_commit();
        } else {
          mbarrier_wait(base + S::kQFull + landing, parity);
          wgmma_fence();
          multiply_rows<S, S::kPanels>(s, own_k, q, false);
          wgmma_commit();
          if constexpr (!S::kThirds) multiply_dout();
        }

        wgmma_wait<S::kThirds ? 0 : 1>();
        settle(s);
        if constexpr (S::kHalves) {
          __syncwarp();  // all lanes are past their waits
          arrive(S::kQFree + other);
          arrive(S::kDoutFree + other);
        }
        uint32_t weights[kQueries / 4], factors[kQueries / 4];
        weigh<S>(a, work, words, part, tile, head, key_again(), thread_again() % 4,
                 base + S::kLse + stage * S::kRowBytes, s, weights, factors);
        if constexpr (S::kThirds) multiply_dout();
        wgmma_fence();
        add_rows<S>(dv, weights, dout + columns);
        wgmma_commit();

        wgmma_wait<S::kThirds ? 0 : 1>();  // thirds: dv's too, whose operands' registers ptxas needs
        settle(dp);
        uint32_t scores[kQueries / 4];  // dS^T
        FK_UNROLL for (int j = 0; j < kQueries / 8; ++j) {
          const float2 delta =
              load_shared_pair(base + S::kDelta + stage * S::kRowBytes + thread_again() % 4 * 8 + j * 32);
          FK_UNROLL for (int k = 2 * j; k < 2 * j + 2; ++k) {
            const float2 p = !S::kWeightsRounded ? float2{s[2 * k], s[2 * k + 1]}
                             : S::kOptions       ? unpack<__half>(factors[k])
                                                 : unpack<T>(weights[k]);
            scores[k] = pack<T>(p.x * (dp[2 * k] - delta.x), p.y * (dp[2 * k + 1] - delta.y));
          }
        }
        const uint32_t buffer = count & 1, before = buffer ^ 1;
        mbarrier_wait(base + S::kScoresFree + 8 * buffer, (count / 2 & 1) ^ 1);
        const int t = thread_again() - 128;  // the four lanes of a row hold the addresses of its 16-byte chunks
        const uint32_t to_scores =
            base + S::kScores + (t / 32 * 16 + t % 16) * kPanelBytes + ((t % 32 / 16 ^ t % 8) << 4);
        FK_UNROLL for (int k = 0; k < kQueries / 16; ++k) {
          const uint32_t at = to_scores + buffer * S::kScoreBytes + k / 4 * S::kKeyPanel;
          const uint32_t four[4] = {scores[4 * k], scores[4 * k + 1], scores[4 * k + 2], scores[4 * k + 3]};
          store_matrices(at ^ (k % 4 << 5), four);
        }
        fence_proxy_async();
        __syncwarp();
        arrive(S::kScoresFull + 8 * buffer);
        wgmma_fence();
        add_rows<S>(dk, scores, q + columns);
        wgmma_commit();

        // dq of the previous step. The first step computes an unused value: a conditional matmul would make ptxas
        // serialise all of them.
        float dq[32];
        if (begun) mbarrier_wait(base + S::kScoresFull + 8 * before, ((count - 1) / 2) & 1);
        wgmma_fence();
        multiply_keys<S>(dq, begun ? dq_scores + before * S::kScoreBytes : dq_k, dq_k);
        wgmma_commit();
        wgmma_wait<1>();  // dv and dk have this step's contributions
        arrive(S::kQFree + landing);
        arrive(S::kDoutFree + landing);
        if (++stage == S::kStages) stage = 0, parity ^= 1;
        wgmma_wait<0>();
        settle(dq);
        if constexpr (S::kThirds) {
          if (begun) deliver(dq, count - 1, place, true, false);
          wgmma_fence();
          multiply_keys<S, 64>(dq, begun ? dq_scores + own_keys() + before * S::kScoreBytes : third_k(), third_k());
          wgmma_commit();
          wgmma_wait<0>();
          settle(dq);
        }
        if (begun) {
          arrive(S::kScoresFree + 8 * before);
          deliver(dq, count - 1, place, !S::kThirds);
        }
        if constexpr (!S::kInOrder)
          place = (block_word(words, kFirstHead) + head) * work.query_tiles + block_word(words, kFirstQueryTile) + tile;
        begun = true;
        ++count;
        if (++head == work.heads) head = 0, tile += part_word(part, kStepBy);
      } while (tile != part_word(part, kStop));
      const uint32_t last = (count - 1) & 1;
      mbarrier_wait(base + S::kScoresFull + 8 * last, ((count - 1) / 2) & 1);
      float dq[32];
      wgmma_fence();
      multiply_keys<S>(dq, dq_scores + last * S::kScoreBytes, dq_k);
      wgmma_commit();
      wgmma_wait<0>();
      settle(dq);
      settle(dk);
      settle(dv);
      if constexpr (S::kThirds) {
        deliver(dq, count - 1, place, true, false);
        wgmma_fence();
        multiply_keys<S, 64>(dq, dq_scores + own_keys() + last * S::kScoreBytes, third_k());
        wgmma_commit();
        wgmma_wait<0>();
        settle(dq);
      }
      arrive(S::kScoresFree + 8 * last);
      arrive(S::kKeysFree);
      deliver(dq, count - 1, place, !S::kThirds);
    }

    const int key_tile = part_word(part, kTile);
    if (work.splits > 1) {
      const auto write = [&](bool of_dv, const auto& sums) {
        float* const to =
            part_at<S::kWidth>(a, work, of_dv, block_word(words, kShare), block_word(words, kFirstKeyTile) + key_tile) +
            (consumer * S::kPanels + column_block * 2) * kPieceFloats + thread_again() % 128 * 4;
        FK_UNROLL for (int i = 0; i < static_cast<int>(sizeof(sums) / 16); ++i)
            store_four(to + i * 512, sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
      };
      write(false, dk);
      write(true, dv);
      continue;
    }
    Head h(a, block_word(words, kSequence), 0);
    h.kv_head = block_word(words, kKvHead);  // avoids a division
    FK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = key_tile * kKeyTile + key_again() + 8 * half;
      const auto write = [&](void* data, const HeadStrides& strides, const auto& sums, float factor, int width) {
        constexpr int kSums = sizeof(sums) / 4;
        const int first_column = column_block * kSums * 2;
        T* const to = static_cast<T*>(data) + h.key_at(strides, row) + first_column;
        tiles::write_row<T, kSums * 2>(row < h.k_len ? to : nullptr,
                                       reinterpret_cast<const float (&)[kSums / 4][4]>(sums), half, factor,
                                       width - first_column, lane);
      };
      write(a.dk, a.dk_strides, dk, a.scale, a.head_dim);
      write(a.dv, a.dv_strides, dv, 1.f, a.head_dim_v);
    }
  }
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
