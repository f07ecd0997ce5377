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

// The operator, for direct_losses.cpp. Returns (log_probs, entropy, lse, stats); all but the first are empty unless
// requested.
std::tuple<Tensor, Tensor, Tensor, Tensor> log_probs(const Tensor& logits, const Tensor& target,
                                                     const LogProbsArguments& options, bool return_entropy,
                                                     bool return_lse, bool return_stats);

// The outputs (log_probs, entropy, lse, lse_low, stats) on logits' device. One that was not requested has shape [0].
using LogProbsOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

inline LogProbsOutputs empty_log_probs_fwd(const Tensor& logits, const Tensor& target, bool save_entropy, bool save_lse,
                                           bool save_low, bool save_stats) {
  check_cross_entropy(logits, target, {});
  const auto of_rows = [&](bool wanted) {
    return wanted ? empty_beside(logits, target.sym_sizes(), at::kFloat) : absent(logits, at::kFloat);
  };
  c10::SymDimVector of_stats(target.sym_sizes().begin(), target.sym_sizes().end());
  of_stats.push_back(3);
  return {of_rows(true), of_rows(save_entropy), of_rows(save_lse), of_rows(save_low),
          save_stats ? empty_beside(logits, of_stats, at::kFloat) : absent(logits, at::kFloat)};
}

}  // namespace foundry
