// Runs a block: its threads in turn, until all wait; then completes a barrier or a warp instruction.
#pragma once

#include <algorithm>

#include "fibers.h"

namespace cuda_on_cpu {

// A meeting of fewer threads than the block has.
inline void advance_clocks(const std::vector<Thread*>& met) {
  const uint64_t epoch = machine().epoch;
  auto joined = std::make_shared<std::vector<uint32_t>>(machine().threads.size(), 0);
  const auto join = [&](unsigned i, uint32_t step) { (*joined)[i] = std::max((*joined)[i], step); };
  const std::vector<uint32_t>* last = nullptr;  // who met before has the same clock
  for (Thread* t : met) {
    if (t->clock_epoch == epoch && t->clock.get() != last) {
      last = t->clock.get();
      for (unsigned i = 0; i < joined->size(); ++i) join(i, (*last)[i]);
    }
    join(t->id, t->step++);
  }
  for (Thread* t : met) {
    t->clock = joined;
    t->clock_epoch = epoch;
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
    static std::vector<Thread*> met;
    met.clear();
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
        if (other.waiting != Waiting::warp || other.mask != t.mask || other.line != t.line ||
            (other.instruction != t.instruction && std::strcmp(other.instruction, t.instruction) != 0))
          all = false;
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
        ++m.epoch;  // all clocks begin anew
      } else {
        advance_clocks(met);
      }
    }
    release(met);
    return true;
  }
  return false;
}

inline void run_threads(Machine& m, bool reverse) {
  const unsigned n = m.block.x * m.block.y * m.block.z;
  m.first_epoch = ++m.epoch;
  m.threads.assign(n, Thread());
  for (unsigned i = 0; i < n; ++i) {
    Thread& t = m.threads[i];
    t.id = i;
    t.index = {i % m.block.x, i / m.block.x % m.block.y, i / (m.block.x * m.block.y)};
  }
  while (m.error.empty()) {
    unsigned alive = 0, left = 0;
    for (unsigned k = 0; k < n && m.error.empty(); ++k) {
      Thread& t = m.threads[reverse ? n - 1 - k : k];
      if (!t.done && t.waiting == Waiting::nothing) {
        resume(m, t);
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
      for (const Thread& t : m.threads)  // a warp instruction if there is one, for which the barriers wait
        if (!t.done && (!stuck || (t.waiting == Waiting::warp && stuck->waiting != Waiting::warp))) stuck = &t;
      const bool warp = stuck->waiting == Waiting::warp;
      m.error = std::string(warp ? stuck->instruction : "a barrier") + " at line " + std::to_string(stuck->line) +
                " never completes: not all that it waits for arrive, " + where(*stuck);
    }
  }
}

inline void run_block(Machine& m, bool reverse) {
  m.line = 0;
  // The signal mask need not be kept: the handler's is that of the kernel.
  if (sigsetjmp(m.fault, 0) == 0) run_threads(m, reverse);
  if (m.error.empty()) return;
  for (Fiber& fiber : m.fibers) fiber.begun = false;
}

}  // namespace cuda_on_cpu
