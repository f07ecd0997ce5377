// The CPU launches of foundry_kernels::combine_experts_fwd and combine_experts_bwd; see combine_experts.cpp for the
// operators.
#include "../cpu/combine_experts.h"

#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "combine_experts.h"
#include "cpu_common.h"

namespace foundry {
namespace combine_experts_cpu {

// Checks the slots before any row is read.
Tensor checked_slots(const Tensor& slots_, int64_t n_rows) {
  const Tensor slots = slots_.to(at::kLong).contiguous();
  const int64_t* s = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < slots.numel(); ++i)
    TORCH_CHECK_INDEX(s[i] >= -1 && s[i] < n_rows, "slots must be -1 or a row of x, 0 .. ", n_rows - 1, "; got ", s[i]);
  return slots;
}

Tensor fwd_cpu(const Tensor& x_, const OptionalTensor& weights_, const Tensor& slots_) {
  const Tensor y = empty_combine_experts_fwd(x_, weights_, slots_);
  if (y.numel() == 0) return y;
  advise_huge_pages(y);
  const Tensor x = with_rows(x_), slots = checked_slots(slots_, x.size(0)), weights = float_weight(unwrap(weights_), 0);
  const CombineExpertsForward args = combine_experts_forward_args(x, weights, slots, y);
  in_parallel(FK_CHOOSE_ISA(combine_experts_forward), args, args.n_tokens, kGrain,
              args.n_cols * std::max<int64_t>(args.k, 1));
  return y;
}

// Zeroes the rows of dx that no slot refers to.
void clear_rest(const Tensor& dx, const Tensor& slots) {
  std::vector<char> named(dx.size(0));
  const int64_t* s = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < slots.numel(); ++i) {
    if (s[i] < 0) continue;
    TORCH_CHECK_VALUE(!named[s[i]], "slots must name a row of x once at most; row ", s[i], " is in several");
    named[s[i]] = true;
  }
  const size_t row_bytes = dx.size(1) * dx.element_size();
  char* row = static_cast<char*>(dx.mutable_data_ptr());
  for (const char is_named : named) {
    if (!is_named) std::memset(row, 0, row_bytes);
    row += row_bytes;
  }
}

std::tuple<Tensor, Tensor> bwd_cpu(const Tensor& dy_, const Tensor& x_, const OptionalTensor& weights_,
                                   const Tensor& slots_, bool need_dx, bool need_dweights) {
  auto [dx, dweights] = empty_combine_experts_bwd(x_, weights_, slots_, need_dx, need_dweights);
  if (x_.numel() == 0 || slots_.numel() == 0) return {dx.zero_(), dweights.zero_()};
  advise_huge_pages(dx);
  const Tensor dy = with_rows(dy_), x = with_rows(x_), slots = checked_slots(slots_, x.size(0));
  const Tensor weights = float_weight(unwrap(weights_), 0);
  const bool in_float = !need_dweights || dweights.scalar_type() == at::kFloat;
  const Tensor sums = in_float ? dweights : at::empty(dweights.sizes(), dweights.options().dtype(at::kFloat));
  const CombineExpertsBackward args = combine_experts_backward_args(dy, x, weights, slots, dx, sums);
  if (need_dx) clear_rest(dx, slots);
  in_parallel(FK_CHOOSE_ISA(combine_experts_backward), args, slots.numel(), kGrain, args.n_cols);
  if (!in_float) dweights.copy_(sums);
  return {dx, dweights};
}

}  // namespace combine_experts_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("combine_experts_fwd", &combine_experts_cpu::fwd_cpu);
  m.impl("combine_experts_bwd", &combine_experts_cpu::bwd_cpu);
}

}  // namespace foundry
