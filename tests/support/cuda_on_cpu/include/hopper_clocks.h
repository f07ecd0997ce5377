// What each thread of a block has seen of the others: vector clocks, of threads and of what copies bring.
//
// A thread's clock says, of every other thread, up to which of its steps all that it did came before. A thread begins
// its next step when it releases: arrives at an mbarrier or meets others. An mbarrier counts as a thread whose steps
// are its phases: what copies bring was done in a step of the mbarrier that they complete.
#pragma once

#include <array>
#include <vector>

#include "fibers.h"

#if defined(__clang__) || !defined(__GNUC__)
#define FK_HOT
#else
#define FK_HOT __attribute__((optimize("O3"), noinline))  // the samples are compiled without optimisation
#endif

namespace cuda_on_cpu {
namespace hopper {

constexpr unsigned kMaxBarriers = 64;

struct Stamp {
  uint32_t who = 0, step = 0;
  bool operator==(const Stamp& other) const { return who == other.who && step == other.step; }
};

typedef uint32_t Four __attribute__((vector_size(16)));
using Row = std::vector<Four>;

FK_HOT inline void join(Four* to, const Four* from, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = to[i] > from[i] ? to[i] : from[i];
}
FK_HOT inline void meet_rows(Four* to, const Four* from, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = to[i] < from[i] ? to[i] : from[i];
}
// The first of `steps` that the clock has not seen, or -1.
FK_HOT inline int first_unseen(const uint32_t* clock, const uint32_t* steps, unsigned n) {
  for (unsigned i = 0; i < n; ++i)
    if (clock[i] < steps[i]) return int(i);
  return -1;
}

class Clocks {
 public:
  void begin(unsigned threads) {
    threads_ = threads;
    width_ = (threads + kMaxBarriers + 3) / 4;
    rows_.assign(size_t(threads) * width_, Four{});
    versions_.assign(threads, 0);
    for (unsigned i = 0; i < threads; ++i) row(i)[i] = 1;
  }
  unsigned threads() const { return threads_; }
  size_t width() const { return width_; }  // of a row, in fours
  uint32_t* row(unsigned thread) { return reinterpret_cast<uint32_t*>(&rows_[size_t(thread) * width_]); }
  const Four* fours(unsigned thread) const { return &rows_[size_t(thread) * width_]; }
  uint64_t version(unsigned thread) const { return versions_[thread]; }
  bool seen(unsigned thread, Stamp s) { return row(thread)[s.who] >= s.step; }
  Stamp now(unsigned thread) { return {thread, row(thread)[thread]}; }

  void acquire(unsigned thread, const Row& from) {
    if (from.empty()) return;
    join(&rows_[size_t(thread) * width_], from.data(), width_);
    ++versions_[thread];
  }
  void release(unsigned thread, Row& to) {
    if (to.empty()) to.assign(width_, Four{});
    join(to.data(), fours(thread), width_);
    next_step(thread);
  }
  void meet(const std::vector<Thread*>& met) {
    Row all(width_, Four{});
    for (const Thread* t : met) join(all.data(), fours(t->id), width_);
    for (const Thread* t : met) {
      std::copy(all.begin(), all.end(), rows_.begin() + long(t->id * width_));
      next_step(t->id);
    }
  }
  // What all of these threads have seen.
  void common(unsigned first, unsigned count, Row& to) {
    to.assign(fours(first), fours(first) + width_);
    for (unsigned i = 1; i < count; ++i) meet_rows(to.data(), fours(first + i), width_);
  }

 private:
  void next_step(unsigned thread) {
    ++row(thread)[thread];
    ++versions_[thread];
  }
  unsigned threads_ = 0;
  size_t width_ = 0;
  std::vector<Four> rows_;
  std::vector<uint64_t> versions_;
};

// The steps in which each thread made a fence. What it did before its n-th is visible to who has seen that step.
class Fences {
 public:
  void begin(unsigned threads) { steps_.assign(threads, {}); }
  uint32_t count(unsigned thread) const { return uint32_t(steps_[thread].size()); }
  void make(Stamp now) { steps_[now.who].push_back(now.step); }
  bool visible(const uint32_t* clock, unsigned writer, uint32_t before) const {
    return steps_[writer].size() > before && clock[writer] >= steps_[writer][before];
  }

 private:
  std::vector<std::vector<uint32_t>> steps_;
};

}  // namespace hopper
}  // namespace cuda_on_cpu
