// The functions of csrc/cuda/hopper/products.cuh for the checker.
#pragma once

#include "hopper_memory.h"

namespace cuda_on_cpu {
namespace hopper {

struct GroupRequest {
  bool done;
};
template <class Do>
void together(const char* name, int line, const Do& act) {
  here();
  GroupRequest request{false};
  meet(
      name, request, line,
      [&](GroupRequest**) {
        const At at(line);
        act(warpgroup());
      },
      128);
}

}  // namespace hopper
}  // namespace cuda_on_cpu

namespace foundry {
namespace cuda {
namespace hopper {

inline void wgmma_fence(int line = __builtin_LINE()) {
  cuda_on_cpu::hopper::together("wgmma_fence", line, [](cuda_on_cpu::hopper::Warpgroup& w) { w.fence(); });
}
inline void wgmma_commit(int line = __builtin_LINE()) {
  cuda_on_cpu::hopper::together("wgmma_commit", line, [](cuda_on_cpu::hopper::Warpgroup& w) { w.commit(); });
}
template <int kGroups>
void wgmma_wait(int line = __builtin_LINE()) {
  cuda_on_cpu::hopper::together("wgmma_wait", line, [](cuda_on_cpu::hopper::Warpgroup& w) { w.wait(kGroups); });
}

template <class T, int kCount>
void settle(T (&r)[kCount], int line = __builtin_LINE()) {
  static_assert(sizeof(T) == 4, "registers");
  const cuda_on_cpu::At at(line);
  for (int i = 0; i < kCount; ++i)
    if constexpr (std::is_same<T, float>::value)
      if (cuda_on_cpu::bits_of(r[i]) == cuda_on_cpu::kRunning)
        cuda_on_cpu::fail("settle of the result of a product that has not been waited for");
}
inline void needed_before_wait(float x, uint32_t place, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::check_value(x);
  cuda_on_cpu::hopper::here().arena.place(place, 4, 4);
  if (x < 0.f) cuda_on_cpu::fail("needed_before_wait of a negative number, which would be stored");
}

template <int kColumns>
struct Wgmma {
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256, "columns");

  template <class T, bool kAcrossA, bool kAcrossB>
  static void shared(float (&d)[kColumns / 2], uint64_t a, uint64_t b, bool add, int line = __builtin_LINE()) {
    issue<T>({false, d, kColumns, nullptr, a, b, kAcrossA, kAcrossB, std::is_same<T, __half>::value, add, line});
  }
  template <class T, bool kAcrossB>
  static void registers(float (&d)[kColumns / 2], const uint32_t* a, uint64_t b, bool add,
                        int line = __builtin_LINE()) {
    issue<T>({false, d, kColumns, a, 0, b, false, kAcrossB, std::is_same<T, __half>::value, add, line});
  }

 private:
  template <class T>
  static void issue(cuda_on_cpu::hopper::ProductRequest request) {
    static_assert(std::is_same<T, __nv_bfloat16>::value || std::is_same<T, __half>::value, "16-bit types");
    cuda_on_cpu::hopper::here();
    cuda_on_cpu::meet(
        "wgmma", request, request.line,
        [&](cuda_on_cpu::hopper::ProductRequest** all) {
          const cuda_on_cpu::At at(request.line);
          cuda_on_cpu::hopper::warpgroup().issue(all);
        },
        128);
  }
};

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
