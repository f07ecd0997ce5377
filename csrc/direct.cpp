// Fast calls of the operators from Python, for plain tensors on the CPU or a GPU. torch's binding of operators converts
// every argument to an IValue by the schema and back, which takes longer than the arithmetic of a small call; argument
// checks in Python take as long again. These functions read the arguments of the public functions directly.
//
// They handle common calls and return None for everything else, including invalid arguments. The caller then takes the
// general path, whose checks raise the errors. Common means: dense tensors on one device, of class Tensor or Parameter,
// in a thread without active modes (FakeTensorMode, torch.func, tracing, TorchFunctionMode, ...). From the operators on
// nothing differs: autograd, the profiler and the dispatcher see the same call.
#include "direct.h"

#include <initializer_list>
#include <map>
#include <string>

#include "direct_calls.h"
#include "torch/grouped_mm.h"

namespace foundry {
namespace {

// A function of the table below.
template <auto call> OnAccelerator served_on_accelerator;
template <auto call>
PyObject* guarded(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  HANDLE_TH_ERRORS
  return call(served_on_accelerator<call>, arguments, given);
  END_HANDLE_TH_ERRORS
}

bool is_weight(const OptionalTensor& weight, const Tensor& x, double weight_offset = 0.0) {
  return weight ? weight->dim() == 1 && weight->size(0) == x.size(-1) : weight_offset == 0.0;
}

PyObject* call_rms_norm(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 4 + WeightOptions::kArguments);
  const Tensor& x = in.tensor();
  const OptionalTensor weight = in.optional_tensor();
  const double eps = in.not_negative();
  WeightOptions options;
  options.read_from(in);
  in.need(in.ok() && x.dim() > 0 && x.size(-1) > 0 && is_weight(weight, x, options.weight_offset));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return rms_norm(x, weight, eps, options); });
}

PyObject* call_add_rms_norm(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 5 + WeightOptions::kArguments);
  const Tensor& x = in.tensor();
  const Tensor& residual = in.tensor();
  const OptionalTensor weight = in.optional_tensor();
  const double eps = in.not_negative();
  WeightOptions options;
  options.read_from(in);
  in.need(in.ok() && x.dim() > 0 && x.size(-1) > 0 && is_weight(weight, x, options.weight_offset));
  in.need(in.ok() && residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type());
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return add_rms_norm(x, residual, weight, eps, options, {}); });
}

PyObject* call_layer_norm(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 5);
  const Tensor& x = in.tensor();
  const OptionalTensor weight = in.optional_tensor(), bias = in.optional_tensor();
  const double eps = in.not_negative();
  in.need(in.ok() && x.dim() > 0 && x.size(-1) > 0 && is_weight(weight, x) && is_weight(bias, x));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return layer_norm(x, weight, bias, eps); });
}

PyObject* call_add_layer_norm(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 6);
  const Tensor &x = in.tensor(), &residual = in.tensor();
  const OptionalTensor weight = in.optional_tensor(), bias = in.optional_tensor();
  const double eps = in.not_negative();
  in.need(in.ok() && x.dim() > 0 && x.size(-1) > 0 && is_weight(weight, x) && is_weight(bias, x));
  in.need(in.ok() && residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type());
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return add_layer_norm(x, residual, weight, bias, eps, {}); });
}

PyObject* call_bias_gelu(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 4);
  const Tensor& x = in.tensor();
  const OptionalTensor bias = in.optional_tensor();
  const bool exact = in.word("none", "tanh");
  in.need(in.ok() && x.dim() > 0 && is_weight(bias, x));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return bias_gelu(x, bias, exact ? "none" : "tanh", {}); });
}

template <auto activated>
PyObject* call_bias_act(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 3);
  const Tensor& x = in.tensor();
  const OptionalTensor bias = in.optional_tensor();
  in.need(in.ok() && x.dim() > 0 && is_weight(bias, x));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return activated(x, bias, {}); });
}

bool is_gate(const Tensor& gate, const OptionalTensor& up) {
  if (gate.dim() == 0) return false;
  return up ? up->sizes() == gate.sizes() && up->scalar_type() == gate.scalar_type() : gate.size(-1) % 2 == 0;
}

PyObject* call_swiglu(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 3 + GatedOptions::kArguments);
  const Tensor& gate = in.tensor();
  const OptionalTensor up = in.optional_tensor();
  GatedOptions options;
  options.read_from(in);
  in.need(in.ok() && is_gate(gate, up) && !(options.interleaved && up));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return swiglu(gate, up, options); });
}

PyObject* call_geglu(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 4);
  const Tensor& gate = in.tensor();
  const OptionalTensor up = in.optional_tensor();
  const bool exact = in.word("none", "tanh");
  in.need(in.ok() && is_gate(gate, up));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return geglu(gate, up, exact ? "none" : "tanh", {}); });
}

template <auto gated>
PyObject* call_gated(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 3);
  const Tensor& gate = in.tensor();
  const OptionalTensor up = in.optional_tensor();
  in.need(in.ok() && is_gate(gate, up));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return gated(gate, up, {}); });
}

