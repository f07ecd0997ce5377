// The CPU launches of foundry_kernels::glu_fwd and glu_bwd; see swiglu.cpp for the operators.
#include "../cpu/swiglu.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"
#include "swiglu.h"

namespace foundry {
namespace swiglu_cpu {

template <class Args>
void run(void (*kernel)(const Args&, const GluOptions&, int64_t, int64_t), const Args& args,
         const GluOptions& options) {
  const int64_t tiles = args.rows.count() * tiles_a_row(args.n_cols);
  at::parallel_for(0, tiles, std::max<int64_t>(1, kExpGrain / std::min(args.n_cols, kTile)),
                   [&](int64_t begin, int64_t end) { kernel(args, options, begin, end); });
}

Tensor fwd_cpu(const Tensor& gate_, const OptionalTensor& up_, c10::string_view activation, const GatedOptions& given) {
  const Activation kind = activation_of(activation);
  const GluOptions options = glu_options(given, up_, kind);
  const Tensor y = empty_glu_fwd(gate_, up_, given);
  if (y.numel() == 0) return y;
  advise_huge_pages(y);
  auto [gate, up] = glu_halves(gate_, up_, given.interleaved);
  run(FK_CHOOSE_ISA(glu_forward), glu_forward_args(gate, up, y, kind, given), options);
  return y;
}

std::tuple<Tensor, Tensor> bwd_cpu(const Tensor& dy_, const Tensor& gate_, const OptionalTensor& up_,
                                   c10::string_view activation, bool need_dgate, bool need_dup,
                                   const GatedOptions& given) {
  const Activation kind = activation_of(activation);
  const GluOptions options = glu_options(given, up_, kind);
  const auto [dgate, dup] = empty_glu_bwd(gate_, up_, need_dgate, need_dup, given);
  if (dgate.numel() == 0 && dup.numel() == 0) return {dgate, dup};
  advise_huge_pages(dgate);
  advise_huge_pages(dup);
  Tensor dy = dy_;
  auto [gate, up] = glu_halves(gate_, up_, given.interleaved);
  const auto [into_gate, into_up] =
      glu_halves(dgate, up_.has_value() ? OptionalTensor(dup) : std::nullopt, given.interleaved);
  run(FK_CHOOSE_ISA(glu_backward), glu_backward_args(dy, gate, up, into_gate, into_up, kind, !up_.has_value(), given),
      options);
  return {dgate, dup};
}

}  // namespace swiglu_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("glu_fwd", flat_kernel<&swiglu_cpu::fwd_cpu>);
  m.impl("glu_bwd", flat_kernel<&swiglu_cpu::bwd_cpu>);
}

}  // namespace foundry
