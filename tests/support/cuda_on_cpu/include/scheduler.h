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

inline void let_go(Machine& m, const std::vector<Thread*>& met, bool order) {
  if (order && m.meetings) m.meetings->meet(met);
  else if (order && met.size() == m.threads.size()) ++m.epoch;  // all clocks begin anew
  else if (order) advance_clocks(met);
  for (Thread* t : met) t->waiting = Waiting::nothing;
}

inline bool same_instruction(const Thread& a, const Thread& b) {
  return a.waiting == b.waiting && a.line == b.line &&
         (a.instruction == b.instruction || std::strcmp(a.instruction, b.instruction) == 0);
}
inline bool has_left(Machine& m, const Thread& t, unsigned i, const char* how) {
  if (!m.threads[i].done) return false;
  m.error = std::string(t.instruction) + " names " + how + std::to_string(i % 32) + ", which has left, in its mask, " +
            where(t);
  return true;
}

inline bool resolve_warp(Machine& m, Thread& t, std::vector<Thread*>& met) {
  const unsigned n = unsigned(m.threads.size()), warp = t.id / 32 * 32;
  bool all = true;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(t.mask >> lane & 1u)) continue;
    if (warp + lane >= n) continue;  // the last warp is narrower
    Thread& other = m.threads[warp + lane];
    if (has_left(m, t, warp + lane, "lane ")) return false;
    if (!same_instruction(t, other) || other.mask != t.mask) all = false;
    met.push_back(&other);
  }
  if (!all) return false;
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
  let_go(m, met, std::strcmp(t.instruction, "__syncwarp") == 0);  // shuffles order no memory
  return true;
}

inline bool resolve_warpgroup(Machine& m, Thread& t, std::vector<Thread*>& met) {
  const unsigned first = t.id / 128 * 128;
  bool all = true;
  for (unsigned i = first; i < first + 128; ++i) {
    Thread& other = m.threads[i];
    if (other.done) {
      m.error =
          std::string(t.instruction) + " of a warpgroup whose thread " + std::to_string(i) + " has left, " + where(t);
      return false;
    }
    if (!same_instruction(t, other)) all = false;
    met.push_back(&other);
  }
  if (all) let_go(m, met, false);
  return all;
}

inline bool resolve_barrier(Machine& m, Thread& t, std::vector<Thread*>& met) {
  for (Thread& other : m.threads) {
    if (!other.done && other.waiting == Waiting::barrier && other.barrier == t.barrier) met.push_back(&other);
  }
  if (met.size() < t.expected) return false;
  for (Thread* other : met) {
    if (other->line != t.line || other->expected != t.expected) {
      m.error = "divergent barrier: thread " + std::to_string(t.id) + " waits at line " + std::to_string(t.line) +
                " and thread " + std::to_string(other->id) + " at line " + std::to_string(other->line) + ", " +
                where(t);
      return false;
    }
  }
  let_go(m, met, true);
  return true;
}

// Completes the barrier or warp instruction that t waits at, if all have arrived; false if not. Sets m.error where it
// can never complete as it should.
inline bool resolve(Machine& m, Thread& t) {
  static std::vector<Thread*> met;
  met.clear();
  if (t.done) return false;
  if (t.waiting == Waiting::warp) return resolve_warp(m, t, met);
  if (t.waiting == Waiting::warpgroup) return resolve_warpgroup(m, t, met);
  return t.waiting == Waiting::barrier && resolve_barrier(m, t, met);
}

inline bool resolve_one(Machine& m) {
  for (Thread& t : m.threads) {
    if (resolve(m, t)) return true;
    if (!m.error.empty()) return false;
  }
  return false;
}

inline void begin_threads(Machine& m) {
  const unsigned n = m.block.x * m.block.y * m.block.z;
  m.first_epoch = ++m.epoch;
  m.line = 0;
  m.threads.assign(n, Thread());
  for (unsigned i = 0; i < n; ++i) {
    Thread& t = m.threads[i];
    t.id = i;
    t.index = {i % m.block.x, i / m.block.x % m.block.y, i / (m.block.x * m.block.y)};
  }
}

// Sets m.error if threads have left before a barrier of the whole block.
inline void check_left(Machine& m) {
  unsigned left = 0;
  for (const Thread& t : m.threads) left += t.done;
  for (const Thread& t : m.threads)
    if (left && !t.done && t.waiting == Waiting::barrier && t.expected == m.threads.size()) {
      m.error = "divergent barrier: " + std::to_string(left) + " threads have left before line " +
                std::to_string(t.line) + ", " + where(t);
      return;
    }
}

inline void run_threads(Machine& m, bool reverse) {
  begin_threads(m);
  const unsigned n = unsigned(m.threads.size());
  while (m.error.empty()) {
    unsigned alive = 0;
    for (unsigned k = 0; k < n && m.error.empty(); ++k) {
      Thread& t = m.threads[reverse ? n - 1 - k : k];
      if (!t.done && t.waiting == Waiting::nothing) resume(m, t);
      if (!t.done) ++alive;
    }
    if (!m.error.empty() || alive == 0) return;
    check_left(m);
    if (!m.error.empty()) return;
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
  // The signal mask need not be kept: the handler's is that of the kernel.
  if (sigsetjmp(fault_exit(), 0) == 0) run_threads(m, reverse);
  if (m.error.empty()) return;
  for (Fiber& fiber : m.fibers) fiber.begun = false;
}

}  // namespace cuda_on_cpu
