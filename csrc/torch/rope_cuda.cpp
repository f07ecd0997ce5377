// The GPU's launches of rope_apply, qk_norm_rope_fwd and qk_norm_rope_bwd; see rope.cpp for the operators.
#include "../cuda/rope.h"

#include <torch/library.h>

#include "cuda_common.h"
#include "rope.h"

namespace foundry {
namespace {

Tensor contiguous_weight(const OptionalTensor& weight) { return weight.has_value() ? weight->contiguous() : Tensor(); }

template <class Heads>
void set_weight(Heads& heads, const Tensor& weight) {
  if (!weight.defined()) return;
  heads.weight = weight.const_data_ptr();
  heads.weight_type = dtype_of(weight);
}

std::tuple<Tensor, Tensor> apply_cuda(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos_,
                                      const Tensor& sin_, bool interleaved, const OptionalTensor& positions_,
                                      bool inverse, OptionalOrder q_order, OptionalOrder k_order) {
  const Tensor positions = unwrap(positions_);
  check_rope(unwrap(q), unwrap(k), cos_, sin_, positions);
  const Tensor in[2] = {unit_stride(unwrap(q)), unit_stride(unwrap(k))};
  const Tensor cos = unit_stride(cos_), sin = unit_stride(sin_);
  auto out = empty_rope(unwrap(q), unwrap(k), q_order, k_order);

  const Tensor* outs[2] = {&std::get<0>(out), &std::get<1>(out)};
  const Tensor& x = in[0].defined() ? in[0] : in[1];
  Rope args{};
  for (int i = 0; i < 2; ++i)
    if (outs[i]->numel() > 0)
      args.heads[i] = {in[i].const_data_ptr(), outs[i]->mutable_data_ptr(), in[i].size(1), head_strides(in[i]),
                       head_strides(*outs[i])};
  if (args.heads[0].n_heads + args.heads[1].n_heads == 0) return out;
  const OnDevice device(x);
  args.tables = rope_tables(cos, sin, positions);
  args.n_tokens = x.size(2);
  args.all_tokens = x.size(0) * x.size(2);
  args.width = x.size(3);
  args.interleaved = interleaved;
  args.inverse = inverse;
  args.type = dtype_of(x);
  check_cuda(cuda::rope(args, device.stream()), "rope");
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fwd_cuda(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                                    const OptionalTensor& k_weight, const Tensor& cos_,
                                                    const Tensor& sin_, double eps, double weight_offset,
                                                    bool round_before_weight, bool interleaved,
                                                    const OptionalTensor& positions_, bool save_rstd) {
  const Tensor positions = unwrap(positions_);
  check_rope(q, k, cos_, sin_, positions);
  check_weight("q_weight", unwrap(q_weight), q);
  check_weight("k_weight", unwrap(k_weight), q);
  const OnDevice device(q);
  const Tensor in[2] = {unit_stride(q), unit_stride(k)}, cos = unit_stride(cos_), sin = unit_stride(sin_);
  const Tensor out[2] = {empty_in_storage_order(q), empty_in_storage_order(k)};
  const Tensor rstd[2] = {empty_rstd(q, save_rstd), empty_rstd(k, save_rstd)};
  const Tensor weight[2] = {contiguous_weight(q_weight), contiguous_weight(k_weight)};
  cuda::QkNormRopeForward args{};
  for (int i = 0; i < 2; ++i) {
    if (in[i].numel() == 0) continue;
    auto& heads = args.heads[i];
    heads.x = in[i].const_data_ptr();
    heads.y = out[i].mutable_data_ptr();
    heads.n_heads = in[i].size(1);
    heads.x_strides = head_strides(in[i]);
    heads.y_strides = head_strides(out[i]);
    heads.rstd = save_rstd ? rstd[i].mutable_data_ptr<float>() : nullptr;
    set_weight(heads, weight[i]);
  }
  if (args.heads[0].n_heads + args.heads[1].n_heads == 0) return {out[0], out[1], rstd[0], rstd[1]};
  args.tables = rope_tables(cos, sin, positions);
  args.n_tokens = q.size(2);
  args.all_tokens = q.size(0) * q.size(2);
  args.width = q.size(3);
  args.eps = static_cast<float>(eps);
  args.weight_offset = static_cast<float>(weight_offset);
  args.round_before_weight = round_before_weight;
  args.interleaved = interleaved;
  args.type = dtype_of(q);
  check_cuda(cuda::qk_norm_rope_forward(args, device.stream()), "qk_norm_rope forward");
  return {out[0], out[1], rstd[0], rstd[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd_cuda(const Tensor& dq_out, const Tensor& dk_out, const Tensor& q,
                                                    const Tensor& k, const OptionalTensor& q_weight,
                                                    const OptionalTensor& k_weight, const Tensor& cos_,
                                                    const Tensor& sin_, const Tensor& q_rstd, const Tensor& k_rstd,
                                                    double weight_offset, bool round_before_weight, bool interleaved,
                                                    const OptionalTensor& positions_, bool need_dq, bool need_dk,
                                                    bool need_dq_weight, bool need_dk_weight) {
  const Tensor positions = unwrap(positions_);
  check_rope(q, k, cos_, sin_, positions);
  const OnDevice device(q);
  const bool need_dx[2] = {need_dq, need_dk}, need_dw[2] = {need_dq_weight, need_dk_weight};
  const Tensor x[2] = {unit_stride(q), unit_stride(k)}, dy[2] = {unit_stride(dq_out), unit_stride(dk_out)};
  const Tensor cos = unit_stride(cos_), sin = unit_stride(sin_);
  const Tensor rstd[2] = {q_rstd, k_rstd}, weight[2] = {contiguous_weight(q_weight), contiguous_weight(k_weight)};
  const Tensor dx[2] = {empty_gradient(q, need_dq), empty_gradient(k, need_dk)};
  const Tensor dw[2] = {empty_weight_gradient("q_weight", unwrap(q_weight), q, need_dq_weight),
                        empty_weight_gradient("k_weight", unwrap(k_weight), k, need_dk_weight)};
  cuda::QkNormRopeBackward args{};
  args.n_tokens = q.size(2);
  args.all_tokens = q.size(0) * q.size(2);
  args.width = q.size(3);
  args.weight_offset = static_cast<float>(weight_offset);
  args.round_before_weight = round_before_weight;
  args.interleaved = interleaved;
  args.type = dtype_of(q);
  args.tables = rope_tables(cos, sin, positions);
  Tensor partial[2];
  for (int i = 0; i < 2; ++i) {
    if (x[i].numel() == 0) {
      dw[i].zero_();
      continue;
    }
    if (!need_dx[i] && !need_dw[i]) continue;
    auto& heads = args.heads[i];
    heads.dy = dy[i].const_data_ptr();
    heads.x = x[i].const_data_ptr();
    heads.rstd = rstd[i].const_data_ptr<float>();
    heads.n_heads = x[i].size(1);
    heads.n_blocks = cuda::qk_norm_rope_backward_blocks(args.all_tokens * heads.n_heads, device.multiprocessors());
    heads.dy_strides = head_strides(dy[i]);
    heads.x_strides = head_strides(x[i]);
    set_weight(heads, weight[i]);
    if (need_dx[i]) {
      heads.dx = dx[i].mutable_data_ptr();
      heads.dx_strides = head_strides(dx[i]);
    }
    if (need_dw[i]) {
      partial[i] = at::empty({heads.n_blocks, args.width}, q.options().dtype(at::kFloat));
      heads.dw_partial = partial[i].mutable_data_ptr<float>();
      heads.dw = dw[i].mutable_data_ptr();
    }
  }
  if (args.heads[0].n_heads + args.heads[1].n_heads > 0)
    check_cuda(cuda::qk_norm_rope_backward(args, device.stream()), "qk_norm_rope backward");
  return {dx[0], dx[1], dw[0], dw[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("rope_apply", &apply_cuda);
  m.impl("qk_norm_rope_fwd", &fwd_cuda);
  m.impl("qk_norm_rope_bwd", &bwd_cuda);
}

}  // namespace foundry
