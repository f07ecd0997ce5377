// Shapes, checks, outputs and kernel arguments that the CPU and CUDA launches share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/swiglu.h"
#include "common.h"
#include "numbers.h"
#include "swiglu_options.h"

namespace foundry {

inline Activation activation_of(c10::string_view name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "sigmoid") return Activation::sigmoid;
  TORCH_CHECK_VALUE(name == "relu", "activation must be one of silu, gelu, gelu_tanh, sigmoid, relu; got ", name);
  return Activation::relu;
}

// The options as the kernels take them.
inline GluOptions glu_options(const GatedOptions& s, const OptionalTensor& up, Activation activation) {
  if (!s.changed() && !s.interleaved) return {};
  TORCH_CHECK_VALUE(activation == Activation::silu,
                    "alpha, limit, up_offset and interleaved are options of silu alone");
  TORCH_CHECK_VALUE(!s.interleaved || !up.has_value(), "interleaved is for a packed gate: up must be None");
  TORCH_CHECK_VALUE(is_number(s.alpha), "alpha must be 0 or of a size in 2^-126 .. 2^127; got ", s.alpha);
  TORCH_CHECK_VALUE(is_number(s.up_offset), "up_offset must be 0 or of a size in 2^-126 .. 2^127; got ", s.up_offset);
  TORCH_CHECK_VALUE(!s.limit || is_positive_number(*s.limit), "limit must be None or in 2^-126 .. 2^127; got ",
                    s.limit.value_or(0.0));
  return {s.interleaved,
          s.changed(),
          s.limit.has_value(),
          static_cast<float>(s.alpha),
          static_cast<float>(s.limit.value_or(0.0)),
          static_cast<float>(s.up_offset)};
}

inline void check_glu(const Tensor& gate, const OptionalTensor& up) {
  TORCH_CHECK_VALUE(gate.dim() >= 1, "gate must have at least one dimension; got a scalar");
  if (!up.has_value()) {
    TORCH_CHECK_VALUE(gate.sym_size(-1) % 2 == 0, "gate must be [..., 2N] where up is None; got ", gate.sym_sizes());
    return;
  }
  TORCH_CHECK_VALUE(up->sym_sizes() == gate.sym_sizes(), "up must have gate's shape ", gate.sym_sizes(), "; got ",
                    up->sym_sizes());
  TORCH_CHECK_TYPE(up->scalar_type() == gate.scalar_type(), "up must have gate's dtype ", gate.scalar_type());
}

// The outputs: contiguous, on gate's device. The meta device uses them as fakes.
inline Tensor empty_glu_fwd(const Tensor& gate, const OptionalTensor& up, const GatedOptions& options) {
  check_glu(gate, up);
  check_dropout(gate, options.dropout());
  auto shape = gate.sym_sizes().vec();
  if (!up.has_value()) shape.back() = shape.back() / 2;
  return at::empty_symint(shape, gate.options());
}

inline std::tuple<Tensor, Tensor> empty_glu_bwd(const Tensor& gate, const OptionalTensor& up, bool need_dgate,
                                                bool need_dup, const GatedOptions& options) {
  check_glu(gate, up);
  check_dropout(gate, options.dropout());
  TORCH_CHECK_VALUE(!need_dup || up.has_value(), "there is no up to give a gradient for");
  const auto like_gate = [&](bool needed) {
    return needed ? at::empty_symint(gate.sym_sizes(), gate.options()) : absent(gate, gate.scalar_type());
  };
  return {like_gate(need_dgate), like_gate(need_dup)};
}

// The two halves of a packed tensor, or gate and up as given. An interleaved tensor stays whole.
inline std::tuple<Tensor, Tensor> glu_halves(const Tensor& gate, const OptionalTensor& up, bool interleaved) {
  if (up.has_value()) return {gate, *up};
  if (interleaved) return {gate, Tensor()};
  const int64_t half = gate.size(-1) / 2;
  return {gate.narrow(-1, 0, half), gate.narrow(-1, half, half)};
}

// Merges all rows into one long row if they are contiguous in every tensor, including the output.
template <size_t N>
void merge_contiguous(Rows& rows, const std::array<RowStrides, N>& strides, const std::array<int64_t, N>& widths,
                      bool contiguous, int64_t& n_cols) {
  contiguous &= rows.size[0] == 1 && rows.size[1] == 1;
  for (size_t i = 0; i < N; ++i) contiguous &= rows.size[2] == 1 || strides[i].stride[2] == widths[i];
  if (!contiguous) return;
  n_cols *= rows.size[2];
  rows = Rows{};
}

// `gate` and `up` come from glu_halves. Replaces them by copies where strides cannot describe their rows.
inline GluForward glu_forward_args(Tensor& gate, Tensor& up, const Tensor& y, Activation activation,
                                   const GatedOptions& options) {
  GluForward args{};
  args.dropout = make_dropout(options.dropout());
  std::array<RowStrides, 2> strides{};
  make_row_layout<2>({&gate, &up}, args.rows, strides);
  args.n_cols = y.size(-1);
  merge_contiguous<2>(args.rows, strides, {gate.size(-1), up.defined() ? args.n_cols : 0}, !args.dropout.seed,
                      args.n_cols);
  args.gate = gate.const_data_ptr();
  args.up = up.defined() ? up.const_data_ptr() : nullptr;
  args.y = y.mutable_data_ptr();
  args.gate_strides = strides[0];
  args.up_strides = strides[1];
  args.activation = activation;
  args.type = dtype_of(gate);
  return args;
}

// `dgate` and `dup` come from glu_halves too if they share one packed tensor. A gradient that is not needed is empty;
// `dup` is undefined if the gate is interleaved.
inline GluBackward glu_backward_args(Tensor& dy, Tensor& gate, Tensor& up, const Tensor& dgate, const Tensor& dup,
                                     Activation activation, bool packed, const GatedOptions& options) {
  GluBackward args{};
  args.dropout = make_dropout(options.dropout());
  std::array<RowStrides, 3> strides{};
  make_row_layout<3>({&dy, &gate, &up}, args.rows, strides);
  args.n_cols = dy.size(-1);
  args.out_stride = packed ? 2 * args.n_cols : args.n_cols;
  merge_contiguous<3>(args.rows, strides, {args.n_cols, gate.size(-1), up.defined() ? args.n_cols : 0},
                      (!packed || !up.defined()) && !args.dropout.seed, args.n_cols);
  args.dy = dy.const_data_ptr();
  args.gate = gate.const_data_ptr();
  args.up = up.defined() ? up.const_data_ptr() : nullptr;
  args.dgate = dgate.numel() ? dgate.mutable_data_ptr() : nullptr;
  args.dup = dup.defined() && dup.numel() ? dup.mutable_data_ptr() : nullptr;
  args.dy_strides = strides[0];
  args.gate_strides = strides[1];
  args.up_strides = strides[2];
  args.activation = activation;
  args.type = dtype_of(gate);
  return args;
}

}  // namespace foundry
