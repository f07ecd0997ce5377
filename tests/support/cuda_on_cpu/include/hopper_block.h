// A block of a kernel of compute capability 9.0, of which several run at the same time.
#pragma once

#include "cuda_on_cpu.h"
#include "hopper_copies.h"
#include "hopper_warpgroups.h"

namespace cuda_on_cpu {
namespace hopper {

struct Block : Meetings {
  Machine machine;
  Arena arena;
  Barriers barriers{arena};
  Copies copies{arena, barriers};
  std::deque<Warpgroup> warpgroups;
  unsigned free_registers = 0;
  bool running = false;
  bool waited = false;  // for the launch before, or for what it tells

  void begin(size_t shared_bytes) {
    machine.meetings = this;
    machine.error.clear();
    begin_threads(machine);
    const unsigned n = unsigned(machine.threads.size());
    arena.begin(n, shared_bytes);
    barriers.begin(n);
    copies.begin(n);
    warpgroups.clear();
    const unsigned each = std::min(65536 / n / 8 * 8, 256u);  // as the compiler gives them
    for (unsigned i = 0; i < n / 128; ++i) {
      warpgroups.emplace_back(arena, i);
      warpgroups.back().registers = each;
    }
    free_registers = 0;
    running = true;
    waited = false;
  }
  void meet(const std::vector<Thread*>& met) override { arena.clocks.meet(met); }

  // The running thread looks at what other blocks, or the launch before, have said.
  void acquire() {
    copies.acquire(true);
    waited = true;
  }

  // What it leaves behind that is a mistake, or "".
  std::string left() const {
    for (const Warpgroup& w : warpgroups)
      if (!w.left().empty()) return w.left();
    const std::string copy = copies.left();
    return copy.empty() ? barriers.left() : copy;
  }
};

// The block of the running thread.
inline Block& here() {
  if (!machine().meetings)
    fail("an instruction of compute capability 9.0 in a kernel that launch_hopper has not launched");
  return *static_cast<Block*>(machine().meetings);
}
inline Warpgroup& warpgroup() { return here().warpgroups[self().id / 128]; }

struct RegisterWait : Condition {
  Block& block;
  Warpgroup& group;
  RegisterWait(Block& b, Warpgroup& g) : block(b), group(g) {}
  bool holds() override {
    if (group.registers == group.wanted) return true;
    const unsigned needed = 128 * (group.wanted - group.registers);
    if (needed > block.free_registers) return false;
    block.free_registers -= needed;
    group.registers = group.wanted;
    return true;
  }
  std::string missing() override {
    return std::to_string(128 * (group.wanted - group.registers)) + " registers more, of which " +
           std::to_string(block.free_registers) + " are free";
  }
};

struct ValueWait : Condition {
  const int* from;
  int value;
  ValueWait(const int* f, int v) : from(f), value(v) {}
  bool holds() override { return *from == value; }
  std::string missing() override { return std::to_string(value) + " where " + std::to_string(*from) + " is"; }
};
struct Spin : Condition {
  Spin() { spins = true; }
  bool holds() override { return true; }
};

}  // namespace hopper
}  // namespace cuda_on_cpu
