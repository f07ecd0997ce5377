// Structs that hold the options of an operation. One list of options generates the operator's schema, its C++
// signature, what autograd saves and how direct.cpp reads Python arguments.
//
//   #define FK_EXAMPLE_OPTIONS(OPTION)                  // type, name, reader of direct.cpp, default if there is one
//     OPTION(double, scale, optional_positive)
//     OPTION(OptionalTensor, positions, positions, std::nullopt)
//   struct ExampleOptions {
//     FK_OPTIONS(FK_EXAMPLE_OPTIONS)
//   };
//
// ExampleOptions::schema() is then "float scale, Tensor? positions=None". A kernel takes `const ExampleOptions&`;
// m.impl takes flat_kernel<&kernel>, and Operator<decltype(kernel)> calls the operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <initializer_list>
#include <iomanip>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common.h"

namespace foundry {

using OptionalInt = std::optional<c10::SymInt>;

#define FK_OPTION_MEMBER(type, name, reader, ...) type name{__VA_ARGS__};
#define FK_OPTION_TIED(type, name, reader, ...) std::tie(options.name),
#define FK_OPTION_READ(type, name, reader, ...) in.reader(name);
#define FK_OPTION_ARGUMENTS(type, name, reader, ...) +takes_an_argument(#reader)
#define FK_OPTION_IN_SCHEMA(type, name, reader, ...) schema_text<type>(#name, {__VA_ARGS__}),

// Whether a reader consumes an argument.
constexpr bool takes_an_argument(std::string_view reader) {
  return reader != "not_an_argument" && reader != "second_of_pair";
}

// The contents of an options struct: its members, references to all of them in order, their schema, and a reader of
// Python arguments (the `Arguments` of direct.cpp), which consumes kArguments of them.
#define FK_OPTIONS(LIST)                                         \
  LIST(FK_OPTION_MEMBER)                                         \
  template <class Self>                                          \
  static auto members_of(Self& options) {                        \
    return std::tuple_cat(LIST(FK_OPTION_TIED) std::tuple<>());  \
  }                                                              \
  auto members() { return members_of(*this); }                   \
  auto members() const { return members_of(*this); }             \
  static constexpr int kArguments = 0 LIST(FK_OPTION_ARGUMENTS); \
  template <class Reader>                                        \
  void read_from(Reader& in) {                                   \
    LIST(FK_OPTION_READ)                                         \
  }                                                              \
  static std::string schema() { return join_schema({LIST(FK_OPTION_IN_SCHEMA)}); }

inline std::string schema_type(const OptionalTensor*) { return "Tensor? "; }
inline std::string schema_type(const c10::SymInt*) { return "SymInt "; }
inline std::string schema_type(const OptionalInt*) { return "SymInt? "; }
inline std::string schema_type(const double*) { return "float "; }
inline std::string schema_type(const std::optional<double>*) { return "float? "; }
inline std::string schema_type(const bool*) { return "bool "; }
inline std::string schema_type(const std::vector<int64_t>*) { return "int[]? "; }
inline std::string schema_type(const std::vector<Tensor>*) { return "Tensor[]? "; }
inline std::string schema_type(const int64_t*) { return "int "; }
inline std::string schema_type(const c10::string_view*) { return "str "; }  // valid as long as its source

inline std::string schema_default(bool value) { return value ? "=True" : "=False"; }
inline std::string schema_default(double value) { return c10::str("=", std::setprecision(17), value); }
inline std::string schema_default(int64_t value) { return c10::str("=", value); }
inline std::string schema_default(c10::string_view value) { return c10::str("='", value, "'"); }
inline std::string schema_default(const c10::SymInt& value) { return "=" + std::to_string(value.expect_int()); }
template <class T> std::string schema_default(const std::optional<T>& value) {
  TORCH_INTERNAL_ASSERT(!value.has_value());
  return "=None";
}
template <class T> std::string schema_default(const std::vector<T>& value) {
  TORCH_INTERNAL_ASSERT(value.empty());
  return "=[]";
}

// `default_value` is empty or one value.
template <class T> std::string schema_text(const char* name, std::initializer_list<T> default_value) {
  std::string text = schema_type(static_cast<const T*>(nullptr)) + name;
  for (const T& value : default_value) text += schema_default(value);
  return text;
}

inline std::string join_schema(std::initializer_list<std::string> texts) {
  std::string joined;
  for (const std::string& text : texts) joined += (joined.empty() ? "" : ", ") + text;
  return joined;
}

inline void define_operator(torch::Library& m, const std::string& schema) {
  m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
}

// --- operators ----------------------------------------------------------------------------------------------------

template <class...> struct Types {};

template <class T, class = void> struct IsOptions : std::false_type {};
template <class T> struct IsOptions<T, std::void_t<decltype(T::schema())>> : std::true_type {};

// The dispatcher passes tensors by reference and everything else by value. An absent list is None, since the dispatcher
// takes 0.7 us to make an empty one.
template <class T> struct OperatorArgumentOf {
  using type = std::conditional_t<std::is_same_v<T, OptionalTensor>, const T&, T>;
};
template <class T> struct OperatorArgumentOf<std::vector<T>> {
  using type = std::optional<std::vector<T>>;
};
template <class T> using OperatorArgument = typename OperatorArgumentOf<T>::type;

template <class T> T&& member_of(T&& argument) { return std::forward<T>(argument); }
template <class T> std::vector<T> member_of(std::optional<std::vector<T>>&& argument) {
  return argument.has_value() ? *std::move(argument) : std::vector<T>();
}

// The operator arguments that one C++ argument expands to: the members of an options struct, or the argument itself.
template <class Argument, class = void> struct Flattened {
  using type = Types<Argument>;
  static constexpr size_t count = 1;

  static std::tuple<const std::decay_t<Argument>&> references(const std::decay_t<Argument>& argument) {
    return {argument};
  }
  template <size_t first, class All> static Argument from(All& all) {
    return static_cast<Argument>(std::get<first>(std::move(all)));
  }
};

template <class Members> struct OperatorArguments;
template <class... Members> struct OperatorArguments<std::tuple<const Members&...>> {
  using type = Types<OperatorArgument<Members>...>;
  static constexpr size_t count = sizeof...(Members);
};

template <class Options> struct Flattened<const Options&, std::enable_if_t<IsOptions<Options>::value>> {
  using Arguments = OperatorArguments<decltype(std::declval<const Options>().members())>;
  using type = typename Arguments::type;
  static constexpr size_t count = Arguments::count;

  static auto references(const Options& options) { return options.members(); }
  template <size_t first, class All> static Options from(All& all) {
    return from<first>(all, std::make_index_sequence<count>());
  }
  template <size_t first, class All, size_t... i> static Options from(All& all, std::index_sequence<i...>) {
    return Options{member_of(std::get<first + i>(std::move(all)))...};
  }
};

template <class... Lists> struct Joined;
template <class... Ts> struct Joined<Types<Ts...>> {
  using type = Types<Ts...>;
};
template <class... As, class... Bs, class... Lists>
struct Joined<Types<As...>, Types<Bs...>, Lists...> : Joined<Types<As..., Bs...>, Lists...> {};

// A function that takes the members of option structs one by one.
template <class Result, class Arguments, class FlatArguments> struct FlatFunction;
template <class Result, class... Arguments, class... Flat>
struct FlatFunction<Result, Types<Arguments...>, Types<Flat...>> {
  using Signature = Result(Flat...);

