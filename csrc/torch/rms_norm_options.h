// The options of rms_norm and layer_norm as objects.
#pragma once

#include "dropout_options.h"
#include "options.h"

namespace foundry {

// How RMSNorm multiplies by its weight, forward and backward.
#define FK_WEIGHT_OPTIONS(OPTION)       \
  OPTION(double, weight_offset, number) \
  OPTION(bool, round_before_weight, boolean)

struct WeightOptions {
  FK_OPTIONS(FK_WEIGHT_OPTIONS)
};

}  // namespace foundry
