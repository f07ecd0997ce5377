// The options of rms_norm and layer_norm as objects.
#pragma once

#include "options.h"

namespace foundry {

// How RMSNorm multiplies by its weight, forward and backward.
#define FK_WEIGHT_OPTIONS(OPTION)       \
  OPTION(double, weight_offset, number) \
  OPTION(bool, round_before_weight, boolean)

// Dropout of what is added to the residual; without a seed there is none.
#define FK_DROPOUT_OPTIONS(OPTION)                \
  OPTION(double, dropout_p, not_an_argument, 0.0) \
  OPTION(OptionalTensor, dropout_seed, not_an_argument, std::nullopt)

struct WeightOptions {
  FK_OPTIONS(FK_WEIGHT_OPTIONS)
};

struct DropoutOptions {
  FK_OPTIONS(FK_DROPOUT_OPTIONS)
};

}  // namespace foundry
