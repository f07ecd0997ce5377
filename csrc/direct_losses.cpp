// Direct calls (direct.cpp) of the losses.
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "direct.h"
#include "direct_calls.h"
#include "torch/autograd.h"
#include "torch/cross_entropy.h"
#include "torch/kl_div.h"
#include "torch/log_probs.h"
#include "torch/products.h"

namespace foundry {
namespace {

// The limits of _linear_loss/sizes.py, which sets them. Until then no call is direct.
struct {
  int64_t multiplications = 0;  // of a small matmul
  int64_t tokens = 0;
} single_chunk;

// Whether there is one target per token of x [..., N].
bool are_targets(const Tensor& x, const Tensor& target) {
  return x.dim() > 0 && x.size(-1) > 0 && target.sizes() == x.sizes().slice(0, x.dim() - 1);
}

// Whether these are weights of the classes, which need no gradient.
bool are_class_weights(const OptionalTensor& weight, int64_t n_classes) {
  return !weight || (weight->dim() == 1 && weight->size(0) == n_classes && !weight->requires_grad());
}

// The number of targets that count.
int64_t counted(const Tensor& target, int64_t ignore_index) {
  const Tensor t = target.to(at::kLong).contiguous();
  const int64_t* values = t.const_data_ptr<int64_t>();
  return target.numel() - std::count(values, values + target.numel(), ignore_index);
}

// t.to(type), of a 16-bit type and float32 either way, without a gradient. Of a few numbers PyTorch's takes a
// microsecond.
Tensor cast_to(at::ScalarType type, const Tensor& t) {
  if (t.scalar_type() == type) return t;
  if (t.numel() > 4096 || !t.is_contiguous()) return t.to(type);
  const Tensor out = empty_beside(t, t.sym_sizes(), type);
  const auto copy = [&](auto from, auto to) {
    std::copy_n(t.const_data_ptr<decltype(from)>(), t.numel(), out.mutable_data_ptr<decltype(to)>());
  };
  if (type == at::kBFloat16) copy(float(), at::BFloat16());
  else if (type == at::kHalf) copy(float(), at::Half());
  else if (t.scalar_type() == at::kBFloat16) copy(at::BFloat16(), float());
  else copy(at::Half(), float());
  return out;
}

// Hidden states and a linear layer, which makes the logits of all tokens at once and keeps them for the backward pass:
// where the strategies of _linear_loss save neither time nor memory that matters. Without gradients these are the calls
// of few tokens. With gradients kept logits must be a fraction of the weight's gradient: a 16th if the loss is reduced,
// whose own gradients could overwrite them, and as much if it is not, as computing them once more takes another matmul.
struct Head {
  const Tensor &hidden, &weight;
  const OptionalTensor& bias;
  double scale = 1.0;

  int64_t tokens() const { return hidden.numel() / hidden.size(-1); }
  bool small() const { return hidden.numel() * weight.size(0) <= single_chunk.multiplications; }
  bool records() const { return any_requires_grad(hidden, weight, bias); }

  bool fits(bool reduced) const {
    if (autocasts(hidden) || hidden.dim() == 0 || hidden.numel() == 0 || weight.dim() != 2 || weight.size(0) == 0 ||
        weight.size(1) != hidden.size(-1) || weight.scalar_type() != hidden.scalar_type())
      return false;
    if (bias && (bias->dim() != 1 || bias->size(0) != weight.size(0) || bias->scalar_type() != hidden.scalar_type()))
      return false;
    const auto type = hidden.scalar_type();
    const bool few = tokens() * 16 <= weight.size(1) || small();
    if (tokens() > single_chunk.tokens || !(small() || type == at::kFloat || fast_products(type))) return false;
    return !records() || few || (!reduced && tokens() <= weight.size(1) && fast_products(type));
  }

