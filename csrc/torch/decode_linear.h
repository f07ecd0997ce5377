// Matmuls with transposed matrices by the kernel of csrc/cpu/decode_linear.h, for operators built on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../cpu/decode_linear.h"
#include "common.h"

namespace foundry {

// A batch of matmuls y = x w^T with any number of rows; the threads share all of them. The rows of y are contiguous.
class DecodeProducts {
 public:
  void add(const Tensor& x, const Tensor& w, const Tensor& y);
  void run() const;

 private:
  std::vector<DecodeLinear> products_;
  std::vector<Tensor> inputs_;  // keeps alive what the pointers point into
};

}  // namespace foundry
