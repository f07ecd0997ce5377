// Fast calls of the operators from Python, for plain tensors on the CPU or a GPU. torch's binding of operators converts
// every argument to an IValue by the schema and back, which takes longer than the arithmetic of a small call; argument
// checks in Python take as long again. These functions read the arguments of the public functions directly.
//
// They handle common calls and return None for everything else, including invalid arguments. The caller then takes the
// general path, whose checks raise the errors. Common means: dense tensors on one device, of class Tensor or Parameter,
// in a thread without active modes (FakeTensorMode, torch.func, tracing, TorchFunctionMode, ...). From the operators on
// nothing differs: autograd, the profiler and the dispatcher see the same call.
#include "direct.h"

#include <ATen/ops/linear.h>
#include <torch/csrc/Exceptions.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "direct_arguments.h"
#include "torch/cross_entropy.h"
#include "torch/grouped_mm.h"
#include "torch/operators.h"
#include "torch/products.h"

namespace foundry {
namespace {

PyObject* to_python(const Tensor& t) { return THPVariable_Wrap(t); }
PyObject* to_python(const std::tuple<Tensor, Tensor>& pair) {
  PyObject* out = PyTuple_New(2);
  if (!out) throw python_error();
  PyTuple_SET_ITEM(out, 0, to_python(std::get<0>(pair)));
  PyTuple_SET_ITEM(out, 1, to_python(std::get<1>(pair)));
  return out;
}

// Runs a call without the GIL and wraps its result.
template <class Call>
PyObject* result_of(const Call& call) {
  return to_python([&] {
    pybind11::gil_scoped_release no_gil;
    return call();
  }());
}

// A function of the table below: reads its arguments and calls the operator, or returns None.
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

// Whether there is one target per token of x [..., N], and the class weights need no gradient.
bool are_targets(const Tensor& x, const Tensor& target, const OptionalTensor& weight, int64_t n_classes) {
  return x.dim() > 0 && x.size(-1) > 0 && target.sizes() == x.sizes().slice(0, x.dim() - 1) &&
         (!weight || (weight->dim() == 1 && weight->size(0) == n_classes && !weight->requires_grad()));
}

PyObject* call_cross_entropy(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 4 + LossOptions::kArguments);
  const Tensor &logits = in.tensor(), &target = in.indices();
  const OptionalTensor weight = in.optional_tensor();
  LossOptions options;
  options.read_from(in);
  in.need(in.ok() && logits.dim() > 0 && are_targets(logits, target, weight, logits.size(-1)));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return std::get<0>(cross_entropy(logits, target, weight, options, false, false)); });
}

// A single chunk without gradients: other strategies cannot save memory there, unless a 16-bit weight is large and its
// gradient is wanted in float32. Small matmuls use float32 copies. The limits are those of
// linear_cross_entropy/chunks.py: multiplications of a small matmul, and tokens of a chunk.
PyObject* call_linear_cross_entropy(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  constexpr int64_t kMultiplications = 1 << 22, kTokens = 256;
  constexpr int64_t kWorthIt = 1 << 13;  // multiplications that justify the call of another matmul
  Arguments in(served, arguments, given, 7 + LossOptions::kArguments);
  const Tensor &hidden = in.tensor(), &weight = in.tensor(), &target = in.indices();
  const OptionalTensor bias = in.optional_tensor(), class_weight = in.optional_tensor();
  LossOptions options;
  options.read_from(in);
  const double logit_scale = in.real();
  in.need(is_number(logit_scale) && in.ok() && !autocasts(hidden));
  in.need(in.ok() && weight.dim() == 2 && weight.size(0) > 0 && target.numel() > 0 && target.numel() <= kTokens &&
          are_targets(hidden, target, class_weight, weight.size(0)) && weight.size(1) == hidden.size(-1) &&
          weight.scalar_type() == hidden.scalar_type());
  in.need(in.ok() && (!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) &&
                                bias->scalar_type() == hidden.scalar_type())));
  if (!in.ok()) Py_RETURN_NONE;
  const auto type = hidden.scalar_type();
  const bool small = hidden.numel() * weight.size(0) <= kMultiplications;
  in.need(small || type == at::kFloat || (type == at::kBFloat16 ? fast_bfloat16_products() : fast_float16_products()));
  in.need(in.ok() && !(at::GradMode::is_enabled() &&
                       (hidden.requires_grad() || weight.requires_grad() || (bias && bias->requires_grad()))));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] {
    const auto within = small ? at::kFloat : type;
    const auto cast = [&](const Tensor& t) { return type == within ? t : t.to(within); };
    const Tensor x = cast(hidden), w = cast(weight);
    const OptionalTensor b = bias ? OptionalTensor(cast(*bias)) : bias;
    const bool worth_it = within == at::kFloat && x.numel() * w.size(0) > kWorthIt;
    const Tensor logits = worth_it ? linear_float32(x, w, b) : at::linear(x, w, b);
    return std::get<0>(cross_entropy(logit_scale == 1.0 ? logits : logits.mul(logit_scale), target, class_weight,
                                     options, false, false));
  });
}

