// A queue of tasks that depend on each other.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <queue>
#include <utility>
#include <vector>

#include "../cpu/flash_attention.h"

namespace foundry {

// Of the ready tasks, the one with the most dependent work goes first. A thread that finds none sleeps. No task depends
// on a later one and a thread with a task never waits, so the first unfinished task is always running or ready: there
// is progress with any number of threads.
class TaskQueue {
 public:
  explicit TaskQueue(const std::vector<AttentionBackwardTask>& tasks)
      : tasks_(tasks),
        waits_for_(tasks.size()),
        left_(static_cast<int64_t>(tasks.size())) {
    for (const AttentionBackwardTask& task : tasks)
      for (const int64_t next : {task.next_of_rows, task.next_of_keys})
        if (next >= 0) ++waits_for_[next];
    for (size_t i = 0; i < tasks.size(); ++i)
      if (waits_for_[i] == 0) push(static_cast<int64_t>(i));
  }

  // The next task for a thread that has finished `done` (negative: none). Negative when no task is left.
  int64_t take(int64_t done) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (done >= 0) {
      release(tasks_[done].next_of_rows);
      release(tasks_[done].next_of_keys);
    }
    changed_.wait(lock, [this] { return !ready_.empty() || left_ == 0; });
    if (left_ == 0) return -1;
    const int64_t task = -ready_.top().second;
    ready_.pop();
    if (--left_ == 0) changed_.notify_all();
    else if (!ready_.empty()) changed_.notify_one();
    return task;
  }

 private:
  void push(int64_t i) { ready_.push({tasks_[i].work_left, -i}); }
  void release(int64_t i) {
    if (i >= 0 && --waits_for_[i] == 0) push(i);
  }

  const std::vector<AttentionBackwardTask>& tasks_;
  std::vector<int> waits_for_;
  std::priority_queue<std::pair<int64_t, int64_t>> ready_;  // (work left, -task): the earlier task first
  int64_t left_;                                            // tasks that no thread has taken
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace foundry
