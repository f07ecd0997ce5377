// The GPU launches of foundry_kernels::flash_attention_fwd and _bwd; see flash_attention.cpp for the operators.
#include "../cuda/flash_attention.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "cuda_common.h"
#include "flash_attention.h"
#include "flash_attention_hopper_cuda.h"

namespace foundry {
namespace flash_attention_cuda {

// Owns what the pointers of cuda::AttentionInputs point into.
struct KeepAlive {
  std::vector<Tensor> tensors;
  hopper_attention::NamedTensors named;  // for error messages

  template <class T>
  const T* operator()(const Tensor& t) {
    tensors.push_back(t);
    return t.const_data_ptr<T>();
  }
  const void* operator()(const Tensor& t) {
    tensors.push_back(t);
    return t.const_data_ptr();
  }
  const void* operator()(const char* name, const Tensor& t) {
    named.emplace_back(name, t);
    return t.const_data_ptr();
  }
};

cuda::DroppedWeights dropout_of(KeepAlive& keep, double p, const Tensor& seed, const OptionalTensor& heads) {
  constexpr double kWords = 65536;
  const double threshold = std::min(std::nearbyint(p * kWords), kWords - 1);
  return {keep.operator()<int64_t>(seed), static_cast<uint32_t>(threshold),
          static_cast<float>(kWords / (kWords - threshold)),
          heads.has_value() ? keep.operator()<int64_t>(heads->contiguous()) : nullptr};
}

void set_masks(cuda::AttentionInputs& a, KeepAlive& keep, const OptionalTensor& attn_mask,
               const OptionalTensor& mask_tiles, const OptionalTensor& mask_bits) {
  if (attn_mask.has_value()) {
    const bool is_bool = attn_mask->scalar_type() == at::kBool;
    (is_bool ? a.mask_strides : a.bias_strides) = pair_strides(*attn_mask);
    const void* data = keep(*attn_mask);
    if (is_bool) a.mask = static_cast<const uint8_t*>(data);
    else a.bias = data, a.bias_type = dtype_of(*attn_mask);
  }
  if (mask_tiles.has_value()) {
    const Tensor tiles = mask_tiles->contiguous(), bits = mask_bits->contiguous();
    a.tiles = {keep.operator()<int32_t>(tiles), pair_strides(tiles),
               reinterpret_cast<const uint64_t*>(keep.operator()<int64_t>(bits))};
  }
}

void set_inputs(cuda::AttentionInputs& a, KeepAlive& keep, const Tensor& q_, const Tensor& k_, const Tensor& v_,
                const AttentionOptions& options) {
  // Names every option, so that adding one that is not handled here does not compile.
  const auto& [cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k, leftpad_k, scale,
               window_left, window_right, softcap, alibi_slopes, sinks, attn_mask, mask_tiles, mask_bits, dropout_p,
               dropout_seed, dropout_heads, score_mod, score_tensors, bottom_right, deterministic, batch_invariant] =
      options;
  TORCH_CHECK_NOT_IMPLEMENTED(score_mod.empty(), "the CUDA kernels of attention do not support score_mod");
  const Tensor q = unit_last_stride(q_), k = unit_last_stride(k_), v = unit_last_stride(v_);
  a.q = keep("q", q), a.k = keep("k", k), a.v = keep("v", v);
  a.q_strides = head_strides(q), a.k_strides = head_strides(k), a.v_strides = head_strides(v);
  a.type = dtype_of(q);
  a.n_heads = q.size(1);
  a.group = q.size(1) / k.size(1);
  a.head_dim = static_cast<int>(q.size(-1)), a.head_dim_v = static_cast<int>(v.size(-1));
  if (options.packed()) {
    a.n_sequences = cu_seqlens_q->size(0) - 1;
    a.total_q = q.size(0), a.total_k = k.size(0);
    a.n_queries = std::min(max_seqlen_q.guard_int(__FILE__, __LINE__), a.total_q);
    a.n_keys = std::min(max_seqlen_k.guard_int(__FILE__, __LINE__), a.total_k);
    a.starts_q = keep.operator()<int32_t>(cu_seqlens_q->to(at::kInt).contiguous());
    a.starts_k = keep.operator()<int32_t>(cu_seqlens_k->to(at::kInt).contiguous());
  } else {
    a.n_sequences = q.size(0);
    a.n_queries = q.size(2), a.n_keys = k.size(2);
  }
  constexpr int64_t kMost = (int64_t(1) << 30) - 1;
  TORCH_CHECK_VALUE(std::max({a.n_queries, a.n_keys, a.total_q, a.total_k}) <= kMost, "q and k must have at most ",
                    kMost, " tokens");
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap.value_or(0.0));
  if (alibi_slopes.has_value()) {
    a.alibi_slopes_batch_stride = alibi_slopes->dim() == 2 ? q.size(1) : 0;
    a.alibi_slopes = keep.operator()<float>(alibi_slopes->to(at::kFloat).contiguous());
  }
  if (sinks.has_value()) a.sinks = keep.operator()<float>(sinks->to(at::kFloat).contiguous());
  set_masks(a, keep, attn_mask, mask_tiles, mask_bits);
  if (dropout_p.has_value()) a.dropout = dropout_of(keep, *dropout_p, *dropout_seed, dropout_heads);
  const auto side = [](const OptionalInt& n) {
    return n.has_value() ? std::min(n->guard_int(__FILE__, __LINE__), kUnbounded) : kUnbounded;
  };
  a.window_left = side(window_left), a.window_right = side(window_right);
  a.bottom_right = bottom_right;
  a.batch_invariant = batch_invariant;
  a.row_strides = row_strides(q);
}

FourTensors fwd_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options, bool save_lse,
                     bool save_stats) {
  check_attention(q, k, v, options);
  TORCH_CHECK_NOT_IMPLEMENTED(!options.paged(), "the CUDA kernels of attention do not support block_table");
  auto [out, lse, entropy, max_logit] = empty_attention_fwd(q, v, options.packed(), save_lse, save_stats);
  if (q.numel() == 0) return {out, lse, entropy, max_logit};
  const OnDevice device(q);
  cuda::AttentionForward a{};
  KeepAlive keep;
  set_inputs(a, keep, q, k, v, options);
  a.out = out.mutable_data_ptr();
  a.out_strides = head_strides(out);
  a.lse = save_lse ? lse.mutable_data_ptr<double>() : nullptr;
  a.entropy = save_stats ? entropy.mutable_data_ptr<float>() : nullptr;
  a.max_logit = save_stats ? max_logit.mutable_data_ptr<float>() : nullptr;
  if (hopper_attention::forward(a, device, q, keep.named)) return {out, lse, entropy, max_logit};
  cuda::Splits splits = cuda::plan_forward(a, {device.multiprocessors(), device.shared_memory(), device.major() == 8});
  Tensor sums;
  if (const int64_t floats = splits.floats(a.head_dim_v)) {
    sums = at::empty({floats}, q.options().dtype(at::kFloat));
    splits.sums = sums.mutable_data_ptr<float>();
  }
  check_cuda(cuda::attention_forward(a, splits, device.stream()), "attention forward");
  return {out, lse, entropy, max_logit};
}

