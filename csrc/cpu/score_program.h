// A score function (ops/flash_attention/score_program) as lists of instructions on tiles of scores.
//
// A value is a 32-bit number (a float, an int or a mask of 0 or ~0) for each pair of a row and a key, but it has as
// many numbers as it varies: one, one per row, one per key, or a tile. What varies with rows alone is computed once a
// block, what varies with keys once a tile, and the rest in chunks of kScoreSteps steps, whose registers stay in the L1
// cache. The lanes of a tile are its rows and its steps the keys, or the other way round for few rows
// (`keys_in_lanes`).
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"

namespace foundry {

// Numbered as OPS of program.py. The last ones are not part of the language.
enum class ScoreOp : int32_t {
  score,
  b,
  h,
  q,
  k,
  constant,
  load,
  to_float,
  to_int,
  detach,
  neg,
  abs,
  exp,
  exp2,
  log,
  log2,
  sqrt,
  rsqrt,
  tanh,
  sigmoid,
  sin,
  cos,
  floor,
  add,
  sub,
  mul,
  div,
  floordiv,
  mod,
  pow,
  min,
  max,
  lt,
  le,
  eq,
  bit_and,
  bit_or,
  bit_xor,
  bit_not,
  where,
  copy,
  spread,
  offsets
};
enum class ScoreKind : int32_t { boolean, integer, real };
enum class ScoreType { f32, bf16, f16, f64, i32, i64, boolean };

constexpr int64_t kScoreLanes = 64;   // numbers of a step; also the most steps of a tile
constexpr int64_t kScoreSteps = 16;   // steps of a chunk
constexpr int64_t kScoreVector = 16;  // room for a register of any instruction set

// Where a value is and how it lies: one number in all lanes; a number per lane; a number per step, side by side or each
// in all lanes; a chunk or a tile of [steps, kScoreLanes]; the tile of scores; int64 per row.
enum class ScoreLayout { one, lanes, steps, spread, chunk, tile, scores, offsets };
enum class ScoreMemory { block, tile, scores };
struct ScoreRegister {
  ScoreLayout layout;
  ScoreMemory memory;
  int64_t offset;
};

struct ScoreInstruction {
  ScoreOp op;
  ScoreKind kind;  // of the operands
  int to, from[3];
  uint32_t bits;  // of a constant
  int load;
};

// Element strides. The index of a dimension is a register. by_lane and by_step: what it grows by from one to the next,
// of loads along diagonals.
struct ScoreDimension {
  int64_t size, stride;
  int64_t by_lane, by_step;
  int index;
  bool may_be_negative;
};
struct ScoreLoad {
  const void* data;
  ScoreType type;
  std::vector<ScoreDimension> dimensions;
  bool is_empty;
  bool narrow;  // offsets fit in 32 bits
  int along;    // the dimension whose index is the key, if the others vary with rows alone; otherwise -1
  int64_t
      diagonal;  // if not 0, the offset grows by it from a lane to the next and shrinks by it from a step to the next
};

// The gradient of the tensor that a load reads: ds times the value of `derivative`, added to elements of a contiguous
// tensor. `load.data` is not used.
struct ScoreGradient {
  int derivative;
  ScoreLoad load;
  int sums;                // which
  int indexed_by[3];       // the dimension whose index is b, h or q itself, or -1
  bool exclusive = false;  // each pair has its own element, along keys: the sums are float, not double
};

struct ScorePlan {
  bool keys_in_lanes;
  std::vector<ScoreRegister> registers;
  std::vector<ScoreInstruction> of_block, of_tile, of_chunk;
  std::vector<ScoreLoad> loads;
  int64_t block_floats, tile_floats;
  int slope;  // d result / d score, a tile; -1 where it is 1 or not wanted
  std::vector<ScoreGradient> gradients;
};

// Scratch of a plan with room for two blocks and, in the backward pass, three tiles.
struct ScoreScratch {
  float *blocks[2], *tile, *tiles[3];

  ScoreScratch(const ScorePlan* plan, float* p) {
    if (!plan) return;
    for (float*& block : blocks) block = p, p += plan->block_floats;
    tile = p, p += plan->tile_floats;
    for (float*& each : tiles) each = p, p += kScoreLanes * kScoreLanes;
  }
};
inline int64_t score_scratch(const ScorePlan* plan) {
  return plan ? 2 * plan->block_floats + plan->tile_floats + 3 * kScoreLanes * kScoreLanes : 0;
}

// Rows of a block: row = query * group + head in group.
struct ScoreRows {
  int64_t sequence, first_head, group, row, count;
  const int64_t* heads;  // of the sequence: batch << 32 | head, or null: a head's own index
};

}  // namespace foundry

// Computes what the rows of a block alone determine.
FK_DECLARE_PER_ISA(void, score_block, const ScorePlan& plan, const ScoreRows& rows, float* block)
// Replaces a tile's scores by the results for `rows` rows of the block and keys [key, key + n), and computes the other
// values of the plan in `tile`. Scores of other lanes become undefined: each step has room for kScoreLanes.
FK_DECLARE_PER_ISA(void, score_tile, const ScorePlan& plan, const float* block, float* tile, float* scores, int64_t ld,
                   int64_t rows, int64_t key, int64_t n)
// Adds ds [n, kScoreLanes] times the derivatives to the sums of captured tensors, after score_tile. `products` is a
// tile of scratch.
FK_DECLARE_PER_ISA(void, score_gradients, const ScorePlan& plan, const float* block, const float* tile, const float* ds,
                   float* products, int64_t rows, int64_t key, int64_t n, void* const* sums)
