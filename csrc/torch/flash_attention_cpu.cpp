// The CPU launches of foundry_kernels::flash_attention_fwd and _bwd; see flash_attention.cpp for the operators.
#include "../cpu/flash_attention_tasks.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "../cpu/processor.h"
#include "cpu_common.h"
#include "flash_attention.h"
#include "flash_attention_score_sums.h"
#include "flash_attention_sequences.h"
#include "score_program.h"
#include "task_queue.h"

namespace foundry {
namespace flash_attention_cpu {

constexpr int64_t kTaskGrain = 1 << 18;  // multiplications that justify waking a thread: about 10 us

// The number of threads for `work` multiplications. The calling thread does small work alone.
int64_t threads_for(int64_t work) {
  return std::min<int64_t>(at::get_num_threads(), std::max<int64_t>(1, work / kTaskGrain));
}

// Calls f(thread's scratch) on up to `most` threads. `work` is the number of multiplications in all tasks.
template <class F>
void on_threads(int64_t most, int64_t work, int64_t scratch_floats, F&& f) {
  const int64_t threads = std::min(most, threads_for(work));
  const Tensor scratch = at::empty({threads, round_up(scratch_floats, kAttentionPad)}, at::kFloat);
  float* memory = scratch.mutable_data_ptr<float>();
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) { f(memory + begin * scratch.stride(0)); });
}

// Owns what the pointers of AttentionInputs point into.
struct KeepAlive {
  Tensor q, k, v, block_table, alibi_slopes, sinks, attn_mask, mask_tiles, mask_bits, dropout_heads;
  std::vector<AttentionSequence> sequences;
  std::vector<ScoreTensor> score_tensors;
  ScorePlan program, decode_program;
};

void set_masks(AttentionInputs& a, KeepAlive& keep, const OptionalTensor& attn_mask, const OptionalTensor& mask_tiles,
               const OptionalTensor& mask_bits) {
  if (attn_mask.has_value()) {
    keep.attn_mask = *attn_mask;
    const bool is_bool = attn_mask->scalar_type() == at::kBool;
    (is_bool ? a.mask_strides : a.bias_strides) = pair_strides(*attn_mask);
    if (is_bool) a.mask = static_cast<const uint8_t*>(attn_mask->const_data_ptr());
    else a.bias = attn_mask->const_data_ptr(), a.bias_type = dtype_of(*attn_mask);
  }
  if (mask_tiles.has_value()) {
    keep.mask_tiles = mask_tiles->contiguous();
    keep.mask_bits = mask_bits->contiguous();
    const int32_t* index = keep.mask_tiles.const_data_ptr<int32_t>();
    const auto [least, most] = std::minmax_element(index, index + keep.mask_tiles.numel());
    TORCH_CHECK_VALUE(keep.mask_tiles.numel() == 0 || (*least >= 0 && *most < keep.mask_bits.size(0)),
                      "mask_tiles must be rows of mask_bits, of which there are ", keep.mask_bits.size(0));
    a.tiles = {index, pair_strides(keep.mask_tiles),
               reinterpret_cast<const uint64_t*>(keep.mask_bits.const_data_ptr<int64_t>())};
  }
}

AttentionDropout dropout_of(double p, const Tensor& seed) {
  constexpr double kWords = 65536;
  const double threshold = std::min(std::nearbyint(p * kWords), kWords - 1);
  return {static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()), static_cast<uint32_t>(threshold),
          static_cast<float>(kWords / (kWords - threshold)), nullptr, 0};
}

// `slope`: the backward pass, which reads the derivative by the score too.
void set_program(AttentionInputs& a, KeepAlive& keep, const AttentionOptions& options, bool slope) {
  keep.score_tensors = score_tensors_of(options.score_tensors);
  const auto plan = [&](bool keys_in_lanes) {
    return plan_scores(options.score_mod, keep.score_tensors, {a.group > 1, keys_in_lanes, slope, {}});
  };
  keep.program = plan(false);
  a.program = &keep.program;
  if (slope) return;
  keep.decode_program = plan(true);
  a.decode_program = &keep.decode_program;
}

