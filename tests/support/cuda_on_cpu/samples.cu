// Small kernels, right and wrong, that the checker is tested with. run_sample returns the report, "" if there is none.
#include "../../../csrc/cuda/launch.cuh"

#include <stdexcept>
#include <string>

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;

__global__ void shuffles(float* out) {
  const int i = threadIdx.x;
  const float v = float(i);
  out[i] = __shfl_sync(kAll, v, 5) + 100 * __shfl_xor_sync(kAll, v, 3) + 10000 * __shfl_down_sync(kAll, v, 2u);
  out[64 + i] =
      __shfl_up_sync(kAll, v, 1u) + 100 * __shfl_sync(kAll, v, 1, 8) + 10000 * __shfl_down_sync(kAll, v, 4u, 8);
}

__global__ void votes(float* out) {
  const int i = threadIdx.x;
  out[i] = float(__ballot_sync(kAll, i % 32 < 3)) + 100 * __any_sync(kAll, i == 40) + 1000 * __all_sync(kAll, i < 32) +
           10000 * float(__reduce_add_sync(kAll, 1u));
}

__global__ void half_warps(float* out) {  // each half calls by itself, with its own mask
  const int i = threadIdx.x;
  const unsigned mask = i % 32 < 16 ? 0xFFFFu : 0xFFFF0000u;
  out[i] = i % 32 < 16 ? __shfl_xor_sync(mask, float(i), 1) : __shfl_xor_sync(mask, float(i), 2);
}

__global__ void dynamic_reverse(float* out) {
  FK_DYNAMIC_SHARED(float, buffer);
  buffer[threadIdx.x] = float(threadIdx.x + 1000 * blockIdx.y);
  __syncthreads();
  out[(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

template <bool kBarrier>
__global__ void named(float* out) {  // the two warps of each pair exchange, the pairs independently
  FK_SHARED(float, buffer, 128);
  const int i = threadIdx.x, pair = i / 64;
  buffer[i] = float(i);
  if (kBarrier) FK_NAMED_BARRIER(1 + pair, 64);
  out[i] = buffer[i ^ 32];
}

template <bool kSync>
__global__ void neighbours(float* out) {
  FK_SHARED(float, buffer, 64);
  buffer[threadIdx.x] = float(threadIdx.x);
  if (kSync) __syncwarp();
  out[threadIdx.x] = buffer[threadIdx.x ^ 1];
}

__global__ void rewritten_too_soon(float* out) {
  FK_SHARED(float, buffer, 64);
  for (int round = 0; round < 2; ++round) {
    buffer[threadIdx.x] = float(threadIdx.x + round);
    __syncthreads();
    out[threadIdx.x] = buffer[63 - threadIdx.x];
  }
}

__global__ void never_written(float* out) {
  FK_SHARED(float, buffer, 65);
  buffer[threadIdx.x] = 1.f;
  __syncthreads();
  out[threadIdx.x] = buffer[threadIdx.x + 1];
}

__global__ void shared_by_one(float* out) {
  FK_SHARED(float, buffer, 64);
  buffer[threadIdx.x + 1] = 1.f;
  __syncthreads();
  out[threadIdx.x] = buffer[threadIdx.x];
}

__global__ void global_by_one(float* out) { out[threadIdx.x + 1] = 1.f; }

__global__ void misaligned(float* out) {
  *reinterpret_cast<foundry::Pack<float, 4>*>(out + 1) = foundry::Pack<float, 4>{};
}

__global__ void leaves_before_barrier(float* out) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
  out[threadIdx.x] = 1.f;
}

__global__ void two_barriers(float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1.f;
}

__global__ void mask_without_caller(float* out) { out[threadIdx.x] = __shfl_xor_sync(0xFFFFu, 1.f, 1); }

__global__ void lane_outside_of_mask(float* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_xor_sync(0xFFFFu, 1.f, 16);
}

__global__ void mask_with_lanes_gone(float* out) {
  if (threadIdx.x % 32 == 31) return;
  out[threadIdx.x] = __shfl_xor_sync(kAll, 1.f, 1);
}

__global__ void barrier_against_shuffle(float* out) {
  if (threadIdx.x % 32 == 0) __syncthreads();
  out[threadIdx.x] = __shfl_xor_sync(kAll, 1.f, 1);
}

__global__ void nothing(float*) {}

}  // namespace

extern "C" const char* run_sample(const char* name, float* out) {
  static std::string report;
  const std::string wanted = name;
  cudaError_t error = cudaErrorInvalidValue;
  const auto run = [&](const char* sample, void (*kernel)(float*), unsigned threads = 64, dim3 grid = dim3(1),
                       size_t shared = 0) {
    if (wanted == sample) error = foundry::launch(kernel, grid, dim3(threads), shared, nullptr, out);
  };
  try {
    run("shuffles", shuffles);
    run("votes", votes);
    run("half_warps", half_warps);
    run("dynamic_reverse", dynamic_reverse, 32, dim3(2, 2), 32 * sizeof(float));
    run("dynamic_too_small", dynamic_reverse, 32, dim3(2, 2), 31 * sizeof(float));
    run("named", named<true>, 128);
    run("named_missing", named<false>, 128);
    run("neighbours", neighbours<true>);
    run("neighbours_missing", neighbours<false>);
    run("rewritten_too_soon", rewritten_too_soon);
    run("never_written", never_written);
    run("shared_by_one", shared_by_one);
    run("global_by_one", global_by_one, 128);
    run("misaligned", misaligned, 1);
    run("leaves_before_barrier", leaves_before_barrier);
    run("two_barriers", two_barriers);
    run("mask_without_caller", mask_without_caller);
    run("lane_outside_of_mask", lane_outside_of_mask);
    run("mask_with_lanes_gone", mask_with_lanes_gone);
    run("barrier_against_shuffle", barrier_against_shuffle);
    run("too_many_threads", nothing, 2048);
    run("empty_grid", nothing, 32, dim3(0));
    report = error == cudaSuccess ? "" : cudaGetErrorString(error);
  } catch (const std::runtime_error& e) {
    report = e.what();
  }
  return report.c_str();
}
