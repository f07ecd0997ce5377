// Runs phases of tasks in one parallel region. Each phase needs all of the phase before. Waking the threads once per
// phase would take longer than a small phase itself; here a thread that has run out of tasks polls a counter.
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
  std::function<void(int64_t thread)> prepare;            // runs on a thread before its first task; may be empty
  std::function<void(int64_t task, int64_t thread)> run;  // in any order
  std::function<void(int64_t thread)> finish;  // runs after all tasks, on one thread that ran prepare; may be empty
};

// The pool decides how many threads really run, and nothing depends on it: each thread takes tasks while there are any.
// A thread starts with a range of its own, because neighbouring tasks read neighbouring memory.
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
        failed_.store(true, std::memory_order_relaxed);  // so that no thread waits for this one
        throw;
      }
    });
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> count;
  };
  static constexpr int kSpins = 4096;  // polls before a thread yields its processor

  int64_t begin_of(size_t p, int64_t part) const { return phases_[p].n_tasks * part / n_threads_; }
  std::atomic<int64_t>& next(size_t p, int64_t part) { return next_[p * n_threads_ + part].count; }

  void work(size_t p, int64_t thread) {
    const Phase& phase = phases_[p];
    int64_t done = 0;
    for (int64_t i = 0; i < n_threads_; ++i) {
      const int64_t part = (thread + i) % n_threads_, end = begin_of(p, part + 1);
      std::atomic<int64_t>& next_task = next(p, part);
      if (next_task.load(std::memory_order_relaxed) >= end) continue;  // many threads may read at once
      for (int64_t task; (task = next_task.fetch_add(1, std::memory_order_relaxed)) < end; ++done) {
        if (done == 0 && phase.prepare) phase.prepare(thread);
        phase.run(task, thread);
      }
    }
    // Negative once `finish` is done too.
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
  std::unique_ptr<Counter[]> next_;  // per phase and range: the first free task
  std::atomic<bool> failed_{false};
};

}  // namespace foundry