// Floats of scratch for a score function.
int64_t program_scratch(const AttentionInputs& a) {
  return std::max(score_scratch(a.program), score_scratch(a.decode_program));
}

void set_inputs(AttentionInputs& a, KeepAlive& keep, const Tensor& q, const Tensor& k, const Tensor& v,
                const AttentionOptions& options, bool backward) {
  // Names every option, so that adding one that is not handled here does not compile.
  const auto& [cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k, leftpad_k, scale,
               window_left, window_right, softcap, alibi_slopes, sinks, attn_mask, mask_tiles, mask_bits, dropout_p,
               dropout_seed, dropout_heads, score_mod, score_tensors, bottom_right, deterministic, batch_invariant] =
      options;
  keep.q = unit_last_stride(q);
  keep.k = unit_last_stride(k);
  keep.v = unit_last_stride(v);
  if (block_table.has_value()) {
    keep.block_table = block_table->to(at::kInt).contiguous();
    a.pages = {keep.block_table.const_data_ptr<int32_t>(), block_table->size(1), k.size(1)};
    keep.sequences = paged_sequences(q, k, options, a.pages, block_table->size(1));
  } else {
    keep.sequences = sequences_of(q, k, options);
  }
  a.q = keep.q.const_data_ptr();
  a.k = keep.k.const_data_ptr();
  a.v = keep.v.const_data_ptr();
  a.q_strides = head_strides(keep.q);
  a.k_strides = block_table.has_value() ? page_strides(keep.k) : head_strides(keep.k);
  a.v_strides = block_table.has_value() ? page_strides(keep.v) : head_strides(keep.v);
  a.sequences = keep.sequences.data();
  a.group = q.size(1) / k.size(kv_heads_dim(options));
  a.head_dim = q.size(-1);
  a.head_dim_v = v.size(-1);
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap.value_or(0.0));
  if (alibi_slopes.has_value()) {
    keep.alibi_slopes = alibi_slopes->to(at::kFloat).contiguous();
    a.alibi_slopes = keep.alibi_slopes.const_data_ptr<float>();
    a.alibi_slopes_batch_stride = keep.alibi_slopes.dim() == 2 ? q.size(1) : 0;
  }
  if (sinks.has_value()) {
    keep.sinks = sinks->to(at::kFloat).contiguous();
    a.sinks = keep.sinks.const_data_ptr<float>();
  }
  set_masks(a, keep, attn_mask, mask_tiles, mask_bits);
  if (dropout_p.has_value()) a.dropout = dropout_of(*dropout_p, *dropout_seed);
  if (dropout_heads.has_value()) {
    keep.dropout_heads = dropout_heads->contiguous();
    a.dropout.heads = keep.dropout_heads.const_data_ptr<int64_t>();
    a.dropout.n_heads = q.size(1);
  }
  if (!score_mod.empty()) set_program(a, keep, options, backward);
  const auto side = [](const OptionalInt& n) {
    return n.has_value() ? std::min(n->guard_int(__FILE__, __LINE__), kUnbounded) : kUnbounded;
  };
  a.window_left = side(window_left);
  a.window_right = side(window_right);
  a.bottom_right = bottom_right;
  a.batch_invariant = batch_invariant;
  a.type = dtype_of(q);
  a.widens = attention_widens(batch_invariant);
  a.lse_strides = row_strides(q);
}

// Multiplications of one matmul of queries and keys plus one of weights and values, ignoring masks.
int64_t work_of(const AttentionInputs& a, const KeepAlive& keep) {
  int64_t pairs = 0;
  for (const auto& s : keep.sequences) pairs += s.q_len * s.k_len;
  return pairs * keep.q.size(1) * (a.head_dim + a.head_dim_v);
}

