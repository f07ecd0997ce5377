// encode_map of csrc/cuda/hopper/tensor_map.cuh for the checker: refuses what the driver refuses.
#pragma once

namespace foundry {
namespace cuda {
namespace hopper {

inline const void* refused_data = nullptr;  // a tensor that a test has it refuse for no reason

inline cudaError_t encode_map(TensorMap& map, const MapOf& of) {
  const auto sized = [](int64_t size) { return size >= 1 && size <= int64_t(1) << 32; };
  const auto strided = [](int64_t elements, int64_t size) {  // of one there is no step to a next
    return size == 1 || (elements > 0 && elements < int64_t(1) << 39 && elements % 8 == 0);
  };
  if (!of.data || of.data == refused_data || reinterpret_cast<uintptr_t>(of.data) % 16 != 0 || of.type == Dtype::f32 ||
      of.rows < 1 || of.rows > 256 || !sized(of.columns) || !sized(of.tokens) || !sized(of.heads) ||
      !sized(of.batches) || !strided(of.strides.token, of.tokens) || !strided(of.strides.head, of.heads) ||
      !strided(of.strides.batch, of.batches))
    return cudaErrorInvalidValue;
  map.made = TensorMap::kMade;
  map.data = static_cast<const unsigned char*>(of.data);
  map.sizes = {of.columns, of.tokens, of.heads, of.batches};
  map.strides = {2, 2 * of.strides.token, 2 * of.strides.head, 2 * of.strides.batch};
  map.rows = of.rows;
  return cudaSuccess;
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
