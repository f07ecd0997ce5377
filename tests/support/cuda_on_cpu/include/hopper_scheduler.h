// Runs the blocks of a kernel, several at the same time: warps of all of them in random order, a warp's threads in
// order or in reverse, until each waits.
#pragma once

#include <random>

#include "hopper_block.h"

namespace cuda_on_cpu {
namespace hopper {

// How the next launches run; a test may change it.
struct Schedule {
  unsigned seed = 1;
  int resident = 4;  // blocks at the same time, begun in order
};
inline Schedule& schedule() {
  static Schedule s;
  return s;
}

class Grid {
 public:
  Grid(dim3 grid, dim3 block, size_t shared_bytes, bool early, std::function<void()> kernel)
      : grid_(grid),
        block_(block),
        shared_bytes_(shared_bytes),
        early_(early),
        kernel_(std::move(kernel)),
        random_(schedule().seed) {
    // How eagerly copies are delivered: only when nothing else can move, or now and then.
    static constexpr unsigned kEvery[] = {16, 0, 2};
    every_ = kEvery[schedule().seed % 3];
  }

  std::string run() {
    FaultHandler handler;
    if (sigsetjmp(fault_exit(), 0) == 0) run_all();
    std::string error = error_.empty() ? machine().error : error_;
    for (auto& b : blocks()) {
      b->running = false;
      b->machine.error.clear();
      if (error.empty()) continue;
      for (Fiber& fiber : b->machine.fibers) {
        fiber.begun = false;
        if (fiber.stack) std::memset(fiber.stack.get(), 0, kStack);  // marks of results that were on their way
      }
    }
    current_machine() = &first_machine();
    return error;
  }

 private:
  static std::vector<std::unique_ptr<Block>>& blocks() {
    static std::vector<std::unique_ptr<Block>> all;
    return all;
  }
  bool failed() const { return !error_.empty() || !machine().error.empty(); }
  void enter(Block& b) { current_machine() = &b.machine; }
  unsigned below(size_t n) { return unsigned(random_() % n); }

  void start() {
    const size_t resident = size_t(std::min(std::max(schedule().resident, 1), int(kMaxResident)));
    while (blocks().size() < resident) {
      blocks().emplace_back(new Block());
      blocks().back()->machine.slot = unsigned(blocks().size());
    }
    for (size_t i = 0; i < resident && next_ < size_t(grid_.x) * grid_.y * grid_.z; ++i) {
      Block& b = *blocks()[i];
      if (b.running) continue;
      b.machine.grid = grid_;
      b.machine.block = block_;
      b.machine.block_index = {unsigned(next_ % grid_.x), unsigned(next_ / grid_.x % grid_.y),
                               unsigned(next_ / grid_.x / grid_.y)};
      b.machine.dynamic_shared = shared_bytes_;
      b.machine.kernel = kernel_;
      b.begin(shared_bytes_);
      ++next_;
    }
  }

  void run_all() {
    std::vector<std::pair<Block*, unsigned>> turns;
    for (unsigned idle = 0;;) {
      start();
      turns.clear();
      for (auto& b : blocks())
        for (unsigned w = 0; b->running && w < (b->machine.threads.size() + 31) / 32; ++w)
          turns.emplace_back(b.get(), w);
      if (turns.empty()) return check_early();
      std::shuffle(turns.begin(), turns.end(), random_);
      bool moved = false;
      spinning_ = false;
      for (const auto& turn : turns) {
        enter(*turn.first);
        moved |= run_warp(*turn.first, turn.second);
        if (failed()) return;
        if (every_ && below(every_) == 0) moved |= deliver(*turn.first);
      }
      for (auto& b : blocks()) finish(*b);
      if (failed()) return;
      if (!moved) moved = deliver_any();
      if (moved) idle = 0;
      else if (!spinning_ || ++idle > 1000) return explain();
    }
  }

  void check_early() {
    if (early_ && !waited_)
      error_ =
          "a kernel that may begin before the launch before it has ended never waits for that (wait_for_launch_before)";
  }

