// The operators foundry_kernels::flash_attention and flash_attention_varlen: schema, shapes and autograd.
// flash_attention_cpu.cpp launches the kernels; there are none for CUDA.
//
// Both are composed of flash_attention_fwd and flash_attention_bwd, which are what a compiled graph, a checkpointing
// policy or a profiler sees. They take dense tensors, or packed ones with the sequences' starts (cu_seqlens), and return
// empty tensors in place of what was not asked for.
#include "flash_attention.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace foundry {
namespace {

FourTensors fwd_meta(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                     const OptionalTensor& cu_seqlens_k, double, OptionalInt, OptionalInt, std::optional<double>,
                     const OptionalTensor& slopes, const OptionalTensor& sinks, bool, bool save_lse, bool save_stats) {
  check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sinks);
  return empty_attention_fwd(q, v, cu_seqlens_q.has_value(), save_lse, save_stats);
}

FourTensors call_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                     const OptionalTensor& cu_seqlens_k, double scale, OptionalInt left, OptionalInt right,
                     std::optional<double> softcap, const OptionalTensor& slopes, const OptionalTensor& sinks,
                     bool bottom_right, bool save_lse, bool save_stats) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(FK_LIBRARY_NAME "::flash_attention_fwd", "")
                             .typed<decltype(fwd_meta)>();
  return op.call(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, left, right, softcap, slopes, sinks, bottom_right,
                 save_lse, save_stats);
}

FourTensors flash_attention(const Tensor& q, const Tensor& k, const Tensor& v, double scale, OptionalInt left,
                            OptionalInt right, std::optional<double> softcap, const OptionalTensor& slopes,
                            const OptionalTensor& sinks, bool bottom_right, bool return_lse, bool return_stats) {
  return call_fwd(q, k, v, std::nullopt, std::nullopt, scale, left, right, softcap, slopes, sinks, bottom_right,
                  return_lse, return_stats);
}

FourTensors flash_attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                                   const Tensor& cu_seqlens_k, double scale, OptionalInt left, OptionalInt right,
                                   std::optional<double> softcap, const OptionalTensor& slopes,
                                   const OptionalTensor& sinks, bool bottom_right, bool return_lse, bool return_stats) {
  return call_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, left, right, softcap, slopes, sinks, bottom_right,
                  return_lse, return_stats);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def(
      "flash_attention(Tensor q, Tensor k, Tensor v, float scale, SymInt? left, SymInt? right, float? softcap, "
      "Tensor? alibi_slopes, Tensor? sinks, bool bottom_right, bool return_lse, bool return_stats) "
      "-> (Tensor out, Tensor lse, Tensor entropy, Tensor max_logit)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "flash_attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, float scale, "
      "SymInt? left, SymInt? right, float? softcap, Tensor? alibi_slopes, Tensor? sinks, bool bottom_right, "
      "bool return_lse, bool return_stats) -> (Tensor out, Tensor lse, Tensor entropy, Tensor max_logit)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "flash_attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float scale, "
      "SymInt? left, SymInt? right, float? softcap, Tensor? alibi_slopes, Tensor? sinks, bool bottom_right, "
      "bool save_lse, bool save_stats) -> (Tensor out, Tensor lse, Tensor entropy, Tensor max_logit)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("flash_attention", &flash_attention);
  m.impl("flash_attention_varlen", &flash_attention_varlen);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) { m.impl("flash_attention_fwd", &fwd_meta); }

}  // namespace foundry
