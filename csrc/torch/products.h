// What PyTorch's matrix products are good for in this process, and the product that takes their place where they are
// slow.
#pragma once

#include <ATen/core/Tensor.h>

#include "common.h"

namespace foundry {

// Whether oneDNN multiplies these faster than float32's: what the processor has instructions for that are fast
// (csrc/cpu/processor.h), unless ONEDNN_MAX_CPU_ISA holds it to older ones. torch's own queries answer for the
// processor alone.
bool fast_bfloat16_products();
bool fast_float16_products();

// As csrc/cpu/product_rates.h measures, of oneDNN's products of bfloat16; negative where it has none.
double onednn_bfloat16_seconds();

// Whether the kernel of csrc/cpu/matmul.h multiplies bfloat16 instead, which it widens: where oneDNN's are slow and
// registers are those of AVX-512, for which that was measured.
bool own_bfloat16_products();

// Whether those of float32 take the registers of AVX-512 where the kernels do: MKL has it for Intel's processors, and
// on AMD's takes AVX2. From Zen 5 on, which computes with these registers whole, that is half the rate.
bool fast_float32_products();

inline bool fast_products(at::ScalarType type) {
  if (type == at::kBFloat16) return fast_bfloat16_products();
  return type == at::kHalf ? fast_float16_products() : fast_float32_products();
}

// Rows, of so many numbers, up to which decode_linear's kernel takes less time than another product
// (docs/dev/performance.md). With matrix instructions that was not measured for more than a call of the kernel takes.
int64_t rows_of_one_pass(at::ScalarType type, int64_t width);

// out = a b, or out += a b, of float32 matrices [M, K] and [K, N], by PyTorch's product where that is fast and by the
// kernel of csrc/cpu/matmul.h elsewhere. out has dense rows or columns. `linear_float32` is F.linear by the same.
// `multiply_bfloat16` is by that kernel, of bfloat16 matrices, where out may be float32.
void multiply_float32(const Tensor& a, const Tensor& b, const Tensor& out, bool add = false);
void multiply_bfloat16(const Tensor& a, const Tensor& b, const Tensor& out, bool add = false);
Tensor linear_float32(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

}  // namespace foundry
