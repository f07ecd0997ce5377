// Runs CUDA kernels on a CPU, to find what is wrong with them. Self-contained: a C++17 compiler is all it needs.
//
// The threads of a block are fibers that take turns; one runs until it meets a barrier or a warp instruction, which the
// scheduler resolves once all that take part have arrived. Blocks run one after another, every other one with its
// threads in reverse order. What is reported (as std::runtime_error from foundry::launch):
//   - shared memory (FK_SHARED, FK_DYNAMIC_SHARED): an index out of range, a value that the block never wrote, and two
//     threads at one element, one of them writing, without a barrier between them;
//   - __syncthreads met at different places, or after some threads have left; a barrier or warp instruction that can
//     never complete; a mask without the calling lane, with lanes that have left, or that lanes disagree on; a shuffle
//     from a lane outside of the mask;
//   - global memory: an access outside of an allocation, where allocations end at an unmapped page (guarded_memory.h),
//     and misaligned vector accesses (foundry::load and store; also others where compiled with -fsanitize=alignment).
// What it cannot see: races in global memory, timing, and the memory model between warps beyond barriers.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"
#include "half_types.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (::cuda_on_cpu::self().index)
#define blockIdx (::cuda_on_cpu::machine().block_index)
#define blockDim (::cuda_on_cpu::machine().block)
#define gridDim (::cuda_on_cpu::machine().grid)
#define FK_SHARED(type, name, count) static ::cuda_on_cpu::SharedArray<type, count> name
#define FK_DYNAMIC_SHARED(type, name) static ::cuda_on_cpu::DynamicShared<type> name

namespace cuda_on_cpu {

constexpr size_t kStack = 64 << 10;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kMaxShared = 227 << 10;

enum class Waiting { nothing, barrier, warp };

// A thread of the block.
struct Thread {
  ucontext_t context;
  uint3 index;
  unsigned id = 0;
  bool done = false;
  Waiting waiting = Waiting::nothing;
  // at a barrier
  int barrier = 0;
  unsigned expected = 0;  // how many threads meet there
  int line = 0;
  // at a warp instruction
  const char* instruction = nullptr;
  unsigned mask = 0;
  unsigned source = 0;  // lane that a shuffle reads
  uint64_t value = 0, result = 0;
  // order of accesses to shared memory: clock[t] is up to which of thread t's steps this thread has waited for
  std::vector<uint32_t> clock;
};

struct Machine {
  dim3 grid, block;
  uint3 block_index;
  uint64_t block_number = 0;  // over all launches: what an earlier block wrote to shared memory is gone
  uint32_t epoch = 0;         // barriers of the whole block so far
  size_t dynamic_shared = 0;
  std::vector<Thread> threads;
  std::vector<char> stacks;
  Thread* running = nullptr;
  ucontext_t scheduler;
  sigjmp_buf fault;
  std::string error;
  std::function<void()> kernel;
};

inline Machine& machine() {
  static Machine m;
  return m;
}
inline Thread& self() { return *machine().running; }

inline std::string where(const Thread& t) {
  const uint3 b = machine().block_index;
  char text[96];
  std::snprintf(text, sizeof(text), "block (%u,%u,%u) thread %u", b.x, b.y, b.z, t.id);
  return text;
}

// Ends the kernel: control never returns to the thread.
[[noreturn]] inline void fail(const std::string& what) {
  Machine& m = machine();
  m.error = what + ", " + where(self());
  m.running = nullptr;
  setcontext(&m.scheduler);
  std::abort();  // setcontext does not return
}

inline void check_aligned(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) fail("misaligned access of " + std::to_string(bytes) + " bytes");
}

inline void yield(Waiting waiting) {
  Thread& t = self();
  t.waiting = waiting;
  swapcontext(&t.context, &machine().scheduler);
}

inline void wait_at_barrier(int barrier, unsigned expected, int line) {
  Thread& t = self();
  t.barrier = barrier;
  t.expected = expected;
  t.line = line;
  yield(Waiting::barrier);
}

inline void check_caller(const char* instruction, unsigned mask) {
  if (!(mask >> (self().id % 32) & 1u)) fail(std::string(instruction) + " with a mask that lacks the calling lane");
}

// All lanes of `mask` meet; each gets the value of the lane that it names.
inline uint64_t warp_exchange(const char* instruction, unsigned mask, uint64_t value, unsigned source, int line) {
  Thread& t = self();
  check_caller(instruction, mask);
  t.instruction = instruction;
  t.mask = mask;
  t.value = value;
  t.source = source;
  t.line = line;
  yield(Waiting::warp);
  return t.result;
}