  // Small matmuls use float32 copies.
  Tensor cast(const Tensor& t) const { return !small() ? t : records() ? t.to(at::kFloat) : cast_to(at::kFloat, t); }
  Tensor logits() const { return logits_of(cast(hidden), cast(weight)); }
  Tensor logits_of(const Tensor& x, const Tensor& w) const {
    constexpr int64_t kWorthIt = 1 << 13;  // multiplications that justify the call of another matmul
    const OptionalTensor b = bias ? OptionalTensor(cast(*bias)) : bias;
    const bool worth_it = x.scalar_type() == at::kFloat && x.numel() * w.size(0) > kWorthIt && !records();
    const Tensor found = worth_it ? linear_float32(x, w, b) : at::linear(x, w, b);
    return scale == 1.0 ? found : found.mul(scale);
  }
};

// The logits and their cross-entropy as one node of autograd: those of two casts, a transposition, a matmul and a loss
// would take longer to record and to run than the arithmetic of a small call.
class HeadCrossEntropy : public torch::autograd::Function<HeadCrossEntropy> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                        const Tensor& target, const OptionalTensor& class_weight, double scale,
                        const LossOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Head head{hidden, weight, bias, scale};
    const Tensor x = head.cast(hidden), w = head.cast(weight), logits = head.logits_of(x, w);
    const auto [loss, lse, lse_low, z, total_weight] =
        cross_entropy_schema::call_fwd(logits, target, class_weight, options, true, false, true);
    const Tensor total = options.reduction == "mean" ? total_weight : Tensor();
    ctx->save_for_backward({x, w, target, unwrap(class_weight), logits, lse, lse_low, total});
    save_unless_usual(ctx, options, cross_entropy_schema::kUsualLoss);
    if (scale != 1.0) ctx->saved_data["scale"] = scale;
    if (x.scalar_type() != hidden.scalar_type()) ctx->saved_data["type"] = hidden.scalar_type();
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("linear_cross_entropy");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [x, w, target, class_weight, logits, lse, lse_low, total] = saved_tensors<8>(ctx);
    const auto options = load_or_usual(ctx, cross_entropy_schema::kUsualLoss);
    const Tensor d = cross_entropy_schema::call_bwd(grads.front(), logits, target, wrap(class_weight), lse, lse_low,
                                                    wrap(total), options)
                         .view({-1, w.size(0)});
    const auto scale = ctx->saved_data.find("scale");
    if (scale != ctx->saved_data.end()) d.mul_(scale->second.toDouble());
    const auto type = ctx->saved_data.find("type");
    const auto rounded = [&](const Tensor& t) {
      return type == ctx->saved_data.end() ? t : cast_to(type->second.toScalarType(), t);
    };
    NeedsGrad needs(ctx);
    variable_list found(7);
    if (needs.next()) found[0] = rounded(at::mm(d, w).view(x.sizes()));
    if (needs.next()) found[1] = rounded(at::mm(d.t(), x.reshape({-1, x.size(-1)})));
    if (needs.next()) found[2] = rounded(d.sum(0));
    return found;
  }
};

// Options of a divergence of logits.
KlDivArguments divergence(Arguments& in) {
  KlDivArguments options{};
  in.positive(options.temperature);
  c10::string_view direction;
  in.text(direction);
  for (const char* known : {"forward", "reverse", "jsd", "tvd"})  // autograd keeps no text of the caller's
    if (direction == known) options.direction = known;
  in.fraction(options.beta);
  in.need(!options.direction.empty());
  in.integer(options.ignore_index);
  return options;
}

// By what a reduced divergence is divided; without targets all tokens count.
std::optional<int64_t> divisor(c10::string_view reduction, const OptionalTensor& target, int64_t ignore_index,
                               int64_t tokens) {
  if (reduction == "none") return std::nullopt;
  if (reduction == "sum") return 1;
  return std::max<int64_t>(target ? counted(*target, ignore_index) : tokens, 1);
}

Tensor divergence_of(const Tensor& logits, const Tensor& teacher, const OptionalTensor& target, KlDivArguments options,
                     c10::string_view reduction) {
  if (!target) options.ignore_index = -100;
  const auto tokens = logits.sizes().slice(0, logits.dim() - 1);
  const Tensor all = target ? *target : at::zeros(tokens, logits.options().dtype(at::kLong));
  return kl_div(logits, teacher.detach(), all, options, divisor(reduction, target, options.ignore_index, all.numel()));
}

}  // namespace

PyObject* call_cross_entropy(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 4 + LossOptions::kArguments);
  const Tensor &logits = in.tensor(), &target = in.indices();
  const OptionalTensor weight = in.optional_tensor();
  LossOptions options;
  options.read_from(in);
  in.need(in.ok() && are_targets(logits, target) && are_class_weights(weight, logits.size(-1)));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return std::get<0>(cross_entropy(logits, target, weight, options, false, false)); });
}

PyObject* call_linear_cross_entropy(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 7 + LossOptions::kArguments);
  const Tensor &hidden = in.tensor(), &weight = in.tensor(), &target = in.indices();
  const OptionalTensor bias = in.optional_tensor(), class_weight = in.optional_tensor();
  LossOptions options;
  options.read_from(in);
  const Head head{hidden, weight, bias, in.real()};
  in.need(in.ok() && is_number(head.scale) && are_targets(hidden, target) && head.fits(options.reduction != "none") &&
          are_class_weights(class_weight, weight.size(0)));
  // A gradient of 0 for an ignored token would not stay 0 in a product with hidden states that are not finite.
  in.need(in.ok() && (!head.records() || counted(target, options.ignore_index) == target.numel()));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] {
    if (head.records()) return HeadCrossEntropy::apply(hidden, weight, bias, target, class_weight, head.scale, options);
    return std::get<0>(cross_entropy(head.logits(), target, class_weight, options, false, false));
  });
}

