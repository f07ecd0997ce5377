// The backward pass's main kernel: dk, dv, and sums of dq.
//
// A block has a warpgroup that copies (its first thread by TMA; two more threads take dq away) and two that multiply,
// of 64 keys each. Scores and their gradients have keys as rows:
//   S^T  = K Q^T          from shared memory       P^T  = exp2(S^T - lse)
//   dP^T = V dO^T         from shared memory       dS^T = P^T (dP^T - delta)
//   dV  += P^T dO         P^T from registers
//   dK  += dS^T Q         dS^T from registers
//   dQ   = dS K           dS^T from shared memory, where both warpgroups put theirs; each makes half of dQ, one step
//                         late, when the other's dS^T is long there
// dK and dV stay in registers over all heads of a group. 256 wide a block makes 128 columns of dK, dV and dQ, and
// another the other 128.
#pragma once

#include "backward_order.cuh"

namespace foundry {
namespace cuda {
namespace hopper {

template <class T_, int kWidth_, bool kOptions_, bool kInOrder_>
struct BackwardShape {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kOptions = kOptions_;  // soft cap and ALiBi
  static constexpr int kQueries = query_tile_of(kWidth), kColumnBlocks = column_blocks_of(kWidth);
  static constexpr int kColumns = kWidth / kColumnBlocks, kPanels = kWidth / kPanel;
  static constexpr bool kHalves = kColumnBlocks == 2;  // Q and dO come, and are free again, 128 columns at a time
  static constexpr int kPieces = pieces_of(kWidth);
  // How dq is added. In any order: by the consumers from registers. By turns: through shared memory and by bulk copies,
  // or, where shared memory is full, by the consumers, who are told when it is their turn.
  static constexpr bool kInOrder = kInOrder_, kStaged = kInOrder && !kHalves, kTold = kInOrder && kHalves;
  static constexpr int kStages = kHalves ? 1 : kStaged ? 2 : 3;  // of Q and dO
  static constexpr int kLandings = kHalves ? 2 : kStages;        // barriers of Q and of dO
  static constexpr bool kWeightsRounded = kWidth == 64;          // dS is made of P as dV is, as registers are few