template <class T>
uint64_t pack(T v) {
  static_assert(sizeof(T) <= 8, "warp instructions move up to 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof(T));
  return bits;
}
template <class T>
T unpack(uint64_t bits) {
  T v;
  std::memcpy(&v, &bits, sizeof(T));
  return v;
}

template <class T>
T shuffle(const char* name, unsigned mask, T v, int lane, int line) {
  check_caller(name, mask);
  if (lane >= 0 && lane < 32 && !(mask >> lane & 1u)) fail(std::string(name) + " reads a lane outside of its mask");
  return unpack<T>(warp_exchange(name, mask, pack(v), unsigned(lane), line));
}

inline int lane_id() { return int(self().id % 32); }

// The lane of a shuffle within segments of `width`; one that falls outside of its segment is the caller itself.
inline int in_segment(int lane, int width) {
  const int first = lane_id() / width * width;
  return lane >= first && lane < first + width ? lane : lane_id();
}

// --- shared memory ---------------------------------------------------------------------------------------------------

struct Access {
  uint64_t block_number = 0;
  uint32_t epoch = 0, step = 0;
  unsigned thread = 0;

  bool current() const { return block_number == machine().block_number; }
  // Whether the running thread may rely on this access having happened before.
  bool ordered() const {
    const Thread& t = self();
    return !current() || epoch < machine().epoch || thread == t.id || t.clock[thread] >= step;
  }
  static Access now() {
    const Thread& t = self();
    return {machine().block_number, machine().epoch, t.clock[t.id], t.id};
  }
};

template <class T>
struct Cell {
  T value;
  Access written;
  std::vector<Access> reads;  // since it was written

  T read() {
    if (!written.current()) fail("shared memory is read before it is written");
    if (!written.ordered())
      fail("race: shared memory is read without a barrier after thread " + std::to_string(written.thread) +
           " wrote it");
    if (reads.empty() || reads.back().thread != self().id || reads.back().epoch != machine().epoch) {
      if (!reads.empty() && reads.back().epoch != machine().epoch) reads.clear();
      reads.push_back(Access::now());
    }
    return value;
  }
  void write(T v) {
    if (written.current()) {
      if (!written.ordered())
        fail("race: shared memory is written without a barrier after thread " + std::to_string(written.thread) +
             " wrote it");
      for (const Access& r : reads)
        if (!r.ordered())
          fail("race: shared memory is written without a barrier after thread " + std::to_string(r.thread) +
               " read it");
    }
    reads.clear();
    value = v;
    written = Access::now();
  }
};

// What shared[i] is: reads and writes go through the cell's checks.
template <class T>
struct Reference {
  Cell<T>& cell;
  operator T() const { return cell.read(); }
  Reference& operator=(T v) {
    cell.write(v);
    return *this;
  }
  Reference& operator=(const Reference& other) { return *this = T(other); }
  Reference& operator+=(T v) { return *this = T(*this) + v; }
};

template <class T>
struct Cells {
  std::vector<Cell<T>> cells;
  size_t count = 0;
  Reference<T> at(long long i) {
    if (i < 0 || size_t(i) >= count)
      fail("shared memory index " + std::to_string(i) + " is outside of 0.." + std::to_string(long(count) - 1));
    return {cells[size_t(i)]};
  }
};

template <class T, size_t kCount>
struct SharedArray : Cells<T> {
  static_assert(kCount * sizeof(T) <= (48 << 10), "static shared memory is limited to 48 KB");
  SharedArray() { this->cells.resize(this->count = kCount); }
  Reference<T> operator[](long long i) { return this->at(i); }
};

template <class T>
struct DynamicShared : Cells<T> {
  Reference<T> operator[](long long i) {
    this->count = machine().dynamic_shared / sizeof(T);
    if (this->cells.size() < this->count) this->cells.resize(this->count);
    return this->at(i);
  }
};

// --- the scheduler ---------------------------------------------------------------------------------------------------

inline void advance_clocks(const std::vector<Thread*>& met) {
  std::vector<uint32_t> joined(machine().threads.size(), 0);
  for (Thread* t : met) {
    for (size_t i = 0; i < joined.size(); ++i) joined[i] = joined[i] > t->clock[i] ? joined[i] : t->clock[i];
  }
  for (Thread* t : met) {
    t->clock = joined;
    ++t->clock[t->id];
  }
}

inline void release(const std::vector<Thread*>& met) {
  for (Thread* t : met) t->waiting = Waiting::nothing;
}

// Completes one barrier or warp instruction whose threads have all arrived; false if there is none. Sets m.error where
// one can never complete as it should.
inline bool resolve_one(Machine& m) {
  const unsigned n = unsigned(m.threads.size());
  for (unsigned first = 0; first < n; ++first) {
    Thread& t = m.threads[first];
    if (t.done || t.waiting == Waiting::nothing) continue;
    std::vector<Thread*> met;
    if (t.waiting == Waiting::warp) {
      const unsigned warp = first / 32 * 32;
      bool all = true;
      for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(t.mask >> lane & 1u)) continue;
        if (warp + lane >= n) continue;  // the last warp is narrower
        Thread& other = m.threads[warp + lane];
        if (other.done) {
          m.error = std::string(t.instruction) + " names lane " + std::to_string(lane) +
                    ", which has left, in its mask, " + where(t);
          return false;
        }
        if (other.waiting != Waiting::warp || other.mask != t.mask || other.line != t.line) all = false;
        met.push_back(&other);
      }
      if (!all) continue;
      for (Thread* other : met) {
        const unsigned source = warp + other->source;
        other->result = other->source < 32 && source < n ? m.threads[source].value : other->value;
      }
      if (std::strcmp(t.instruction, "ballot") == 0 || std::strcmp(t.instruction, "reduce_add") == 0) {
        uint64_t total = 0;
        for (Thread* other : met)
          total += t.instruction[0] == 'b' ? uint64_t(other->value != 0) << (other->id % 32) : other->value;
        for (Thread* other : met) other->result = total;
      }
      if (std::strcmp(t.instruction, "__syncwarp") == 0) advance_clocks(met);  // shuffles order no memory
    } else {
      for (Thread& other : m.threads) {
        if (!other.done && other.waiting == Waiting::barrier && other.barrier == t.barrier) met.push_back(&other);
      }
      if (met.size() < t.expected) continue;
      for (Thread* other : met) {
        if (other->line != t.line || other->expected != t.expected) {
          m.error = "divergent barrier: thread " + std::to_string(t.id) + " waits at line " + std::to_string(t.line) +
                    " and thread " + std::to_string(other->id) + " at line " + std::to_string(other->line) + ", " +
                    where(t);
          return false;
        }
      }
      if (met.size() == n) {
        ++m.epoch;
        for (Thread& each : m.threads) each.clock.assign(n, 0);
        for (Thread& each : m.threads) each.clock[each.id] = 1;
      } else {
        advance_clocks(met);
      }
    }
    release(met);
    return true;
  }
  return false;
}

