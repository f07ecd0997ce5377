// Linear layers with low-rank adapters that read the same x, on the CPU, with their gradients, for direct calls. The
// composition is that of ops/lora_linear/autograd.py, which serves all other calls: matmuls with the weights are
// PyTorch's, thin ones those of lora_linear.cpp or, where they are faster, PyTorch's.
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "autograd.h"
#include "lora_linear.h"
#include "operators.h"

namespace foundry {
namespace lora_layers {

// The number of rows up to which PyTorch's matmuls are faster in all dtypes: they need not pack the adapter. float32
// sums always are.
constexpr int64_t kFewRows = 4;

Tensor meta_down(const Tensor&, const Tensor&, double, const DropoutOptions&);
void meta_up(const Tensor&, const Tensor&, const Tensor&, double, const DropoutOptions&);
Tensor meta_outer(const Tensor&, const Tensor&, double, bool, const DropoutOptions&);

Tensor down(const Tensor& x, const Tensor& a, double scale, const DropoutOptions& dropout) {
  static const Operator<decltype(meta_down)> op(FK_LIBRARY_NAME "::lora_down");
  const bool few = x.size(0) <= kFewRows && scale == 1.0 && a.scalar_type() == at::kFloat && !dropout.dropout_seed;
  return few ? at::mm(x.to(at::kFloat), a.t()) : op(x, a, scale, dropout);
}

// base += drop(scale t b^T)
void add(const Tensor& base, const Tensor& t, const Tensor& b, double scale, const DropoutOptions& dropout) {
  static const Operator<decltype(meta_up)> op(FK_LIBRARY_NAME "::lora_up_");
  const bool narrow = base.scalar_type() != at::kFloat;
  if (b.scalar_type() != at::kFloat || dropout.dropout_seed || (narrow && base.size(0) > kFewRows))
    op(base, t, b, scale, dropout);
  else if (narrow) base.copy_(base.to(at::kFloat).addmm_(t, b.t(), 1, scale));
  else base.addmm_(t, b.t(), 1, scale);
}

Tensor outer(const Tensor& t, const Tensor& x, double scale, bool transposed, const DropoutOptions& dropout) {
  static const Operator<decltype(meta_outer)> op(FK_LIBRARY_NAME "::lora_outer");
  return op(t, x, scale, transposed, dropout);
}

Tensor rows_of(const Tensor& x) { return x.dim() == 2 ? x : x.dim() > 2 ? x.flatten(0, -2) : x.unsqueeze(0); }

Tensor stacked(at::TensorList tensors) { return tensors.size() == 1 ? tensors[0] : at::cat(tensors); }

// Columns [first, first + count) of t.
Tensor part(const Tensor& t, int64_t first, int64_t count) {
  return count == t.size(1) ? t : t.narrow(1, first, count);
}

// The tensors of n layers: weights, A's, B's, biases and bases. Absent ones are undefined.
struct Layers {
  size_t n;
  at::TensorList weights, a, b, biases, bases;

  explicit Layers(at::TensorList tensors)
      : n(tensors.size() / 5),
        weights(tensors.slice(0, n)),
        a(tensors.slice(n, n)),
        b(tensors.slice(2 * n, n)),
        biases(tensors.slice(3 * n, n)),
        bases(tensors.slice(4 * n, n)) {}
};

bool any_learns(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.defined() && t.requires_grad(); });
}

std::pair<Tensor, variable_list> forward_of(const Tensor& x, at::TensorList tensors, const LoraCall& call) {
  const Layers of(tensors);
  const Tensor t = down(rows_of(x), stacked(of.a), 1.0, call.dropout);
  variable_list found(of.n);
  int64_t first = 0;
  for (size_t i = 0; i < of.n; ++i) {
    const int64_t rank = of.a[i].size(0);
    Tensor y = of.bases[i].defined() ? of.bases[i].clone(at::MemoryFormat::Contiguous)
                                     : at::linear(x, of.weights[i], wrap(of.biases[i]));
    add(rows_of(y), part(t, first, rank), of.b[i], call.scales[i], {});
    found[i] = std::move(y);
    first += rank;
  }
  return {t, std::move(found)};
}

