// The CPU's launches of foundry_kernels::flash_attention_fwd and _bwd; see flash_attention.cpp for the operators.
#include "../cpu/flash_attention.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu_common.h"
#include "flash_attention.h"

namespace foundry {
namespace {

// Calls f(task, thread's scratch) for every task, each thread taking the next one when it is free.
template <class F>
void for_each_task(int64_t n_tasks, int64_t scratch_floats, F&& f) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), n_tasks);
  const Tensor scratch = at::empty({threads, round_up(scratch_floats, kAttentionPad)}, at::kFloat);
  float* memory = scratch.mutable_data_ptr<float>();
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;)
      f(task, memory + begin * scratch.stride(0));
  });
}

HeadStrides head_strides(const Tensor& t) {
  return t.dim() == 4 ? HeadStrides{t.stride(0), t.stride(1), t.stride(2)} : HeadStrides{0, t.stride(1), t.stride(0)};
}

// The strides of lse and its like: [B, H, T], or [H, total] for packed sequences.
HeadStrides row_strides(const Tensor& q) {
  return q.dim() == 4 ? HeadStrides{q.size(1) * q.size(2), q.size(2), 1} : HeadStrides{0, q.size(0), 1};
}

Tensor unit_last_stride(const Tensor& t) { return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous(); }

// Sequences from their starts, which are read as int64 and must lie within the tensors.
std::vector<AttentionSequence> packed_sequences(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q,
                                                const Tensor& cu_seqlens_k) {
  const auto starts = [](const char* name, const Tensor& cu_seqlens, int64_t total) {
    const Tensor t = cu_seqlens.to(at::kLong).contiguous();
    std::vector<int64_t> values(t.const_data_ptr<int64_t>(), t.const_data_ptr<int64_t>() + t.numel());
    TORCH_CHECK_VALUE(std::is_sorted(values.begin(), values.end()) && values.front() == 0 && values.back() == total,
                      name, " must start at 0, never decrease and end at the ", total, " packed tokens");
    return values;
  };
  const auto at_q = starts("cu_seqlens_q", cu_seqlens_q, q.size(0)),
             at_k = starts("cu_seqlens_k", cu_seqlens_k, k.size(0));
  std::vector<AttentionSequence> sequences;
  for (size_t n = 0; n + 1 < at_q.size(); ++n)
    sequences.push_back({0, at_q[n], at_q[n + 1] - at_q[n], at_k[n], at_k[n + 1] - at_k[n]});
  return sequences;
}

std::vector<AttentionSequence> sequences_of(const Tensor& q, const Tensor& k, const OptionalTensor& cu_seqlens_q,
                                            const OptionalTensor& cu_seqlens_k) {
  if (cu_seqlens_q.has_value()) return packed_sequences(q, k, *cu_seqlens_q, *cu_seqlens_k);
  std::vector<AttentionSequence> sequences;
  for (int64_t b = 0; b < q.size(0); ++b) sequences.push_back({b, 0, q.size(2), 0, k.size(2)});
  return sequences;
}

// The tensors that the pointers of AttentionInputs point into.
struct Held {
  Tensor q, k, v, slopes, sinks;
  std::vector<AttentionSequence> sequences;
};

