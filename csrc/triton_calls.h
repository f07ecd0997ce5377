// What a call of a Triton kernel asks about its arguments; see triton_calls.cpp.
#pragma once

#include <Python.h>

namespace foundry {

// To be added to the extension's module.
PyMethodDef* triton_calls();

}  // namespace foundry
