// The options of attention as one object. An operator's schema and its function list them one by one, and autograd
// keeps them: only here are they taken apart and put together.
//
// A new option is a member of AttentionOptions, its place in `members` and its type in FK_ATTENTION_OPTIONS.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "common.h"

namespace foundry {

using OptionalInt = std::optional<c10::SymInt>;

// The schema of what follows, in its order.
#define FK_ATTENTION_OPTIONS                                                                            \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, " \
  "SymInt? window_left, SymInt? window_right, float? softcap, Tensor? alibi_slopes, Tensor? sinks, "    \
  "bool bottom_right, bool deterministic"

struct AttentionOptions {
  OptionalTensor cu_seqlens_q, cu_seqlens_k;  // given for packed sequences
  c10::SymInt max_seqlen_q, max_seqlen_k;
  double scale;
  OptionalInt window_left, window_right;
  std::optional<double> softcap;
  OptionalTensor alibi_slopes, sinks;
  bool bottom_right;
  bool deterministic;  // of no account on the CPU, where everything is

  bool packed() const { return cu_seqlens_q.has_value(); }

  // References to all of them, in the order of the schema.
  template <class Self> static auto members_of(Self& o) {
    return std::tie(o.cu_seqlens_q, o.cu_seqlens_k, o.max_seqlen_q, o.max_seqlen_k, o.scale, o.window_left,
                    o.window_right, o.softcap, o.alibi_slopes, o.sinks, o.bottom_right, o.deterministic);
  }
  auto members() { return members_of(*this); }
  auto members() const { return members_of(*this); }
};

template <class...> struct Types {};

// The dispatcher passes tensors by reference and all else by value.
template <class T> using OperatorArgument = std::conditional_t<std::is_same_v<T, OptionalTensor>, const T&, T>;

template <class Members> struct OperatorArguments;
template <class... Members> struct OperatorArguments<std::tuple<const Members&...>> {
  using type = Types<OperatorArgument<Members>...>;
};

template <class Result, class Before, class Options, class After> struct FlatOperator;
template <class Result, class... Before, class... Options, class... After>
struct FlatOperator<Result, Types<Before...>, Types<Options...>, Types<After...>> {
  using Signature = Result(Before..., Options..., After...);

  template <auto kernel> static Result kernel_of(Before... before, Options... options, After... after) {
    return kernel(before..., AttentionOptions{std::forward<Options>(options)...}, after...);
  }

  static Result call(const c10::TypedOperatorHandle<Signature>& op, Before... before, const AttentionOptions& options,
                     After... after) {
    return std::apply([&](const auto&... each) { return op.call(before..., each..., after...); }, options.members());
  }
};

// Of a function's arguments: those before AttentionOptions, and those after.
template <class Result, class Before, class Rest> struct SplitArguments;
template <class Result, class... Before, class... After>
struct SplitArguments<Result, Types<Before...>, Types<const AttentionOptions&, After...>> {
  using Options = typename OperatorArguments<decltype(std::declval<const AttentionOptions>().members())>::type;
  using type = FlatOperator<Result, Types<Before...>, Options, Types<After...>>;
};
template <class Result, class... Before, class Next, class... Rest>
struct SplitArguments<Result, Types<Before...>, Types<Next, Rest...>>
    : SplitArguments<Result, Types<Before..., Next>, Types<Rest...>> {};

template <class Function> struct Flat;
template <class Result, class... Arguments>
struct Flat<Result(Arguments...)> : SplitArguments<Result, Types<>, Types<Arguments...>>::type {};

// For m.impl: `kernel(tensors..., const AttentionOptions&, flags...)` with the options one by one.
template <auto kernel>
constexpr auto* flat_kernel = &Flat<std::remove_pointer_t<decltype(kernel)>>::template kernel_of<kernel>;

// A call through the dispatcher of the operator that is implemented by functions of this type.
template <class Function> class AttentionOperator {
 public:
  explicit AttentionOperator(const char* name)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<typename Flat<Function>::Signature>()) {}

  template <class... Arguments> auto operator()(const Arguments&... arguments) const {
    return Flat<Function>::call(op_, arguments...);
  }

 private:
  c10::TypedOperatorHandle<typename Flat<Function>::Signature> op_;
};

// What autograd keeps of the options: the tensors, appended to those that go through save_for_backward, and the rest.
inline c10::IValue save_options(const AttentionOptions& options, torch::autograd::variable_list& tensors) {
  std::vector<c10::IValue> rest;
  const auto save = [&](const auto& member) {
    using Member = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<Member, OptionalTensor>) tensors.push_back(unwrap(member));
    else rest.emplace_back(member);
  };
  std::apply([&](const auto&... each) { (save(each), ...); }, options.members());
  return c10::ivalue::Tuple::create(std::move(rest));
}

// The options again; `tensors` begins with theirs.
inline AttentionOptions load_options(const Tensor* tensors, const c10::IValue& rest) {
  AttentionOptions options{};
  size_t n = 0;
  const auto load = [&](auto& member) {
    using Member = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<Member, OptionalTensor>) member = wrap(*tensors++);
    else member = rest.toTupleRef().elements()[n++].to<Member>();
  };
  std::apply([&](auto&... each) { (load(each), ...); }, options.members());
  return options;
}

}  // namespace foundry