void set_inputs(AttentionInputs& a, Held& held, const Tensor& q, const Tensor& k, const Tensor& v,
                const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, double scale, OptionalInt left,
                OptionalInt right, std::optional<double> softcap, const OptionalTensor& slopes, bool bottom_right) {
  held.q = unit_last_stride(q);
  held.k = unit_last_stride(k);
  held.v = unit_last_stride(v);
  held.sequences = sequences_of(q, k, cu_seqlens_q, cu_seqlens_k);
  a.q = held.q.const_data_ptr();
  a.k = held.k.const_data_ptr();
  a.v = held.v.const_data_ptr();
  a.q_strides = head_strides(held.q);
  a.k_strides = head_strides(held.k);
  a.v_strides = head_strides(held.v);
  a.sequences = held.sequences.data();
  a.group = q.size(1) / k.size(1);
  a.width = q.size(-1);
  a.value_width = v.size(-1);
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap.value_or(0.0));
  if (slopes.has_value()) {
    held.slopes = slopes->to(at::kFloat).contiguous();
    a.slopes = held.slopes.const_data_ptr<float>();
    a.slopes_batch_stride = slopes->dim() == 2 ? q.size(1) : 0;
  }
  const auto side = [](const OptionalInt& n) {
    return n.has_value() ? std::min(n->guard_int(__FILE__, __LINE__), kUnbounded) : kUnbounded;
  };
  a.left = side(left);
  a.right = side(right);
  a.bottom_right = bottom_right;
  a.type = dtype_of(q);
  a.lse_strides = row_strides(q);
}

constexpr int64_t kFewTasks = 32;    // with fewer, keys are split, if there are
constexpr int64_t kSplitKeys = 512;  // at least so many a part

// The tasks of a forward pass, the longest of a head first, and how many parts each row's keys are in. All of it
// follows from the shapes, so that the result is the same bits whatever the number of threads.
std::vector<AttentionTask> forward_tasks(const AttentionForward& a, const Held& held, int64_t& n_parts) {
  const int64_t rows = kAttentionBlocks * kAttentionRows, kv_heads = held.k.size(1);
  int64_t n_tasks = 0, most_keys = 0;
  for (const auto& s : held.sequences) {
    n_tasks += (s.q_len * a.group + rows - 1) / rows * kv_heads;
    most_keys = std::max(most_keys, s.k_len);
  }
  n_parts = std::max<int64_t>(1, std::min(most_keys / kSplitKeys, kFewTasks / std::max<int64_t>(1, n_tasks)));
  std::vector<AttentionTask> tasks;
  tasks.reserve(n_tasks * n_parts);
  for (size_t n = 0; n < held.sequences.size(); ++n) {
    const auto& s = held.sequences[n];
    const int64_t total = s.q_len * a.group, part_keys = round_up((s.k_len + n_parts - 1) / n_parts, kAttentionKeys);
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t begin = (total - 1) / rows * rows; begin >= 0 && total > 0; begin -= rows)
        for (int64_t p = 0; p < n_parts; ++p)
          tasks.push_back({int64_t(n), head, begin, std::min(begin + rows, total), std::min(p * part_keys, s.k_len),
                           std::min((p + 1) * part_keys, s.k_len), int64_t(tasks.size())});
  }
  return tasks;
}

FourTensors fwd_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                    const OptionalTensor& cu_seqlens_k, double scale, OptionalInt left, OptionalInt right,
                    std::optional<double> softcap, const OptionalTensor& slopes, const OptionalTensor& sinks,
                    bool bottom_right, bool save_lse, bool save_stats) {
  check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sinks);
  auto [out, lse, entropy, max_logit] = empty_attention_fwd(q, v, cu_seqlens_q.has_value(), save_lse, save_stats);
  if (q.numel() == 0) return {out, lse, entropy, max_logit};
  advise_huge_pages(out);
  AttentionForward a{};
  Held held;
  set_inputs(a, held, q, k, v, cu_seqlens_q, cu_seqlens_k, scale, left, right, softcap, slopes, bottom_right);
  if (sinks.has_value()) {
    held.sinks = sinks->to(at::kFloat).contiguous();
    a.sinks = held.sinks.const_data_ptr<float>();
  }
  a.out = out.mutable_data_ptr();
  a.out_strides = head_strides(out);
  a.lse = save_lse ? lse.mutable_data_ptr<float>() : nullptr;
  a.entropy = save_stats ? entropy.mutable_data_ptr<float>() : nullptr;
  a.max_logit = save_stats ? max_logit.mutable_data_ptr<float>() : nullptr;

  int64_t n_parts;
  const auto tasks = forward_tasks(a, held, n_parts);
  const int64_t n_tasks = static_cast<int64_t>(tasks.size());
  Tensor parts;
  if (n_parts > 1) {
    parts = at::empty({n_tasks, kAttentionBlocks * kAttentionRows, attention_part_size(a.value_width)}, at::kFloat);
    a.parts = parts.mutable_data_ptr<float>();
  }
  const auto kernel = FK_CHOOSE_ISA(attention_forward);
  const auto merge = FK_CHOOSE_ISA(attention_merge);
  std::vector<std::atomic<int64_t>> done(n_parts > 1 ? n_tasks / n_parts : 0);
  for_each_task(n_tasks, attention_forward_scratch(a.width, a.value_width), [&](int64_t i, float* scratch) {
    kernel(a, tasks[i], scratch);
    // Whoever does the last part of some rows merges them: waking threads once more would cost more than that.
    if (n_parts > 1 && done[i / n_parts].fetch_add(1, std::memory_order_acq_rel) == n_parts - 1)
      merge(a, tasks[i / n_parts * n_parts], n_parts);
  });
  return {out, lse, entropy, max_logit};
}