  template <auto kernel> static Result call(Flat... flat) {
    return regroup<kernel>(std::forward_as_tuple(std::forward<Flat>(flat)...), std::index_sequence_for<Arguments...>());
  }

 private:
  static constexpr size_t start(size_t argument) {
    const size_t counts[] = {Flattened<Arguments>::count...};
    size_t before = 0;
    for (size_t i = 0; i < argument; ++i) before += counts[i];
    return before;
  }
  template <auto kernel, class All, size_t... i> static Result regroup(All all, std::index_sequence<i...>) {
    return kernel(Flattened<Arguments>::template from<start(i)>(all)...);
  }
};

template <class Function> struct Flat;
template <class Result, class... Arguments>
struct Flat<Result(Arguments...)>
    : FlatFunction<Result, Types<Arguments...>,
                   typename Joined<Types<>, typename Flattened<Arguments>::type...>::type> {};

// For m.impl: `kernel` with its option structs expanded into single arguments.
template <auto kernel>
constexpr auto* flat_kernel = &Flat<std::remove_pointer_t<decltype(kernel)>>::template call<kernel>;

// A call through the dispatcher of the operator with this C++ signature, below autograd: whoever calls it has recorded
// the call or has nothing to record, and autograd's fallback for operators without a rule takes 2 us.
template <class Function> class Operator;
template <class Result, class... Arguments> class Operator<Result(Arguments...)> {
  using Signature = typename Flat<Result(Arguments...)>::Signature;

 public:
  explicit Operator(const char* name)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>()) {}