  static constexpr uint32_t kKeyPanel = kKeyTile * kPanelBytes, kQueryPanel = kQueries * kPanelBytes;
  static constexpr uint32_t kKeyBytes = kPanels * kKeyPanel, kQueryBytes = kPanels * kQueryPanel;
  static constexpr uint32_t kScoreBytes = kKeyTile * kQueries * 2, kPieceBytes = kPieceFloats * 4;
  static constexpr uint32_t kRowBytes = kQueries * 4;
  static constexpr uint32_t kK = 0, kV = kK + kKeyBytes, kQ = kV + kKeyBytes, kDout = kQ + kStages * kQueryBytes,
                            kScores = kDout + kStages * kQueryBytes, kSums = kScores + 2 * kScoreBytes,
                            kLse = kSums + (kStaged ? 4 * kPieceBytes : 0), kDelta = kLse + kStages * kRowBytes,
                            kBarriers = kDelta + kStages * kRowBytes;
  // Barriers: full where something has come, free where it may be overwritten.
  static constexpr uint32_t kKFull = kBarriers, kVFull = kKFull + 8, kKeysFree = kVFull + 8, kQFull = kKeysFree + 8,
                            kQFree = kQFull + 8 * kLandings, kDoutFull = kQFree + 8 * kLandings,
                            kDoutFree = kDoutFull + 8 * kLandings, kScoresFull = kDoutFree + 8 * kLandings,
                            kScoresFree = kScoresFull + 16, kSumsFull = kScoresFree + 16, kSumsFree = kSumsFull + 32,
                            kWords = kSumsFree + 32;
  static constexpr int kShared = kWords + 4 * (kAllWords + 1);
  static constexpr uint32_t kTicket = kWords + 4 * kAllWords;
  static_assert(kShared <= 232448, "the shared memory of a block");
};

// d (64 rows of a, kRows of b) = or += a b^T along kPanels panels of columns of both.
template <class S, int kPanels>
__device__ __forceinline__ void multiply_rows(float (&d)[S::kQueries / 2], uint32_t a, uint32_t b, bool add) {
  const uint64_t left = matrix(a), right = matrix(b);
  FK_UNROLL for (int k = 0; k < kPanels * 4; ++k) Wgmma<S::kQueries>::template shared<typename S::T, false, false>(
      d, further(left, k / 4 * S::kKeyPanel + k % 4 * 32), further(right, k / 4 * S::kQueryPanel + k % 4 * 32),
      add || k > 0);
}

// sums (64 keys, kColumns) += scores^T in registers x rows of Q or dO.
template <class S>
__device__ __forceinline__ void add_rows(float (&sums)[S::kColumns / 2], const uint32_t (&scores)[S::kQueries / 4],
                                         uint32_t rows) {
  const uint64_t right = matrix(rows, S::kQueryPanel);
  FK_UNROLL for (int k = 0; k < S::kQueries / 16; ++k)
      Wgmma<S::kColumns>::template registers<typename S::T, true>(sums, scores + 4 * k, further(right, k * 2048), true);
}

// dq (64 queries, 64 columns) = a panel of dS^T, transposed, x a panel of K, along the block's keys.
template <class S>
__device__ __forceinline__ void multiply_keys(float (&dq)[32], uint32_t scores, uint32_t keys) {
  const uint64_t left = matrix(scores, kSwizzleBytes), right = matrix(keys, kSwizzleBytes);
  FK_UNROLL for (int k = 0; k < kKeyTile / 16; ++k) Wgmma<64>::template shared<typename S::T, true, true>(
      dq, further(left, k * 2048), further(right, k * 2048), k > 0);
}

struct BackwardMaps {
  const TensorMap *q, *k, *v, *dout;
};

// --- copies in: one thread -------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void produce(const AttentionBackward& a, const BackwardWork& work, const BackwardMaps& maps,
                                        uint32_t base) {
  constexpr int kAtOnce = S::kHalves ? 2 : S::kPanels;  // panels of Q and dO
  const uint32_t words = base + S::kWords;
  const int batch = a.starts_q ? 0 : block_word(words, kSequence), kv_head = block_word(words, kKvHead);
  const int group = static_cast<int>(a.group), column_block = S::kHalves ? block_word(words, kColumnBlock) : 0;
  const auto load_keys = [&](uint32_t to, const TensorMap* map, uint32_t full, uint32_t part) {
    mbarrier_expect(base + full, S::kKeyBytes);
    const int token = block_word(words, kKeyStart) + part_word(part, kTile) * kKeyTile;
    FK_UNROLL for (int panel = 0; panel < S::kPanels; ++panel)
        tma_load(base + to + panel * S::kKeyPanel, map, base + full, panel * kPanel, token, kv_head, batch);
  };
  int stage = 0;
  uint32_t parity = 1;
  for (Walk walk(words, group); !walk.at_end(); walk.next()) {
    const int head = kv_head * group + walk.head;
    const int token = block_word(words, kQueryStart) + walk.tile * S::kQueries;
    const int64_t row = query_tile_at(work, head, block_word(words, kFirstQueryTile), walk.tile) * S::kQueries;
    const auto load_queries = [&](uint32_t to, const TensorMap* map, uint32_t full, uint32_t free, const float* numbers,
                                  uint32_t numbers_to, int landing) {
      // Of halves the one that is only for S and dP comes first, as it is free first.
      const int first = S::kHalves ? 2 * landing : 0;
      const bool last = !S::kHalves || landing == column_block;
      full = base + full + 8 * landing;
      mbarrier_wait(base + free + 8 * landing, parity);
      mbarrier_expect(full, kAtOnce * S::kQueryPanel + (last ? S::kRowBytes : 0));
      FK_UNROLL for (int panel = 0; panel < kAtOnce; ++panel)
          tma_load(base + to + stage * S::kQueryBytes + (first + panel) * S::kQueryPanel, map, full,
                   (first + panel) * kPanel, token, head, batch);
      if (last) bulk_load(base + numbers_to + stage * S::kRowBytes, numbers + row, S::kRowBytes, full);
    };
    const bool begins = walk.begins_part();
    if (begins) {
      if (walk.part != part_words(words, 0)) mbarrier_wait(base + S::kKeysFree, 0);
      load_keys(S::kK, maps.k, S::kKFull, walk.part);
    }
    FK_UNROLL for (int half = 0; half < (S::kHalves ? 2 : 1); ++half) {
      const int landing = !S::kHalves ? stage : half == 0 ? 1 - column_block : column_block;
      load_queries(S::kQ, maps.q, S::kQFull, S::kQFree, work.lse, S::kLse, landing);
      if (begins && half == 0) load_keys(S::kV, maps.v, S::kVFull, walk.part);
      load_queries(S::kDout, maps.dout, S::kDoutFull, S::kDoutFree, work.delta, S::kDelta, landing);
    }
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
}

// --- dq out, by turns: one thread for each of the warpgroups `consumer`
// --------------------------------------------------

template <class S>
__device__ __forceinline__ int64_t piece_at(const BackwardWork& work, uint32_t words, const Walk& walk, int group,
                                            int piece) {
  const int head = block_word(words, kKvHead) * group + walk.head;
  return query_tile_at(work, head, block_word(words, kFirstQueryTile), walk.tile) * S::kPieces + piece;
}

// Adds what the warpgroup has put into shared memory.
template <class S>
__device__ __forceinline__ void add_staged(const AttentionBackward& a, const BackwardWork& work, uint32_t base,
                                           int consumer) {
  const uint32_t words = base + S::kWords;
  const int group = static_cast<int>(a.group);
  int count = 0;
  for (Walk walk(words, group); !walk.at_end(); walk.next(), ++count) {
    const int64_t piece = piece_at<S>(work, words, walk, group, consumer);
    const int turn = turn_of<S::kQueries>(a, work, words, walk.tile, part_word(walk.part, kTile));
    const int place = 2 * consumer + count % 2;
    const uint32_t from = base + S::kSums + place * S::kPieceBytes;
    mbarrier_wait(base + S::kSumsFull + 8 * place, count / 2 & 1);
    wait_until(work.turns + piece, turn);
    fence_proxy_async_global();
    if (turn == 0) bulk_store(work.dq + piece * kPieceFloats, from, S::kPieceBytes);
    else bulk_add(work.dq + piece * kPieceFloats, from, S::kPieceBytes);
    bulk_commit();
    bulk_wait_read();
    mbarrier_arrive(base + S::kSumsFree + 8 * place);
    bulk_wait();
    fence_proxy_async_global();
    add_release(work.turns + piece);
  }
}

// Tells the warpgroup that it is its turn, and the next adder when it has added. Whether the next step's turn has come
// is looked up while this step is made, so that the warpgroup seldom waits for the release.
template <class S>
__device__ __forceinline__ void tell_turns(const AttentionBackward& a, const BackwardWork& work, uint32_t base,
                                           int consumer) {
  const uint32_t words = base + S::kWords, full = base + S::kSumsFull + 8 * consumer;
  const uint32_t free = base + S::kSumsFree + 8 * consumer;
  const int group = static_cast<int>(a.group), place = 2 * block_word(words, kColumnBlock) + consumer;
  Walk walk(words, group);
  bool told = false;
  for (uint32_t parity = 0; !walk.at_end(); parity ^= 1) {
    const auto turn = [&] { return turn_of<S::kQueries>(a, work, words, walk.tile, part_word(walk.part, kTile)); };
    int* const turns = work.turns + piece_at<S>(work, words, walk, group, place);
    if (!told) {
      wait_until(turns, turn());
      mbarrier_arrive(free);
    }
    walk.next();
    told = !walk.at_end() && load_acquire(work.turns + piece_at<S>(work, words, walk, group, place)) == turn();
    mbarrier_wait(full, parity);
    if (told) mbarrier_arrive(free);
    add_release(turns);
  }
}

// --- products --------------------------------------------------------------------------------------------------------

// P^T from S^T, in `weights` rounded, and what dP^T - delta is to be multiplied by: in s, or where these registers are
// needed, in `factors` (as halves, which have most bits for what is at most 1), or where that is P^T in `weights`
// alone. Element 4 j + 2 half + e is of key `key` + 8 half of the tile and query 8 j + 2 c + e.
template <class S>
__device__ __forceinline__ void weigh(const AttentionBackward& a, const BackwardWork& work, uint32_t words,
                                      uint32_t part, int tile, int head, int key, int c, uint32_t lse,
                                      float (&s)[S::kQueries / 2], uint32_t (&weights)[S::kQueries / 4],
                                      uint32_t (&factors)[S::kQueries / 4]) {
  using T = typename S::T;
  if constexpr (S::kOptions)
    if (a.softcap > 0.f) FK_UNROLL for (int k = 0; k < S::kQueries / 2; ++k) s[k] = tanhf(s[k] * work.cap_in);
  if (tile < part_word(part, kBeginWhole) || tile >= part_word(part, kEndWhole)) {
    FK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = key + 8 * half, shift = row - tile * S::kQueries - 2 * c;
      // Columns, less 2 c, that the key is seen by.
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
          exp2_fast(fmaf(s[k], work.scale_log2, -(k % 2 ? numbers.y : numbers.x)));
    }
    FK_UNROLL for (int k = 0; k < S::kQueries / 4; ++k) weights[k] = pack<T>(s[2 * k], s[2 * k + 1]);
  } else {
    float slope = 0.f;
    if (a.alibi_slopes)
      slope = kLog2e * a.alibi_slopes[block_word(words, kSequence) * a.alibi_slopes_batch_stride +
                                      block_word(words, kKvHead) * a.group + head];
    const float distance =
        static_cast<float>(tile * S::kQueries + 2 * c + block_word(words, kOffset) - part_word(part, kTile) * kKeyTile -
                           key);  // of the first query from the first key
    // Of a capped score the derivative is 1 - t^2; of a hidden one, where t is not finite, 0.
    const float curve = a.softcap > 0.f ? -1.f : 0.f, factor = a.softcap > 0.f ? work.cap_out_log2 : work.scale_log2;
    FK_UNROLL for (int j = 0; j < S::kQueries / 8; ++j) {
      const float2 numbers = load_shared_pair(lse + c * 8 + j * 32);
      FK_UNROLL for (int k = 2 * j; k < 2 * j + 2; ++k) {
        float p[2];
        FK_UNROLL for (int e = 0; e < 2; ++e) {
          float& t = s[2 * k + e];
          const float far = fabsf(distance + (8 * j + e - k % 2 * 8));
          p[e] = exp2_fast(fmaf(t, factor, -(e ? numbers.y : numbers.x)) - slope * far);
          t = p[e] * fmaxf(fmaf(t * curve, t, 1.f), 0.f);
        }
        weights[k] = pack<T>(p[0], p[1]);
        if constexpr (S::kWeightsRounded) factors[k] = pack<__half>(s[2 * k], s[2 * k + 1]);
      }
    }
  }
}

// Rows of Q and dO behind the end of a packed sequence, of both warpgroups' step, become zeros.
template <class S>
__device__ __forceinline__ void clear_behind(uint32_t base, int consumer, int thread, int stage, uint32_t parity,
                                             int n) {
  FK_UNROLL for (int landing = 0; landing < (S::kHalves ? 2 : 1); ++landing) mbarrier_wait_both(
      base + S::kQFull + 8 * (stage + landing), parity, base + S::kDoutFull + 8 * (stage + landing), parity);
  const uint32_t tile = base + (consumer == 0 ? S::kQ : S::kDout) + stage * S::kQueryBytes;
  clear_rows(tile, n, S::kQueries, S::kPanels, S::kQueryPanel, thread);
  FK_NAMED_BARRIER(1, 256);
}

template <class S>
__device__ __forceinline__ void consume(const AttentionBackward& a, const BackwardWork& work, uint32_t base,
                                        int consumer) {
  using T = typename S::T;
  constexpr int kQueries = S::kQueries;
  const uint32_t words = base + S::kWords;
  const int thread = threadIdx.x % 128, lane = thread % 32, group = static_cast<int>(a.group);
  // The first of its two keys within the tile. With options registers are few, and what is cheap is made again.
  const auto thread_again = [] { return static_cast<int>(S::kOptions ? tiles::hidden(threadIdx.x) : threadIdx.x); };
  const auto key_again = [&] {
    const int t = thread_again() - 128;
    return t / 32 * 16 + t % 32 / 4;
  };
  const int column_block = S::kHalves ? block_word(words, kColumnBlock) : 0;
  const uint32_t own_k = base + S::kK + consumer * 64 * kPanelBytes, own_v = own_k + S::kV - S::kK;
  const uint32_t columns = S::kHalves ? column_block * 2 * S::kQueryPanel : 0;  // the block's, of Q and dO
  // Of dq's product the panel of K, and the panel of dS^T.
  const uint32_t dq_k = base + S::kK + (kQueries == 64 ? (2 * column_block + consumer) * S::kKeyPanel : 0);
  const uint32_t dq_scores = base + S::kScores + (kQueries == 64 ? 0 : consumer * S::kKeyPanel);
  const auto arrive = [&](uint32_t barrier) {
    if (lane == 0) mbarrier_arrive(base + barrier);
  };
  int stage = 0, count = 0;  // steps done
  uint32_t parity = 0;

  // dq's piece of step `step`, which was of the query tile with number `place` among those of all heads.
  const auto deliver = [&](const float (&dq)[32], int step, int place, bool first) {
    float* const to =
        work.dq + (static_cast<int64_t>(place) * S::kPieces + 2 * column_block + consumer) * kPieceFloats + thread * 4;
    if constexpr (S::kStaged) {
      const int buffer = 2 * consumer + step % 2;
      mbarrier_wait(base + S::kSumsFree + 8 * buffer, (step / 2 & 1) ^ 1);
      const uint32_t at = base + S::kSums + buffer * S::kPieceBytes + thread * 16;
      FK_UNROLL for (int r = 0; r < 8; ++r)
          store_shared_four(at + r * 2048, dq[4 * r], dq[4 * r + 1], dq[4 * r + 2], dq[4 * r + 3]);
      fence_proxy_async();
      __syncwarp();
      arrive(S::kSumsFull + 8 * buffer);
    } else {
      if constexpr (S::kTold) mbarrier_wait(base + S::kSumsFree + 8 * consumer, step & 1);  // until it is our turn
      if (S::kTold && first) {
        FK_UNROLL for (int r = 0; r < 8; ++r)
            store_four(to + r * 512, dq[4 * r], dq[4 * r + 1], dq[4 * r + 2], dq[4 * r + 3]);
      } else {
        FK_UNROLL for (int r = 0; r < 8; ++r)
            add_four(to + r * 512, dq[4 * r], dq[4 * r + 1], dq[4 * r + 2], dq[4 * r + 3]);
      }
      if constexpr (S::kTold) {
        __syncwarp();
        arrive(S::kSumsFull + 8 * consumer);
      }
    }
  };

#pragma unroll 1
  for (uint32_t part = part_words(words, 0); part != part_words(words, block_word(words, kParts));
       part += 4 * kPartWords) {
    float dk[S::kColumns / 2] = {}, dv[S::kColumns / 2] = {};
    int tile = part_word(part, kStart), head = 0, place = 0;
    if (tile != part_word(part, kStop)) {
      bool begun = false, first = false;  // first: whether the step before was the first to add to its piece
      const uint32_t keys_parity = part == part_words(words, 0) ? 0 : 1;
      mbarrier_wait_both(base + S::kKFull, keys_parity, base + S::kVFull, keys_parity);
      if (a.starts_k && part_word(part, kKeysLeft) < kKeyTile) {
        clear_rows(base + (consumer == 0 ? S::kK : S::kV), part_word(part, kKeysLeft), kKeyTile, S::kPanels,
                   S::kKeyPanel, thread);
        FK_NAMED_BARRIER(1, 256);
      }
      float s[kQueries / 2];
#pragma unroll 1
      do {
        const uint32_t q = base + S::kQ + stage * S::kQueryBytes, dout = base + S::kDout + stage * S::kQueryBytes;
        const uint32_t landing = 8 * (S::kHalves ? column_block : stage), other = 8 * (1 - column_block);
        if (a.starts_q && block_word(words, kQueryLength) < (tile + 1) * kQueries)
          clear_behind<S>(base, consumer, thread, stage, parity, block_word(words, kQueryLength) - tile * kQueries);

        float dp[kQueries / 2];
        if constexpr (S::kHalves) {
          const uint32_t k0 = 2 * S::kKeyPanel - column_block * 2 * S::kKeyPanel, k1 = 2 * S::kKeyPanel - k0;
          const uint32_t q0 = 2 * S::kQueryPanel - columns;
          mbarrier_wait(base + S::kQFull + other, parity);
          forget(s);
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
          forget(s);
          wgmma_fence();
          multiply_rows<S, S::kPanels>(s, own_k, q, false);
          wgmma_commit();
          mbarrier_wait(base + S::kDoutFull + landing, parity);
          wgmma_fence();
          multiply_rows<S, S::kPanels>(dp, own_v, dout, false);
          wgmma_commit();
        }

        wgmma_wait<1>();
        settle(s);
        if constexpr (S::kHalves) {
          __syncwarp();  // all lanes are past their waits for them
          arrive(S::kQFree + other);
          arrive(S::kDoutFree + other);
        }
        uint32_t weights[kQueries / 4], factors[kQueries / 4];
        weigh<S>(a, work, words, part, tile, head, key_again(), thread_again() % 4,
                 base + S::kLse + stage * S::kRowBytes, s, weights, factors);
        wgmma_fence();
        add_rows<S>(dv, weights, dout + columns);
        wgmma_commit();

        wgmma_wait<1>();
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
        const int t = thread_again() - 128;  // four lanes a row say where its chunks of 16 bytes go
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

        // dq of the step before. The first one makes something of no use, as with a product under a condition ptxas
        // serialises all.
        float dq[32];
        if (begun) mbarrier_wait(base + S::kScoresFull + 8 * before, ((count - 1) / 2) & 1);
        wgmma_fence();
        multiply_keys<S>(dq, begun ? dq_scores + before * S::kScoreBytes : dq_k, dq_k);
        wgmma_commit();
        wgmma_wait<1>();  // dv and dk have what they get of this step
        arrive(S::kQFree + landing);
        arrive(S::kDoutFree + landing);
        if (++stage == S::kStages) stage = 0, parity ^= 1;
        wgmma_wait<0>();
        settle(dq);
        if (begun) {
          arrive(S::kScoresFree + 8 * before);
          deliver(dq, count - 1, place, first);
        }
        if constexpr (!S::kStaged)
          place = (block_word(words, kKvHead) * group + head) * work.query_tiles + block_word(words, kFirstQueryTile) +
                  tile;
        if constexpr (S::kTold) first = turn_of<kQueries>(a, work, words, tile, part_word(part, kTile)) == 0;
        begun = true;
        ++count;
        if (++head == group) head = 0, tile += part_word(part, kStepBy);
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
      arrive(S::kScoresFree + 8 * last);
      arrive(S::kKeysFree);
      deliver(dq, count - 1, place, first);
    }

    const Head h(a, block_word(words, kSequence), block_word(words, kKvHead) * group);
    FK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = part_word(part, kTile) * kKeyTile + key_again() + 8 * half;
      const int first_column = column_block * S::kColumns;
      const auto write = [&](void* data, const HeadStrides& strides, const float (&sums)[S::kColumns / 2], float factor,
                             int width) {
        T* const to = static_cast<T*>(data) + h.key_at(strides, row) + first_column;
        tiles::write_row<T, S::kColumns>(row < h.k_len ? to : nullptr,
                                         reinterpret_cast<const float (&)[S::kColumns / 8][4]>(sums), half, factor,
                                         width - first_column, lane);
      };
      write(a.dk, a.dk_strides, dk, a.scale, a.head_dim);
      write(a.dv, a.dv_strides, dv, 1.f, a.head_dim_v);
    }
  }
}

template <class S>
__global__ void __launch_bounds__(384, 1)
    attention_backward_kernel(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                              const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout,
                              const __grid_constant__ AttentionBackward a, const __grid_constant__ BackwardWork work) {
  FK_HOPPER_SHARED(base);
  launch_dependents();
  if (threadIdx.x == 0) {
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
  // Of a warp's registers, which the compiler then knows to be equal in all lanes.
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0), warpgroup = warp / 4;
  const auto count_as_done = [&] {
    add_release(work.done + block_word(words, kKvHead) * a.n_sequences + block_word(words, kSequence));
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
  const int64_t blocks = a.n_heads / a.group * work.units * S::kColumnBlocks;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  return launch_hopper(attention_backward_kernel<S>, dim3(static_cast<unsigned>(blocks)), dim3(384), S::kShared, stream,
                       false, q, k, v, dout, a, work);
}

template <int kWidth>
cudaError_t launch_backward_of_width(const AttentionBackward& a, const BackwardWork& work, cudaStream_t stream) {
  const auto of = [&](auto type, auto options) {
    using T = FK_TYPE(type);
    constexpr bool kOptions = decltype(options)::value;
    return work.in_order ? launch_backward<BackwardShape<T, kWidth, kOptions, true>>(a, work, stream)
                         : launch_backward<BackwardShape<T, kWidth, kOptions, false>>(a, work, stream);
  };
  const auto of_type = [&](auto type) {
    return has_score_options(a) ? of(type, Constant<true>{}) : of(type, Constant<false>{});
  };
  return a.type == Dtype::bf16 ? of_type(Tag<__nv_bfloat16>{}) : of_type(Tag<__half>{});
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
