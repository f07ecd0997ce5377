// Shapes, checks and outputs of foundry_kernels::flash_attention_fwd and _bwd.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>
#include <vector>

#include "../common/flash_attention.h"
#include "common.h"
#include "flash_attention_options.h"

namespace foundry {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using SixTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Slots = std::vector<int64_t>;  // which of score_tensors

// The tensor must broadcast to these four sizes.
inline void check_broadcasts(const char* name, const Tensor& t, const std::vector<c10::SymInt>& sizes) {
  TORCH_CHECK_VALUE(t.dim() == 4, name, " must have 4 dimensions; got ", t.dim());
  for (int64_t i = 0; i < 4; ++i)
    TORCH_CHECK_VALUE(t.sym_size(i) == sizes[i] || t.sym_size(i) == 1, name, " must broadcast to ",
                      c10::SymIntArrayRef(sizes), "; got ", t.sym_sizes());
}

// The dimension of k and v that indexes heads.
inline int64_t kv_heads_dim(const AttentionOptions& options) { return options.paged() ? 2 : 1; }

inline void check_masks(const Tensor& q, const Tensor& k, const AttentionOptions& options) {
  const OptionalTensor &mask = options.attn_mask, &tiles = options.mask_tiles, &bits = options.mask_bits;
  TORCH_CHECK_VALUE(tiles.has_value() == bits.has_value(), "mask_tiles and mask_bits must be given together");
  if (!mask.has_value() && !tiles.has_value()) return;
  TORCH_CHECK_VALUE(!options.packed(), "packed sequences do not support attn_mask");
  std::vector<c10::SymInt> sizes{q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2)};
  if (mask.has_value()) {
    TORCH_CHECK_TYPE(mask->scalar_type() == at::kBool || mask->is_floating_point(),
                     "attn_mask must be bool or floating; got ", mask->scalar_type());
    check_broadcasts("attn_mask", *mask, sizes);
  }
  if (!tiles.has_value()) return;
  for (int64_t i : {2, 3}) sizes[i] = (sizes[i] + (kMaskTile - 1)) / kMaskTile;
  TORCH_CHECK_TYPE(tiles->scalar_type() == at::kInt, "mask_tiles must be int32; got ", tiles->scalar_type());
  TORCH_CHECK_TYPE(bits->scalar_type() == at::kLong, "mask_bits must be int64; got ", bits->scalar_type());
  check_broadcasts("mask_tiles", *tiles, sizes);
  TORCH_CHECK_VALUE(bits->dim() == 2 && bits->sym_size(1) == kMaskTile, "mask_bits must be [n, ", kMaskTile, "]; got ",
                    bits->sym_sizes());
}

inline void check_dropout(const AttentionOptions& options, const c10::SymInt& batch, const c10::SymInt& n_heads) {
  const OptionalTensor &seed = options.dropout_seed, &heads = options.dropout_heads;
  if (!options.dropout_p.has_value()) return;
  const double p = *options.dropout_p;
  TORCH_CHECK_VALUE(p >= 0.0 && p < 1.0, "dropout_p must be in [0, 1); got ", p);
  TORCH_CHECK_VALUE(seed.has_value() && seed->scalar_type() == at::kLong && seed->sym_numel() == 1,
                    "dropout_seed must be one int64 number");
  if (heads.has_value())
    TORCH_CHECK_VALUE(heads->scalar_type() == at::kLong && heads->dim() == 2 && heads->sym_size(0) == batch &&
                          heads->sym_size(1) == n_heads,
                      "dropout_heads must be int64 [B, H]; got ", heads->sym_sizes());
}

// Paged keys of packed sequences: block_table and the lengths are integer tensors. The CPU launch checks their values.
inline void check_pages(const AttentionOptions& options, const c10::SymInt& batch) {
  const auto check = [&](const char* name, const OptionalTensor& t, int64_t dims) {
    TORCH_CHECK_VALUE(t->dim() == dims && t->sym_size(0) == batch, name, " must have ", dims,
                      " dimensions, the first of them the ", batch, " sequences; got ", t->sym_sizes());
    TORCH_CHECK_TYPE(t->scalar_type() == at::kInt || t->scalar_type() == at::kLong, name,
                     " must be int32 or int64; got ", t->scalar_type());
  };
  TORCH_CHECK_VALUE(options.packed() && options.seqused_k.has_value() && !options.cu_seqlens_k.has_value(),
                    "block_table needs cu_seqlens_q, and seqused_k in place of cu_seqlens_k");
  TORCH_CHECK_VALUE(!options.dropout_p.has_value(), "dropout_p must be absent with block_table");
  check("block_table", options.block_table, 2);
  check("seqused_k", options.seqused_k, 1);
  if (options.leftpad_k.has_value()) check("leftpad_k", options.leftpad_k, 1);
}