PyObject* call_log_probs(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 3 + LogProbsArguments::kArguments);
  const Tensor &logits = in.tensor(), &target = in.indices();
  LogProbsArguments options;
  options.read_from(in);
  in.need(in.ok() && options.logit_scale != 0.0 && are_targets(logits, target));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return std::get<0>(log_probs(logits, target, options, false, false, false)); });
}

PyObject* call_linear_log_probs(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 5 + LogProbsArguments::kArguments);
  const Tensor &hidden = in.tensor(), &weight = in.tensor(), &target = in.indices();
  const OptionalTensor bias = in.optional_tensor();
  LogProbsArguments options;
  options.read_from(in);
  const Head head{hidden, weight, bias, options.logit_scale};
  in.need(in.ok() && head.scale != 0.0 && are_targets(hidden, target) && head.fits(false));
  in.need(in.ok() && (!head.records() || counted(target, options.ignore_index) == target.numel()));
  if (!in.ok()) Py_RETURN_NONE;
  options.logit_scale = 1.0;
  return result_of([&] { return std::get<0>(log_probs(head.logits(), target, options, false, false, false)); });
}

PyObject* call_kl_div(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 9);
  const Tensor &logits = in.tensor(), &teacher = in.tensor();
  OptionalTensor target;
  in.optional_indices(target);
  const KlDivArguments options = divergence(in);
  c10::string_view reduction;
  in.reduction(reduction);
  in.need(in.ok() && logits.dim() > 0 && logits.numel() > 0 && teacher.sizes() == logits.sizes());
  in.need(in.ok() && (!target || are_targets(logits, *target)));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return divergence_of(logits, teacher, target, options, reduction); });
}

PyObject* call_linear_kl_div(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 18);
  const Tensor &hidden = in.tensor(), &weight = in.tensor();
  const OptionalTensor teacher_hidden = in.optional_tensor(), teacher_weight = in.optional_tensor(),
                       teacher_logits = in.optional_tensor(), bias = in.optional_tensor(),
                       teacher_bias = in.optional_tensor();
  OptionalTensor target;
  in.optional_indices(target);
  KlDivArguments options = divergence(in);
  c10::string_view reduction;
  in.reduction(reduction);
  const Head head{hidden, weight, bias, in.real()};
  in.optional_positive(options.softcap);
  const double teacher_scale = in.real();
  in.optional_positive(options.teacher_softcap);
  in.need(is_number(head.scale) && head.scale != 0.0 && is_number(teacher_scale) && teacher_scale != 0.0);
  in.need(in.ok() && head.fits(reduction != "none") && (!target || are_targets(hidden, *target)));
  in.need(in.ok() && (!head.records() || !target || counted(*target, options.ignore_index) == target->numel()));
  if (!in.ok()) Py_RETURN_NONE;
  const auto tokens = hidden.sizes().slice(0, hidden.dim() - 1);
  const auto of_tokens = [&](const Tensor& x) { return x.dim() > 0 && x.sizes().slice(0, x.dim() - 1) == tokens; };
  if (teacher_logits) {
    in.need(!teacher_hidden && !teacher_weight && !teacher_bias && teacher_scale == 1.0 && !options.teacher_softcap &&
            of_tokens(*teacher_logits) && teacher_logits->size(-1) == weight.size(0));
    if (!in.ok()) Py_RETURN_NONE;
    return result_of([&] { return divergence_of(head.logits(), *teacher_logits, target, options, reduction); });
  }
  in.need(teacher_hidden && teacher_weight);
  if (!in.ok()) Py_RETURN_NONE;
  const Head teacher{*teacher_hidden, *teacher_weight, teacher_bias, teacher_scale};
  in.need(of_tokens(*teacher_hidden) && teacher.fits(false) && teacher_weight->size(0) == weight.size(0));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] {
    const Tensor of_teacher = [&] {
      const at::NoGradGuard constant;
      return teacher.logits();
    }();
    return divergence_of(head.logits(), of_teacher, target, options, reduction);
  });
}

void set_single_chunk(int64_t multiplications, int64_t tokens) { single_chunk = {multiplications, tokens}; }
std::pair<int64_t, int64_t> get_single_chunk() { return {single_chunk.multiplications, single_chunk.tokens}; }

}  // namespace foundry
