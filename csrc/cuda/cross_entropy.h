// Cross-entropy on a GPU over raw pointers and a stream. Each launcher returns the error of its launch.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/cross_entropy.h"

namespace foundry {
namespace cuda {

// Sums losses over the rows and, unless null, zs. For a mean, divides by the sum of the weights of the targets that are
// not ignored.
struct CrossEntropyReduce {
  const float* losses;
  const float* zs;
  const int64_t* target;
  const float* weight;
  float* loss;
  float* z_loss;        // or null
  float* total_weight;  // or null
  int64_t n_rows, n_cols, ignore_index;
  bool mean;
};

cudaError_t cross_entropy_forward(const CrossEntropyForward& args, cudaStream_t stream);
cudaError_t cross_entropy_reduce(const CrossEntropyReduce& args, cudaStream_t stream);
cudaError_t cross_entropy_backward(const CrossEntropyBackward& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace foundry
