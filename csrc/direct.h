// Calls of the operators from Python that skip torch's binding of operators; see direct.cpp.
#pragma once

#include <Python.h>

#include <string>

namespace foundry {

// To be added to the extension's module.
PyMethodDef* direct_calls();

// Which calls of an operation on a GPU its direct call takes: see OnAccelerator in direct_arguments.h.
void serve_on_accelerator(const std::string& operation, int native, int automatic, int unmeasured);
// Whether csrc/cuda has attention for all GPUs of this process, and csrc/cuda/hopper.
void attention_gpus(bool supported, bool hopper);
// For tests: the device type that counts as a GPU's.
void accelerator(const std::string& type);

}  // namespace foundry