FourTensors fwd_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options, bool save_lse,
                    bool save_stats) {
  check_attention(q, k, v, options);
  auto [out, lse, entropy, max_logit] = empty_attention_fwd(q, v, options.packed(), save_lse, save_stats);
  if (q.numel() == 0) return {out, lse, entropy, max_logit};
  advise_huge_pages(out);
  AttentionForward a{};
  KeepAlive keep;
  set_inputs(a, keep, q, k, v, options, false);
  a.out = out.mutable_data_ptr();
  a.out_strides = head_strides(out);
  a.lse = save_lse ? lse.mutable_data_ptr<double>() : nullptr;
  a.entropy = save_stats ? entropy.mutable_data_ptr<float>() : nullptr;
  a.max_logit = save_stats ? max_logit.mutable_data_ptr<float>() : nullptr;

  const ForwardTasks all = forward_tasks(a, static_cast<int64_t>(keep.sequences.size()), q.size(1) / a.group);
  const int64_t n_tasks = static_cast<int64_t>(all.tasks.size()), num_splits = all.num_splits;
  Tensor splits;
  if (num_splits > 1) {
    splits = at::empty({n_tasks, kTaskRows, attention_split_size(a.head_dim_v)}, at::kFloat);
    a.splits = splits.mutable_data_ptr<float>();
  }
  const auto kernel = FK_CHOOSE_ISA_OF(attention_isa(a.batch_invariant), attention_forward);
  const auto combine = FK_CHOOSE_ISA(attention_combine);
  std::vector<std::atomic<int64_t>> done(num_splits > 1 ? n_tasks / num_splits : 0);
  std::atomic<int64_t> next{0};
  const int64_t scratch_floats =
      attention_forward_scratch(a.head_dim, a.head_dim_v, a.bias != nullptr) + program_scratch(a);
  on_threads(n_tasks, work_of(a, keep), scratch_floats, [&](float* scratch) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
      kernel(a, all.tasks[i], scratch);
      // The thread that finishes the last split of some rows combines them: waking threads again would cost
      // more.
      if (num_splits > 1 && done[i / num_splits].fetch_add(1, std::memory_order_acq_rel) == num_splits - 1)
        combine(a, all.tasks[i / num_splits * num_splits], num_splits);
    }
  });
  return {out, lse, entropy, max_logit};
}

AttentionDelta delta_args(const AttentionInputs& a, const Tensor& q, const Tensor& out, const Tensor& dout,
                          const Tensor& lse, const Tensor& dlse, const Tensor& delta) {
  AttentionDelta d{};
  d.out = out.const_data_ptr();
  d.dout = dout.const_data_ptr();
  d.out_strides = head_strides(out);
  d.dout_strides = head_strides(dout);
  d.lse_strides = a.lse_strides;
  d.sequences = a.sequences;
  d.n_heads = q.size(1);
  d.head_dim_v = a.head_dim_v;
  d.lse = lse.const_data_ptr<double>();
  d.dlse = dlse.defined() ? dlse.const_data_ptr<float>() : nullptr;
  d.type = a.type;
  d.delta = delta.mutable_data_ptr<float>();
  return d;
}

void compute_delta(const AttentionDelta& d, const KeepAlive& keep) {
  const auto kernel = FK_CHOOSE_ISA(attention_delta);
  for (size_t n = 0; n < keep.sequences.size(); ++n)
    at::parallel_for(0, keep.sequences[n].q_len, std::max<int64_t>(1, kGrain / (d.n_heads * d.head_dim_v)),
                     [&](int64_t begin, int64_t end) { kernel(d, static_cast<int64_t>(n), begin, end); });
}

void compute_dsinks(const AttentionDelta& d, const KeepAlive& keep, const Tensor& dsinks) {
  const Tensor total = at::empty({d.n_heads}, keep.sinks.options());
  const float* sinks = keep.sinks.const_data_ptr<float>();
  float* sums = total.mutable_data_ptr<float>();
  const auto kernel = FK_CHOOSE_ISA(attention_dsink);
  at::parallel_for(0, d.n_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) sums[h] = kernel(d, static_cast<int64_t>(keep.sequences.size()), h, sinks[h]);
  });
  dsinks.copy_(total);
}

