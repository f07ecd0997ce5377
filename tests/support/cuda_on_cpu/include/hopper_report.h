// What a sample of Hopper's instructions says: the checker's report, or the error of a GPU; "" if all went well.
#pragma once

#include <stdexcept>
#include <string>

// run: returns a cudaError_t.
template <class Run>
const char* report_of(Run&& run) {
  static std::string report;
  try {
    cudaError_t error = run();
#if !defined(FK_CUDA_ON_CPU)
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
#endif
    report = error == cudaSuccess ? "" : cudaGetErrorString(error);
  } catch (const std::runtime_error& e) {
    report = e.what();
  }
  return report.c_str();
}