constexpr int64_t kBackwardTasks = 16;  // with fewer sequences x heads, rows are split, if there are
constexpr int64_t kSplitRows = 512;     // at least so many a part

// The tasks of a backward pass, `n_parts` in a row for each sequence and key-value head, from the shapes alone.
std::vector<AttentionTask> backward_tasks(const AttentionInputs& a, const Held& held, int64_t& n_parts) {
  const int64_t kv_heads = held.k.size(1), n_pairs = static_cast<int64_t>(held.sequences.size()) * kv_heads;
  int64_t most_rows = 0;
  for (const auto& s : held.sequences) most_rows = std::max(most_rows, s.q_len * a.group);
  n_parts = std::max<int64_t>(1, std::min(most_rows / kSplitRows, kBackwardTasks / std::max<int64_t>(1, n_pairs)));
  std::vector<AttentionTask> tasks;
  tasks.reserve(n_pairs * n_parts);
  for (size_t n = 0; n < held.sequences.size(); ++n) {
    const auto& s = held.sequences[n];
    const int64_t rows = s.q_len * a.group, part_rows = round_up((rows + n_parts - 1) / n_parts, kAttentionRows);
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t p = 0; p < n_parts; ++p)
        tasks.push_back({int64_t(n), head, std::min(p * part_rows, rows), std::min((p + 1) * part_rows, rows), 0,
                         s.k_len, int64_t(tasks.size())});
  }
  return tasks;
}

