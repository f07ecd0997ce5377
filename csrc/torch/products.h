// How fast PyTorch's matmuls are in this process, and our own matmul for where they are slow.
#pragma once

#include <ATen/core/Tensor.h>

#include "common.h"

namespace foundry {

// Whether oneDNN's bfloat16 matmuls are faster than its float32 ones. That holds if the processor has fast instructions
// for them (csrc/cpu/processor.h) and ONEDNN_MAX_CPU_ISA does not restrict oneDNN to older ones. torch's own queries
// look at the processor alone.
bool fast_bfloat16_products();
bool fast_float16_products();

// Seconds of oneDNN's bfloat16 matmuls, measured as in csrc/cpu/product_rates.h. Negative if there are none.
double onednn_bfloat16_seconds();

// Whether the kernel of csrc/cpu/matmul.h, which widens bfloat16 to float32, replaces oneDNN: where oneDNN is slow and
// the kernels use AVX-512, for which this was measured.
bool own_bfloat16_products();

// Whether float32 matmuls use AVX-512 registers if our kernels do. MKL uses them on Intel processors, but AVX2 on AMD.
// From Zen 5 on, whose AVX-512 units are full width, that is half the speed.
bool fast_float32_products();

inline bool fast_products(at::ScalarType type) {
  if (type == at::kBFloat16) return fast_bfloat16_products();
  return type == at::kHalf ? fast_float16_products() : fast_float32_products();
}

// The number of rows of this width up to which decode_linear's kernel is faster than another matmul
// (docs/dev/performance.md). With matrix instructions it was not measured beyond one call of the kernel.
int64_t rows_of_one_pass(at::ScalarType type, int64_t width);

// out = a b, or out += a b, of float32 matrices [M, K] and [K, N]. Uses PyTorch's matmul if that is fast and the kernel
// of csrc/cpu/matmul.h otherwise. out has contiguous rows or columns. `linear_float32` is F.linear by the same rule.
// `multiply_bfloat16` always uses the kernel; its inputs are bfloat16 and out may be float32.
void multiply_float32(const Tensor& a, const Tensor& b, const Tensor& out, bool add = false);
void multiply_bfloat16(const Tensor& a, const Tensor& b, const Tensor& out, bool add = false);
Tensor linear_float32(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

}  // namespace foundry