  bool run_warp(Block& b, unsigned warp) {
    Machine& m = b.machine;
    const unsigned first = 32 * warp, count = std::min(32u, unsigned(m.threads.size()) - first);
    bool moved = false;
    for (;;) {
      const bool reverse = below(2);
      bool resumed = false;
      for (unsigned k = 0; k < count; ++k) {
        Thread& t = m.threads[first + (reverse ? count - 1 - k : k)];
        if (t.done) continue;
        bool spins = false;
        if (t.waiting == Waiting::condition) {
          spins = t.condition->spins;
          if (!spins && !t.condition->holds()) continue;
          t.waiting = Waiting::nothing;
        }
        if (t.waiting != Waiting::nothing) continue;
        resume(m, t);
        if (failed()) return true;
        spinning_ |= spins;
        if (!spins || t.done || t.waiting != Waiting::condition || !t.condition->spins) resumed = true;
      }
      int barrier = -1;
      for (unsigned k = 0; resumed && k < count; ++k) {
        Thread& t = m.threads[first + k];
        if (t.done || t.waiting == Waiting::nothing || t.waiting == Waiting::condition) continue;
        if (t.waiting == Waiting::barrier && t.barrier == barrier) continue;
        if (t.waiting == Waiting::barrier) barrier = t.barrier;
        if (t.waiting == Waiting::warpgroup && barrier == -2) continue;
        if (t.waiting == Waiting::warpgroup) barrier = -2;
        resolve(m, t);
        if (failed()) return true;
      }
      moved |= resumed;
      if (!resumed || below(8) == 0) return moved;
    }
  }

  bool deliver(Block& b) {
    if (b.copies.under_way() == 0) return false;
    const size_t i = below(b.copies.under_way());
    enter(b);
    b.machine.running = &b.machine.threads[b.copies.issuer(i)];  // whose fault it is, if there is one
    b.machine.line = b.copies.line(i);
    b.copies.deliver(i);
    b.machine.running = nullptr;
    b.machine.line = 0;
    return true;
  }
  bool deliver_any() {
    std::vector<Block*> candidates;
    for (auto& b : blocks())
      if (b->running && b->copies.under_way()) candidates.push_back(b.get());
    return !candidates.empty() && deliver(*candidates[below(candidates.size())]);
  }

  void finish(Block& b) {
    if (!b.running || failed()) return;
    for (const Thread& t : b.machine.threads)
      if (!t.done) return;
    enter(b);
    const std::string left = b.left();
    if (!left.empty()) {
      error_ = left + ", " + where(b.machine.threads[0]);
      return;
    }
    b.copies.finish();
    waited_ |= b.waited;
    b.running = false;
  }

  // Nothing can move any more.
  void explain() {
    const Thread* stuck = nullptr;
    Block* of = nullptr;
    const auto rank = [](const Thread& t) {
      return t.waiting == Waiting::warp        ? 3
             : t.waiting == Waiting::warpgroup ? 2
             : t.waiting == Waiting::condition ? 1
                                               : 0;
    };
    std::map<std::string, int> others;
    for (auto& b : blocks()) {
      if (!b->running) continue;
      enter(*b);
      check_left(b->machine);
      if (!b->machine.error.empty()) return;
      for (const Thread& t : b->machine.threads) {
        if (t.done) continue;
        ++others[describe(t)];
        if (stuck && rank(*stuck) >= rank(t)) continue;
        stuck = &t;
        of = b.get();
      }
    }
    enter(*of);
    error_ = describe(*stuck) + ", " + where(*stuck) + "; what waits:";
    int named = 0;
    for (const auto& o : others)
      if (++named <= 12) error_ += "\n  " + std::to_string(o.second) + " threads: " + o.first;
  }
  static std::string describe(const Thread& t) {
    const std::string at = " at line " + std::to_string(t.line);
    if (t.waiting == Waiting::barrier) return "a barrier" + at + " never completes: not all that it waits for arrive";
    if (t.waiting != Waiting::condition)
      return t.instruction + at + " never completes: not all that it waits for arrive";
    const std::string missing = t.condition->missing();
    return t.instruction + at + " never ends" + (missing.empty() ? "" : ": it waits for " + missing);
  }

  dim3 grid_, block_;
  size_t shared_bytes_;
  bool early_, waited_ = false;
  std::function<void()> kernel_;
  std::mt19937 random_;
  unsigned every_;
  size_t next_ = 0;
  bool spinning_ = false;
  std::string error_;
};

}  // namespace hopper
}  // namespace cuda_on_cpu

// For tests: how the next launches of this library run.
extern "C" __attribute__((used)) inline void cuda_on_cpu_schedule(unsigned seed, int resident) {
  cuda_on_cpu::hopper::schedule() = {seed, resident};
}
