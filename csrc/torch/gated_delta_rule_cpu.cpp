// The CPU launches of foundry_kernels::gated_delta_rule_fwd, _bwd and _step; see gated_delta_rule.cpp for the
// operators.
#include "../cpu/gated_delta_rule.h"

#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "cpu_common.h"
#include "gated_delta_rule.h"

namespace foundry {
namespace gated_delta_rule_cpu {

// Multiply-adds with the state that justify a thread.
constexpr int64_t kProducts = 1 << 18;

HeadStrides strides_of(const Tensor& t) {  // of [B, H, T, D] or [B, H, T]
  return {t.stride(0), t.stride(1), t.stride(2)};
}

Tensor unit_last_stride(const Tensor& t) { return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous(); }

// rank: without channels.
DeltaRuleNumbers numbers_of(const OptionalTensor& t, int64_t rank) {
  if (!t.has_value()) return {nullptr, {}, Dtype::f32, false};
  return {
      t->const_data_ptr(), {t->stride(0), t->stride(1), rank == 3 ? t->stride(2) : 0}, dtype_of(*t), t->dim() > rank};
}

// g whose channels are contiguous.
OptionalTensor unit_channels(const OptionalTensor& g, int64_t rank) {
  return g.has_value() && g->dim() > rank ? OptionalTensor(unit_last_stride(*g)) : g;
}

std::vector<DeltaRuleDocument> documents_of(const Tensor& v, const DeltaRuleOptions& o) {
  std::vector<DeltaRuleDocument> documents;
  const int64_t tokens = v.size(2);
  if (!o.cu_seqlens.has_value()) {
    for (int64_t b = 0; b < v.size(0); ++b) documents.push_back({b, 0, tokens, 0});
    return documents;
  }
  const Tensor ends = o.cu_seqlens->to(at::kLong).contiguous();
  const int64_t *end = ends.const_data_ptr<int64_t>(), n = ends.numel() - 1;
  int64_t chunk = 0;
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK_VALUE(end[0] == 0 && end[i + 1] >= end[i] && end[i + 1] <= tokens,
                      "cu_seqlens must start at 0, never decrease and end at T = ", tokens);
    documents.push_back({0, end[i], end[i + 1], chunk});
    chunk += (end[i + 1] - end[i] + o.chunk() - 1) / o.chunk();
  }
  TORCH_CHECK_VALUE(end[n] == tokens, "cu_seqlens must end at T = ", tokens, "; got ", end[n]);
  return documents;
}

// The gates' parameters as contiguous floats.
struct GateParameters {
  Tensor decay_log, dt_bias;

  GateParameters(const OptionalTensor& A_log, const OptionalTensor& bias) {
    if (A_log.has_value()) decay_log = A_log->to(at::kFloat).contiguous();
    if (bias.has_value()) dt_bias = bias->to(at::kFloat).contiguous();
  }

  DeltaRuleGates gates(const std::optional<double>& beta_limit) const {
    const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; };
    return {data(decay_log), data(dt_bias), static_cast<float>(beta_limit.value_or(0.0))};
  }
};

void set_inputs(DeltaRuleInputs& in, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                const OptionalTensor& beta, const DeltaRuleOptions& o,
                const std::vector<DeltaRuleDocument>& documents) {
  in.q = q.const_data_ptr();
  in.k = k.const_data_ptr();
  in.v = v.const_data_ptr();
  in.q_strides = strides_of(q);
  in.k_strides = strides_of(k);
  in.v_strides = strides_of(v);
  in.g = numbers_of(g, 3);
  in.beta = numbers_of(beta, 3);
  in.documents = documents.data();
  in.n_heads = v.size(1);
  in.group = v.size(1) / q.size(1);
  in.key_width = q.size(3);
  in.value_width = v.size(3);
  in.chunk = o.chunk();
  in.n_chunks = delta_rule_chunks(v, o).guard_int(__FILE__, __LINE__);
  in.scale = static_cast<float>(o.scale);
  in.l2norm = o.qk_l2norm;
  in.delta = o.delta;
  in.type = dtype_of(q);
}

