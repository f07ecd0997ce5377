// Options for dropout whose mask is a function of a seed. Without a seed there is no dropout.
#pragma once

#include "../common/dropout.h"
#include "options.h"

namespace foundry {

#define FK_DROPOUT_OPTIONS(OPTION)                \
  OPTION(double, dropout_p, not_an_argument, 0.0) \
  OPTION(OptionalTensor, dropout_seed, not_an_argument, std::nullopt)

struct DropoutOptions {
  FK_OPTIONS(FK_DROPOUT_OPTIONS)
};

// The seed must be on the device of `x`.
inline void check_dropout(const Tensor& x, const DropoutOptions& dropout) {
  const auto& [p, seed] = dropout;
  TORCH_CHECK_VALUE(seed.has_value() || p == 0.0, "dropout_p needs a dropout_seed; got dropout_p=", p);
  if (!seed.has_value()) return;
  TORCH_CHECK_VALUE(p >= 0.0 && p < 1.0, "dropout_p must be in [0, 1); got ", p);
  TORCH_CHECK_TYPE(seed->scalar_type() == at::kLong, "dropout_seed must be int64; got ", seed->scalar_type());
  TORCH_CHECK_VALUE(seed->sym_numel() == 1, "dropout_seed must hold one number; got shape ", seed->sym_sizes());
  TORCH_CHECK_VALUE(seed->device() == x.device(), "dropout_seed must be on the tensors' device ", x.device(), "; got ",
                    seed->device());
}

inline Dropout make_dropout(const DropoutOptions& dropout) {
  const auto& [p, seed] = dropout;
  if (!seed.has_value()) return {};
  return {seed->const_data_ptr<int64_t>(), static_cast<uint32_t>(p * 4294967296.0),
          static_cast<float>(1.0 / (1.0 - p))};
}

}  // namespace foundry