class LoraFunction : public torch::autograd::Function<LoraFunction> {
 public:
  // Autograd takes defined tensors alone: `given` are those of `tensors`.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, [[maybe_unused]] at::TensorList given,
                               const at::TensorList* tensors_, const LoraCall* call_) {
    const at::TensorList tensors = *tensors_;
    const LoraCall& call = *call_;
    const Layers of(tensors);
    auto [t, found] = forward_of(x, tensors, call);
    std::vector<int64_t> places;
    for (const Tensor& each : tensors) places.push_back(each.defined());
    const bool needs_x = any_learns(of.weights) || any_learns(of.a);
    variable_list saved{needs_x ? x : Tensor(), t, unwrap(call.dropout.dropout_seed)};
    saved.insert(saved.end(), tensors.begin(), tensors.begin() + 3 * of.n);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["places"] = std::move(places);
    ctx->saved_data["scales"] = call.scales;
    ctx->saved_data["dropout_p"] = call.dropout.dropout_p;
    ctx->saved_data["shape"] = x.sizes().vec();
    return found;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("lora_linear");
    const size_t n = grads.size();
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &t = saved[1];
    const at::TensorList weights = at::TensorList(saved).slice(3, n), a = at::TensorList(saved).slice(3 + n, n),
                         b = at::TensorList(saved).slice(3 + 2 * n, n);
    const std::vector<double> scales = ctx->saved_data["scales"].toDoubleVector();
    const DropoutOptions dropout{ctx->saved_data["dropout_p"].toDouble(), wrap(saved[2])};
    // The place of each tensor among those that autograd was given; 0 of an absent one.
    std::vector<int64_t> places = ctx->saved_data["places"].toIntVector();
    size_t n_given = 0;
    for (int64_t& place : places) place = place ? ++n_given : 0;
    const auto needs = [&](size_t kind, size_t i) {
      const int64_t place = places[kind * n + i];
      return place > 0 && ctx->needs_input_grad(place);
    };
    const bool need_x = ctx->needs_input_grad(0);
    bool need_a = false;
    for (size_t i = 0; i < n; ++i) need_a = need_a || needs(1, i);
    variable_list found(1 + n_given + 2), downs;
    Tensor dx;
    int64_t first = 0;
    for (size_t i = 0; i < n; ++i) {
      const Tensor dy = rows_of(grads[i]);
      const int64_t rank = a[i].size(0);
      if (need_x || need_a) downs.push_back(down(dy, b[i].t(), scales[i], {}));
      if (needs(2, i))
        found[places[2 * n + i]] = outer(part(t, first, rank), dy, scales[i], true, {}).to(b[i].scalar_type());
      if (needs(0, i)) found[places[i]] = at::mm(dy.t(), rows_of(x));
      if (needs(3, i)) found[places[3 * n + i]] = dy.sum(0);
      if (needs(4, i)) found[places[4 * n + i]] = grads[i];
      if (need_x && weights[i].defined()) dx = dx.defined() ? dx.addmm_(dy, weights[i]) : at::mm(dy, weights[i]);
      first += rank;
    }
    if (downs.empty()) return found;
    const Tensor dt = n == 1 ? downs[0] : at::cat(downs, 1);
    if (need_a) {
      const Tensor da = outer(dt, rows_of(x), 1.0, false, dropout);
      first = 0;
      for (size_t i = 0; i < n; ++i) {
        if (needs(1, i)) found[places[n + i]] = da.narrow(0, first, a[i].size(0)).to(a[i].scalar_type());
        first += a[i].size(0);
      }
    }
    if (need_x) {
      if (!dx.defined()) dx = at::zeros({dt.size(0), a[0].size(1)}, grads[0].options());
      add(dx, dt, stacked(a).t(), 1.0, dropout);
      found[0] = dx.view(ctx->saved_data["shape"].toIntVector());
    }
    return found;
  }
};

}  // namespace lora_layers

std::vector<Tensor> lora_linears(const Tensor& x, at::TensorList tensors, const LoraCall& call) {
  using namespace lora_layers;
  if (any_requires_grad(x) || (at::GradMode::is_enabled() && any_learns(tensors))) {
    variable_list given;
    for (const Tensor& t : tensors)
      if (t.defined()) given.push_back(t);
    return LoraFunction::apply(x, at::TensorList(given), &tensors, &call);
  }
  return forward_of(x, tensors, call).second;
}

}  // namespace foundry