inline void thread_main() {
  machine().kernel();
  machine().running->done = true;
  setcontext(&machine().scheduler);
}

inline void on_fault(int signal, siginfo_t* info, void*) {
  Machine& m = machine();
  if (!m.running) {  // not ours
    ::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  char text[128];
  if (signal == SIGSEGV || signal == SIGBUS)
    std::snprintf(text, sizeof(text), "access outside of an allocation at %p, ", info->si_addr);
  else std::snprintf(text, sizeof(text), "misaligned access or undefined arithmetic, ");
  m.error = text + where(*m.running);
  m.running = nullptr;
  siglongjmp(m.fault, 1);
}

// While it lives, faults of a kernel are caught, on a stack of their own.
struct FaultHandler {
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL};
  struct sigaction before[3];
  stack_t old_stack;
  std::vector<char> stack;
  FaultHandler() : stack(64 << 10) {
    stack_t s{};
    s.ss_sp = stack.data();
    s.ss_size = stack.size();
    sigaltstack(&s, &old_stack);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &before[i]);
  }
  ~FaultHandler() {
    for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before[i], nullptr);
    sigaltstack(&old_stack, nullptr);
  }
};

inline void run_block(Machine& m, bool reverse) {
  const unsigned n = m.block.x * m.block.y * m.block.z;
  ++m.block_number;
  m.epoch = 0;
  m.threads.assign(n, Thread());
  m.stacks.resize(n * kStack);
  for (unsigned i = 0; i < n; ++i) {
    Thread& t = m.threads[i];
    t.id = i;
    t.index = {i % m.block.x, i / m.block.x % m.block.y, i / (m.block.x * m.block.y)};
    t.clock.assign(n, 0);
    t.clock[i] = 1;
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = m.stacks.data() + i * kStack;
    t.context.uc_stack.ss_size = kStack;
    t.context.uc_link = nullptr;
    makecontext(&t.context, thread_main, 0);
  }
  while (m.error.empty()) {
    unsigned alive = 0, left = 0;
    for (unsigned k = 0; k < n && m.error.empty(); ++k) {
      Thread& t = m.threads[reverse ? n - 1 - k : k];
      if (!t.done && t.waiting == Waiting::nothing) {
        m.running = &t;
        if (sigsetjmp(m.fault, 1) == 0) swapcontext(&m.scheduler, &t.context);
        m.running = nullptr;
      }
      t.done ? ++left : ++alive;
    }
    if (!m.error.empty() || alive == 0) return;
    for (const Thread& t : m.threads)
      if (left && !t.done && t.waiting == Waiting::barrier && t.expected == n) {
        m.error = "divergent barrier: " + std::to_string(left) + " threads have left before line " +
                  std::to_string(t.line) + ", " + where(t);
        return;
      }
    bool resolved = false;
    while (m.error.empty() && resolve_one(m)) resolved = true;
    if (!resolved && m.error.empty()) {
      const Thread* stuck = nullptr;
      for (const Thread& t : m.threads)
        if (!t.done && !stuck) stuck = &t;
      const bool warp = stuck->waiting == Waiting::warp;
      m.error = std::string(warp ? stuck->instruction : "a barrier") + " at line " + std::to_string(stuck->line) +
                " never completes: not all that it waits for arrive, " + where(*stuck);
    }
  }
}

}  // namespace cuda_on_cpu

