// Tensor maps by the driver's cuTensorMapEncodeTiled. The runtime gives its address, so the extension does not link the
// driver's library. Under the checker, hopper_tensor_map.h provides encode_map.
#include "tensor_map.cuh"

#if !defined(FK_CUDA_ON_CPU)
#include <cuda_runtime_api.h>

namespace foundry {
namespace cuda {
namespace hopper {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);
constexpr unsigned kSince = 12000;  // the CUDA version of the function's signature
constexpr int kRank = 4;
constexpr cuuint64_t kElement = 2;  // bytes

struct EntryPoint {
  Encode encode = nullptr;
  cudaError_t error = cudaErrorSymbolNotFound;
};

EntryPoint find_entry_point() {
  EntryPoint found;
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, kSince, cudaEnableDefault, &result);
  if (error != cudaSuccess) found.error = error;
  else if (result == cudaDriverEntryPointSuccess && address) found = {reinterpret_cast<Encode>(address), cudaSuccess};
  return found;
}

}  // namespace

cudaError_t encode_map(TensorMap& map, const MapOf& of) {
  static const EntryPoint driver = find_entry_point();
  if (driver.error != cudaSuccess) return driver.error;
  const cuuint64_t sizes[kRank] = {static_cast<cuuint64_t>(of.columns), static_cast<cuuint64_t>(of.tokens),
                                   static_cast<cuuint64_t>(of.heads), static_cast<cuuint64_t>(of.batches)};
  // No address depends on the stride of a dimension of size 1, but the driver requires a valid one.
  const auto bytes = [&](int64_t stride, int64_t size) {
    return kElement * static_cast<cuuint64_t>(size > 1 ? stride : of.columns);
  };
  const cuuint64_t strides[kRank - 1] = {bytes(of.strides.token, of.tokens), bytes(of.strides.head, of.heads),
                                         bytes(of.strides.batch, of.batches)};
  const cuuint32_t box[kRank] = {kPanel, static_cast<cuuint32_t>(of.rows), 1, 1}, steps[kRank] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      of.type == Dtype::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      driver.encode(&map, type, kRank, const_cast<void*>(of.data), sizes, strides, box, steps,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);  // zeros
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
#endif
