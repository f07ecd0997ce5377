// The options of gated linear units: those of swiglu, and dropout, which all of them have.
#pragma once

#include "dropout_options.h"
#include "options.h"

namespace foundry {

#define FK_GATED_OPTIONS(OPTION)                                        \
  OPTION(double, alpha, number, 1.0)                                    \
  OPTION(std::optional<double>, limit, optional_positive, std::nullopt) \
  OPTION(double, up_offset, number, 0.0)                                \
  OPTION(bool, interleaved, boolean, false)                             \
  FK_DROPOUT_OPTIONS(OPTION)

struct GatedOptions {
  FK_OPTIONS(FK_GATED_OPTIONS)

  // Whether any option differs from plain SwiGLU.
  bool changed() const { return alpha != 1.0 || limit.has_value() || up_offset != 0.0; }
  DropoutOptions dropout() const { return {dropout_p, dropout_seed}; }
};

}  // namespace foundry
