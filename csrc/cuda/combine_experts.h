// Weighted sums of rows on a GPU over raw pointers and a stream. Each launcher returns the error of its launch.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/combine_experts.h"

namespace foundry {
namespace cuda {

// Never reads outside x: a token with a slot beyond its rows becomes NaN.
cudaError_t combine_experts_forward(const CombineExpertsForward& args, cudaStream_t stream);

// Rows of dx that no slot refers to become zero. `named` has one byte per row of dx, zero before the call; null if dx
// is null.
cudaError_t combine_experts_backward(const CombineExpertsBackward& args, uint8_t* named, cudaStream_t stream);

}  // namespace cuda
}  // namespace foundry