// A task for each head of a document, longest documents first, each for columns of its own of the values.
std::vector<DeltaRuleTask> tasks_of(const std::vector<DeltaRuleDocument>& documents, int64_t n_heads, int64_t width,
                                    int64_t columns) {
  std::vector<int64_t> order(documents.size());
  std::iota(order.begin(), order.end(), 0);
  const auto length = [&](int64_t i) { return documents[i].last - documents[i].first; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return length(i) > length(j); });
  std::vector<DeltaRuleTask> tasks;
  for (const int64_t i : order)
    for (int64_t h = 0; h < n_heads; ++h)
      for (int64_t c = 0; c < width; c += columns) tasks.push_back({i, h, c, std::min(columns, width - c)});
  return tasks;
}

// Runs the tasks, each on the next free thread with its scratch.
template <class Args>
void run(void (*kernel)(const Args&, const DeltaRuleTask&, float*), const Args& args,
         const std::vector<DeltaRuleTask>& tasks, int64_t n_tokens, int64_t scratch) {
  const int64_t products = n_tokens * args.n_heads * args.key_width * args.value_width;
  const int64_t threads = std::min({static_cast<int64_t>(tasks.size()), static_cast<int64_t>(at::get_num_threads()),
                                    std::max<int64_t>(1, products / kProducts)});
  const int64_t line = round_up(scratch, 16);
  const Tensor memory = at::empty({threads * line}, at::kFloat);
  std::atomic<size_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
    float* own = memory.mutable_data_ptr<float>() + begin * line;
    for (size_t i = next++; i < tasks.size(); i = next++) kernel(args, tasks[i], own);
  });
}

DeltaRuleOutputs fwd_cpu(const Tensor& q_, const Tensor& k_, const Tensor& v_, const OptionalTensor& g_,
                         const OptionalTensor& beta, const OptionalTensor& initial_state, const OptionalTensor& A_log,
                         const OptionalTensor& dt_bias, const DeltaRuleOptions& o, bool need_final_state,
                         bool save_states) {
  const auto outputs =
      empty_delta_rule_fwd(q_, k_, v_, g_, beta, initial_state, A_log, dt_bias, o, need_final_state, save_states);
  const GateParameters parameters(A_log, dt_bias);
  const OptionalTensor g = unit_channels(g_, 3);
  const auto& [out, final_state, states] = outputs;
  advise_huge_pages(out);
  advise_huge_pages(states);
  const Tensor q = unit_last_stride(q_), k = unit_last_stride(k_), v = unit_last_stride(v_);
  const Tensor initial = initial_state.has_value() ? initial_state->contiguous() : Tensor();
  const auto documents = documents_of(v, o);
  DeltaRuleForward args{};
  set_inputs(args, q, k, v, g, beta, o, documents);
  args.gates = parameters.gates(o.beta_limit);
  args.initial_state = initial.defined() ? initial.const_data_ptr<float>() : nullptr;
  args.out = out.mutable_data_ptr();
  args.out_strides = strides_of(out);
  args.final_state = need_final_state ? final_state.mutable_data_ptr<float>() : nullptr;
  args.states = save_states ? states.mutable_data_ptr<float>() : nullptr;
  const int64_t heads = static_cast<int64_t>(documents.size()) * args.n_heads;
  if (heads == 0) return outputs;
  // Columns of the state are independent of each other: the division changes no bits.
  const int64_t parts = std::min(at::get_num_threads() / heads, args.value_width / kDeltaRuleColumns);
  const int64_t columns =
      parts > 1 ? round_up((args.value_width + parts - 1) / parts, kDeltaRuleColumns) : args.value_width;
  run(FK_CHOOSE_ISA(gated_delta_rule_forward), args, tasks_of(documents, args.n_heads, args.value_width, columns),
      v.size(0) * v.size(2), gated_delta_rule_forward_scratch(args, columns));
  return outputs;
}

// Where the gradient of queries or keys of each head of v goes: into the result, or to be added up.
Tensor parts_of(const Tensor& dx, const Tensor& v, bool shared) {
  if (!shared || dx.numel() == 0) return dx;
  const Tensor parts = at::empty({v.size(0), v.size(1), v.size(2), dx.size(3)}, dx.options().dtype(at::kFloat));
  advise_huge_pages(parts);
  return parts;
}

