// Phases of tasks, each of which needs all of the phase before, in one parallel region. Waking a team of threads once a
// phase takes longer than the small ones among them: here a thread that has nothing left to do looks at a counter.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace foundry {

struct Phase {
  int64_t n_tasks;
  std::function<void(int64_t thread)> prepare;            // by a thread before its first task, or empty
  std::function<void(int64_t task, int64_t thread)> run;  // in any order
  std::function<void(int64_t thread)> finish;             // by one thread that has prepared, after all tasks, or empty
};

// Nothing depends on how many threads there are in truth, which the pool decides: each that comes takes tasks while
// there are any. It begins with a part of its own, because tasks that follow each other read memory that does.
class Phases {
 public:
  Phases(std::vector<Phase> phases, int64_t n_threads)
      : phases_(std::move(phases)),
        n_threads_(n_threads),
        left_(phases_.size()),
        next_(new Counter[phases_.size() * n_threads]) {
    for (size_t p = 0; p < phases_.size(); ++p) {
      left_[p].count.store(phases_[p].n_tasks > 0 ? phases_[p].n_tasks : -1, std::memory_order_relaxed);
      for (int64_t part = 0; part < n_threads; ++part)
        next(p, part).store(begin_of(p, part), std::memory_order_relaxed);
    }
  }

  void run() {
    at::parallel_for(0, n_threads_, 1, [&](int64_t thread, int64_t) {
      try {
        for (size_t p = 0; p < phases_.size() && !failed_.load(std::memory_order_relaxed); ++p) work(p, thread);
      } catch (...) {
        failed_.store(true, std::memory_order_relaxed);  // so that nobody waits for this thread
        throw;
      }
    });
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> count;
  };
  static constexpr int kSpins = 4096;  // before a thread lets another one have its processor

  int64_t begin_of(size_t p, int64_t part) const { return phases_[p].n_tasks * part / n_threads_; }
  std::atomic<int64_t>& next(size_t p, int64_t part) { return next_[p * n_threads_ + part].count; }

  void work(size_t p, int64_t thread) {
    const Phase& phase = phases_[p];
    int64_t done = 0;
    for (int64_t i = 0; i < n_threads_; ++i) {
      const int64_t part = (thread + i) % n_threads_, end = begin_of(p, part + 1);
      std::atomic<int64_t>& next_task = next(p, part);
      if (next_task.load(std::memory_order_relaxed) >= end) continue;  // many threads may read at a time
      for (int64_t task; (task = next_task.fetch_add(1, std::memory_order_relaxed)) < end; ++done) {
        if (done == 0 && phase.prepare) phase.prepare(thread);
        phase.run(task, thread);
      }
    }
    // Negative once the phase is finished too.
    std::atomic<int64_t>& left = left_[p].count;
    if (done > 0 && left.fetch_sub(done, std::memory_order_acq_rel) == done) {
      if (phase.finish) phase.finish(thread);
      left.store(-1, std::memory_order_release);
    }
    for (int spins = 0; left.load(std::memory_order_acquire) >= 0; ++spins) {
      if (failed_.load(std::memory_order_relaxed)) return;
      if (spins > kSpins) std::this_thread::yield();
      else pause();
    }
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  std::vector<Phase> phases_;
  int64_t n_threads_;
  std::vector<Counter> left_;
  std::unique_ptr<Counter[]> next_;  // by phase and part: the first task that nobody has taken
  std::atomic<bool> failed_{false};
};

}  // namespace foundry