// score_mod is a program of ops/flash_attention/score_program, which begins with the number of its tensors.
inline void check_score_mod(const AttentionOptions& options, const Tensor& q) {
  const size_t wanted = options.score_mod.empty() ? 0 : static_cast<size_t>(options.score_mod[0]);
  TORCH_CHECK_VALUE(options.score_tensors.size() == wanted, "score_tensors must be ", wanted, " tensors; got ",
                    options.score_tensors.size());
  for (const Tensor& t : options.score_tensors)
    TORCH_CHECK_VALUE(t.device() == q.device(), "score_tensors must be on q's device ", q.device(), "; got ",
                      t.device());
}

// q is [B, H, T, D], or packed [total_q, H, D] with cu_seqlens. Dimension 1 indexes heads in both.
inline void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  const OptionalTensor &cu_seqlens_q = options.cu_seqlens_q, &cu_seqlens_k = options.cu_seqlens_k;
  const OptionalTensor &alibi_slopes = options.alibi_slopes, &sinks = options.sinks;
  const bool packed = options.packed(), paged = options.paged();
  const int64_t rank = packed ? 3 : 4, rank_k = paged ? 4 : rank, heads = kv_heads_dim(options);
  TORCH_CHECK_VALUE(paged || cu_seqlens_k.has_value() == packed,
                    "cu_seqlens_q and cu_seqlens_k must be given together");
  TORCH_CHECK_VALUE(q.dim() == rank && k.dim() == rank_k && v.dim() == rank_k, "q, k and v must have ", rank, ", ",
                    rank_k, " and ", rank_k, " dimensions; got ", q.dim(), ", ", k.dim(), " and ", v.dim());
  for (const Tensor* t : {&k, &v}) {
    const char* name = t == &k ? "k" : "v";
    TORCH_CHECK_TYPE(t->scalar_type() == q.scalar_type(), name, " must have q's dtype ", q.scalar_type(), "; got ",
                     t->scalar_type());
    TORCH_CHECK_VALUE(packed || t->sym_size(0) == q.sym_size(0), name, " must have q's batch size ", q.sym_size(0));
  }
  for (int64_t i = 0; i + 1 < rank_k; ++i)
    TORCH_CHECK_VALUE(v.sym_size(i) == k.sym_size(i), "v must have k's heads and tokens; got ", k.sym_sizes(), " and ",
                      v.sym_sizes());
  TORCH_CHECK_VALUE(k.sym_size(-1) == q.sym_size(-1), "k must have q's head dimension ", q.sym_size(-1), "; got ",
                    k.sym_size(-1));
  TORCH_CHECK_VALUE(q.sym_size(-1) > 0 && v.sym_size(-1) > 0, "q and v must have a head dimension of at least 1");
  TORCH_CHECK_VALUE(k.sym_size(heads) > 0 && q.sym_size(1) % k.sym_size(heads) == 0, "q must have a multiple of k's ",
                    k.sym_size(heads), " heads; got ", q.sym_size(1));
  const c10::SymInt batch = packed ? cu_seqlens_q->sym_size(0) - 1 : q.sym_size(0);
  if (packed)
    for (const OptionalTensor* t : {&cu_seqlens_q, paged ? &cu_seqlens_q : &cu_seqlens_k})
      TORCH_CHECK_VALUE((*t)->dim() == 1 && (*t)->sym_size(0) == batch + 1 && batch >= 0,
                        "cu_seqlens_q and cu_seqlens_k must both be [B + 1]");
  if (paged) check_pages(options, batch);
  if (alibi_slopes.has_value())
    TORCH_CHECK_VALUE(
        alibi_slopes->sym_size(-1) == q.sym_size(1) &&
            (alibi_slopes->dim() == 1 || (alibi_slopes->dim() == 2 && alibi_slopes->sym_size(0) == batch)),
        "alibi_slopes must be [H] or [B, H]; got ", alibi_slopes->sym_sizes());
  if (sinks.has_value())
    TORCH_CHECK_VALUE(sinks->dim() == 1 && sinks->sym_size(0) == q.sym_size(1), "sinks must be [H]; got ",
                      sinks->sym_sizes());
  check_masks(q, k, options);
  check_dropout(options, batch, q.sym_size(1));
  check_score_mod(options, q);
}

