// Fast calls of the operators from Python, without torch's binding of operators; see direct.cpp.
#pragma once

#include <Python.h>

#include <string>

namespace foundry {

// The methods to add to the extension's module.
PyMethodDef* direct_calls();

// Sets which GPU calls of an operation its direct call handles: see OnAccelerator in direct_arguments.h.
void serve_on_accelerator(const std::string& operation, int native, int automatic, int unmeasured);
// Sets whether csrc/cuda, and csrc/cuda/hopper, support attention on all GPUs of this process.
void attention_gpus(bool supported, bool hopper);
// For tests: sets the device type that counts as a GPU.
void accelerator(const std::string& type);

}  // namespace foundry
