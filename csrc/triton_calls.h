// Argument queries of Triton kernel calls; see triton_calls.cpp.
#pragma once

#include <Python.h>

namespace foundry {

// The methods to add to the extension's module.
PyMethodDef* triton_calls();

}  // namespace foundry