// Whether tables and positions need no preparation. Those with a leading dimension of 1 for many sequences do.
bool are_rotations(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                   const OptionalTensor& positions) {
  if (q.dim() != 4 || k.dim() != 4 || k.scalar_type() != q.scalar_type()) return false;
  for (const int64_t d : {0, 2, 3})
    if (k.size(d) != q.size(d)) return false;
  const int64_t batch = q.size(0), tokens = q.size(2), half = cos.dim() ? cos.size(-1) : 0;
  if (half == 0 || 2 * half > q.size(3) || sin.sizes() != cos.sizes() || sin.scalar_type() != cos.scalar_type())
    return false;
  if (at::GradMode::is_enabled() && (cos.requires_grad() || sin.requires_grad())) return false;
  if (cos.dim() == 3) return !positions && cos.size(0) == batch && cos.size(1) == tokens;
  if (cos.dim() != 2) return false;
  if (!positions) return cos.size(0) >= tokens;
  return positions->dim() == 1 ? positions->size(0) == tokens
                               : positions->dim() == 2 && positions->size(0) == batch && positions->size(1) == tokens;
}

PyObject* call_rope(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 5 + RopeOptions::kArguments);
  const Tensor &q = in.tensor(), &k = in.tensor(), &cos = in.tensor(), &sin = in.tensor();
  RopeOptions options;
  options.read_from(in);
  in.need(in.ok() && are_rotations(q, k, cos, sin, options.positions));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return rope(q, k, cos, sin, options); });
}

PyObject* call_qk_norm_rope(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 8 + WeightOptions::kArguments + RopeOptions::kArguments);
  const Tensor &q = in.tensor(), &k = in.tensor();
  const OptionalTensor q_weight = in.optional_tensor(), k_weight = in.optional_tensor();
  const Tensor &cos = in.tensor(), &sin = in.tensor();
  const double eps = in.not_negative();
  WeightOptions weight_options;
  weight_options.read_from(in);
  RopeOptions rope_options;
  rope_options.read_from(in);
  in.need(in.ok() && are_rotations(q, k, cos, sin, rope_options.positions));
  in.need(in.ok() && is_weight(q_weight, q, weight_options.weight_offset) &&
          is_weight(k_weight, k, weight_options.weight_offset));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, weight_options, rope_options); });
}

PyObject* call_combine_experts(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 4);
  const Tensor& x = in.tensor();
  const OptionalTensor weights = in.optional_tensor();
  const Tensor& slots = in.indices();
  in.need(in.ok() && x.dim() == 2 && slots.dim() == 2 && slots.size(1) > 0);
  in.need(in.ok() && (!weights || (weights->sizes() == slots.sizes() && (weights->scalar_type() == at::kFloat ||
                                                                         weights->scalar_type() == x.scalar_type()))));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return combine_experts(x, weights, slots); });
}

PyObject* call_grouped_mm(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 5);
  const Tensor &x = in.tensor(), &weight = in.tensor(), &offs = in.indices();
  const bool batch_invariant = in.boolean();
  in.need(in.ok() && !autocasts(x) && x.dim() == 2 && weight.dim() == 3 && weight.size(0) > 0 &&
          weight.size(1) == x.size(1) && weight.scalar_type() == x.scalar_type());
  in.need(in.ok() && offs.scalar_type() == at::kInt && offs.dim() == 1 && offs.size(0) == weight.size(0));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return grouped_mm(x, weight, offs, batch_invariant); });
}

std::map<std::string, OnAccelerator*> operations;

template <auto call>
PyMethodDef method(const char* name) {
  operations[name] = &served_on_accelerator<call>;
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(guarded<call>)), METH_FASTCALL,
          "The public function's arguments, backend first, by position. None where the call is not a common one."};
}

}  // namespace

void serve_on_accelerator(const std::string& operation, int native, int automatic, int unmeasured) {
  *operations.at(operation) = {static_cast<uint8_t>(native), static_cast<uint8_t>(automatic),
                               static_cast<uint8_t>(unmeasured)};
}
void accelerator(const std::string& type) { OnAccelerator::type = c10::Device(type).type(); }

PyMethodDef* direct_calls() {
  static PyMethodDef methods[] = {
      method<call_rms_norm>("rms_norm"),
      method<call_add_rms_norm>("add_rms_norm"),
      method<call_layer_norm>("layer_norm"),
      method<call_add_layer_norm>("add_layer_norm"),
      method<call_bias_gelu>("bias_gelu"),
      method<call_bias_act<&bias_silu>>("bias_silu"),
      method<call_bias_act<&bias_relu>>("bias_relu"),
      method<call_swiglu>("swiglu"),
      method<call_geglu>("geglu"),
      method<call_gated<&glu>>("glu"),
      method<call_gated<&reglu>>("reglu"),
      method<call_rope>("rope"),
      method<call_qk_norm_rope>("qk_norm_rope"),
      method<call_combine_experts>("combine_experts"),
      method<call_grouped_mm>("grouped_mm"),
      method<call_flash_attention>("flash_attention"),
      method<call_cross_entropy>("cross_entropy"),
      method<call_linear_cross_entropy>("linear_cross_entropy"),
      method<call_log_probs>("log_probs"),
      method<call_linear_log_probs>("linear_log_probs"),
      method<call_kl_div>("kl_div"),
      method<call_linear_kl_div>("linear_kl_div"),
      method<call_lora_linear>("lora_linear"),
      method<call_gated_delta_rule_step>("gated_delta_rule_step"),
      method<call_short_conv1d_step>("short_conv1d_step"),
      method<call_decode_blocks>("decode_blocks"),
      {nullptr, nullptr, 0, nullptr},
  };
  return methods;
}

}  // namespace foundry