void sum_groups(const Tensor& parts, const Tensor& dx) {
  if (parts.is_same(dx) || dx.numel() == 0) return;
  const DeltaRuleGroups args{parts.const_data_ptr<float>(),
                             parts.size(1) / dx.size(1),
                             dx.size(2),
                             dx.size(3),
                             dx.size(1),
                             dx.mutable_data_ptr(),
                             strides_of(dx),
                             dtype_of(dx)};
  in_parallel(FK_CHOOSE_ISA(gated_delta_rule_sum_groups), args, dx.numel() / dx.size(3), kGrain,
              args.width * args.group);
}

DeltaRuleGradients bwd_cpu(const Tensor& dout_, const OptionalTensor& dfinal_state, const Tensor& q_, const Tensor& k_,
                           const Tensor& v_, const OptionalTensor& g_, const OptionalTensor& beta,
                           const OptionalTensor&, const OptionalTensor& A_log, const OptionalTensor& dt_bias,
                           const Tensor& states_, const DeltaRuleOptions& o, bool need_dq, bool need_dk, bool need_dv,
                           bool need_dg, bool need_dbeta, bool need_dinitial_state, bool need_dA_log,
                           bool need_ddt_bias) {
  const auto gradients = empty_delta_rule_bwd(q_, k_, v_, g_, beta, A_log, dt_bias, o, need_dq, need_dk, need_dv,
                                              need_dg, need_dbeta, need_dinitial_state, need_dA_log, need_ddt_bias);
  const OptionalTensor g = unit_channels(g_, 3);
  const auto& [dq, dk, dv, dg, dbeta, dinitial_state, dA_log, ddt_bias] = gradients;
  const GateParameters parameters(A_log, dt_bias);
  TORCH_CHECK_VALUE(dout_.sizes() == v_.sizes() && dout_.scalar_type() == v_.scalar_type(),
                    "dout must have v's shape and dtype; got ", dout_.sizes());
  const Tensor q = unit_last_stride(q_), k = unit_last_stride(k_), v = unit_last_stride(v_),
               dout = unit_last_stride(dout_), states = states_.contiguous(),
               dfinal = dfinal_state.has_value() ? dfinal_state->contiguous() : Tensor();
  const auto documents = documents_of(v, o);
  DeltaRuleBackward args{};
  set_inputs(args, q, k, v, g, beta, o, documents);
  args.gates = parameters.gates(o.beta_limit);
  TORCH_CHECK_VALUE(states.numel() == v.size(0) * args.n_heads * args.n_chunks * args.key_width * args.value_width,
                    "states must have a state for each chunk; got ", states.sizes());
  if (dfinal.defined()) check_delta_rule_state("dfinal_state", dfinal, k, v, static_cast<int64_t>(documents.size()));
  const bool shared = args.group > 1;
  const Tensor dq_parts = parts_of(dq, v, shared), dk_parts = parts_of(dk, v, shared);
  const auto written = [](const Tensor& t, bool needed) { return needed ? t.mutable_data_ptr() : nullptr; };
  const auto strides = [](const Tensor& t, bool needed) { return needed ? strides_of(t) : HeadStrides{}; };
  args.dout = dout.const_data_ptr();
  args.dout_strides = strides_of(dout);
  args.dfinal_state = dfinal.defined() ? dfinal.const_data_ptr<float>() : nullptr;
  args.states = states.const_data_ptr<float>();
  args.dq = written(dq_parts, need_dq);
  args.dk = written(dk_parts, need_dk);
  args.dv = written(dv, need_dv);
  args.dq_strides = strides(dq_parts, need_dq);
  args.dk_strides = strides(dk_parts, need_dk);
  args.dv_strides = strides(dv, need_dv);
  args.dg = written(dg, need_dg);
  args.dbeta = written(dbeta, need_dbeta);
  args.n_tokens = v.size(2);
  args.dinitial_state = need_dinitial_state ? dinitial_state.mutable_data_ptr<float>() : nullptr;
  // Each document's part of a parameter's gradient, added up in order.
  const auto of_documents = [&](const Tensor& t, bool needed) {
    if (!needed) return Tensor();
    std::vector<int64_t> sizes = t.sizes().vec();
    sizes.insert(sizes.begin(), static_cast<int64_t>(documents.size()));
    return at::zeros(sizes, at::kDouble);
  };
  const Tensor of_A_log = of_documents(dA_log, need_dA_log), of_dt_bias = of_documents(ddt_bias, need_ddt_bias);
  if (need_dA_log) args.ddecay_log = of_A_log.mutable_data_ptr<double>();
  if (need_ddt_bias) args.ddt_bias = of_dt_bias.mutable_data_ptr<double>();
  const auto add_documents = [&] {
    if (need_dA_log) dA_log.copy_(of_A_log.sum(0));
    if (need_ddt_bias) ddt_bias.copy_(of_dt_bias.sum(0));
  };
  if (documents.empty() || args.n_heads == 0) {
    add_documents();
    return gradients;
  }
  run(FK_CHOOSE_ISA(gated_delta_rule_backward), args,
      tasks_of(documents, args.n_heads, args.value_width, args.value_width), v.size(0) * v.size(2),
      gated_delta_rule_backward_scratch(args));
  sum_groups(dq_parts, dq);
  sum_groups(dk_parts, dk);
  add_documents();
  return gradients;
}

