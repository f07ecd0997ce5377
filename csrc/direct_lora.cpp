// The direct call (direct.cpp) of linear layers with low-rank adapters, on the CPU.
#include "direct.h"
#include "direct_calls.h"

namespace foundry {
namespace {

// The tensors of one layer and their scale; absent tensors are undefined.
struct LoraLayer {
  Tensor weight, a, b, bias, base;
  double scale = 1.0;

  // Whether `tuple` has a layer that reads x.
  bool read_from(PyObject* tuple, const Tensor& x) {
    Arguments in(tuple, 6);
    weight = unwrap(in.optional_tensor());
    a = in.tensor();
    b = in.tensor();
    bias = unwrap(in.optional_tensor());
    base = unwrap(in.optional_tensor());
    in.number(scale);
    return in.ok() && weight.defined() != base.defined() && (bias.defined() ? weight.defined() : true) &&
           is_adapter(a, x) && is_adapter(b, x) && a.size(0) > 0 && a.size(1) == x.size(-1) && b.size(1) == a.size(0) &&
           (weight.defined() ? is_matrix(x) : is_base(x));
  }

 private:
  static bool is_adapter(const Tensor& t, const Tensor& x) {
    return t.is_cpu() && t.dim() == 2 && (t.scalar_type() == at::kFloat || t.scalar_type() == x.scalar_type());
  }
  static bool is_like(const Tensor& t, const Tensor& x) { return t.is_cpu() && t.scalar_type() == x.scalar_type(); }
  bool is_matrix(const Tensor& x) const {
    return is_like(weight, x) && weight.dim() == 2 && weight.size(0) == b.size(0) && weight.size(1) == x.size(-1) &&
           (!bias.defined() || (is_like(bias, x) && bias.dim() == 1 && bias.size(0) == b.size(0)));
  }
  bool is_base(const Tensor& x) const {
    return is_like(base, x) && base.dim() == x.dim() && base.size(-1) == b.size(0) &&
           base.sizes().slice(0, base.dim() - 1) == x.sizes().slice(0, x.dim() - 1);
  }
};

}  // namespace

// backend, x, the layers as a list with one tuple each, dropout_p, dropout_seed (a tensor, or None without dropout).
PyObject* call_lora_linear(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 5);
  const Tensor& x = in.tensor();
  PyObject* const layers = in.list();
  in.need(in.ok() && x.is_cpu() && x.dim() > 0 && !autocasts(x));
  if (!in.ok()) Py_RETURN_NONE;
  const size_t n = PyList_GET_SIZE(layers);
  std::vector<Tensor> tensors(5 * n);
  LoraCall call;
  for (size_t i = 0; i < n; ++i) {
    LoraLayer layer;
    if (!layer.read_from(PyList_GET_ITEM(layers, Py_ssize_t(i)), x)) Py_RETURN_NONE;
    Tensor* const each[] = {&layer.weight, &layer.a, &layer.b, &layer.bias, &layer.base};
    for (size_t kind = 0; kind < 5; ++kind) tensors[kind * n + i] = std::move(*each[kind]);
    call.scales.push_back(layer.scale);
  }
  call.dropout.dropout_p = in.not_negative();
  in.optional_indices(call.dropout.dropout_seed);
  in.need(in.ok() && n > 0);
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return lora_linears(x, tensors, call); });
}

}  // namespace foundry
