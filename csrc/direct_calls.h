// What the files of direct calls share (direct.cpp).
#pragma once

#include <torch/csrc/Exceptions.h>

#include <tuple>
#include <vector>

#include "direct_arguments.h"

namespace foundry {

inline PyObject* to_python(const Tensor& t) { return THPVariable_Wrap(t); }
inline PyObject* to_python(const std::tuple<Tensor, Tensor>& pair) {
  PyObject* out = PyTuple_New(2);
  if (!out) throw python_error();
  PyTuple_SET_ITEM(out, 0, to_python(std::get<0>(pair)));
  PyTuple_SET_ITEM(out, 1, to_python(std::get<1>(pair)));
  return out;
}
inline PyObject* to_python(const std::vector<Tensor>& tensors) {
  PyObject* out = PyTuple_New(static_cast<Py_ssize_t>(tensors.size()));
  if (!out) throw python_error();
  for (size_t i = 0; i < tensors.size(); ++i) PyTuple_SET_ITEM(out, static_cast<Py_ssize_t>(i), to_python(tensors[i]));
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

// A direct call: reads its arguments and calls the operator, or returns None.
using DirectCall = PyObject*(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given);
DirectCall call_flash_attention, call_decode_blocks;  // direct_attention.cpp
DirectCall call_cross_entropy, call_linear_cross_entropy, call_log_probs, call_linear_log_probs, call_kl_div,
    call_linear_kl_div;                                         // direct_losses.cpp
DirectCall call_lora_linear;                                    // direct_lora.cpp
DirectCall call_gated_delta_rule_step, call_short_conv1d_step;  // direct_steps.cpp

}  // namespace foundry
