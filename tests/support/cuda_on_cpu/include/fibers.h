// The threads of a block as fibers, and the machine that runs them.
//
// Fibers switch by _setjmp and _longjmp: swapcontext sets the signal mask, two system calls a switch. A fiber lives on
// from block to block, and is begun anew only after an error, which leaves it in the middle of a kernel.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"

namespace cuda_on_cpu {

constexpr size_t kStack = 128 << 10;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kMaxShared = 227 << 10;
constexpr unsigned kMaxResident = 16;  // blocks that run at once (hopper_scheduler.h)

enum class Waiting { nothing, barrier, warp, warpgroup, condition };

// What a thread waits for that is not the arrival of certain others.
struct Condition {
  bool spins = false;  // the thread goes on without it, and looks again
  virtual bool holds() = 0;
  virtual std::string missing() { return ""; }
  virtual ~Condition() = default;
};

// A thread of the block.
struct Thread {
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
  Condition* condition = nullptr;  // on the thread's stack
  // order of accesses to shared memory: (*clock)[i] is up to which of thread i's steps this thread has waited for since
  // clock_epoch began, the last barrier of the whole block; shared by those who met
  uint32_t step = 1;
  uint64_t clock_epoch = 0;
  std::shared_ptr<const std::vector<uint32_t>> clock;
};

struct Fiber {
  std::unique_ptr<char[]> stack;
  bool begun = false;
  jmp_buf here;
};

// Is told which threads have met, in place of what Thread::clock is for.
struct Meetings {
  virtual void meet(const std::vector<Thread*>& met) = 0;
  virtual ~Meetings() = default;
};

// A block and its threads: one machine runs all blocks, one after another, or several run one each at the same time.
struct Machine {
  unsigned slot = 0;  // 0, or 1 .. kMaxResident for those that run at the same time
  Meetings* meetings = nullptr;
  dim3 grid, block;
  uint3 block_index;
  uint64_t epoch = 0;        // barriers of a whole block and beginnings of blocks so far, over all launches
  uint64_t first_epoch = 0;  // of this block: what an earlier one wrote to shared memory is gone
  size_t dynamic_shared = 0;
  std::vector<Thread> threads;
  std::vector<Fiber> fibers = std::vector<Fiber>(kMaxThreads);
  Thread* running = nullptr;
  int line = 0;  // of the instruction whose accesses are being checked, where that is known
  jmp_buf scheduler;
  std::string error;
  std::function<void()> kernel;
};

inline Machine& first_machine() {
  static Machine m;
  return m;
}
inline Machine*& current_machine() {
  static Machine* current = &first_machine();
  return current;
}
inline Machine& machine() { return *current_machine(); }
inline sigjmp_buf& fault_exit() {  // where a kernel that went wrong ends
  static sigjmp_buf exit;
  return exit;
}
inline Thread& self() { return *machine().running; }

inline std::string where(const Thread& t) {
  const uint3 b = machine().block_index;
  char text[96];
  std::snprintf(text, sizeof(text), "block (%u,%u,%u) thread %u", b.x, b.y, b.z, t.id);
  return text;
}
inline std::string where_now() {
  const Machine& m = machine();
  return (m.line ? "line " + std::to_string(m.line) + ", " : "") + where(*m.running);
}

// Ends the kernel: control never returns to the thread.
[[noreturn]] inline void fail(const std::string& what) {
  Machine& m = machine();
  m.error = what + ", " + where_now();
  m.running = nullptr;
  siglongjmp(fault_exit(), 1);
}

inline void check_aligned(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) fail("misaligned access of " + std::to_string(bytes) + " bytes");
}

inline void yield(Waiting waiting) {
  Machine& m = machine();
  m.running->waiting = waiting;
  if (_setjmp(m.fibers[m.running->id].here) == 0) _longjmp(m.scheduler, 1);
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

// The 128 threads of the warpgroup meet.
inline void meet_warpgroup(const char* instruction, int line) {
  Thread& t = self();
  t.instruction = instruction;
  t.line = line;
  yield(Waiting::warpgroup);
}

inline void wait_for(const char* instruction, Condition& condition, int line) {
  Thread& t = self();
  t.instruction = instruction;
  t.condition = &condition;
  t.line = line;
  yield(Waiting::condition);
}

inline void fiber_main() {
  for (;;) {
    machine().kernel();
    machine().running->done = true;
    yield(Waiting::nothing);  // until the next block
  }
}

// Lets a thread run until it waits or is done.
inline void resume(Machine& m, Thread& t) {
  Fiber& fiber = m.fibers[t.id];
  m.running = &t;
  if (_setjmp(m.scheduler) == 0) {
    if (fiber.begun) _longjmp(fiber.here, 1);
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    fiber.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    setcontext(&context);
  }
  m.running = nullptr;
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
  m.error = text + where_now();
  m.running = nullptr;
  siglongjmp(fault_exit(), 1);
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

}  // namespace cuda_on_cpu
