// Shapes and checks of the operators of log_probs.cpp and log_probs_cpu.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "../common/log_probs.h"
#include "common.h"
#include "cross_entropy.h"

namespace foundry {

#define FK_LOG_PROBS_OPTIONS(OPTION)     \
  OPTION(int64_t, ignore_index, integer) \
  OPTION(double, logit_scale, number)    \
  OPTION(std::optional<double>, softcap, optional_positive)

struct LogProbsArguments {
  FK_OPTIONS(FK_LOG_PROBS_OPTIONS)
};

// The operator, for direct_losses.cpp. Returns (log_probs, entropy, lse); the last two are empty unless requested.
std::tuple<Tensor, Tensor, Tensor> log_probs(const Tensor& logits, const Tensor& target,
                                             const LogProbsArguments& options, bool return_entropy, bool return_lse);

// The outputs (log_probs, entropy, lse, lse_low) on logits' device. One that was not requested has shape [0].
using LogProbsOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

inline LogProbsOutputs empty_log_probs_fwd(const Tensor& logits, const Tensor& target, bool save_entropy, bool save_lse,
                                           bool save_low) {
  check_cross_entropy(logits, target, {});
  const auto of_rows = [&](bool wanted) {
    return wanted ? empty_beside(logits, target.sym_sizes(), at::kFloat) : absent(logits, at::kFloat);
  };
  return {of_rows(true), of_rows(save_entropy), of_rows(save_lse), of_rows(save_low)};
}

}  // namespace foundry
