// The first warpgroup of the backward kernel: copies inputs in, and adds dq in turn.
#pragma once

#include "backward_shape.cuh"

namespace foundry {
namespace cuda {
namespace hopper {

struct BackwardMaps {
  const TensorMap *q, *k, *v, *dout;
};

// --- copies in: one thread -------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void produce(const AttentionBackward& a, const BackwardWork& work, const BackwardMaps& maps,
                                        uint32_t base) {
  const uint32_t words = base + S::kWords;
  const int batch = a.starts_q ? 0 : block_word(words, kSequence), kv_head = block_word(words, kKvHead);
  const int first_head = block_word(words, kFirstHead), column_block = S::kHalves ? block_word(words, kColumnBlock) : 0;
  const auto load_keys = [&](uint32_t to, const TensorMap* map, uint32_t full, int panels, uint32_t part) {
    mbarrier_expect(base + full, panels * S::kKeyPanel);
    const int token = block_word(words, kKeyStart) + part_word(part, kTile) * kKeyTile;
    FK_UNROLL for (int panel = 0; panel < panels; ++panel)
        tma_load(base + to + panel * S::kKeyPanel, map, base + full, panel * kPanel, token, kv_head, batch);
  };
  int stage = 0;
  uint32_t parity = 1;
  for (Walk walk(words, work.heads); !walk.at_end(); walk.next()) {
    const int head = first_head + walk.head;
    const int token = block_word(words, kQueryStart) + walk.tile * S::kQueries;
    const int64_t row = query_tile_at(work, head, block_word(words, kFirstQueryTile), walk.tile) * S::kQueries;
    const auto load_queries = [&](uint32_t to, const TensorMap* map, uint32_t full, uint32_t free, const float* numbers,
                                  uint32_t numbers_to, int landing, int panels) {
      const int at_once = S::kHalves ? 2 : panels;
      // Of the halves, the one used only for S and dP comes first, because its buffer is free first.
      const int first = S::kHalves ? 2 * landing : 0;
      const bool last = !S::kHalves || landing == column_block;
      full = base + full + 8 * landing;
      mbarrier_wait(base + free + 8 * landing, parity);
      mbarrier_expect(full, at_once * S::kQueryPanel + (last ? S::kRowBytes : 0));
      FK_UNROLL for (int panel = 0; panel < at_once; ++panel)
          tma_load(base + to + stage * (panels * S::kQueryPanel) + (first + panel) * S::kQueryPanel, map, full,
                   (first + panel) * kPanel, token, head, batch);
      if (last) bulk_load(base + numbers_to + stage * S::kRowBytes, numbers + row, S::kRowBytes, full);
    };
    const bool begins = walk.begins_part();
    if (begins) {
      if (walk.part != part_words(words, 0)) mbarrier_wait(base + S::kKeysFree, 0);
      load_keys(S::kK, maps.k, S::kKFull, S::kPanels, walk.part);
    }
    FK_UNROLL for (int half = 0; half < (S::kHalves ? 2 : 1); ++half) {
      const int landing = !S::kHalves ? stage : half == 0 ? 1 - column_block : column_block;
      load_queries(S::kQ, maps.q, S::kQFull, S::kQFree, work.lse, S::kLse, landing, S::kPanels);
      if (begins && half == 0) load_keys(S::kV, maps.v, S::kVFull, S::kPanelsV, walk.part);
      load_queries(S::kDout, maps.dout, S::kDoutFull, S::kDoutFree, work.delta, S::kDelta, landing, S::kPanelsV);
    }
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
}

// --- dq out, by turns: one thread for each of the warpgroups that multiply -------------------------------------------

template <class S>
__device__ __forceinline__ int64_t piece_at(const AttentionBackward& a, const BackwardWork& work, uint32_t words,
                                            const Walk& walk, int piece) {
  const int head = block_word(words, kFirstHead) + walk.head;
  const int64_t tile = work.pairs && walk.part != part_words(words, 0)
                           ? upper_tile_at(a, work, head, block_word(words, kSequence), walk.tile)
                           : query_tile_at(work, head, block_word(words, kFirstQueryTile), walk.tile);
  return tile * S::kPieces + piece;
}

// Adds what the warpgroup has put into shared memory.
template <class S>
__device__ __forceinline__ void add_staged(const AttentionBackward& a, const BackwardWork& work, uint32_t base,
                                           int consumer) {
  const uint32_t words = base + S::kWords;
  int count = 0;
  for (Walk walk(words, work.heads); !walk.at_end(); walk.next(), ++count) {
    const int64_t piece = piece_at<S>(a, work, words, walk, consumer);
    const int turn = turn_of<S::kQueries>(work, words, walk);
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

// Tells the warpgroup which piece to add to when its turn comes, and the next adder when it has added. Polls for the
// next step's turn during this step, so that the warpgroup rarely waits.
template <class S>
__device__ __forceinline__ void tell_turns(const AttentionBackward& a, const BackwardWork& work, uint32_t base,
                                           int consumer) {
  const uint32_t words = base + S::kWords, full = base + S::kSumsFull + 8 * consumer;
  const int place = 2 * block_word(words, kColumnBlock) + consumer;
  Walk walk(words, work.heads);
  bool told = false;
  for (uint32_t parity = 0; !walk.at_end(); parity ^= 1) {
    int piece = 0, turn = 0;
    const auto find = [&] {
      piece = static_cast<int>(piece_at<S>(a, work, words, walk, place));
      turn = turn_of<S::kQueries>(work, words, walk);
    };
    const auto tell = [&] {
      store_shared(words + 4 * (kPiece0 + consumer), turn == 0 ? ~piece : piece);
      mbarrier_arrive(base + S::kSumsFree + 8 * consumer);
    };
    find();
    int* const turns = work.turns + piece;
    if (!told) {
      wait_until(turns, turn);
      tell();
    }
    walk.next();
    told = false;
    if (!walk.at_end()) {
      find();
      told = load_acquire(work.turns + piece) == turn;
    }
    mbarrier_wait(full, parity);
    if (told) tell();
    add_release(turns);
  }
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
