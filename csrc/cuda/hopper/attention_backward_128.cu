// The backward pass for head dimensions of 72 to 128.
#include "attention_backward.cuh"

namespace foundry {
namespace cuda {
namespace hopper {

template cudaError_t launch_backward_of_width<128>(const AttentionBackward& a, const BackwardWork& work,
                                                   cudaStream_t stream);

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
