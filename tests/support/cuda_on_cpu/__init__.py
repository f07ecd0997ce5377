"""The CUDA kernels of `csrc/cuda`, compiled by g++ and run on the CPU under a checker. See include/cuda_on_cpu.h."""
