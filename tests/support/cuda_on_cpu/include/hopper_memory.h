// The functions of csrc/cuda/hopper/memory.cuh for the checker.
#pragma once

#include "hopper_scheduler.h"

#define FK_HOPPER_SHARED(name) const uint32_t name = ::cuda_on_cpu::hopper::shared_base()
#define __grid_constant__

namespace cuda_on_cpu {
namespace hopper {

inline uint32_t shared_base() {
  here();
  return kBase;
}

template <class... Values>
void check_values(Values... v) {
  (check_value(v), ...);
}

struct MatricesRequest {
  bool done;
  uint32_t at;
  std::array<uint32_t, 4> row, result;
};

}  // namespace hopper
}  // namespace cuda_on_cpu

namespace foundry {
namespace cuda {
namespace hopper {

// --- mbarriers -------------------------------------------------------------------------------------------------------

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::hopper::here().barriers.init(barrier, arrivals);
}
inline void mbarrier_init_fence() {
  cuda_on_cpu::hopper::Block& block = cuda_on_cpu::hopper::here();
  block.barriers.init_fence();
  block.arena.proxy.make(block.arena.clocks.now(cuda_on_cpu::self().id));
}
inline void mbarrier_arrive(uint32_t barrier, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::hopper::Barriers& all = cuda_on_cpu::hopper::here().barriers;
  all.arrive(all.use("mbarrier_arrive", barrier, line), 0);
}
inline void mbarrier_expect(uint32_t barrier, uint32_t bytes, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::hopper::Barriers& all = cuda_on_cpu::hopper::here().barriers;
  all.arrive(all.use("mbarrier_expect", barrier, line), bytes);
}
inline bool mbarrier_try(uint32_t barrier, uint32_t parity, int line = __builtin_LINE()) {
  return cuda_on_cpu::hopper::here().barriers.test("mbarrier_try", barrier, parity, line);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity, int line = __builtin_LINE()) {
  cuda_on_cpu::hopper::here().barriers.wait("mbarrier_wait", barrier, parity, line);
}
inline void mbarrier_wait_both(uint32_t first, uint32_t first_parity, uint32_t second, uint32_t second_parity,
                               int line = __builtin_LINE()) {
  mbarrier_wait(first, first_parity, line);
  mbarrier_wait(second, second_parity, line);
}

// --- copies ----------------------------------------------------------------------------------------------------------

inline void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int column, int token, int head, int batch,
                     int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::hopper::here().copies.load_box(to, map, barrier, {column, token, head, batch}, line);
}
inline void tma_prefetch_map(const TensorMap* map) {
  if (map->made != TensorMap::kMade) cuda_on_cpu::fail("tma_prefetch_map of a tensor map that encode_map has not made");
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::hopper::here().copies.load_row(to, from, bytes, barrier, line);
}
inline void bulk_store(void* to, uint32_t from, uint32_t bytes, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::hopper::here().copies.store(to, from, bytes, false, line);
}
inline void bulk_add(float* to, uint32_t from, uint32_t bytes, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::hopper::here().copies.store(to, from, bytes, true, line);
}
inline void bulk_commit() { cuda_on_cpu::hopper::here().copies.commit(); }
inline void bulk_wait_read() { cuda_on_cpu::hopper::here().copies.wait_read(); }
inline void bulk_wait() { cuda_on_cpu::hopper::here().copies.wait(); }

// --- fences ----------------------------------------------------------------------------------------------------------

inline void fence_proxy_async() {
  cuda_on_cpu::hopper::Arena& arena = cuda_on_cpu::hopper::here().arena;
  arena.proxy.make(arena.clocks.now(cuda_on_cpu::self().id));
}
inline void fence_proxy_async_global() { cuda_on_cpu::hopper::here().copies.acquire(false); }

// --- ordinary accesses -----------------------------------------------------------------------------------------------

inline void store_shared(uint32_t to, int value, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::hopper::here().arena.write(to, 4, &value);
}
inline int load_shared(uint32_t from, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  int value;
  cuda_on_cpu::hopper::here().arena.read(from, 4, &value);
  return value;
}
inline float2 load_shared_pair(uint32_t from, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  float2 value;
  cuda_on_cpu::hopper::here().arena.read(from, 8, &value);
  return value;
}
inline void store_shared_four(uint32_t to, float a, float b, float c, float d, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::hopper::check_values(a, b, c, d);
  const float values[4] = {a, b, c, d};
  cuda_on_cpu::hopper::here().arena.write(to, 16, values);
}
inline void clear_shared_16(uint32_t to, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  const uint32_t zeros[4] = {};
  cuda_on_cpu::hopper::here().arena.write(to, 16, zeros);
}
inline void load_matrices(uint32_t (&r)[4], uint32_t from, int line = __builtin_LINE()) {
  using Request = cuda_on_cpu::hopper::MatricesRequest;
  Request request{false, from, {}, {}};
  {
    const cuda_on_cpu::At at(line);
    cuda_on_cpu::hopper::here().arena.read(from, 16, request.row.data());
  }
  cuda_on_cpu::meet("load_matrices", request, line, [](Request** warp) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) warp[lane]->result[size_t(i)] = warp[8 * i + lane / 4]->row[size_t(lane % 4)];
  });
  for (size_t i = 0; i < 4; ++i) r[i] = request.result[i];
}
inline void store_matrices(uint32_t to, const uint32_t (&r)[4], int line = __builtin_LINE()) {
  using Request = cuda_on_cpu::hopper::MatricesRequest;
  Request request{false, to, {r[0], r[1], r[2], r[3]}, {}};
  cuda_on_cpu::meet("store_matrices", request, line, [](Request** warp) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) warp[8 * i + lane / 4]->result[size_t(lane % 4)] = warp[lane]->row[size_t(i)];
  });
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::hopper::here().arena.write(to, 16, request.result.data());
}

