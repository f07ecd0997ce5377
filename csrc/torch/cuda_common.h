// Shared by the CUDA launches: the stream, the device, and error messages.
#pragma once

#include <cuda_runtime_api.h>

#include "common.h"

#if defined(FK_CUDA_ON_CPU)

#define FK_CUDA_KEY CPU
namespace foundry {
struct OnDevice {
  inline static bool pretends_hopper = false;  // set by tests/support/cuda_on_cpu/device.cpp
  explicit OnDevice(const at::Tensor&) {}
  cudaStream_t stream() const { return nullptr; }
  int multiprocessors() const { return 4; }
  int shared_memory() const { return 164 << 10; }
  int major() const { return pretends_hopper ? 9 : 8; }
  bool is_hopper() const { return pretends_hopper; }
  int* counter() const {
    static int counter = 0;
    return &counter;
  }
};
inline void check_cuda(cudaError_t error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}
}  // namespace foundry

#else

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>
#include <utility>

#define FK_CUDA_KEY CUDA
namespace foundry {

// Makes the tensor's device current for its lifetime. Launches use PyTorch's current stream of that device.
struct OnDevice {
  c10::cuda::CUDAGuard guard;
  explicit OnDevice(const at::Tensor& t) : guard(t.device()) {}
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }
  int multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }
  int shared_memory() const { return attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor); }  // bytes
  int major() const { return attribute(cudaDevAttrComputeCapabilityMajor); }
  // Whether code compiled for sm_90a runs.
  bool is_hopper() const { return major() == 9 && attribute(cudaDevAttrComputeCapabilityMinor) == 0; }
  // An integer in the device's memory that is 0 between the kernels of the current stream, each of which leaves it so.
  // Null where others may use it at the same time: in a graph's capture, and on streams that are not PyTorch's, whose
  // handles may be used again.
  int* counter() const {
    using Key = std::pair<c10::DeviceIndex, c10::StreamId>;
    static std::mutex mutex;
    static std::map<Key, int*> counters;
    const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream();
    const bool external = current.id() != 0 && reinterpret_cast<cudaStream_t>(current.id()) == current.stream();
    if (external || c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    int*& counter = counters[{current.device_index(), current.id()}];
    if (counter) return counter;
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};  // other threads may capture
    void* data = nullptr;
    if (cudaMalloc(&data, sizeof(int)) == cudaSuccess &&
        cudaMemsetAsync(data, 0, sizeof(int), current.stream()) == cudaSuccess)
      counter = static_cast<int*>(data);
    else cudaGetLastError();
    return counter;
  }

 private:
  int attribute(cudaDeviceAttr name) const {
    int value = 0;
    cudaDeviceGetAttribute(&value, name, guard.current_device().index());
    return value;
  }
};

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // reported here; clear it for the next call
  TORCH_CHECK(error != cudaErrorNoKernelImageForDevice, what, ": the extension was compiled for CUDA architectures ",
              FK_CUDA_ARCHITECTURES,
              ", none of which runs on this GPU; rebuild it with TORCH_CUDA_ARCH_LIST set to the "
              "GPU's compute capability");
  TORCH_CHECK(false, what, ": ", cudaGetErrorString(error));
}

}  // namespace foundry

#endif
