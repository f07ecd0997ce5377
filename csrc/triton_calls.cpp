// Argument queries of Triton kernel calls. In Python each of them takes 0.1 to 0.3 us per tensor, and an attention call
// has twenty tensors. `_triton/operators.py` and `_triton/launch.py` do the same in Python if there is no extension.
#include "triton_calls.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/profiler.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/object_ptr.h>

namespace foundry {
namespace {

using c10::DispatchKey;

// Whether a mode, profiler or tracer is active, so that the call must go through the dispatcher. (So must transforms,
// but torch's header for them needs a library that wheels lack; Python checks for them.)
bool watched() {
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 || at::impl::PythonTorchFunctionTLS::stack_len() > 0 ||
         torch::autograd::profiler::profilerEnabled() || torch::jit::tracer::isTracing();
}

// Whether the object is a Tensor or Parameter that is plain memory on a device: no lazy negation, no wrapper.
bool plain(PyObject* object) {
  constexpr c10::DispatchKeySet kPlain{
      DispatchKey::CPU,         DispatchKey::CUDA,         DispatchKey::AutogradCPU,    DispatchKey::AutogradCUDA,
      DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA, DispatchKey::ADInplaceOrView};
  return THPVariable_CheckExact(object) && (THPVariable_Unpack(object).key_set().raw_repr() & ~kPlain.raw_repr()) == 0;
}

// Whether all tensors among the values, including those in tuples, are plain. Sets `first` to the first one.
bool all_plain(PyObject* values, PyObject*& first) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); ++i) {
    PyObject* value = PyTuple_GET_ITEM(values, i);
    if (value == Py_None) continue;
    if (PyTuple_Check(value)) {
      if (!all_plain(value, first)) return false;
    } else if (THPVariable_Check(value)) {
      if (!plain(value)) return false;
      if (!first) first = value;
    }
  }
  return true;
}

// usual_device(arguments): the device index of the tensors among them (-1: CPU). None if the dispatcher must see the
// call.
PyObject* usual_device(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* first = nullptr;
  if (!PyTuple_Check(arguments) || watched() || !all_plain(arguments, first) || !first) Py_RETURN_NONE;
  const at::Tensor& x = THPVariable_Unpack(first);
  return PyLong_FromLong(x.is_cpu() ? -1 : x.get_device());
  END_HANDLE_TH_ERRORS
}

// What Triton specialises a pointer on, and a little more, in one byte.
uint8_t kind(const at::Tensor& x, bool aligned) {
  static_assert(static_cast<int>(c10::ScalarType::NumOptions) < 63, "a type has 6 bits, and all bits stand for None");
  return static_cast<uint8_t>(static_cast<int>(x.scalar_type()) << 2 | (aligned ? 2 : 0) | (x.is_cpu() ? 1 : 0));
}

// pointers(tensors): (one byte per tensor, launch arguments in their place). A GPU tensor becomes its address, which
// Triton's launcher would otherwise ask for and then look up. A CPU tensor stays as it is, so that the launcher rejects
// it. Returns None if a value is neither a tensor nor None.
PyObject* pointers(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kMost = 64;
  const Py_ssize_t n = PyTuple_Check(tensors) ? PyTuple_GET_SIZE(tensors) : kMost + 1;
  if (n > kMost) Py_RETURN_NONE;
  uint8_t kinds[kMost];
  THPObjectPtr taken(PyTuple_New(n));
  if (!taken) throw python_error();
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* value = PyTuple_GET_ITEM(tensors, i);
    if (value != Py_None) {
      if (!THPVariable_Check(value)) Py_RETURN_NONE;
      const at::Tensor& x = THPVariable_Unpack(value);
      const auto address = reinterpret_cast<uintptr_t>(x.data_ptr());
      kinds[i] = kind(x, address % 16 == 0);
      if (!x.is_cpu()) {
        PyObject* number = PyLong_FromUnsignedLongLong(address);
        if (!number) throw python_error();
        PyTuple_SET_ITEM(taken.get(), i, number);
        continue;
      }
    } else {
      kinds[i] = 0xFF;
    }
    Py_INCREF(value);
    PyTuple_SET_ITEM(taken.get(), i, value);
  }
  THPObjectPtr key(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(kinds), n));
  if (!key) throw python_error();
  return PyTuple_Pack(2, key.get(), taken.get());
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef* triton_calls() {
  static PyMethodDef methods[] = {
      {"usual_device", usual_device, METH_O,
       "The device of plain tensors, or None if the dispatcher must see the call."},
      {"pointers", pointers, METH_O, "The cache key of a launch, and its arguments in place of tensors."},
      {nullptr, nullptr, 0, nullptr},
  };
  return methods;
}

}  // namespace foundry
