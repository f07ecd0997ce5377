// Reads the arguments of direct calls (direct.cpp) from Python objects.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>

#include "torch/numbers.h"
#include "torch/operators.h"

namespace foundry {

inline bool within(c10::DispatchKeySet keys, c10::DispatchKeySet known) {
  return (keys.raw_repr() & ~known.raw_repr()) == 0;
}

inline bool common_thread() {
  return within(c10::impl::tls_local_dispatch_key_set().included_, c10::default_included_set) &&
         !at::impl::torch_function_mode_enabled();
}

// Dense, on the CPU or the accelerator, and not conjugate, negated, batched, forward-mode dual, ...
inline bool common_tensor(const Tensor& t, c10::DeviceType accelerator) {
  constexpr c10::DispatchKeySet kCpu{c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                                     c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU};
  constexpr c10::DispatchKeySet kAccelerator{c10::DispatchKey::CUDA,         c10::DispatchKey::ADInplaceOrView,
                                             c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA,
                                             c10::DispatchKey::Meta,         c10::DispatchKey::AutogradMeta};
  if (!t.defined()) return false;
  const bool here =
      t.is_cpu() ? within(t.key_set(), kCpu) : t.device().type() == accelerator && within(t.key_set(), kAccelerator);
  return here && !t._fw_grad(0).defined();
}

// One bit per dtype that kernels support; 0 for other dtypes.
inline uint8_t dtype_bit(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return 1;
    case at::kBFloat16: return 2;
    case at::kHalf: return 4;
    default: return 0;
  }
}

// Which calls on the accelerator an operation's native kernels handle, as bits of dtypes: calls that name "native",
// calls for which "auto" is native, and calls for which no other order of backends was measured. OpSpec.choose decides.
struct OnAccelerator {
  uint8_t native = 0, automatic = 0, unmeasured = 0;
  // CUDA. Tests without a GPU set it to Meta, whose tensors take the same path up to the kernels.
  inline static c10::DeviceType type = c10::DeviceType::CUDA;
};

// Whether autocast is enabled for the tensor's device.
inline bool autocasts(const Tensor& t) { return at::autocast::is_autocast_enabled(t.is_cpu() ? at::kCPU : at::kCUDA); }

// Reads the arguments of a call in order. `ok()` tells at the end whether every argument was as expected; one that was
// not is read as a default.
class Arguments {
 public:
  Arguments(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given, Py_ssize_t wanted)
      : next_(arguments),
        ok_(given == wanted && common_thread() && is_text(*arguments, "auto", "native")) {
    if (!ok_) return;
    is_auto_ = PyUnicode_CompareWithASCIIString(*next_++, "auto") == 0;  // backend
    on_accelerator_ = is_auto_ ? served.automatic : served.native;
  }
  // The arguments that a CPU call passes together in a tuple.
  Arguments(PyObject* tuple, Py_ssize_t wanted)
      : next_(nullptr),
        ok_(PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == wanted) {
    if (ok_) next_ = PySequence_Fast_ITEMS(tuple);
  }

  bool ok() const { return ok_; }
  bool is_auto() const { return is_auto_; }
  void need(bool condition) { ok_ = ok_ && condition; }

  // A tensor of a dtype that kernels support. The first tensor's dtype decides which kernels run.
  const Tensor& tensor() {
    const bool is_first = first_ == nullptr;
    const Tensor& t = any_tensor();
    const uint8_t bit = ok_ ? dtype_bit(t) : 0;
    need(bit != 0 && (!is_first || t.is_cpu() || (bit & on_accelerator_)));
    return t;
  }
  OptionalTensor optional_tensor() { return take_none() ? OptionalTensor() : OptionalTensor(tensor()); }
  bool boolean() {
    need(ok_ && PyBool_Check(*next_));
    return ok_ && *next_++ == Py_True;
  }
  PyObject* list() {
    need(ok_ && PyList_CheckExact(*next_));
    return ok_ ? *next_++ : nullptr;
  }
  double real() {
    need(ok_ && PyFloat_CheckExact(*next_));
    return ok_ ? PyFloat_AS_DOUBLE(*next_++) : 0.0;
  }
  // One of two words. Returns whether it is the first.
  bool word(const char* first, const char* second) {
    need(ok_ && is_text(*next_, first, second));
    return ok_ && PyUnicode_CompareWithASCIIString(*next_++, first) == 0;
  }
  // None or one of two words. Returns whether it is a word.
  bool optional_word(const char* first, const char* second) {
    if (take_none()) return false;
    word(first, second);
    return true;
  }