// [B, H, T, Dv] of q's dtype, dense in q's storage order; [total_q, H, Dv] contiguous.
inline Tensor empty_attention_out(const Tensor& q, const c10::SymInt& head_dim_v, bool packed) {
  std::vector<c10::SymInt> sizes = q.sym_sizes().vec();
  sizes.back() = head_dim_v;
  if (packed || q.is_contiguous()) return at::empty_symint(sizes, q.options());
  if (q.sym_size(-1) == head_dim_v) return empty_in_storage_order(q);
  return empty_in_order(q.narrow(-1, 0, 1).expand_symint(sizes), storage_order(q));
}

// out, and lse, entropy and max_logit if requested. The meta device uses them as fakes. lse is double because the
// backward pass needs it so (see AttentionBackward); callers of foundry_kernels::flash_attention get it as float.
inline FourTensors empty_attention_fwd(const Tensor& q, const Tensor& v, bool packed, bool save_lse, bool save_stats) {
  std::vector<c10::SymInt> rows{q.sym_size(0), q.sym_size(1)};
  if (packed) std::swap(rows[0], rows[1]);
  else rows.push_back(q.sym_size(2));
  const auto row_tensor = [&](bool wanted, at::ScalarType dtype) {
    return wanted ? at::empty_symint(rows, q.options().dtype(dtype)) : absent(q, dtype);
  };
  return {empty_attention_out(q, v.sym_size(-1), packed), row_tensor(save_lse, at::kDouble),
          row_tensor(save_stats, at::kFloat), row_tensor(save_stats, at::kFloat)};
}

// dq, dk, dv, dsinks and dbias, each with the layout of its input. A gradient that is not needed is empty. dscore is
// float, the gradients of these slots of score_tensors one after the other, each as if its tensor were contiguous.
inline SixTensors empty_attention_bwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                      const AttentionOptions& options, bool need_dq, bool need_dk, bool need_dv,
                                      bool need_dsinks, bool need_dbias, const Slots& dscore_slots) {
  const OptionalTensor &sinks = options.sinks, &bias = options.attn_mask;
  TORCH_CHECK_VALUE(!need_dsinks || sinks.has_value(), "there are no sinks to give a gradient for");
  TORCH_CHECK_VALUE(!need_dbias || (bias.has_value() && bias->is_floating_point()),
                    "there is no bias to give a gradient for");
  c10::SymInt numbers = 0;
  for (int64_t slot : dscore_slots) {
    TORCH_CHECK_VALUE(0 <= slot && slot < static_cast<int64_t>(options.score_tensors.size()),
                      "dscore_slots must be indices of score_tensors; got ", slot);
    numbers += options.score_tensors[slot].sym_numel();
  }
  const Tensor dscore =
      dscore_slots.empty() ? absent(q, at::kFloat) : at::empty_symint({numbers}, q.options().dtype(at::kFloat));
  const auto like = [&](const Tensor& t, bool wanted) {
    return wanted ? empty_in_storage_order(t) : absent(t, t.scalar_type());
  };
  return {like(q, need_dq),
          like(k, need_dk),
          like(v, need_dv),
          like(sinks.value_or(q), need_dsinks),
          like(bias.value_or(q), need_dbias),
          dscore};
}

inline HeadStrides head_strides(const Tensor& t) {
  return t.dim() == 4 ? HeadStrides{t.stride(0), t.stride(1), t.stride(2)} : HeadStrides{0, t.stride(1), t.stride(0)};
}

// The strides of pages [pages, positions, Hk, D]: the page index takes the place of the batch index.
inline HeadStrides page_strides(const Tensor& t) { return {t.stride(0), t.stride(2), t.stride(1)}; }

// The strides of per-row outputs such as lse: [B, H, T], or [H, total] for packed sequences.
inline HeadStrides row_strides(const Tensor& q) {
  return q.dim() == 4 ? HeadStrides{q.size(1) * q.size(2), q.size(2), 1} : HeadStrides{0, q.size(0), 1};
}

inline Tensor unit_last_stride(const Tensor& t) { return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous(); }

inline PairStrides pair_strides(const Tensor& t) {
  const auto stride = [&](int64_t i) { return t.size(i) == 1 ? 0 : t.stride(i); };
  return {stride(0), stride(1), stride(2), stride(3)};
}

}  // namespace foundry