void compute_dqkv(AttentionBackward& a, const KeepAlive& keep) {
  const int64_t work = 2 * work_of(a, keep);
  const BackwardTasks all =
      backward_tasks(a, static_cast<int64_t>(keep.sequences.size()), keep.k.size(1), threads_for(work));
  Tensor sums;
  if (all.sums > 0) {
    sums = at::empty({all.sums}, at::kFloat);
    advise_huge_pages(sums);
    a.sums = sums.mutable_data_ptr<float>();
  }
  int64_t own_keys = 0;  // keys whose gradient sums fit in a thread's scratch
  for (const auto& task : all.tasks)
    if (task.sums < 0) own_keys = std::max(own_keys, task.key_end);
  const int64_t scratch = attention_backward_scratch(a.head_dim, a.head_dim_v, a.bias != nullptr) +
                          a.dk_sums(own_keys) + a.dv_sums(own_keys) + program_scratch(a);
  const auto kernel = FK_CHOOSE_ISA_OF(attention_isa(a.batch_invariant), attention_backward);
  TaskQueue queue(all.tasks);
  on_threads(static_cast<int64_t>(all.tasks.size()), work, scratch, [&](float* memory) {
    for (int64_t i = -1; (i = queue.take(i)) >= 0;) kernel(a, all.tasks[i], memory);
  });
}

// Whether each pair has its own element of dbias.
bool is_own(const Tensor& dbias, const Tensor& q, const Tensor& k) {
  return dbias.size(0) == q.size(0) && dbias.size(1) == q.size(1) && dbias.size(2) == q.size(2) &&
         dbias.size(3) == k.size(2);
}

// Computes dbias if pairs share its elements, or if no other gradient is needed.
void compute_dbias(const AttentionBackward& a, const KeepAlive& keep) {
  const auto tasks = bias_tasks(a, static_cast<int64_t>(keep.sequences.size()), keep.k.size(1));
  const auto n_tasks = static_cast<int64_t>(tasks.size());
  const int64_t scratch =
      attention_backward_scratch(a.head_dim, a.head_dim_v, true) + attention_bias_sums(a.group) + program_scratch(a);
  const auto kernel = FK_CHOOSE_ISA_OF(attention_isa(a.batch_invariant), attention_bias_gradient);
  std::atomic<int64_t> next{0};
  on_threads(n_tasks, work_of(a, keep), scratch, [&](float* memory) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) kernel(a, tasks[i], memory);
  });
}

// Computes dscore. If each pair has its own element of all captured tensors, and others are wanted, computes dq, dk and
// dv in the same pass. Returns whether it has.
bool compute_dscore(AttentionBackward a, const KeepAlive& keep, const AttentionOptions& options, const Slots& slots,
                    const Tensor& dscore, bool need_dqkv) {
  ScorePlan program = plan_scores(options.score_mod, keep.score_tensors, {a.group > 1, false, true, slots});
  a.program = &program;
  const ScoreSums split(a, keep.sequences, keep.k.size(1), options, slots);
  for (ScoreGradient& g : program.gradients) g.exclusive = split.exclusive[g.sums];
  std::vector<Tensor> sums, results;
  for (size_t i = 0, begin = 0; i < slots.size(); begin += split.numel[i++]) {
    results.push_back(dscore.narrow(0, begin, split.numel[i]));
    sums.push_back(split.exclusive[i] ? results[i].zero_() : at::zeros({split.copies[i], split.numel[i]}, at::kDouble));
  }
  if (need_dqkv && std::all_of(split.exclusive.begin(), split.exclusive.end(), [](bool each) { return each; })) {
    std::vector<void*> own;
    for (const Tensor& each : results) own.push_back(each.mutable_data_ptr<float>());
    a.score_sums = own.data();
    compute_dqkv(a, keep);
    return true;
  }
  a.dbias = nullptr;
  const auto n_tasks = static_cast<int64_t>(split.tasks.size());
  const int64_t scratch =
      attention_backward_scratch(a.head_dim, a.head_dim_v, a.bias != nullptr) + score_scratch(a.program);
  const auto kernel = FK_CHOOSE_ISA_OF(attention_isa(a.batch_invariant), attention_score_gradient);
  std::atomic<int64_t> next{0};
  on_threads(n_tasks, work_of(a, keep), scratch, [&](float* memory) {
    std::vector<void*> own(slots.size());
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
      for (size_t i = 0; i < slots.size(); ++i)
        own[i] = split.exclusive[i] ? static_cast<void*>(sums[i].mutable_data_ptr<float>())
                                    : sums[i].mutable_data_ptr<double>() + split.copy_of[task][i] * split.numel[i];
      kernel(a, split.tasks[task], own.data(), memory);
    }
  });
  for (size_t i = 0; i < slots.size(); ++i)
    if (!split.exclusive[i]) add_copies(sums[i], results[i]);
  return false;
}

