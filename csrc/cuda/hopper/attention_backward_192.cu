// The backward pass for head dimensions of 136 to 192, with values of up to 128 columns.
#include "attention_backward.cuh"

namespace foundry {
namespace cuda {
namespace hopper {

template cudaError_t launch_backward_of_width<192>(const AttentionBackward& a, const BackwardWork& work,
                                                   cudaStream_t stream);

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