// --- between blocks --------------------------------------------------------------------------------------------------

inline int load_acquire(const int* from, int line = __builtin_LINE()) {
  cuda_on_cpu::hopper::here().acquire();
  cuda_on_cpu::hopper::Spin spin;
  cuda_on_cpu::wait_for("load_acquire", spin, line);
  return *from;
}
inline void add_release(int* to, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  if (cuda_on_cpu::hopper::here().copies.writing(cuda_on_cpu::self().id))
    cuda_on_cpu::fail(
        "add_release while this thread's bulk copies are not in global memory: bulk_wait has not been passed");
  ++*to;
}
inline void wait_until(const int* from, int value, int line = __builtin_LINE()) {
  cuda_on_cpu::hopper::here().acquire();
  cuda_on_cpu::hopper::ValueWait condition(from, value);
  if (!condition.holds()) cuda_on_cpu::wait_for("wait_until", condition, line);
}
inline void add_four(float* to, float a, float b, float c, float d, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::check_aligned(to, 16);
  cuda_on_cpu::hopper::check_values(a, b, c, d);
  to[0] += a;
  to[1] += b;
  to[2] += c;
  to[3] += d;
}
inline void store_four(float* to, float a, float b, float c, float d, int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::check_aligned(to, 16);
  cuda_on_cpu::hopper::check_values(a, b, c, d);
  to[0] = a;
  to[1] = b;
  to[2] = c;
  to[3] = d;
}
// Launches run one after another.
inline void launch_dependents() {}
inline void wait_for_launch_before() {
  if (cuda_on_cpu::machine().meetings) cuda_on_cpu::hopper::here().waited = true;
}

// --- registers -------------------------------------------------------------------------------------------------------

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry

namespace cuda_on_cpu {
namespace hopper {

struct RegistersRequest {
  bool done;
};
inline void set_registers(const char* name, unsigned count, bool more, int line) {
  Block& block = here();
  RegistersRequest request{false};
  meet(
      name, request, line,
      [&](RegistersRequest**) {
        const At at(line);
        Warpgroup& w = warpgroup();
        if (count % 8 || count < 24 || count > 256)
          fail(std::string(name) + " of " + std::to_string(count) + ": not a multiple of 8 from 24 to 256");
        if (more ? count < w.registers : count > w.registers)
          fail(std::string(name) + " to " + std::to_string(count) + " where the warpgroup has " +
               std::to_string(w.registers));
        w.wanted = count;
        if (more) return;
        block.free_registers += 128 * (w.registers - count);
        w.registers = count;
      },
      128);
  RegisterWait wait(block, warpgroup());
  if (!wait.holds()) wait_for(name, wait, line);
}

}  // namespace hopper
}  // namespace cuda_on_cpu

namespace foundry {
namespace cuda {
namespace hopper {

template <int kRegisters>
void more_registers(int line = __builtin_LINE()) {
  cuda_on_cpu::hopper::set_registers("more_registers", kRegisters, true, line);
}
template <int kRegisters>
void fewer_registers(int line = __builtin_LINE()) {
  cuda_on_cpu::hopper::set_registers("fewer_registers", kRegisters, false, line);
}

// --- launches --------------------------------------------------------------------------------------------------------

template <class... Params, class... Args>
cudaError_t launch_hopper(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
                          bool early, const Args&... args) {
  const size_t threads = size_t(block.x) * block.y * block.z;
  if (shared_bytes > cuda_on_cpu::kMaxShared) return cudaErrorInvalidValue;
  if (threads < 1 || threads > cuda_on_cpu::kMaxThreads || block.z > 64 || grid.x == 0 || grid.x > 0x7FFFFFFF ||
      grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  cuda_on_cpu::hopper::Grid all(grid, block, shared_bytes, early, [=] { kernel(Params(args)...); });
  const std::string error = all.run();
  if (!error.empty()) throw std::runtime_error("CUDA on CPU: " + error);
  return cudaSuccess;
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
