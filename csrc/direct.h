// Calls of the operators from Python that skip torch's binding of operators; see direct.cpp.
#pragma once

#include <Python.h>

namespace foundry {

// To be added to the extension's module.
PyMethodDef* direct_calls();

}  // namespace foundry