// --- what kernels call -----------------------------------------------------------------------------------------------

#define __syncthreads() ::cuda_on_cpu::wait_at_barrier(0, blockDim.x* blockDim.y* blockDim.z, __LINE__)
#define FK_CHECK_ALIGNED(p, bytes) ::cuda_on_cpu::check_aligned(p, bytes)
#define FK_NAMED_BARRIER(id, count) ::cuda_on_cpu::wait_at_barrier(id, count, __LINE__)

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, int line = __builtin_LINE()) {
  cuda_on_cpu::warp_exchange("__syncwarp", mask, 0, 32, line);
}
template <class T>
T __shfl_sync(unsigned mask, T v, int lane, int width = 32, int line = __builtin_LINE()) {
  const int first = cuda_on_cpu::lane_id() / width * width;
  return cuda_on_cpu::shuffle("__shfl_sync", mask, v, first + (lane & (width - 1)), line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, int line = __builtin_LINE()) {
  const int lane = cuda_on_cpu::lane_id() ^ bits;
  return cuda_on_cpu::shuffle("__shfl_xor_sync", mask, v, cuda_on_cpu::in_segment(lane, width), line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = cuda_on_cpu::lane_id() + int(delta);
  return cuda_on_cpu::shuffle("__shfl_down_sync", mask, v, cuda_on_cpu::in_segment(lane, width), line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = cuda_on_cpu::lane_id() - int(delta);
  return cuda_on_cpu::shuffle("__shfl_up_sync", mask, v, cuda_on_cpu::in_segment(lane, width), line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return unsigned(cuda_on_cpu::warp_exchange("ballot", mask, predicate != 0, 32, line));
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, !predicate, line) == 0;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v, int line = __builtin_LINE()) {
  return unsigned(cuda_on_cpu::warp_exchange("reduce_add", mask, v, 32, line));
}

namespace cuda_on_cpu {

// Threads that a multiprocessor holds, in place of the driver's answer for a kernel. A test may change it.
static int resident_threads = 512;

}  // namespace cuda_on_cpu

namespace foundry {

template <class... Params>
int resident_blocks(void (*)(Params...), int threads) {
  const int blocks = cuda_on_cpu::resident_threads / threads;
  return blocks > 0 ? blocks : 1;
}

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, Args... args) {
  using namespace cuda_on_cpu;
  const size_t threads = size_t(block.x) * block.y * block.z;
  const bool fits = threads >= 1 && threads <= kMaxThreads && block.z <= 64 && shared_bytes <= kMaxShared;
  if (!fits || grid.x == 0 || grid.x > 0x7FFFFFFF || grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  Machine& m = machine();
  m.grid = grid;
  m.block = block;
  m.dynamic_shared = shared_bytes;
  m.error.clear();
  m.kernel = [=] { kernel(Params(args)...); };
  {
    FaultHandler handler;
    bool reverse = false;
    for (unsigned z = 0; z < grid.z; ++z)
      for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x && m.error.empty(); ++x, reverse = !reverse) {
          m.block_index = {x, y, z};
          run_block(m, reverse);
        }
  }
  if (!m.error.empty()) throw std::runtime_error("CUDA on CPU: " + m.error);
  return cudaSuccess;
}

}  // namespace foundry

#include "matrix_units.h"
