// Checks, outputs and kernel arguments that the CPU and CUDA launches of rope and qk_norm_rope share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/rope.h"
#include "common.h"
#include "rms_norm_options.h"
#include "rope_options.h"

namespace foundry {

using OptionalOrder = at::OptionalIntArrayRef;

// q, or k if there is no q. One of them must be given.
inline const Tensor& either(const OptionalTensor& q, const OptionalTensor& k) {
  TORCH_CHECK_VALUE(q || k, "q or k must be given");
  return q ? *q : *k;
}

inline void check_rope(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin,
                       const RopeOptions& options) {
  const OptionalTensor& positions = options.positions;
  const Tensor& x = either(q, k);
  for (const OptionalTensor* t : {&q, &k})
    TORCH_CHECK_VALUE(!*t || (*t)->dim() == 4, "q and k must be [B, H, T, D]; got ", (*t)->sym_sizes());
  if (q && k) {
    TORCH_CHECK_TYPE(q->scalar_type() == k->scalar_type(), "k must have q's dtype");
    for (const int64_t d : {0, 2, 3})
      TORCH_CHECK_VALUE(q->sym_size(d) == k->sym_size(d), "k must be [B, Hk, T, D] with q's B, T and D; got ",
                        k->sym_sizes());
  }
  TORCH_CHECK_VALUE(cos.dim() == 2 || cos.dim() == 3, "cos must be [P, R/2] or [B, T, R/2]; got ", cos.sym_sizes());
  TORCH_CHECK_VALUE(sin.sym_sizes() == cos.sym_sizes(), "sin must have cos's shape");
  TORCH_CHECK_TYPE(sin.scalar_type() == cos.scalar_type(), "sin must have cos's dtype");
  TORCH_CHECK_VALUE((cos.sym_size(-1) > 0 || x.sym_size(3) == 0) && cos.sym_size(-1) * 2 <= x.sym_size(3),
                    "cos must have a last dimension R/2 of 1 to D/2; got ", cos.sym_sizes());
  if (cos.dim() == 3) {
    TORCH_CHECK_VALUE(!positions && cos.sym_size(0) == x.sym_size(0) && cos.sym_size(1) == x.sym_size(2),
                      "cos of [B, T, R/2] must have a row for each token of q, and no positions; got ",
                      cos.sym_sizes());
  } else if (!positions) {
    TORCH_CHECK_VALUE(cos.sym_size(0) >= x.sym_size(2), "cos must have a row for each position; got ", cos.sym_sizes());
  }
  if (!positions) return;
  TORCH_CHECK_TYPE(positions->scalar_type() == at::kLong || positions->scalar_type() == at::kInt,
                   "positions must be int32 or int64");
  TORCH_CHECK_VALUE((positions->dim() == 1 || (positions->dim() == 2 && positions->sym_size(0) == x.sym_size(0))) &&
                        positions->sym_size(-1) == x.sym_size(2),
                    "positions must be [T] or [B, T]; got ", positions->sym_sizes());
}

inline void check_norms(const Tensor& x, const OptionalTensor& q_weight, const OptionalTensor& k_weight) {
  TORCH_CHECK_VALUE(x.sym_size(3) > 0, "q must have a last dimension of at least 2, for it is normalised");
  const auto check = [&](const char* name, const OptionalTensor& weight) {
    TORCH_CHECK_VALUE(!weight || (weight->dim() == 1 && weight->sym_size(0) == x.sym_size(3)), name,
                      " must have shape [", x.sym_size(3), "], one element per dimension of a head; got ",
                      unwrap(weight).sym_sizes());
  };
  check("q_weight", q_weight);
  check("k_weight", k_weight);
}

// Checks one side (`name` is q or k) of the backward pass: its input, its rstd and the gradient of its result are all
// given or all absent.
inline void check_side(char name, const OptionalTensor& x, const OptionalTensor& rstd, const OptionalTensor& dy,
                       bool need_dx, bool need_dw, const OptionalTensor& weight) {
  const bool given = x.has_value();
  TORCH_CHECK_VALUE(given == rstd.has_value() && given == dy.has_value(), "d", name, "_out, ", name, " and ", name,
                    "_rstd must be given together");
  TORCH_CHECK_VALUE(given || !(need_dx || need_dw), "there is no ", name, " to give a gradient for");
  TORCH_CHECK_VALUE(!need_dw || weight.has_value(), "there is no ", name, "_weight to give a gradient for");
  if (!given) return;
  TORCH_CHECK_VALUE(dy->sym_sizes() == x->sym_sizes(), "d", name, "_out must have the shape of ", name);
  TORCH_CHECK_VALUE(rstd->sym_sizes() == x->sym_sizes().slice(0, 3), name, "_rstd must be [B, H, T] of ", name);
}

// The outputs. The meta device uses them as fakes. Outputs that are not needed are empty.
inline std::tuple<Tensor, Tensor> empty_rope(const OptionalTensor& q, const OptionalTensor& k, OptionalOrder q_order,
                                             OptionalOrder k_order) {
  const Tensor& given = either(q, k);
  const auto empty = [&](const OptionalTensor& x, OptionalOrder order) {
    return x ? empty_in_order(*x, order ? *order : at::IntArrayRef(storage_order(*x)))
             : absent(given, given.scalar_type());
  };
  return {empty(q, q_order), empty(k, k_order)};
}

inline Tensor empty_rstd(const Tensor& x, bool save) {
  return save ? at::empty_symint(x.sym_sizes().slice(0, 3), x.options().dtype(at::kFloat)) : absent(x, at::kFloat);
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> empty_qk_norm_rope_fwd(const Tensor& q, const Tensor& k,
                                                                         bool save_q_rstd, bool save_k_rstd) {
  return {empty_in_storage_order(q), empty_in_storage_order(k), empty_rstd(q, save_q_rstd), empty_rstd(k, save_k_rstd)};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> empty_qk_norm_rope_bwd(
    const OptionalTensor& q, const OptionalTensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
    bool need_dq, bool need_dk, bool need_dq_weight, bool need_dk_weight) {
  const Tensor& given = either(q, k);
  const auto gradient = [&](const OptionalTensor& x, bool needed) {
    return needed ? empty_in_storage_order(*x) : absent(given, given.scalar_type());
  };
  const auto of_weight = [&](const OptionalTensor& weight, bool needed) {
    return needed ? at::empty_symint(weight->sym_sizes(), weight->options()) : absent(given, given.scalar_type());
  };
  return {gradient(q, need_dq), gradient(k, need_dk), of_weight(q_weight, need_dq_weight),
          of_weight(k_weight, need_dk_weight)};
}

// x itself, or a copy if its last dimension is strided.
inline Tensor unit_stride(const Tensor& x) {
  return !x.defined() || x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous();
}

inline RopeStrides rope_strides(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

// `cos` and `sin` come from unit_stride.
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

// `x` is q, or k if there is no q. `cos` and `sin` come from unit_stride.
template <class Heads>
void set_call(RopeCall<Heads>& call, const Tensor& x, const Tensor& cos, const Tensor& sin,
              const RopeOptions& options) {
  call.tables = rope_tables(cos, sin, unwrap(options.positions));
  call.n_tokens = x.size(2);
  call.all_tokens = x.size(0) * x.size(2);
  call.width = x.size(3);
  call.interleaved = options.interleaved;
  call.type = dtype_of(x);
}

// `x` comes from unit_stride. If it has no elements, n_heads becomes 0.
inline void set_heads(RopeHeads& heads, const Tensor& x, const Tensor& out) {
  if (out.numel() == 0) return;
  heads.x = x.const_data_ptr();
  heads.y = out.mutable_data_ptr();
  heads.n_heads = x.size(1);
  heads.x_strides = rope_strides(x);
  heads.y_strides = rope_strides(out);
}

template <class Heads>
int64_t count_heads(const Heads (&heads)[2]) {
  return heads[0].n_heads + heads[1].n_heads;
}

// The three calls. Each checks its arguments, allocates the outputs and keeps alive what `args` points into. Args is
// the kernel struct of the backend. The backends set the weights themselves, because they read them in different forms.
struct RopeApplyCall {
  Tensor cos, sin, x[2], out[2];  // of q and of k
  Rope args{};

  RopeApplyCall(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos_, const Tensor& sin_,
                const RopeOptions& options, bool inverse, OptionalOrder q_order, OptionalOrder k_order) {
    check_rope(q, k, cos_, sin_, options);
    std::tie(out[0], out[1]) = empty_rope(q, k, q_order, k_order);
    cos = unit_stride(cos_), sin = unit_stride(sin_);
    x[0] = unit_stride(unwrap(q)), x[1] = unit_stride(unwrap(k));
    set_call(args, either(q, k), cos, sin, options);
    args.inverse = inverse;
    for (int side = 0; side < 2; ++side) set_heads(args.heads[side], x[side], out[side]);
  }
};

template <class Args>
struct QkNormRopeForwardCall {
  Tensor cos, sin, x[2], out[2], rstd[2];  // of q and of k
  Args args{};

  QkNormRopeForwardCall(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                        const OptionalTensor& k_weight, const Tensor& cos_, const Tensor& sin_, double eps,
                        const WeightOptions& weight_options, const RopeOptions& options, bool save_q_rstd,
                        bool save_k_rstd) {
    check_rope(q, k, cos_, sin_, options);
    check_norms(q, q_weight, k_weight);
    std::tie(out[0], out[1], rstd[0], rstd[1]) = empty_qk_norm_rope_fwd(q, k, save_q_rstd, save_k_rstd);
    cos = unit_stride(cos_), sin = unit_stride(sin_);
    x[0] = unit_stride(q), x[1] = unit_stride(k);
    set_call(args, q, cos, sin, options);
    args.eps = static_cast<float>(eps);
    args.round_before_weight = weight_options.round_before_weight;
    for (int side = 0; side < 2; ++side) {
      set_heads(args.heads[side], x[side], out[side]);
      args.heads[side].rstd = rstd[side].numel() ? rstd[side].template mutable_data_ptr<float>() : nullptr;
    }
  }
};

template <class Args>
struct QkNormRopeBackwardCall {
  Tensor cos, sin, dy[2], x[2], rstd[2], dx[2], dw[2];  // of q and of k
  Args args{};

  QkNormRopeBackwardCall(const OptionalTensor& dq_out, const OptionalTensor& dk_out, const OptionalTensor& q,
                         const OptionalTensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                         const Tensor& cos_, const Tensor& sin_, const OptionalTensor& q_rstd,
                         const OptionalTensor& k_rstd, const WeightOptions& weight_options, const RopeOptions& options,
                         bool need_dq, bool need_dk, bool need_dq_weight, bool need_dk_weight) {
    check_rope(q, k, cos_, sin_, options);
    check_norms(either(q, k), q_weight, k_weight);
    check_side('q', q, q_rstd, dq_out, need_dq, need_dq_weight, q_weight);
    check_side('k', k, k_rstd, dk_out, need_dk, need_dk_weight, k_weight);
    std::tie(dx[0], dx[1], dw[0], dw[1]) =
        empty_qk_norm_rope_bwd(q, k, q_weight, k_weight, need_dq, need_dk, need_dq_weight, need_dk_weight);
    cos = unit_stride(cos_), sin = unit_stride(sin_);
    dy[0] = unit_stride(unwrap(dq_out)), dy[1] = unit_stride(unwrap(dk_out));
    x[0] = unit_stride(unwrap(q)), x[1] = unit_stride(unwrap(k));
    rstd[0] = unwrap(q_rstd), rstd[1] = unwrap(k_rstd);
    set_call(args, either(q, k), cos, sin, options);
    args.round_before_weight = weight_options.round_before_weight;
    const bool need_dx[2] = {need_dq, need_dk}, need_dw[2] = {need_dq_weight, need_dk_weight};
    for (int side = 0; side < 2; ++side) {
      if (!need_dx[side] && !need_dw[side]) continue;
      if (x[side].numel() == 0) {
        dw[side].zero_();
        continue;
      }
      auto& heads = args.heads[side];
      heads.dy = dy[side].const_data_ptr();
      heads.x = x[side].const_data_ptr();
      heads.rstd = rstd[side].template const_data_ptr<float>();
      heads.n_heads = x[side].size(1);
      heads.dy_strides = rope_strides(dy[side]);
      heads.x_strides = rope_strides(x[side]);
      if (!need_dx[side]) continue;
      heads.dx = dx[side].mutable_data_ptr();
      heads.dx_strides = rope_strides(dx[side]);
    }
  }

  // Whether a gradient of the weight is to be computed, not only zeroed.
  bool sums_dw(int side) const { return args.heads[side].n_heads > 0 && dw[side].numel() > 0; }
};

}  // namespace foundry
