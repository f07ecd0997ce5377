// The backward kernel's tiles, shared memory layout and barriers, and its matmuls.
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
  static constexpr int kColumns = kWidth / kColumnBlocks, kPanels = kWidth / kPanel;  // of dk, dq; K, Q
  static constexpr int kColumnsV = value_width_of(kWidth) / kColumnBlocks, kPanelsV = value_width_of(kWidth) / kPanel;
  static constexpr bool kThirds = kWidth == 192;       // a warpgroup computes 64 columns of dq, and half of the last 64
  static constexpr bool kHalves = kColumnBlocks == 2;  // Q and dO are copied, and freed, 128 columns at a time
  static constexpr int kPieces = pieces_of(kWidth);
  // How dq is added. In any order: by the computing warpgroups from registers. By turns: through shared memory with
  // bulk copies or, if shared memory is full, by the computing warpgroups, which are told when their turn comes.
  static constexpr bool kInOrder = kInOrder_, kTold = kInOrder && kWidth > 128, kStaged = kInOrder && !kTold;
  static constexpr int kStages = kHalves ? 1 : kStaged || kThirds ? 2 : 3;  // of Q and dO
  static constexpr int kLandings = kHalves ? 2 : kStages;                   // barriers of Q and of dO
  static constexpr bool kWeightsRounded = kWidth == 64 || kThirds;  // dS uses the P that dV does, to save registers

  static constexpr uint32_t kKeyPanel = kKeyTile * kPanelBytes, kQueryPanel = kQueries * kPanelBytes;
  static constexpr uint32_t kKeyBytes = kPanels * kKeyPanel, kQueryBytes = kPanels * kQueryPanel;
  static constexpr uint32_t kValueBytes = kPanelsV * kKeyPanel, kDoutBytes = kPanelsV * kQueryPanel;
  static constexpr uint32_t kScoreBytes = kKeyTile * kQueries * 2, kPieceBytes = kPieceFloats * 4;
  static constexpr uint32_t kRowBytes = kQueries * 4;
  static constexpr uint32_t kK = 0, kV = kK + kKeyBytes, kQ = kV + kValueBytes, kDout = kQ + kStages * kQueryBytes,
                            kScores = kDout + kStages * kDoutBytes, kSums = kScores + 2 * kScoreBytes,
                            kLse = kSums + (kStaged ? 4 * kPieceBytes : 0), kDelta = kLse + kStages * kRowBytes,
                            kBarriers = kDelta + kStages * kRowBytes;
  // Barriers. Full: data has arrived. Free: it may be overwritten.
  static constexpr uint32_t kKFull = kBarriers, kVFull = kKFull + 8, kKeysFree = kVFull + 8, kQFull = kKeysFree + 8,
                            kQFree = kQFull + 8 * kLandings, kDoutFull = kQFree + 8 * kLandings,
                            kDoutFree = kDoutFull + 8 * kLandings, kScoresFull = kDoutFree + 8 * kLandings,
                            kScoresFree = kScoresFull + 16, kSumsFull = kScoresFree + 16, kSumsFree = kSumsFull + 32,
                            kWords = kSumsFree + 32;
  static constexpr int kShared = kWords + 4 * kAllWords;
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
template <class S, int kColumns>
__device__ __forceinline__ void add_rows(float (&sums)[kColumns], const uint32_t (&scores)[S::kQueries / 4],
                                         uint32_t rows) {
  const uint64_t right = matrix(rows, S::kQueryPanel);
  FK_UNROLL for (int k = 0; k < S::kQueries / 16; ++k) Wgmma<2 * kColumns>::template registers<typename S::T, true>(
      sums, scores + 4 * k, further(right, k * 2048), true);
}

// dq (64 queries, 64 columns) = a panel of dS^T, transposed, x a panel of K, along kKeys keys.
template <class S, int kKeys = kKeyTile>
__device__ __forceinline__ void multiply_keys(float (&dq)[32], uint32_t scores, uint32_t keys) {
  const uint64_t left = matrix(scores, kSwizzleBytes), right = matrix(keys, kSwizzleBytes);
  FK_UNROLL for (int k = 0; k < kKeys / 16; ++k) Wgmma<64>::template shared<typename S::T, true, true>(
      dq, further(left, k * 2048), further(right, k * 2048), k > 0);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
