// Shapes and checks of the operators of gated_delta_rule.cpp and gated_delta_rule_cpu.cpp.
#pragma once

#include <tuple>

#include "common.h"
#include "options.h"

namespace foundry {

#define FK_DELTA_RULE_OPTIONS(OPTION)               \
  OPTION(OptionalTensor, cu_seqlens, tensor)        \
  OPTION(double, scale, positive)                   \
  OPTION(bool, qk_l2norm, boolean)                  \
  OPTION(bool, delta, boolean)                      \
  OPTION(OptionalInt, chunk_size, optional_integer) \
  OPTION(std::optional<double>, beta_limit, optional_positive)

struct DeltaRuleOptions {
  FK_OPTIONS(FK_DELTA_RULE_OPTIONS)

  // Tokens of a chunk.
  int64_t chunk() const { return chunk_size.has_value() ? chunk_size->guard_int(__FILE__, __LINE__) : 64; }
};

// Where the state before each chunk is saved, in an entry of the batch.
inline c10::SymInt delta_rule_chunks(const Tensor& v, const DeltaRuleOptions& o) {
  const c10::SymInt tokens = v.sym_size(2);
  if (!o.cu_seqlens.has_value()) return (tokens + (o.chunk() - 1)) / o.chunk();
  return tokens / o.chunk() + (o.cu_seqlens->sym_size(0) - 1);
}

// q, k [B, H_k, T, D_k], v [B, H_v, T, D_v], g and beta [B, H_v, T], or g [B, H_v, T, D_k]; of a step without T.
inline void check_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                             const OptionalTensor& beta, int64_t rank) {
  TORCH_CHECK_VALUE(q.dim() == rank && v.dim() == rank, "q and v must have ", rank, " dimensions");
  TORCH_CHECK_VALUE(k.sym_sizes() == q.sym_sizes(), "k must have q's shape; got ", k.sym_sizes());
  TORCH_CHECK_TYPE(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                   "k and v must have q's dtype");
  TORCH_CHECK_VALUE(v.sym_size(0) == q.sym_size(0) && (rank == 3 || v.sym_size(2) == q.sym_size(2)),
                    "v must have q's batch and tokens; got ", v.sym_sizes());
  TORCH_CHECK_VALUE(q.sym_size(1) > 0 && v.sym_size(1) % q.sym_size(1) == 0,
                    "v must have a multiple of q's heads; got ", v.sym_size(1));
  TORCH_CHECK_VALUE(q.sym_size(-1) > 0 && v.sym_size(-1) > 0, "q and v must have a head dimension of at least 1");
  for (const OptionalTensor* x : {&g, &beta})
    TORCH_CHECK_VALUE(
        !x->has_value() || (x == &g && g->dim() == rank) || (*x)->sym_sizes() == v.sym_sizes().slice(0, rank - 1),
        "g and beta must have v's shape without the last dimension");
  if (g.has_value() && g->dim() == rank)
    TORCH_CHECK_VALUE(
        g->sym_sizes().slice(0, rank - 1) == v.sym_sizes().slice(0, rank - 1) && g->sym_size(-1) == q.sym_size(-1),
        "g must have v's shape with D_k as the last dimension; got ", g->sym_sizes());
}

// The gates: A_log [H_v], dt_bias [H_v] or, if g has a number for each dimension of a key, [H_v, D_k].
inline void check_delta_rule_gates(const Tensor& v, const OptionalTensor& g, const OptionalTensor& beta,
                                   const OptionalTensor& A_log, const OptionalTensor& dt_bias,
                                   const std::optional<double>& beta_limit) {
  TORCH_CHECK_VALUE(!beta_limit.has_value() || beta.has_value(), "beta must be given with beta_limit");
  TORCH_CHECK_VALUE(!dt_bias.has_value() || A_log.has_value(), "A_log must be given with dt_bias");
  if (!A_log.has_value()) return;
  TORCH_CHECK_VALUE(g.has_value(), "g must be given with A_log");
  TORCH_CHECK_VALUE(A_log->dim() == 1 && A_log->sym_size(0) == v.sym_size(1), "A_log must be [H_v]; got ",
                    A_log->sym_sizes());
  if (!dt_bias.has_value()) return;
  const bool channels = g->dim() == v.dim();
  TORCH_CHECK_VALUE(dt_bias->dim() == 1 + channels && dt_bias->sym_size(0) == v.sym_size(1) &&
                        (!channels || dt_bias->sym_size(1) == g->sym_size(-1)),
                    "dt_bias must be [H_v], or [H_v, D_k] for a g of each dimension; got ", dt_bias->sym_sizes());
}

