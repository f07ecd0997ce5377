// The operators behind the public functions, for direct.cpp. Each checks its arguments, supports any device and records
// itself for backward. The file of the operation says which lower-level operators it consists of.
#pragma once

#include <tuple>
#include <vector>

#include "common.h"
#include "decode_block_options.h"
#include "flash_attention_options.h"
#include "rms_norm_options.h"
#include "rope_options.h"
#include "swiglu_options.h"

namespace foundry {

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, const WeightOptions& options);
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        double eps, const WeightOptions& options, const DropoutOptions& dropout);
Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps);
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                          const OptionalTensor& bias, double eps, const DropoutOptions& dropout);
Tensor bias_gelu(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate,
                 const DropoutOptions& dropout);
Tensor bias_silu(const Tensor& x, const OptionalTensor& bias, const DropoutOptions& dropout);
Tensor bias_relu(const Tensor& x, const OptionalTensor& bias, const DropoutOptions& dropout);
Tensor swiglu(const Tensor& gate, const OptionalTensor& up, const GatedOptions& options);
Tensor geglu(const Tensor& gate, const OptionalTensor& up, c10::string_view approximate, const DropoutOptions& dropout);
Tensor glu(const Tensor& gate, const OptionalTensor& up, const DropoutOptions& dropout);
Tensor reglu(const Tensor& gate, const OptionalTensor& up, const DropoutOptions& dropout);
std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                const RopeOptions& options);
std::tuple<Tensor, Tensor> qk_norm_rope(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                        const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin,
                                        double eps, const WeightOptions& weight_options, const RopeOptions& options);
std::tuple<Tensor, Tensor, Tensor, Tensor> flash_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                           const AttentionOptions& options, bool return_lse,
                                                           bool return_stats);
Tensor combine_experts(const Tensor& x, const OptionalTensor& weights, const Tensor& slots);
// Linear layers with adapters that read x, on the CPU: weights, A's, B's, biases and bases, of n layers each. Tensors
// that a layer lacks are undefined.
struct LoraCall {
  std::vector<double> scales;
  DropoutOptions dropout;
};
std::vector<Tensor> lora_linears(const Tensor& x, at::TensorList tensors, const LoraCall& call);
// Steps of decoding, without gradients. They overwrite the state.
Tensor gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                             const OptionalTensor& beta, const Tensor& state, const OptionalTensor& A_log,
                             const OptionalTensor& dt_bias, double scale, bool qk_l2norm,
                             std::optional<double> beta_limit);
Tensor short_conv1d_step(const Tensor& x, const Tensor& state, const Tensor& weight, const OptionalTensor& bias,
                         c10::string_view activation, const OptionalTensor& residual);
// CPU inference only.
std::tuple<Tensor, Tensor> decode_block(const OptionalTensor& branch, const Tensor& stream, at::TensorList weights,
                                        at::TensorList norms, const Tensor& cos, const Tensor& sin,
                                        const Tensor& k_cache, const Tensor& v_cache, const BlockOptions& options);

}  // namespace foundry