SixTensors bwd_cpu(const Tensor& dout_, const OptionalTensor& dlse_, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& out, const Tensor& lse, const AttentionOptions& options, bool need_dq, bool need_dk,
                   bool need_dv, bool need_dsinks, bool need_dbias, Slots dscore_slots) {
  check_attention(q, k, v, options);
  TORCH_CHECK_VALUE(!options.paged(), "block_table does not support gradients");
  auto [dq, dk, dv, dsinks, dbias, dscore] =
      empty_attention_bwd(q, k, v, options, need_dq, need_dk, need_dv, need_dsinks, need_dbias, dscore_slots);
  if (q.numel() == 0) return {dq.zero_(), dk.zero_(), dv.zero_(), dsinks.zero_(), dbias.zero_(), dscore.zero_()};
  for (const Tensor* t : {&dq, &dk, &dv}) advise_huge_pages(*t);
  AttentionBackward a{};
  KeepAlive keep;
  set_inputs(a, keep, q, k, v, options, true);
  const Tensor dout = unit_last_stride(dout_), dlse = dlse_.has_value() ? dlse_->contiguous() : Tensor();
  const Tensor delta = at::empty_like(lse, at::kFloat);
  const AttentionDelta d = delta_args(a, q, out, dout, lse, dlse, delta);
  compute_delta(d, keep);
  if (need_dsinks) compute_dsinks(d, keep, dsinks);
  if (!need_dq && !need_dk && !need_dv && !need_dbias && dscore_slots.empty())
    return {dq, dk, dv, dsinks, dbias, dscore};

  a.dout = d.dout;
  a.dout_strides = d.dout_strides;
  a.lse = d.lse;
  a.delta = d.delta;
  const auto write_to = [](const Tensor& gradient, bool needed, void*& data, HeadStrides& strides) {
    if (!needed) return;
    data = gradient.mutable_data_ptr();
    strides = head_strides(gradient);
  };
  write_to(dq, need_dq, a.dq, a.dq_strides);
  write_to(dk, need_dk, a.dk, a.dk_strides);
  write_to(dv, need_dv, a.dv, a.dv_strides);
  const bool need_dqkv = need_dq || need_dk || need_dv;
  if (need_dbias) {
    a.dbias = dbias.mutable_data_ptr();
    a.dbias_strides = pair_strides(dbias);
    a.own_dbias = need_dqkv && is_own(dbias, q, k);
    const bool all_seen = !a.masked() && a.window_left == kUnbounded && a.window_right == kUnbounded;
    if (a.own_dbias && !all_seen) dbias.zero_();
    if (!a.own_dbias) compute_dbias(a, keep);
  }
  const bool done = !dscore_slots.empty() && compute_dscore(a, keep, options, dscore_slots, dscore, need_dqkv);
  if (need_dqkv && !done) compute_dqkv(a, keep);
  return {dq, dk, dv, dsinks, dbias, dscore};
}

}  // namespace flash_attention_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("flash_attention_fwd", flat_kernel<&flash_attention_cpu::fwd_cpu>);
  m.impl("flash_attention_bwd", flat_kernel<&flash_attention_cpu::bwd_cpu>);
}

}  // namespace foundry
