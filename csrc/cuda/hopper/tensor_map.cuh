// Tensor maps: how TMA sees a tensor [batch, head, token, column] of 16-bit numbers in global memory.
#pragma once

#include "../flash_attention.h"

#if defined(FK_CUDA_ON_CPU)
#include "hopper_tensor_map.h"
#else
#include <cuda.h>

namespace foundry {
namespace cuda {
namespace hopper {
using TensorMap = CUtensorMap;
}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
#endif

namespace foundry {
namespace cuda {
namespace hopper {

constexpr int kPanel = 64;           // columns of a box: 128 bytes, the width of the swizzle
constexpr int kPanelBytes = 128;     // of a row of a panel
constexpr int kSwizzleBytes = 1024;  // of 8 rows; a box begins at a multiple of it

// The tensor's sizes and element strides. A box has `rows` tokens and kPanel columns. In shared memory the 16-byte
// chunk c of row r of a box is at byte 128 r + 16 (c ^ r % 8).
struct MapOf {
  const void* data;
  Dtype type;
  int64_t batches, heads, tokens, columns;
  HeadStrides strides;
  int rows;
};

// Returns cudaErrorInvalidValue if the driver rejects it.
cudaError_t encode_map(TensorMap& map, const MapOf& of);

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry

#if defined(FK_CUDA_ON_CPU)
#include "hopper_encode_map.h"
#endif