  Result operator()(const std::decay_t<Arguments>&... arguments) const {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return std::apply([&](const auto&... each) { return op_.call(each...); },
                      std::tuple_cat(Flattened<Arguments>::references(arguments)...));
  }

 private:
  c10::TypedOperatorHandle<Signature> op_;
};

// --- autograd -----------------------------------------------------------------------------------------------------

// What autograd saves of the options: tensors are appended to those for save_for_backward; the rest goes into an
// IValue, of a list of tensors their number.
template <class Options> c10::IValue save_options(const Options& options, torch::autograd::variable_list& tensors) {
  std::vector<c10::IValue> rest;
  rest.reserve(std::tuple_size_v<decltype(options.members())>);
  const auto save = [&](const auto& member) {
    using Member = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<Member, OptionalTensor>) {
      tensors.push_back(unwrap(member));
    } else if constexpr (std::is_same_v<Member, std::vector<Tensor>>) {
      tensors.insert(tensors.end(), member.begin(), member.end());
      rest.emplace_back(static_cast<int64_t>(member.size()));
    } else {
      rest.emplace_back(member);
    }
  };
  std::apply([&](const auto&... each) { (save(each), ...); }, options.members());
  return c10::ivalue::Tuple::create(std::move(rest));
}

// As `save_options` in ctx, for options without tensors. Saving takes as long as a small call, so usual ones are not
// saved.
template <class Options>
void save_unless_usual(torch::autograd::AutogradContext* ctx, const Options& options, const Options& usual) {
  torch::autograd::variable_list none;
  if (options.members() != usual.members()) ctx->saved_data["options"] = save_options(options, none);
}

// Restores the options. Their tensors come first in `tensors`.
template <class Options> Options load_options(const Tensor* tensors, const c10::IValue& rest) {
  Options options{};
  size_t n = 0;
  const auto load = [&](auto& member) {
    using Member = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<Member, OptionalTensor>) {
      member = wrap(*tensors++);
    } else if constexpr (std::is_same_v<Member, std::vector<Tensor>>) {
      const int64_t given = rest.toTupleRef().elements()[n++].toInt();
      member.assign(tensors, tensors + given);
      tensors += given;
    } else {
      member = rest.toTupleRef().elements()[n++].template to<Member>();
    }
  };
  std::apply([&](auto&... each) { (load(each), ...); }, options.members());
  return options;
}

template <class Options> Options load_or_usual(torch::autograd::AutogradContext* ctx, const Options& usual) {
  const auto found = ctx->saved_data.find("options");
  return found == ctx->saved_data.end() ? usual : load_options<Options>(nullptr, found->second);
}

}  // namespace foundry
