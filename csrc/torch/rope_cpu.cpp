// The CPU launches of rope_apply, qk_norm_rope_fwd and qk_norm_rope_bwd; see rope.cpp for the operators.
#include "../cpu/rope.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"
#include "rope.h"

namespace foundry {
namespace rope_cpu {

// Checks that every position has a row in the tables, before anything is written.
void check_positions(const RopeTables& tables, const OptionalTensor& positions) {
  if (!positions) return;
  const int64_t n_batch = positions->dim() == 2 ? positions->size(0) : 1;
  for (int64_t b = 0; b < n_batch; ++b)
    for (int64_t t = 0; t < positions->size(-1); ++t)
      TORCH_CHECK_INDEX(tables.has_row(tables.row(b, t)), "positions must lie in 0 .. ", tables.n_rows - 1,
                        ", the rows of cos and sin; got ", tables.row(b, t));
}

// Calls kernel(args, begin, end) on several threads for ranges of tokens.
template <class Args>
void parallel_over_tokens(void (*kernel)(const Args&, int64_t, int64_t), const Args& args) {
  const int64_t of_a_token = count_heads(args.heads) * args.width;  // elements per token
  if (of_a_token == 0) return;
  at::parallel_for(0, args.all_tokens, std::max<int64_t>(1, kGrain / of_a_token),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

std::tuple<Tensor, Tensor> apply_cpu(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos,
                                     const Tensor& sin, const RopeOptions& options, bool inverse, OptionalOrder q_order,
                                     OptionalOrder k_order) {
  const RopeApplyCall call(q, k, cos, sin, options, inverse, q_order, k_order);
  check_positions(call.args.tables, options.positions);
  for (const Tensor& out : call.out) advise_huge_pages(out);
  parallel_over_tokens(FK_CHOOSE_ISA(rope), call.args);
  return {call.out[0], call.out[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fwd_cpu(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                                   const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin,
                                                   double eps, const WeightOptions& weight_options,
                                                   const RopeOptions& options, bool save_q_rstd, bool save_k_rstd) {
  QkNormRopeForwardCall<QkNormRopeForward> call(q, k, q_weight, k_weight, cos, sin, eps, weight_options, options,
                                                save_q_rstd, save_k_rstd);
  check_positions(call.args.tables, options.positions);
  const Tensor weight[2] = {float_weight(unwrap(q_weight), weight_options.weight_offset),
                            float_weight(unwrap(k_weight), weight_options.weight_offset)};
  for (int side = 0; side < 2; ++side) {
    advise_huge_pages(call.out[side]);
    if (weight[side].defined()) call.args.heads[side].weight = weight[side].const_data_ptr<float>();
  }
  parallel_over_tokens(FK_CHOOSE_ISA(qk_norm_rope_forward), call.args);
  return {call.out[0], call.out[1], call.rstd[0], call.rstd[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd_cpu(const OptionalTensor& dq_out, const OptionalTensor& dk_out,
                                                   const OptionalTensor& q, const OptionalTensor& k,
                                                   const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                                   const Tensor& cos, const Tensor& sin, const OptionalTensor& q_rstd,
                                                   const OptionalTensor& k_rstd, const WeightOptions& weight_options,
                                                   const RopeOptions& options, bool need_dq, bool need_dk,
                                                   bool need_dq_weight, bool need_dk_weight) {
  QkNormRopeBackwardCall<QkNormRopeBackward> call(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd,
                                                  weight_options, options, need_dq, need_dk, need_dq_weight,
                                                  need_dk_weight);
  QkNormRopeBackward& args = call.args;
  check_positions(args.tables, options.positions);
  const Tensor weight[2] = {float_weight(unwrap(q_weight), weight_options.weight_offset),
                            float_weight(unwrap(k_weight), weight_options.weight_offset)};
  // The chunks of tokens depend only on the shapes, so dW does not depend on the number of threads.
  const int64_t all_heads = (q ? q->size(1) : 0) + (k ? k->size(1) : 0);
  const int64_t of_a_token = std::max<int64_t>(1, all_heads * args.width);
  args.chunk_tokens = std::max<int64_t>({1, std::min<int64_t>(64, kGrain / of_a_token), (args.all_tokens + 127) / 128});
  const int64_t n_chunks = (args.all_tokens + args.chunk_tokens - 1) / args.chunk_tokens;

  Tensor dw_chunks[2];
  for (int side = 0; side < 2; ++side) {
    auto& heads = args.heads[side];
    advise_huge_pages(call.dx[side]);
    if (weight[side].defined()) heads.weight = weight[side].const_data_ptr<float>();
    if (!call.sums_dw(side)) continue;
    dw_chunks[side] = at::empty({n_chunks, args.width}, cos.options().dtype(at::kFloat));
    heads.dw_chunks = dw_chunks[side].mutable_data_ptr<float>();
  }
  if (count_heads(args.heads) > 0) {
    in_parallel(FK_CHOOSE_ISA(qk_norm_rope_backward), args, n_chunks, kGrain, args.chunk_tokens * of_a_token);
  }
  for (int side = 0; side < 2; ++side)
    if (dw_chunks[side].defined()) sum_chunks_into(call.dw[side], dw_chunks[side]);
  return {call.dx[0], call.dx[1], call.dw[0], call.dw[1]};
}

}  // namespace rope_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("rope_apply", flat_kernel<&rope_cpu::apply_cpu>);
  m.impl("qk_norm_rope_fwd", flat_kernel<&rope_cpu::fwd_cpu>);
  m.impl("qk_norm_rope_bwd", flat_kernel<&rope_cpu::bwd_cpu>);
}

}  // namespace foundry
