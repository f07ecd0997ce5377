// mbarriers of the checker, of one block.
#pragma once

#include <deque>

#include "cuda_on_cpu.h"
#include "hopper_arena.h"

namespace cuda_on_cpu {
namespace hopper {

struct Barrier {
  uint32_t at = 0;
  unsigned index = 0;
  uint32_t count = 0, pending = 0;  // arrivals of a phase; those still to come in this one
  int64_t bytes = 0;                // announced and not come yet
  uint32_t phase = 0;
  int64_t waited = -1, brought = -1;  // the last phase that was waited for; in which bytes came
  int line = 0;                       // of the last copy
  Stamp made;
  uint32_t fences = 0;  // of the thread that made it, before
  Row gathered, released;
};

struct PhaseWait : Condition {
  Barrier& barrier;
  uint32_t parity;
  PhaseWait(Barrier& b, uint32_t p) : barrier(b), parity(p) {}
  bool holds() override { return (barrier.phase & 1) != (parity & 1); }
  std::string missing() override {
    return "parity " + std::to_string(parity) + " of the mbarrier at " + std::to_string(barrier.at) + " (number " +
           std::to_string(barrier.index + 1) + "), in phase " + std::to_string(barrier.phase) + " with " +
           std::to_string(barrier.pending) + " of " + std::to_string(barrier.count) + " arrivals and " +
           std::to_string(barrier.bytes) + " bytes to come";
  }
};

class Barriers {
 public:
  explicit Barriers(Arena& arena) : arena_(arena) {}
  void begin(unsigned threads) {
    all_.clear();
    fences_.begin(threads);
    progress = 0;
  }
  uint64_t progress = 0;  // arrivals and bytes so far

  void init(uint32_t at, uint32_t arrivals) {
    const size_t word = arena_.place(at, 8, 8) / 4;
    if (arrivals == 0 || arrivals >= 1u << 20) fail("mbarrier_init with " + std::to_string(arrivals) + " arrivals");
    Chunk& c = arena_.chunk(at);
    if (c.barriers >> word % 4 & 3u) fail("mbarrier_init of what is an mbarrier");
    if (all_.size() == kMaxBarriers) fail("more than " + std::to_string(kMaxBarriers) + " mbarriers");
    const uint32_t zero[2] = {};
    arena_.write(at, 8, zero);
    c.barriers = uint8_t(c.barriers | 3u << word % 4);
    all_.emplace_back();
    Barrier& b = all_.back();
    b.at = at;
    b.index = unsigned(all_.size()) - 1;
    b.count = b.pending = arrivals;
    b.made = arena_.clocks.now(self().id);
    b.fences = fences_.count(self().id);
  }
  void init_fence() { fences_.make(arena_.clocks.now(self().id)); }

  Barrier& use(const char* what, uint32_t at, int line) {
    const At in(line);
    arena_.place(at, 8, 8);
    for (Barrier& b : all_) {
      if (b.at != at) continue;
      const uint32_t* clock = arena_.clocks.row(self().id);
      if (clock[b.made.who] < b.made.step)
        fail("race: " + std::string(what) + " without a barrier after thread " + std::to_string(b.made.who) +
             " initialized the mbarrier");
      if (!fences_.visible(clock, b.made.who, b.fences))
        fail(std::string(what) + " of an mbarrier that no mbarrier_init_fence made visible");
      return b;
    }
    fail(std::string(what) + " before mbarrier_init of address " + std::to_string(at));
  }

  void arrive(Barrier& b, uint32_t bytes) {
    if (b.pending == 0)
      fail("more arrivals than the " + std::to_string(b.count) + " of the mbarrier at " + std::to_string(b.at) +
           ", whose phase " + std::to_string(b.phase) + " still waits for " + std::to_string(b.bytes) + " bytes");
    b.bytes += bytes;
    if (b.bytes >= 1 << 20) fail("more than 2^20 - 1 bytes are announced to an mbarrier");
    arena_.clocks.release(self().id, b.gathered);
    --b.pending;
    advance(b);
  }
  // Bytes of a copy; the step in which they came.
  Stamp bring(Barrier& b, uint32_t bytes, int line) {
    const Stamp by{arena_.clocks.threads() + b.index, b.phase + 1};
    b.brought = b.phase;
    b.line = line;
    b.bytes -= bytes;
    if (b.bytes < 0)
      fail("more bytes come to the mbarrier at " + std::to_string(b.at) +
           " than were announced: " + std::to_string(-b.bytes));
    advance(b);
    return by;
  }
  void wait(const char* what, uint32_t at, uint32_t parity, int line) {
    Barrier& b = use(what, at, line);
    PhaseWait condition(b, parity);
    if (!condition.holds()) wait_for(what, condition, line);
    passed(b);
  }
  bool test(const char* what, uint32_t at, uint32_t parity, int line) {
    Barrier& b = use(what, at, line);
    PhaseWait condition(b, parity);
    condition.spins = true;
    if (!condition.holds()) {
      wait_for(what, condition, line);
      return false;
    }
    passed(b);
    return true;
  }
  // What the block leaves behind that is a mistake, or "".
  std::string left() const {
    for (const Barrier& b : all_)
      if (b.brought > b.waited) return "the kernel ends though nobody has waited for the copy of " + line_text(b.line);
    return "";
  }

 private:
  void passed(Barrier& b) {
    b.waited = std::max(b.waited, int64_t(b.phase) - 1);
    arena_.clocks.acquire(self().id, b.released);
  }
  void advance(Barrier& b) {
    ++progress;
    if (b.pending || b.bytes) return;
    b.released = b.gathered;
    uint32_t* steps = reinterpret_cast<uint32_t*>(b.released.data());
    ++b.phase;
    steps[arena_.clocks.threads() + b.index] = b.phase;
    b.gathered.clear();
    b.pending = b.count;
  }
  Arena& arena_;
  Fences fences_;
  std::deque<Barrier> all_;
};

}  // namespace hopper
}  // namespace cuda_on_cpu
