// Gated linear units on a GPU over raw pointers and a stream. Each launcher returns the error of its launch.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/swiglu.h"

namespace foundry {
namespace cuda {

cudaError_t glu_forward(const GluForward& args, const GluOptions& options, cudaStream_t stream);
cudaError_t glu_backward(const GluBackward& args, const GluOptions& options, cudaStream_t stream);

}  // namespace cuda
}  // namespace foundry
