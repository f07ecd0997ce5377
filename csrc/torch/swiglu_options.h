// The options of swiglu as an object; with the defaults it is the plain one, and geglu has no others.
#pragma once

#include "options.h"

namespace foundry {

#define FK_GATED_OPTIONS(OPTION)                                        \
  OPTION(double, alpha, number, 1.0)                                    \
  OPTION(std::optional<double>, limit, optional_positive, std::nullopt) \
  OPTION(double, up_offset, number, 0.0)                                \
  OPTION(bool, interleaved, boolean, false)

struct GatedOptions {
  FK_OPTIONS(FK_GATED_OPTIONS)

  bool changed() const { return alpha != 1.0 || limit.has_value() || up_offset != 0.0; }
};

}  // namespace foundry