Tensor step_cpu(const Tensor& q_, const Tensor& k_, const Tensor& v_, const OptionalTensor& g_,
                const OptionalTensor& beta, const Tensor& state, const OptionalTensor& A_log,
                const OptionalTensor& dt_bias, double scale, bool l2norm, std::optional<double> beta_limit) {
  check_delta_rule_step(q_, k_, v_, g_, beta, state, A_log, dt_bias, beta_limit);
  const GateParameters parameters(A_log, dt_bias);
  const OptionalTensor g = unit_channels(g_, 2);
  const Tensor out(at::detail::empty_cpu(v_.sizes(), v_.scalar_type()));
  const int64_t dk = q_.size(2), dv = v_.size(2), heads = v_.size(0) * v_.size(1);
  TORCH_CHECK_VALUE((state.stride(3) == 1 || dv == 1) && (state.stride(2) == dv || dk == 1),
                    "state must be contiguous in its last two dimensions");
  if (heads == 0) return out;
  const Tensor q = unit_last_stride(q_), k = unit_last_stride(k_), v = unit_last_stride(v_);
  const auto strides = [](const Tensor& t) { return HeadStrides{t.stride(0), t.stride(1), 0}; };
  const DeltaRuleStep args{q.const_data_ptr(),
                           k.const_data_ptr(),
                           v.const_data_ptr(),
                           strides(q),
                           strides(k),
                           strides(v),
                           numbers_of(g, 2),
                           numbers_of(beta, 2),
                           state.mutable_data_ptr<float>(),
                           state.stride(0),
                           state.stride(1),
                           out.mutable_data_ptr(),
                           v.size(1),
                           v.size(1) / q.size(1),
                           dk,
                           dv,
                           static_cast<float>(scale),
                           l2norm,
                           dtype_of(q),
                           parameters.gates(beta_limit)};
  const auto kernel = FK_CHOOSE_ISA(gated_delta_rule_step);
  at::parallel_for(0, heads, std::max<int64_t>(1, 2 * kGrain / (dk * dv)), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(gated_delta_rule_step_scratch(args));
    kernel(args, begin, end, scratch.data());
  });
  if (!state.is_inference()) state.unsafeGetTensorImpl()->bump_version();
  return out;
}

}  // namespace gated_delta_rule_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("gated_delta_rule_fwd", flat_kernel<&gated_delta_rule_cpu::fwd_cpu>);
  m.impl("gated_delta_rule_bwd", flat_kernel<&gated_delta_rule_cpu::bwd_cpu>);
  m.impl("gated_delta_rule_step", &gated_delta_rule_cpu::step_cpu);
}

}  // namespace foundry