SixTensors bwd_cuda(const Tensor& dout_, const OptionalTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& out, const Tensor& lse, const AttentionOptions& options, bool need_dq, bool need_dk,
                    bool need_dv, bool need_dsinks, bool need_dbias, Slots dscore_slots) {
  check_attention(q, k, v, options);
  auto [dq, dk, dv, dsinks, dbias, dscore] =
      empty_attention_bwd(q, k, v, options, need_dq, need_dk, need_dv, need_dsinks, need_dbias, dscore_slots);
  if (q.numel() == 0) return {dq.zero_(), dk.zero_(), dv.zero_(), dsinks.zero_(), dbias.zero_(), dscore.zero_()};
  const OnDevice device(q);
  cuda::AttentionBackward a{};
  KeepAlive keep;
  set_inputs(a, keep, q, k, v, options);
  const Tensor dout = unit_last_stride(dout_), delta = at::empty(lse.sizes(), lse.options().dtype(at::kFloat));
  a.out = keep("out", out), a.out_strides = head_strides(out);
  a.dout = keep("dout", dout), a.dout_strides = head_strides(dout);
  a.lse = keep.operator()<double>(lse);
  a.dlse = dlse.has_value() ? keep.operator()<float>(dlse->contiguous()) : nullptr;
  a.delta = delta.mutable_data_ptr<float>();
  const auto write_to = [](const Tensor& gradient, bool needed, void*& data, HeadStrides& strides) {
    if (!needed) return;
    data = gradient.mutable_data_ptr();
    strides = head_strides(gradient);
  };
  write_to(dq, need_dq, a.dq, a.dq_strides);
  write_to(dk, need_dk, a.dk, a.dk_strides);
  write_to(dv, need_dv, a.dv, a.dv_strides);
  Tensor sink_sums;
  if (need_dsinks) {
    sink_sums = at::empty({q.size(1)}, q.options().dtype(at::kFloat));
    a.dsinks = sink_sums.mutable_data_ptr<float>();
  }
  if (need_dbias) {
    a.dbias = dbias.mutable_data_ptr();
    a.dbias_strides = pair_strides(dbias);
    std::copy_n(dbias.sizes().begin(), 4, a.dbias_sizes);
    a.own_dbias = need_dq && dbias.numel() == q.numel() / q.size(3) * k.size(2);
    if (a.own_dbias) dbias.zero_();
  }
  if (hopper_attention::backward(a, options.deterministic, device, q, keep.named)) {
    if (need_dsinks) dsinks.copy_(sink_sums);
    return {dq, dk, dv, dsinks, dbias, dscore};
  }
  Tensor numbers;
  if (cuda::backward_in_tiles(a)) {
    numbers = at::empty({delta.numel(), 2}, delta.options());
    a.numbers = numbers.mutable_data_ptr<float>();
  }
  check_cuda(cuda::attention_backward(a, device.stream()), "attention backward");
  if (need_dsinks) dsinks.copy_(sink_sums);
  return {dq, dk, dv, dsinks, dbias, dscore};
}

// How many passes the kernels of csrc/cuda/hopper have run, for tests of dispatch.
std::tuple<int64_t, int64_t> hopper_passes() { return {hopper_attention::forwards, hopper_attention::backwards}; }

}  // namespace flash_attention_cuda

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def("flash_attention_hopper_passes() -> (int forward, int backward)", &flash_attention_cuda::hopper_passes);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("flash_attention_fwd", flat_kernel<&flash_attention_cuda::fwd_cuda>);
  m.impl("flash_attention_bwd", flat_kernel<&flash_attention_cuda::bwd_cuda>);
}

}  // namespace foundry
