// The CPU launch of foundry_kernels::ssd_step; see ssd.cpp for the operator.
#include "../cpu/ssd.h"

#include <torch/library.h>

#include <vector>

#include "cpu_common.h"
#include "ssd.h"

namespace foundry {
namespace ssd_cpu {

Tensor step_cpu(const Tensor& state, const Tensor& x_, const Tensor& dt, const Tensor& A, const Tensor& B_,
                const Tensor& C_, const OptionalTensor& D_, const OptionalTensor& z_, const OptionalTensor& dt_bias,
                bool softplus, double dt_min, double dt_max) {
  check_ssd_step(state, x_, dt, A, B_, C_, D_, z_, dt_bias);
  const Tensor y(at::detail::empty_cpu(x_.sizes(), x_.scalar_type()));
  const int64_t width = x_.size(2), state_width = B_.size(2), heads = x_.size(0) * x_.size(1);
  const auto dense = [&](int64_t rows, int64_t columns) {
    return (state.stride(columns) == 1 || state.size(columns) == 1) &&
           (state.stride(rows) == state.size(columns) || state.size(rows) == 1);
  };
  const bool transposed = !dense(2, 3);
  TORCH_CHECK_VALUE(!transposed || dense(3, 2), "state must be dense in its last two dimensions");
  if (heads == 0) return y;
  const auto rows = [](const Tensor& t) { return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous(); };
  const auto strides = [](const Tensor& t) { return HeadStrides{t.stride(0), t.stride(1), 0}; };
  const auto of_heads = [](const Tensor& t) {
    return t.defined() ? DeltaRuleNumbers{t.const_data_ptr(), {0, t.stride(0), 0}, dtype_of(t)}
                       : DeltaRuleNumbers{nullptr, {}, Dtype::f32};
  };
  const Tensor x = rows(x_), B = rows(B_), C = rows(C_), D = D_.has_value() ? rows(*D_) : Tensor();
  const Tensor z = z_.has_value() ? rows(*z_) : Tensor();
  SsdStep args{};
  args.x = x.const_data_ptr();
  args.B = B.const_data_ptr();
  args.C = C.const_data_ptr();
  args.x_strides = strides(x);
  args.B_strides = strides(B);
  args.C_strides = strides(C);
  if (z.defined()) args.z = z.const_data_ptr(), args.z_strides = strides(z);
  args.dt = {dt.const_data_ptr(), strides(dt), dtype_of(dt)};
  args.A = of_heads(A);
  args.D = of_heads(D);
  args.D_is_row = D.defined() && D.dim() == 2;
  args.dt_bias = of_heads(unwrap(dt_bias));
  args.state = state.mutable_data_ptr<float>();
  args.state_batch = state.stride(0);
  args.state_head = state.stride(1);
  args.transposed = transposed;
  args.y = y.mutable_data_ptr();
  args.n_heads = x.size(1);
  args.group = x.size(1) / B.size(1);
  args.width = width;
  args.state_width = state_width;
  args.softplus = softplus;
  args.dt_min = static_cast<float>(dt_min);
  args.dt_max = static_cast<float>(dt_max);
  args.type = dtype_of(x);
  const auto kernel = FK_CHOOSE_ISA(ssd_step);
  at::parallel_for(0, heads, std::max<int64_t>(1, 2 * kGrain / (width * state_width)), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(ssd_step_scratch(args));
    kernel(args, begin, end, scratch.data());
  });
  if (!state.is_inference()) state.unsafeGetTensorImpl()->bump_version();
  return y;
}

}  // namespace ssd_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) { m.impl("ssd_step", &ssd_cpu::step_cpu); }

}  // namespace foundry
