// What the CPU and CUDA sides of the operators share: shapes, checks, outputs, and what the kernels are given.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/swiglu.h"
#include "common.h"

namespace foundry {

inline Activation activation_of(c10::string_view name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  TORCH_CHECK_VALUE(name == "gelu_tanh", "activation must be one of silu, gelu, gelu_tanh; got ", name);
  return Activation::gelu_tanh;
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

// Outputs, on gate's device, contiguous; they also serve as the fakes of the meta device.
inline Tensor empty_glu_fwd(const Tensor& gate, const OptionalTensor& up) {
  check_glu(gate, up);
  auto shape = gate.sym_sizes().vec();
  if (!up.has_value()) shape.back() = shape.back() / 2;
  return at::empty_symint(shape, gate.options());
}

inline std::tuple<Tensor, Tensor> empty_glu_bwd(const Tensor& gate, const OptionalTensor& up, bool need_dgate,
                                                bool need_dup) {
  check_glu(gate, up);
  TORCH_CHECK_VALUE(!need_dup || up.has_value(), "there is no up to give a gradient for");
  const auto like_gate = [&](bool needed) {
    return needed ? at::empty_symint(gate.sym_sizes(), gate.options()) : absent(gate, gate.scalar_type());
  };
  return {like_gate(need_dgate), like_gate(need_dup)};
}

// The two halves of a packed tensor, or gate and up as they are.
inline std::tuple<Tensor, Tensor> glu_halves(const Tensor& gate, const OptionalTensor& up) {
  if (up.has_value()) return {gate, *up};
  const int64_t half = gate.size(-1) / 2;
  return {gate.narrow(-1, 0, half), gate.narrow(-1, half, half)};
}

// Rows that are contiguous in every tensor and in the output are one long row.
template <size_t N>
void merge_contiguous(Rows& rows, std::array<RowStrides, N>& strides, int64_t out_stride, int64_t& n_cols) {
  bool contiguous = rows.size[0] == 1 && rows.size[1] == 1 && out_stride == n_cols;
  for (const RowStrides& s : strides) contiguous &= rows.size[2] == 1 || s.stride[2] == n_cols;
  if (!contiguous) return;
  n_cols *= rows.size[2];
  rows = Rows{};
}

// `gate` and `up` (of glu_halves) are replaced by copies where strides do not reach their rows.
inline GluForward glu_forward_args(Tensor& gate, Tensor& up, const Tensor& y, Activation activation) {
  GluForward args{};
  std::array<RowStrides, 2> strides{};
  make_row_layout<2>({&gate, &up}, args.rows, strides);
  args.n_cols = gate.size(-1);
  merge_contiguous(args.rows, strides, args.n_cols, args.n_cols);
  args.gate = gate.const_data_ptr();
  args.up = up.const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.gate_strides = strides[0];
  args.up_strides = strides[1];
  args.activation = activation;
  args.type = dtype_of(gate);
  return args;
}

// `dgate` and `dup` are of glu_halves too where they are one packed tensor, and empty where they are not wanted.
inline GluBackward glu_backward_args(Tensor& dy, Tensor& gate, Tensor& up, const Tensor& dgate, const Tensor& dup,
                                     Activation activation, bool packed) {
  GluBackward args{};
  std::array<RowStrides, 3> strides{};
  make_row_layout<3>({&dy, &gate, &up}, args.rows, strides);
  args.n_cols = gate.size(-1);
  args.out_stride = packed ? 2 * args.n_cols : args.n_cols;
  merge_contiguous(args.rows, strides, args.out_stride, args.n_cols);
  args.dy = dy.const_data_ptr();
  args.gate = gate.const_data_ptr();
  args.up = up.const_data_ptr();
  args.dgate = dgate.numel() ? dgate.mutable_data_ptr() : nullptr;
  args.dup = dup.numel() ? dup.mutable_data_ptr() : nullptr;
  args.dy_strides = strides[0];
  args.gate_strides = strides[1];
  args.up_strides = strides[2];
  args.activation = activation;
  args.type = dtype_of(gate);
  return args;
}

}  // namespace foundry