bool is_attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4) return false;
  if (k.scalar_type() != q.scalar_type() || v.scalar_type() != q.scalar_type()) return false;
  const int64_t head_dim = q.size(3), head_dim_v = v.size(3), n_kv_heads = k.size(1);
  return k.size(0) == q.size(0) && v.size(0) == q.size(0) && v.size(1) == n_kv_heads && v.size(2) == k.size(2) &&
         k.size(3) == head_dim && 0 < head_dim && head_dim <= kMaxHeadDim && 0 < head_dim_v &&
         head_dim_v <= kMaxHeadDim && n_kv_heads > 0 && q.size(1) > 0 && q.size(1) % n_kv_heads == 0;
}

// The GPUs of this process, as attention needs to know them.
struct Gpus {
  bool supported = false;  // by the kernels of csrc/cuda
  bool hopper = false;     // all of them are Hopper, and csrc/cuda/hopper is compiled in
} gpus;

// Whether TMA can copy the tensor without conversion: rows begin at multiples of 16 bytes and do not overlap.
bool has_map(const Tensor& x) {
  constexpr int64_t kStep = 8;  // elements of 16 bits
  for (int64_t d = 0; d < 3; ++d)
    if (x.size(d) > 1 && (x.stride(d) <= 0 || x.stride(d) % kStep != 0)) return false;
  return x.size(3) % kStep == 0 && x.stride(3) == 1 && x.storage_offset() % kStep == 0;
}

// Whether "auto" uses csrc/cuda/hopper: `takes` of ops/flash_attention/hopper.py, restricted to the calls that come
// here and to tensors that need no copy.
bool is_for_hopper(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  constexpr int64_t kFewestQueries = 128, kWidest = 256;
  return dtype_bit(q) != 1 && q.numel() > 0 && k.size(2) > 0 && q.size(3) <= kWidest && v.size(3) <= kWidest &&
         (options.batch_invariant || q.size(2) >= kFewestQueries) && has_map(q) && has_map(k) && has_map(v);
}

PyObject* call_flash_attention(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  const OnAccelerator first{
      served.native, static_cast<uint8_t>(served.automatic | (gpus.hopper ? served.unmeasured : 0)), served.unmeasured};
  Arguments in(first, arguments, given, 7 + AttentionOptions::kArguments);
  const Tensor &q = in.tensor(), &k = in.tensor(), &v = in.tensor();
  const bool causal = in.boolean();
  AttentionOptions options;
  options.read_from(in);
  const bool return_lse = in.boolean(), return_stats = in.boolean();
  in.need(in.ok() && is_attention(q, k, v) && !return_lse && !return_stats);
  in.need(in.ok() && !autocasts(q));
  if (in.ok() && !q.is_cpu())
    in.need(gpus.supported && (!in.is_auto() || (served.automatic & dtype_bit(q)) || is_for_hopper(q, k, v, options)));
  if (!in.ok()) Py_RETURN_NONE;
  options.max_seqlen_q = q.size(2);
  options.max_seqlen_k = k.size(2);
  if (options.scale == 0.0) options.scale = std::pow(static_cast<double>(q.size(3)), -0.5);
  if (options.softcap && !is_positive_number(options.scale / *options.softcap)) Py_RETURN_NONE;
  if (causal) options.window_right = 0;
  return result_of([&] { return std::get<0>(flash_attention(q, k, v, options, false, false)); });
}

// The arguments of decode_block besides the stream, from a tuple.
struct Block {
  std::array<Tensor, 7> weights;
  std::array<Tensor, 2> norms;
  Tensor cos, sin, k_cache, v_cache;
  BlockOptions options;

  bool read_from(PyObject* tuple) {
    Arguments in(tuple, 7 + 2 + 4 + BlockOptions::kArguments);
    for (Tensor& weight : weights) weight = in.tensor();
    for (Tensor& norm : norms) norm = in.tensor();
    for (Tensor* t : {&cos, &sin, &k_cache, &v_cache}) *t = in.tensor();
    options.read_from(in);
    return in.ok();
  }
};

// Consecutive blocks, as a list with one tuple each.
PyObject* call_decode_blocks(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 4);
  const OptionalTensor branch = in.optional_tensor();
  const Tensor& stream = in.tensor();
  std::vector<Block> blocks(in.ok() && PyList_CheckExact(arguments[3]) ? PyList_GET_SIZE(arguments[3]) : 0);
  in.need(!blocks.empty());
  for (size_t i = 0; i < blocks.size(); ++i)
    in.need(in.ok() && blocks[i].read_from(PyList_GET_ITEM(arguments[3], Py_ssize_t(i))));
  if (!in.ok()) Py_RETURN_NONE;
  try {
    return result_of([&] {
      std::tuple<Tensor, Tensor> found{unwrap(branch), stream};
      for (const Block& b : blocks)
        found = decode_block(wrap(std::get<0>(found)), std::get<1>(found), b.weights, b.norms, b.cos, b.sin, b.k_cache,
                             b.v_cache, b.options);
      return found;
    });
  } catch (const c10::ValueError&) {
    Py_RETURN_NONE;  // the general path writes to the caches again
  } catch (const c10::TypeError&) {
    Py_RETURN_NONE;
  }
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
void attention_gpus(bool supported, bool hopper) { gpus = {supported, hopper}; }
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
      method<call_decode_blocks>("decode_blocks"),
      {nullptr, nullptr, 0, nullptr},
  };
  return methods;
}

}  // namespace foundry
