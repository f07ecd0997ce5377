// What the CPU and CUDA sides of rope and qk_norm_rope share: checks, shapes, and what kernels are told of tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/rope.h"
#include "common.h"

namespace foundry {

using OptionalOrder = at::OptionalIntArrayRef;

// Either of q and k may be undefined; one of them is not.
inline void check_rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                       const Tensor& positions) {
  TORCH_CHECK_VALUE(q.defined() || k.defined(), "q or k must be given");
  const Tensor& x = q.defined() ? q : k;
  for (const Tensor* t : {&q, &k})
    TORCH_CHECK_VALUE(!t->defined() || t->dim() == 4, "q and k must be [B, H, T, D]; got ", t->sym_sizes());
  if (q.defined() && k.defined()) {
    TORCH_CHECK_TYPE(q.scalar_type() == k.scalar_type(), "k must have q's dtype");
    for (const int64_t d : {0, 2, 3})
      TORCH_CHECK_VALUE(q.sym_size(d) == k.sym_size(d), "k must be [B, Hk, T, D] with q's B, T and D; got ",
                        k.sym_sizes());
  }
  TORCH_CHECK_VALUE(cos.dim() == 2 || cos.dim() == 3, "cos must be [P, R/2] or [B, T, R/2]; got ", cos.sym_sizes());
  TORCH_CHECK_VALUE(sin.sym_sizes() == cos.sym_sizes(), "sin must have cos's shape");
  TORCH_CHECK_TYPE(sin.scalar_type() == cos.scalar_type(), "sin must have cos's dtype");
  TORCH_CHECK_VALUE(cos.sym_size(-1) > 0 && cos.sym_size(-1) * 2 <= x.sym_size(3),
                    "cos must have a last dimension R/2 of 1 to D/2; got ", cos.sym_sizes());
  if (cos.dim() == 3) {
    TORCH_CHECK_VALUE(!positions.defined() && cos.sym_size(0) == x.sym_size(0) && cos.sym_size(1) == x.sym_size(2),
                      "cos of [B, T, R/2] must have a row for each token of q, and no positions; got ",
                      cos.sym_sizes());
  } else if (!positions.defined()) {
    TORCH_CHECK_VALUE(cos.sym_size(0) >= x.sym_size(2), "cos must have a row for each position; got ", cos.sym_sizes());
  }
  if (!positions.defined()) return;
  TORCH_CHECK_TYPE(positions.scalar_type() == at::kLong || positions.scalar_type() == at::kInt,
                   "positions must be int32 or int64");
  TORCH_CHECK_VALUE((positions.dim() == 1 || (positions.dim() == 2 && positions.sym_size(0) == x.sym_size(0))) &&
                        positions.sym_size(-1) == x.sym_size(2),
                    "positions must be [T] or [B, T]; got ", positions.sym_sizes());
}

inline void check_weight(const char* name, const Tensor& weight, const Tensor& q) {
  TORCH_CHECK_VALUE(!weight.defined() || (weight.dim() == 1 && weight.sym_size(0) == q.sym_size(3)), name,
                    " must have shape [", q.sym_size(3), "], one element a dimension of a head; got ",
                    weight.sym_sizes());
}

// Outputs, which also serve as the fakes of the meta device. Those that are not wanted are empty.
inline Tensor empty_turned(const Tensor& x, OptionalOrder order, const at::TensorOptions& options) {
  if (!x.defined()) return at::empty({0}, options);
  return order.has_value() ? empty_in_order(x, *order) : empty_in_storage_order(x);
}

inline std::tuple<Tensor, Tensor> empty_rope(const Tensor& q, const Tensor& k, OptionalOrder q_order,
                                             OptionalOrder k_order) {
  const auto options = (q.defined() ? q : k).options();
  return {empty_turned(q, q_order, options), empty_turned(k, k_order, options)};
}

inline Tensor empty_rstd(const Tensor& x, bool save_rstd) {
  const auto options = x.options().dtype(at::kFloat);
  return save_rstd ? at::empty_symint(x.sym_sizes().slice(0, 3), options) : at::empty({0}, options);
}

inline Tensor empty_gradient(const Tensor& x, bool needed) {
  return needed ? empty_in_storage_order(x) : at::empty({0}, x.options());
}

inline Tensor empty_weight_gradient(const char* name, const Tensor& weight, const Tensor& x, bool needed) {
  TORCH_CHECK_VALUE(!needed || weight.defined(), "there is no ", name, " to give a gradient for");
  return needed ? at::empty_symint(weight.sym_sizes(), weight.options()) : at::empty({0}, x.options());
}

// A tensor that kernels can read: itself, or a copy where its last dimension is strided.
inline Tensor unit_stride(const Tensor& x) {
  return !x.defined() || x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous();
}

inline HeadStrides head_strides(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

// `cos` and `sin` have gone through unit_stride.
inline RopeTables rope_tables(const Tensor& cos, const Tensor& sin, const Tensor& positions) {
  RopeTables tables{};
  tables.cos = cos.const_data_ptr();
  tables.sin = sin.const_data_ptr();
  tables.type = dtype_of(cos);
  tables.n_rows = cos.size(-2);
  tables.half = cos.size(-1);
  tables.cos_stride = cos.stride(-2);
  tables.sin_stride = sin.stride(-2);
  if (cos.dim() == 3) {
    tables.cos_batch_stride = cos.stride(0);
    tables.sin_batch_stride = sin.stride(0);
  }
  if (!positions.defined()) return tables;
  tables.positions = positions.const_data_ptr();
  tables.positions_are_64_bit = positions.scalar_type() == at::kLong;
  tables.position_stride = positions.stride(-1);
  if (positions.dim() == 2) tables.position_batch_stride = positions.stride(0);
  return tables;
}

}  // namespace foundry