  const Tensor& indices() {
    const Tensor& t = any_tensor();
    need(ok_ && (t.scalar_type() == at::kLong || t.scalar_type() == at::kInt));
    return t;
  }

  double not_negative() {
    const double value = real();
    need(is_not_negative(value));
    return value;
  }

  // Readers of options, named as in their lists (torch/options.h). Allowed numbers are those of numbers.h.
  template <class T> void not_an_argument(T&) {}
  template <class T> void none(T&) { need(take_none()); }
  void boolean(bool& value) { value = boolean(); }
  void number(double& value) { need(is_number(value = real())); }
  void optional_positive(double& value) {  // None is 0
    if (!take_none()) need(is_positive_number(value = real()));
  }
  void optional_positive(std::optional<double>& value) {
    if (!take_none()) need(is_positive_number(*(value = real())));
  }
  void not_negative(double& value) { value = not_negative(); }
  void fraction(double& value) { need((value = not_negative()) <= 1.0); }
  void integer(int64_t& value) {
    need(ok_ && PyLong_CheckExact(*next_));
    if (!ok_) return;
    int overflow = 0;
    value = PyLong_AsLongLongAndOverflow(*next_++, &overflow);
    need(overflow == 0);
  }
  void reduction(c10::string_view& value) {
    for (const char* name : {"mean", "none", "sum"})
      if (ok_ && is_text(*next_, name, name)) value = name;
    need(!value.empty());
    next_ += ok_;
  }
  void zero(std::optional<double>&) { need(real() == 0.0); }  // 0 or None, read as absent
  void optional_indices(OptionalTensor& value) {
    if (!take_none()) value = indices();
  }
  // The two sides of a window, each None or a number >= 0. None may stand for the pair.
  void first_of_pair(OptionalInt& value) {
    const bool is_pair = ok_ && PyTuple_CheckExact(*next_) && PyTuple_GET_SIZE(*next_) == 2;
    need(ok_ && (is_pair || *next_ == Py_None));
    if (ok_ && is_pair) value = count(PyTuple_GET_ITEM(*next_, 0));
  }
  void second_of_pair(OptionalInt& value) {  // and moves to the next argument
    if (ok_ && *next_ != Py_None) value = count(PyTuple_GET_ITEM(*next_, 1));
    next_ += ok_;
  }
  void positive(double& value) { need(is_positive_number(value = real())); }
  void positive(int64_t& value) {
    const OptionalInt number = next_count();
    need(number.has_value() && *number > 0);
    if (ok_) value = number->expect_int();
  }
  void count(c10::SymInt& value) {
    const OptionalInt number = next_count();
    need(number.has_value());
    if (ok_) value = *number;
  }
  void optional_count(OptionalInt& value) { value = next_count(); }
  void text(c10::string_view& value) {  // valid as long as the argument
    need(ok_ && PyUnicode_CheckExact(*next_));
    Py_ssize_t size = 0;
    const char* data = ok_ ? PyUnicode_AsUTF8AndSize(*next_++, &size) : nullptr;
    need(data != nullptr);
    if (ok_) value = {data, static_cast<size_t>(size)};
  }
  void alignment(bool& bottom_right) { bottom_right = word("bottom_right", "top_left"); }

 private:
  static bool is_text(PyObject* object, const char* first, const char* second) {
    return PyUnicode_CheckExact(object) && (PyUnicode_CompareWithASCIIString(object, first) == 0 ||
                                            PyUnicode_CompareWithASCIIString(object, second) == 0);
  }
  bool take_none() {
    const bool is_none = ok_ && *next_ == Py_None;
    next_ += is_none;
    return is_none;
  }
  const Tensor& any_tensor() {
    static const Tensor undefined;
    need(ok_ && THPVariable_CheckExact(*next_) && common_tensor(THPVariable_Unpack(*next_), OnAccelerator::type));
    if (!ok_) return undefined;
    const Tensor& t = THPVariable_Unpack(*next_++);
    if (!first_) first_ = &t;
    need(t.device() == first_->device());
    return t;
  }
  OptionalInt count(PyObject* object) {
    if (object == Py_None) return std::nullopt;
    need(PyLong_CheckExact(object));
    if (!ok_) return std::nullopt;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    need(overflow == 0 && value >= 0);
    return value;
  }

  OptionalInt next_count() { return ok_ ? count(*next_++) : std::nullopt; }

  PyObject* const* next_;
  bool ok_, is_auto_ = false;
  uint8_t on_accelerator_ = 0;
  const Tensor* first_ = nullptr;  // all tensors must be on its device
};

}  // namespace foundry
