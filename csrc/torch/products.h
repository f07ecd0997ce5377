// What PyTorch's matrix products are good for in this process.
#pragma once

#include <c10/core/ScalarType.h>

namespace foundry {

// Whether oneDNN multiplies these faster than float32's: what the processor has instructions for, unless
// ONEDNN_MAX_CPU_ISA holds it to older ones. torch's own queries answer for the processor alone.
bool fast_bfloat16_products();
bool fast_float16_products();

// Whether those of float32 take the registers of AVX-512 where the kernels do: MKL has it for Intel's processors, and
// on AMD's takes AVX2, at half the rate.
bool fast_float32_products();

inline bool fast_products(at::ScalarType type) {
  if (type == at::kBFloat16) return fast_bfloat16_products();
  return type == at::kHalf ? fast_float16_products() : fast_float32_products();
}

}  // namespace foundry