FourTensors bwd_cpu(const Tensor& dout_, const OptionalTensor& dlse_, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& out, const Tensor& lse, const OptionalTensor& cu_seqlens_q,
                    const OptionalTensor& cu_seqlens_k, double scale, OptionalInt left, OptionalInt right,
                    std::optional<double> softcap, const OptionalTensor& slopes, const OptionalTensor& sinks,
                    bool bottom_right, bool need_dq, bool need_dk, bool need_dv, bool need_dsinks) {
  check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sinks);
  auto [dq, dk, dv, dsinks] = empty_attention_bwd(q, k, v, sinks, need_dq, need_dk, need_dv, need_dsinks);
  if (q.numel() == 0) return {dq.zero_(), dk.zero_(), dv.zero_(), dsinks.zero_()};
  for (const Tensor* t : {&dq, &dk, &dv}) advise_huge_pages(*t);
  AttentionBackward a{};
  Held held;
  set_inputs(a, held, q, k, v, cu_seqlens_q, cu_seqlens_k, scale, left, right, softcap, slopes, bottom_right);
  const Tensor dout = unit_last_stride(dout_), dlse = dlse_.has_value() ? dlse_->contiguous() : Tensor();
  const Tensor delta = at::empty_like(lse);

  AttentionDelta d{};
  d.out = out.const_data_ptr();
  d.dout = dout.const_data_ptr();
  d.out_strides = head_strides(out);
  d.dout_strides = head_strides(dout);
  d.lse_strides = a.lse_strides;
  d.sequences = a.sequences;
  d.heads = q.size(1);
  d.value_width = a.value_width;
  d.lse = lse.const_data_ptr<float>();
  d.dlse = dlse.defined() ? dlse.const_data_ptr<float>() : nullptr;
  d.type = a.type;
  d.delta = delta.mutable_data_ptr<float>();
  const auto delta_kernel = FK_CHOOSE_ISA(attention_delta);
  const int64_t n_sequences = static_cast<int64_t>(held.sequences.size());
  for (int64_t n = 0; n < n_sequences; ++n)
    at::parallel_for(0, held.sequences[n].q_len, std::max<int64_t>(1, kGrain / (d.heads * d.value_width)),
                     [&](int64_t begin, int64_t end) { delta_kernel(d, n, begin, end); });
  if (need_dsinks) {
    const Tensor logits = sinks->to(at::kFloat).contiguous(), total = at::empty({d.heads}, logits.options());
    const auto kernel = FK_CHOOSE_ISA(attention_dsink);
    at::parallel_for(0, d.heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h)
        total.mutable_data_ptr<float>()[h] = kernel(d, n_sequences, h, logits.const_data_ptr<float>()[h]);
    });
    dsinks.copy_(total);
  }
  if (!need_dq && !need_dk && !need_dv) return {dq, dk, dv, dsinks};

  a.dout = d.dout;
  a.dout_strides = d.dout_strides;
  a.lse = d.lse;
  a.delta = d.delta;
  a.dq = need_dq ? dq.mutable_data_ptr() : nullptr;
  a.dk = need_dk ? dk.mutable_data_ptr() : nullptr;
  a.dv = need_dv ? dv.mutable_data_ptr() : nullptr;
  if (need_dq) a.dq_strides = head_strides(dq);
  if (need_dk) a.dk_strides = head_strides(dk);
  if (need_dv) a.dv_strides = head_strides(dv);
  int64_t n_parts, most_keys = 0;
  const auto tasks = backward_tasks(a, held, n_parts);
  for (const auto& s : held.sequences) most_keys = std::max(most_keys, s.k_len);
  a.dk_size = need_dk ? most_keys * round_up(a.width, kAttentionPad) : 0;
  a.part_size = a.dk_size + (need_dv ? most_keys * round_up(a.value_width, kAttentionPad) : 0);
  const int64_t n_tasks = static_cast<int64_t>(tasks.size());
  Tensor parts;
  if (n_parts > 1) {
    parts = at::empty({n_tasks, a.part_size}, at::kFloat);
    advise_huge_pages(parts);
    a.parts = parts.mutable_data_ptr<float>();
  }
  const auto kernel = FK_CHOOSE_ISA(attention_backward);
  const int64_t scratch = attention_backward_scratch(a.width, a.value_width) + (n_parts > 1 ? 0 : a.part_size);
  // The last rows of a causal sequence see the most keys: they go first.
  for_each_task(n_tasks, scratch, [&](int64_t i, float* memory) { kernel(a, tasks[n_tasks - 1 - i], memory); });
  if (n_parts > 1) {
    const auto merge = FK_CHOOSE_ISA(attention_backward_keys);
    const int64_t blocks = (most_keys + kAttentionKeys - 1) / kAttentionKeys;
    at::parallel_for(0, n_tasks / n_parts * blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const AttentionTask* first = &tasks[i / blocks * n_parts];
        const int64_t keys = held.sequences[first->sequence].k_len, key = i % blocks * kAttentionKeys;
        merge(a, first, n_parts, std::min(key, keys), std::min(key + kAttentionKeys, keys),
              a.parts + first->part * a.part_size);
      }
    });
  }
  return {dq, dk, dv, dsinks};
}

}  // namespace

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("flash_attention_fwd", &fwd_cpu);
  m.impl("flash_attention_bwd", &bwd_cpu);
}

}  // namespace foundry
