// The CPU launches of foundry_kernels::short_conv1d_fwd, short_conv1d_bwd and short_conv1d_step; see short_conv1d.cpp
// for the operators.
#include "../cpu/short_conv1d.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"
#include "short_conv1d.h"

namespace foundry {
namespace short_conv1d_cpu {

// Keeps the tensors that a kernel's arguments point into.
struct Prepared {
  Tensor x, bounds, weight, bias;
  ConvInput in{};
  ConvFilter filter{};
};

ConvState state_of(const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return {};
  return {t.data_ptr(), t.size(2), t.stride(0), t.stride(1), t.stride(2)};
}

// x [B, T, C], with channels next to each other.
Tensor with_channels(const Tensor& x) { return x.stride(2) == 1 || x.size(2) <= 1 ? x : x.contiguous(); }

// Checks the documents before any row is read.
Tensor checked_bounds(const Tensor& cu_seqlens, int64_t n_rows) {
  const Tensor bounds = cu_seqlens.to(at::kLong).contiguous();
  const int64_t* b = bounds.const_data_ptr<int64_t>();
  bool valid = b[0] == 0 && b[bounds.numel() - 1] == n_rows;
  for (int64_t i = 1; i < bounds.numel(); ++i) valid &= b[i - 1] <= b[i];
  TORCH_CHECK_VALUE(valid, "cu_seqlens must start at 0, never decrease and end at T, ", n_rows, "; got ", bounds);
  return bounds;
}

Prepared prepare(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view activation,
                 const OptionalTensor& cu_seqlens, const OptionalTensor& initial_state) {
  Prepared p;
  p.x = with_channels(x);
  p.weight = weight.t().to(at::kFloat).contiguous();
  p.bias = float_weight(unwrap(bias), 0.0);
  p.filter = {p.weight.const_data_ptr<float>(), p.bias.defined() ? p.bias.const_data_ptr<float>() : nullptr,
              static_cast<int>(weight.size(1)), is_silu(activation)};
  p.in.x = p.x.const_data_ptr();
  p.in.stride_batch = p.x.stride(0);
  p.in.stride_time = p.x.stride(1);
  p.in.length = x.size(1);
  p.in.n_rows = x.size(0) * x.size(1);
  p.in.n_channels = x.size(2);
  p.in.n_documents = x.size(0);
  if (cu_seqlens.has_value()) {
    p.bounds = checked_bounds(*cu_seqlens, p.in.n_rows);
    p.in.bounds = p.bounds.const_data_ptr<int64_t>();
    p.in.n_documents = p.bounds.numel() - 1;
  }
  p.in.initial = state_of(unwrap(initial_state));
  p.in.type = dtype_of(x);
  return p;
}

// Chunks only depend on the shape, so the filter's gradient does not depend on the number of threads.
int64_t rows_of_chunk(const ConvInput& in) { return std::max<int64_t>(64, (in.n_rows + 127) / 128); }

int64_t chunks(const ConvInput& in, int64_t chunk_rows) { return (in.n_rows + chunk_rows - 1) / chunk_rows; }

template <class Args>
void run(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t groups, int64_t rows, int64_t grain) {
  at::parallel_for(0, groups * args.in.tiles(),
                   std::max<int64_t>(1, grain / (rows * std::min(args.in.n_channels, kConvTile))),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void forward(const Prepared& p, const OptionalTensor& residual, const Tensor& y) {
  if (y.numel() == 0) return;
  advise_huge_pages(y);
  ConvForward args{p.in, p.filter, nullptr, 0, 0, y.mutable_data_ptr(), rows_of_chunk(p.in)};
  Tensor added;
  if (residual.has_value()) {
    added = with_channels(*residual);
    args.residual = added.const_data_ptr();
    args.residual_stride_batch = added.stride(0);
    args.residual_stride_time = added.stride(1);
  }
  run(FK_CHOOSE_ISA(short_conv1d_forward), args, chunks(p.in, args.chunk_rows), args.chunk_rows, kExpGrain);
}

void write_final(const Prepared& p, const Tensor& state) {
  if (state.numel() == 0) return;
  const ConvFinal args{p.in, state_of(state)};
  run(FK_CHOOSE_ISA(short_conv1d_final), args, p.in.n_documents, state.size(2), kGrain);
}

std::tuple<Tensor, Tensor> fwd_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                   c10::string_view activation, const OptionalTensor& cu_seqlens,
                                   const OptionalTensor& initial_state, const OptionalTensor& residual,
                                   bool need_state) {
  auto [y, state] = empty_short_conv1d_fwd(x, weight, bias, cu_seqlens, initial_state, residual, need_state);
  const Prepared p = prepare(x, weight, bias, activation, cu_seqlens, initial_state);
  forward(p, residual, y);
  if (need_state) write_final(p, state);
  return {y, state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd_cpu(const Tensor& dy_, const OptionalTensor& dfinal_, const Tensor& x,
                                                   const Tensor& weight, const OptionalTensor& bias,
                                                   c10::string_view activation, const OptionalTensor& cu_seqlens,
                                                   const OptionalTensor& initial_state, bool need_dx, bool need_dweight,
                                                   bool need_dbias, bool need_dinitial_state) {
  auto [dx, dweight, dbias, dinitial] = empty_short_conv1d_bwd(x, weight, bias, cu_seqlens, initial_state, need_dx,
                                                               need_dweight, need_dbias, need_dinitial_state);
  const Tensor dfinal = unwrap(dfinal_), dy = with_channels(dy_);
  TORCH_CHECK_VALUE(dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type(), "dy must be like x; got ",
                    dy.sizes());
  const Prepared p = prepare(x, weight, bias, activation, cu_seqlens, initial_state);
  const int64_t taps = weight.size(1);
  if (dfinal.defined())
    TORCH_CHECK_VALUE(dfinal.dim() == 3 && dfinal.size(0) == p.in.n_documents && dfinal.size(1) == x.size(2) &&
                          dfinal.size(2) == taps - 1 && dfinal.scalar_type() == x.scalar_type(),
                      "dfinal_state must be [N, C, W - 1] of x's dtype; got ", dfinal.sizes());
  // The state of an empty document passes through; the kernel writes the others.
  if (need_dinitial_state && (cu_seqlens.has_value() || x.size(1) == 0)) {
    if (dfinal.defined()) dinitial.copy_(dfinal);
    else dinitial.zero_();
  }
  if (x.numel() == 0) return {dx, dweight.zero_(), dbias.zero_(), dinitial};
  advise_huge_pages(dx);
  ConvBackward args{};
  args.in = p.in;
  args.filter = p.filter;
  args.dy = dy.const_data_ptr();
  args.dy_stride_batch = dy.stride(0);
  args.dy_stride_time = dy.stride(1);
  args.dfinal = state_of(dfinal);
  args.dx = need_dx ? dx.mutable_data_ptr() : nullptr;
  args.dinitial = need_dinitial_state ? state_of(dinitial) : ConvState{};
  args.chunk_rows = rows_of_chunk(p.in);
  const int64_t n_chunks = chunks(p.in, args.chunk_rows);
  Tensor sums;
  if (need_dweight || need_dbias) {
    sums = at::empty({n_chunks, (taps + 1) * p.in.n_channels}, p.weight.options());
    args.sums = sums.mutable_data_ptr<float>();
  }
  run(FK_CHOOSE_ISA(short_conv1d_backward), args, n_chunks, args.chunk_rows, kExpGrain);
  if (sums.defined()) {
    const Tensor total = at::empty({(taps + 1) * p.in.n_channels}, sums.options());
    sum_chunks_into(total, sums);
    const Tensor by_tap = total.view({taps + 1, p.in.n_channels});
    if (need_dweight) dweight.copy_(by_tap.narrow(0, 0, taps).t());
    if (need_dbias) dbias.copy_(by_tap.select(0, taps));
  }
  return {dx, dweight, dbias, dinitial};
}

Tensor step_cpu(const Tensor& x, const Tensor& state, const Tensor& weight, const OptionalTensor& bias,
                c10::string_view activation, const OptionalTensor& residual) {
  TORCH_CHECK_VALUE(x.dim() == 2, "x must be [B, C]; got ", x.sizes());
  check_conv_filter(weight, bias, x.size(1));
  check_conv_residual(x, residual);
  TORCH_CHECK_VALUE(state.dim() == 3 && state.size(0) == x.size(0) && state.size(1) == x.size(1) &&
                        state.size(2) >= weight.size(1) - 1 && state.scalar_type() == x.scalar_type(),
                    "state must be [B, C, S] of x's dtype, S at least W - 1; got ", state.sizes());
  const Tensor y(at::detail::empty_cpu(x.sizes(), x.scalar_type()));
  if (y.numel() == 0) return y;
  const Tensor shift = float_weight(unwrap(bias), 0.0);
  Tensor added = unwrap(residual);
  if (added.defined() && added.stride(1) != 1) added = added.contiguous();
  const ConvStep args{x.const_data_ptr(),
                      x.stride(0),
                      x.stride(1),
                      state_of(state),
                      weight.const_data_ptr(),
                      weight.stride(0),
                      weight.stride(1),
                      shift.defined() ? shift.const_data_ptr<float>() : nullptr,
                      added.defined() ? added.const_data_ptr() : nullptr,
                      added.defined() ? added.stride(0) : 0,
                      y.mutable_data_ptr(),
                      x.size(0),
                      x.size(1),
                      static_cast<int>(weight.size(1)),
                      is_silu(activation),
                      dtype_of(x),
                      dtype_of(weight)};
  in_parallel(FK_CHOOSE_ISA(short_conv1d_step), args, args.tiles(), kExpGrain, args.n_rows * kConvStepTile);
  return y;
}

}  // namespace short_conv1d_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("short_conv1d_fwd", &short_conv1d_cpu::fwd_cpu);
  m.impl("short_conv1d_bwd", &short_conv1d_cpu::bwd_cpu);
  m.impl("short_conv1d_step", &short_conv1d_cpu::step_cpu);
}

}  // namespace foundry
