// The options of rope and qk_norm_rope as an object.
#pragma once

#include "options.h"

namespace foundry {

#define FK_ROPE_OPTIONS(OPTION)      \
  OPTION(bool, interleaved, boolean) \
  OPTION(OptionalTensor, positions, optional_indices)

struct RopeOptions {
  FK_OPTIONS(FK_ROPE_OPTIONS)
};

}  // namespace foundry
