// The CPU's launches of rope_apply, qk_norm_rope_fwd and qk_norm_rope_bwd; see rope.cpp for the operators.
#include "../cpu/rope.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"
#include "rope.h"

namespace foundry {
namespace {

// Every position must have a row, which is found out before anything is written.
void check_positions(const RopeTables& tables, const Tensor& positions) {
  if (!positions.defined()) return;
  const int64_t n_batch = positions.dim() == 2 ? positions.size(0) : 1;
  for (int64_t b = 0; b < n_batch; ++b)
    for (int64_t t = 0; t < positions.size(-1); ++t)
      TORCH_CHECK_INDEX(tables.has_row(tables.row(b, t)), "positions must lie in 0 .. ", tables.n_rows - 1,
                        ", the rows of cos and sin; got ", tables.row(b, t));
}

// Calls f(begin, end) for ranges of the tokens of q and k on several threads.
template <class F>
void parallel_over_tokens(int64_t all_tokens, int64_t all_heads, int64_t width, const F& f) {
  at::parallel_for(0, all_tokens, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, all_heads * width)), f);
}

std::tuple<Tensor, Tensor> apply_cpu(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos_,
                                     const Tensor& sin_, bool interleaved, const OptionalTensor& positions_,
                                     bool inverse, OptionalOrder q_order, OptionalOrder k_order) {
  const Tensor positions = unwrap(positions_);
  check_rope(unwrap(q), unwrap(k), cos_, sin_, positions);
  const Tensor in[2] = {unit_stride(unwrap(q)), unit_stride(unwrap(k))};
  const Tensor cos = unit_stride(cos_), sin = unit_stride(sin_);
  Rope args{};
  args.tables = rope_tables(cos, sin, positions);
  check_positions(args.tables, positions);
  auto out = empty_rope(unwrap(q), unwrap(k), q_order, k_order);

  const Tensor* outs[2] = {&std::get<0>(out), &std::get<1>(out)};
  const Tensor& x = in[0].defined() ? in[0] : in[1];
  int64_t all_heads = 0;
  for (int i = 0; i < 2; ++i) {
    if (outs[i]->numel() == 0) continue;
    advise_huge_pages(*outs[i]);
    args.heads[i] = {in[i].const_data_ptr(), outs[i]->mutable_data_ptr(), in[i].size(1), head_strides(in[i]),
                     head_strides(*outs[i])};
    all_heads += in[i].size(1);
  }
  if (all_heads == 0) return out;
  args.n_tokens = x.size(2);
  args.all_tokens = x.size(0) * x.size(2);
  args.width = x.size(3);
  args.interleaved = interleaved;
  args.inverse = inverse;
  args.type = dtype_of(x);
  const auto kernel = FK_CHOOSE_ISA(rope);
  parallel_over_tokens(args.all_tokens, all_heads, args.width,
                       [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fwd_cpu(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                                   const OptionalTensor& k_weight, const Tensor& cos_,
                                                   const Tensor& sin_, double eps, double weight_offset,
                                                   bool round_before_weight, bool interleaved,
                                                   const OptionalTensor& positions_, bool save_rstd) {
  const Tensor positions = unwrap(positions_);
  check_rope(q, k, cos_, sin_, positions);
  check_weight("q_weight", unwrap(q_weight), q);
  check_weight("k_weight", unwrap(k_weight), q);
  const Tensor cos = unit_stride(cos_), sin = unit_stride(sin_);
  QkNormRopeForward args{};
  args.tables = rope_tables(cos, sin, positions);
  check_positions(args.tables, positions);

  const Tensor in[2] = {unit_stride(q), unit_stride(k)};
  const Tensor out[2] = {empty_in_storage_order(q), empty_in_storage_order(k)};
  const Tensor rstd[2] = {empty_rstd(q, save_rstd), empty_rstd(k, save_rstd)};
  const Tensor weight[2] = {float_weight(unwrap(q_weight), weight_offset),
                            float_weight(unwrap(k_weight), weight_offset)};
  int64_t all_heads = 0;
  for (int i = 0; i < 2; ++i) {
    if (in[i].numel() == 0) continue;
    advise_huge_pages(out[i]);
    auto& heads = args.heads[i];
    heads.x = in[i].const_data_ptr();
    heads.y = out[i].mutable_data_ptr();
    heads.n_heads = in[i].size(1);
    heads.x_strides = head_strides(in[i]);
    heads.y_strides = head_strides(out[i]);
    heads.weight = weight[i].defined() ? weight[i].const_data_ptr<float>() : nullptr;
    heads.rstd = save_rstd ? rstd[i].mutable_data_ptr<float>() : nullptr;
    all_heads += heads.n_heads;
  }
  if (all_heads == 0) return {out[0], out[1], rstd[0], rstd[1]};
  args.n_tokens = q.size(2);
  args.all_tokens = q.size(0) * q.size(2);
  args.width = q.size(3);
  args.eps = static_cast<float>(eps);
  args.round_before_weight = round_before_weight;
  args.interleaved = interleaved;
  args.type = dtype_of(q);
  const auto kernel = FK_CHOOSE_ISA(qk_norm_rope_forward);
  parallel_over_tokens(args.all_tokens, all_heads, args.width,
                       [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return {out[0], out[1], rstd[0], rstd[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd_cpu(const Tensor& dq_out, const Tensor& dk_out, const Tensor& q,
                                                   const Tensor& k, const OptionalTensor& q_weight,
                                                   const OptionalTensor& k_weight, const Tensor& cos_,
                                                   const Tensor& sin_, const Tensor& q_rstd, const Tensor& k_rstd,
                                                   double weight_offset, bool round_before_weight, bool interleaved,
                                                   const OptionalTensor& positions_, bool need_dq, bool need_dk,
                                                   bool need_dq_weight, bool need_dk_weight) {
  const Tensor positions = unwrap(positions_);
  check_rope(q, k, cos_, sin_, positions);
  const Tensor cos = unit_stride(cos_), sin = unit_stride(sin_);
  QkNormRopeBackward args{};
  args.tables = rope_tables(cos, sin, positions);
  check_positions(args.tables, positions);

  const bool need_dx[2] = {need_dq, need_dk}, need_dw[2] = {need_dq_weight, need_dk_weight};
  const Tensor x[2] = {unit_stride(q), unit_stride(k)}, dy[2] = {unit_stride(dq_out), unit_stride(dk_out)};
  const Tensor rstd[2] = {q_rstd, k_rstd};
  const Tensor dx[2] = {empty_gradient(q, need_dq), empty_gradient(k, need_dk)};
  const Tensor dw[2] = {empty_weight_gradient("q_weight", unwrap(q_weight), q, need_dq_weight),
                        empty_weight_gradient("k_weight", unwrap(k_weight), k, need_dk_weight)};
  const Tensor weight[2] = {float_weight(unwrap(q_weight), weight_offset),
                            float_weight(unwrap(k_weight), weight_offset)};
  args.n_tokens = q.size(2);
  args.all_tokens = q.size(0) * q.size(2);
  args.width = q.size(3);
  args.round_before_weight = round_before_weight;
  args.interleaved = interleaved;
  args.type = dtype_of(q);
  // Tokens are cut into chunks by the shapes alone, so that dW is the same bits whatever the number of threads.
  const int64_t of_a_token = std::max<int64_t>(1, (q.size(1) + k.size(1)) * args.width);
  args.chunk_tokens = std::max<int64_t>({1, std::min<int64_t>(64, kGrain / of_a_token), (args.all_tokens + 127) / 128});
  const int64_t n_chunks = (args.all_tokens + args.chunk_tokens - 1) / args.chunk_tokens;

  Tensor dw_chunks[2];
  bool anything = false;
  for (int i = 0; i < 2; ++i) {
    if (x[i].numel() == 0) {
      dw[i].zero_();
      continue;
    }
    if (!need_dx[i] && !need_dw[i]) continue;
    anything = true;
    auto& heads = args.heads[i];
    heads.dy = dy[i].const_data_ptr();
    heads.x = x[i].const_data_ptr();
    heads.weight = weight[i].defined() ? weight[i].const_data_ptr<float>() : nullptr;
    heads.rstd = rstd[i].const_data_ptr<float>();
    heads.n_heads = x[i].size(1);
    heads.dy_strides = head_strides(dy[i]);
    heads.x_strides = head_strides(x[i]);
    if (need_dx[i]) {
      advise_huge_pages(dx[i]);
      heads.dx = dx[i].mutable_data_ptr();
      heads.dx_strides = head_strides(dx[i]);
    }
    if (need_dw[i]) {
      dw_chunks[i] = at::empty({n_chunks, args.width}, q.options().dtype(at::kFloat));
      heads.dw_chunks = dw_chunks[i].mutable_data_ptr<float>();
    }
  }
  if (anything) {
    const auto kernel = FK_CHOOSE_ISA(qk_norm_rope_backward);
    at::parallel_for(0, n_chunks, std::max<int64_t>(1, kGrain / (args.chunk_tokens * of_a_token)),
                     [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  }
  for (int i = 0; i < 2; ++i)
    if (dw_chunks[i].defined()) sum_chunks_into(dw[i], dw_chunks[i]);
  return {dx[0], dx[1], dw[0], dw[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("rope_apply", &apply_cpu);
  m.impl("qk_norm_rope_fwd", &fwd_cpu);
  m.impl("qk_norm_rope_bwd", &bwd_cpu);
}

}  // namespace foundry
