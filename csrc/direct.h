// Fast calls of the operators from Python, without torch's binding of operators; see direct.cpp.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <utility>

namespace foundry {

// The methods to add to the extension's module.
PyMethodDef* direct_calls();

// Sets which GPU calls of an operation its direct call handles: see OnAccelerator in direct_arguments.h.
void serve_on_accelerator(const std::string& operation, int native, int automatic, int unmeasured);
// Sets whether csrc/cuda, and csrc/cuda/hopper, support attention on all GPUs of this process.
void attention_gpus(bool supported, bool hopper);
// Sets up to how many multiplications a matmul of linear_cross_entropy is small, and up to how many tokens its direct
// call makes all logits at once.
void set_single_chunk(int64_t multiplications, int64_t tokens);
std::pair<int64_t, int64_t> get_single_chunk();
// For tests: sets the device type that counts as a GPU.
void accelerator(const std::string& type);

}  // namespace foundry