// [N, H_v, D_k, D_v] of float.
inline std::vector<c10::SymInt> delta_rule_state(const Tensor& k, const Tensor& v, const c10::SymInt& n) {
  return {n, v.sym_size(1), k.sym_size(-1), v.sym_size(-1)};
}

inline void check_delta_rule_state(const char* name, const Tensor& state, const Tensor& k, const Tensor& v,
                                   const c10::SymInt& n) {
  TORCH_CHECK_TYPE(state.scalar_type() == at::kFloat, name, " must be float32");
  TORCH_CHECK_VALUE(state.sym_sizes().equals(delta_rule_state(k, v, n)), name, " must be [N, H_v, D_k, D_v]; got ",
                    state.sym_sizes());
}

inline c10::SymInt delta_rule_documents(const Tensor& v, const DeltaRuleOptions& o) {
  return o.cu_seqlens.has_value() ? o.cu_seqlens->sym_size(0) - 1 : v.sym_size(0);
}

// out, final_state and states. What is not requested has shape [0].
using DeltaRuleOutputs = std::tuple<Tensor, Tensor, Tensor>;

inline DeltaRuleOutputs empty_delta_rule_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                                             const OptionalTensor& beta, const OptionalTensor& initial_state,
                                             const OptionalTensor& A_log, const OptionalTensor& dt_bias,
                                             const DeltaRuleOptions& o, bool need_final_state, bool save_states) {
  check_delta_rule(q, k, v, g, beta, 4);
  check_delta_rule_gates(v, g, beta, A_log, dt_bias, o.beta_limit);
  const c10::SymInt n = delta_rule_documents(v, o);
  TORCH_CHECK_VALUE(!o.cu_seqlens.has_value() || (o.cu_seqlens->dim() == 1 && n >= 0 && v.sym_size(0) == 1),
                    "cu_seqlens must be [N + 1], with a batch of 1");
  TORCH_CHECK_VALUE(o.chunk() > 0 && o.chunk() % 16 == 0, "chunk_size must be a multiple of 16; got ", o.chunk());
  if (initial_state.has_value()) check_delta_rule_state("initial_state", *initial_state, k, v, n);
  const auto floats = v.options().dtype(at::kFloat);
  const std::vector<c10::SymInt> saved{v.sym_size(0), v.sym_size(1), delta_rule_chunks(v, o), k.sym_size(-1),
                                       v.sym_size(-1)};
  return {empty_in_storage_order(v),
          need_final_state ? at::empty_symint(delta_rule_state(k, v, n), floats) : absent(v, at::kFloat),
          save_states ? at::empty_symint(saved, floats) : absent(v, at::kFloat)};
}

using DeltaRuleGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline DeltaRuleGradients empty_delta_rule_bwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                               const OptionalTensor& g, const OptionalTensor& beta,
                                               const OptionalTensor& A_log, const OptionalTensor& dt_bias,
                                               const DeltaRuleOptions& o, bool need_dq, bool need_dk, bool need_dv,
                                               bool need_dg, bool need_dbeta, bool need_dinitial_state,
                                               bool need_dA_log, bool need_ddt_bias) {
  check_delta_rule(q, k, v, g, beta, 4);
  check_delta_rule_gates(v, g, beta, A_log, dt_bias, o.beta_limit);
  TORCH_CHECK_VALUE((!need_dg || g.has_value()) && (!need_dbeta || beta.has_value()) &&
                        (!need_dA_log || A_log.has_value()) && (!need_ddt_bias || dt_bias.has_value()),
                    "there is no g, beta, A_log or dt_bias to give a gradient for");
  const auto like = [&](const Tensor& t, bool wanted) {
    return wanted ? empty_in_storage_order(t) : absent(t, t.scalar_type());
  };
  const auto numbers = [&](const OptionalTensor& t, bool wanted) {
    return wanted ? at::empty_symint(t->sym_sizes(), t->options()) : absent(v, at::kFloat);
  };
  return {like(q, need_dq),
          like(k, need_dk),
          like(v, need_dv),
          numbers(g, need_dg),
          numbers(beta, need_dbeta),
          need_dinitial_state
              ? at::empty_symint(delta_rule_state(k, v, delta_rule_documents(v, o)), v.options().dtype(at::kFloat))
              : absent(v, at::kFloat),
          numbers(A_log, need_dA_log),
          numbers(dt_bias, need_ddt_bias)};
}

inline void check_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                                  const OptionalTensor& beta, const Tensor& state, const OptionalTensor& A_log,
                                  const OptionalTensor& dt_bias, const std::optional<double>& beta_limit) {
  check_delta_rule(q, k, v, g, beta, 3);
  check_delta_rule_gates(v, g, beta, A_log, dt_bias, beta_limit);
  check_delta_rule_state("state", state, k, v, v.sym_size(0));
}

}  // namespace foundry
