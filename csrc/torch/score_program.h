// Plans of score functions (cpu/score_program.h) from the encoded programs of ops/flash_attention/score_program.
#pragma once

#include "../cpu/score_program.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace foundry {

struct ScoreTensor {
  ScoreType type;
  at::Tensor data;  // any strides
};
// Captured tensors as the kernels read them: of other dtypes, a copy.
std::vector<ScoreTensor> score_tensors_of(const std::vector<at::Tensor>& tensors);

struct ScoreQuery {
  bool own_heads;                  // the rows of a block are those of several heads
  bool keys_in_lanes;              // see ScorePlan
  bool slope;                      // the derivative by the score is wanted
  std::vector<int64_t> gradients;  // the slots of tensors whose gradients are wanted
};

// The encoded list holds a program, then its derivatives. Raises ValueError if it is malformed.
ScorePlan plan_scores(const std::vector<int64_t>& code, const std::vector<ScoreTensor>& tensors,
                      const ScoreQuery& query);

}  // namespace foundry
