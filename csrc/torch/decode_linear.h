// Products of rows with transposed matrices by the kernel of csrc/cpu/decode_linear.h, for the operators that are made
// of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../cpu/decode_linear.h"
#include "common.h"

namespace foundry {

// Products y = x w^T of any numbers of rows, divided among the threads together. The rows of y are dense.
class DecodeProducts {
 public:
  void add(const Tensor& x, const Tensor& w, const Tensor& y);
  void run() const;

 private:
  std::vector<DecodeLinear> products_;
  std::vector<Tensor> inputs_;  // what their pointers point into
};

}  // namespace foundry
