// How attention is split into tasks. It depends only on the shapes and the mask, so results are bitwise the same for
// any number of threads. The number of threads decides only which heads share memory.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "flash_attention.h"

namespace foundry {

constexpr int64_t kAttentionThreads = 64;                         // threads that a large call should keep busy
constexpr int64_t kSplitKeys = 512;                               // least keys of a split in the forward pass
constexpr int64_t kTaskRows = kAttentionBlocks * kAttentionRows;  // rows of a task; in backward at least
constexpr int64_t kTaskKeys = 256;  // least keys of a task in the backward pass; half of that if there are few

// Pairs of a row and a key in rows [row_begin, row_end) and keys [key_begin, key_end), without hidden ones.
inline int64_t attention_work(const AttentionInputs& a, const AttentionSequence& s, int64_t row_begin, int64_t row_end,
                              int64_t key_begin, int64_t key_end) {
  int64_t work = 0;
  for (int64_t row = row_begin; row < row_end; row += kAttentionRows) {
    const int64_t last = std::min(row + kAttentionRows, row_end) - 1;
    const int64_t begin = std::max(key_begin, row / a.group + a.offset(s) - a.window_left);
    const int64_t end = std::min(key_end, last / a.group + a.offset(s) + a.window_right + 1);
    work += std::max<int64_t>(0, end - begin) * (last + 1 - row);
  }
  return work;
}

struct ForwardTasks {
  std::vector<AttentionTask> tasks;  // longer ones first; splits of the same rows are adjacent
  int64_t num_splits;                // per row
};

inline ForwardTasks forward_tasks(const AttentionInputs& a, int64_t n_sequences, int64_t n_kv_heads) {
  struct Rows {
    int64_t work, sequence, kv_head, begin;
  };
  std::vector<Rows> all;
  int64_t longest = 0, most_work = 1;
  for (int64_t n = 0; n < n_sequences; ++n) {
    const AttentionSequence& s = a.sequences[n];
    const int64_t total = s.q_len * a.group;
    longest = std::max(longest, s.k_len);
    for (int64_t head = 0; head < n_kv_heads; ++head)
      for (int64_t begin = (total - 1) / kTaskRows * kTaskRows; begin >= 0 && total > 0; begin -= kTaskRows) {
        all.push_back({attention_work(a, s, begin, std::min(begin + kTaskRows, total), 0, s.k_len), n, head, begin});
        most_work = std::max(most_work, all.back().work);
      }
  }
  // Compares in eighths of the longest task: tasks of similar length stay with those of their head, whose keys are
  // cached.
  std::stable_sort(all.begin(), all.end(), [&](const Rows& x, const Rows& y) {
    return 8 * x.work / (most_work + 1) > 8 * y.work / (most_work + 1);
  });
  const int64_t count = static_cast<int64_t>(all.size());
  const int64_t num_splits =
      a.batch_invariant
          ? 1
          : std::max<int64_t>(1, std::min(longest / kSplitKeys, kAttentionThreads / std::max<int64_t>(1, count)));
  ForwardTasks result{{}, num_splits};
  result.tasks.reserve(count * num_splits);
  for (const Rows& rows : all) {
    const AttentionSequence& s = a.sequences[rows.sequence];
    const int64_t end = std::min(rows.begin + kTaskRows, s.q_len * a.group);
    const int64_t split_keys = round_up((s.k_len + num_splits - 1) / num_splits, kAttentionKeys);
    for (int64_t i = 0; i < num_splits; ++i)
      result.tasks.push_back({rows.sequence, rows.kv_head, rows.begin, end, std::min(i * split_keys, s.k_len),
                              std::min((i + 1) * split_keys, s.k_len), int64_t(result.tasks.size())});
  }
  return result;
}

struct BackwardTasks {
  std::vector<AttentionBackwardTask> tasks;  // a task comes after those that it waits for
  int64_t sums;                              // floats of AttentionBackward::sums
};

// In `tasks` each task comes after those that it waits for.
inline void set_work_left(std::vector<AttentionBackwardTask>& tasks) {
  const auto left = [&](int64_t next) { return next < 0 ? 0 : tasks[next].work_left; };
  for (auto task = tasks.rbegin(); task != tasks.rend(); ++task)
    task->work_left = task->work + std::max(left(task->next_of_rows), left(task->next_of_keys));
}

// The tasks of one sequence and key-value head. Rows and keys are cut into `chunks` each, and a task is a pair of
// chunks. In round t row chunk r meets key chunk t - r. So tasks of a round do not wait for each other, and with a
// causal mask every round has equally many.
inline std::vector<AttentionBackwardTask> backward_tasks_of_head(const AttentionInputs& a, int64_t sequence,
                                                                 int64_t chunks) {
  const AttentionSequence& s = a.sequences[sequence];
  const int64_t rows = s.q_len * a.group, keys = s.k_len;
  std::vector<AttentionBackwardTask> tasks;
  const auto add = [&](int64_t row_begin, int64_t row_end, int64_t key_begin, int64_t key_end) {
    const int64_t work = attention_work(a, s, row_begin, row_end, key_begin, key_end);
    tasks.push_back(
        {sequence, 0, row_begin, row_end, key_begin, key_end, -1, -1, work, -1, -1, true, true, true, true, work});
  };
  if (chunks == 1) {
    add(0, rows, 0, keys);
    return tasks;
  }
  const int64_t row_chunk = round_up((rows + chunks - 1) / chunks, kTaskRows),
                n_rows = (rows + row_chunk - 1) / row_chunk;
  const int64_t key_chunk = round_up((keys + chunks - 1) / chunks, kAttentionKeys),
                n_keys = (keys + key_chunk - 1) / key_chunk;
  std::vector<int64_t> last_of_rows(n_rows, -1), last_of_keys(n_keys, -1);
  const int64_t n_rounds = std::max(n_rows, n_keys);
  for (int64_t round = 0; round < n_rounds; ++round)
    for (int64_t r = 0; r < n_rows; ++r) {
      const int64_t c = (round - r + n_rounds) % n_rounds;
      if (c >= n_keys) continue;
      const int64_t index = static_cast<int64_t>(tasks.size());
      add(r * row_chunk, std::min((r + 1) * row_chunk, rows), c * key_chunk, std::min((c + 1) * key_chunk, keys));
      AttentionBackwardTask& task = tasks.back();
      if (task.work == 0) {
        tasks.pop_back();
        continue;
      }
      if (int64_t& last = last_of_rows[r]; last >= 0) {
        tasks[last].next_of_rows = index;
        tasks[last].last_of_rows = task.first_of_rows = false;
      }
      if (int64_t& last = last_of_keys[c]; last >= 0) {
        tasks[last].next_of_keys = index;
        tasks[last].last_of_keys = task.first_of_keys = false;
      }
      last_of_rows[r] = last_of_keys[c] = index;
    }
  // Rows without keys and keys without rows get zero gradients.
  for (int64_t r = 0; r < n_rows; ++r)
    if (last_of_rows[r] < 0) add(r * row_chunk, std::min((r + 1) * row_chunk, rows), 0, 0);
  for (int64_t c = 0; c < n_keys; ++c)
    if (last_of_keys[c] < 0) add(0, 0, c * key_chunk, std::min((c + 1) * key_chunk, keys));
  set_work_left(tasks);
  return tasks;
}

// How many of `heads` heads with these tasks are needed to keep the threads busy. The work per thread should exceed the
// longest chain of tasks by a third; otherwise threads wait at the ends of chains. Rounds up rather than down at the
// end.
inline int64_t heads_at_a_time(const std::vector<AttentionBackwardTask>& of_head, int64_t heads, int64_t threads) {
  int64_t total = 1, longest = 0;
  for (const AttentionBackwardTask& task : of_head) {
    total += task.work;
    longest = std::max(longest, task.work_left);
  }
  const int64_t needed = std::max<int64_t>(1, (4 * threads * longest + 3 * total - 1) / (3 * total));
  const int64_t times = std::max<int64_t>(1, heads / needed);
  return (heads + times - 1) / times;
}

// Adds the tasks of `heads` heads: those of of_head's sequence and of the following sequences, whose heads have the
// same tasks. There are as many copies of the sums as keep `threads` busy. Head h reuses the memory of head h - copies,
// chunk by chunk: its first task of a chunk waits for that head's last task of the chunk. A head's tasks all come
// before those of the next head, so again each task comes after those that it waits for.
inline void add_heads(const AttentionBackward& a, const std::vector<AttentionBackwardTask>& of_head, int64_t heads,
                      int64_t n_kv_heads, int64_t threads, BackwardTasks& result) {
  const AttentionSequence& s = a.sequences[of_head[0].sequence];
  const auto count = static_cast<int64_t>(of_head.size());
  const bool in_scratch = count == 1;  // otherwise a head has several tasks
  const int64_t key_sums = in_scratch ? 0 : a.dk_sums(s.k_len) + a.dv_sums(s.k_len);
  const int64_t copies = heads_at_a_time(of_head, heads, threads);
  // For each task: the first task of its rows, the first task of its keys, and the offset of the sums of its rows
  // within the head.
  std::vector<int64_t> first_of_rows(count), first_of_keys(count), row_sums(count, -1);
  int64_t size = key_sums;
  for (int64_t i = 0; i < count; ++i) {
    const AttentionBackwardTask& task = of_head[i];
    if (task.first_of_rows) first_of_rows[i] = i;
    if (task.first_of_keys) first_of_keys[i] = i;
    if (a.dq && task.first_of_rows && !task.last_of_rows)
      row_sums[i] = std::exchange(size, size + a.dq_sums(task.row_end - task.row_begin));
    if (const int64_t next = task.next_of_rows; next >= 0)
      first_of_rows[next] = first_of_rows[i], row_sums[next] = row_sums[i];
    if (const int64_t next = task.next_of_keys; next >= 0) first_of_keys[next] = first_of_keys[i];
  }
  for (int64_t head = 0; head < heads; ++head) {
    const auto begin = static_cast<int64_t>(result.tasks.size());
    const int64_t sums = result.sums + head % copies * size;
    const auto place = [&](int64_t next, bool shared, int64_t first) {
      if (next >= 0) return begin + next;
      return shared && head + copies < heads ? begin + copies * count + first : -1;
    };
    for (int64_t i = 0; i < count; ++i) {
      AttentionBackwardTask task = of_head[i];
      task.sequence += head / n_kv_heads;
      task.kv_head = head % n_kv_heads;
      if (!in_scratch) task.sums = sums;
      if (row_sums[i] >= 0) task.row_sums = sums + row_sums[i];
      task.next_of_rows = place(task.next_of_rows, row_sums[i] >= 0, first_of_rows[i]);
      task.next_of_keys = place(task.next_of_keys, key_sums > 0 && task.key_begin < task.key_end, first_of_keys[i]);
      result.tasks.push_back(task);
    }
  }
  result.sums += copies * size;
}

inline BackwardTasks backward_tasks(const AttentionBackward& a, int64_t n_sequences, int64_t n_kv_heads,
                                    int64_t threads) {
  std::vector<int64_t> work(n_sequences);
  int64_t total = 0;
  for (int64_t n = 0; n < n_sequences; ++n) {
    const AttentionSequence& s = a.sequences[n];
    work[n] = attention_work(a, s, 0, s.q_len * a.group, 0, s.k_len);
    total += work[n] * n_kv_heads;
  }
  BackwardTasks result{};
  for (int64_t n = 0, end; n < n_sequences; n = end) {
    const AttentionSequence& s = a.sequences[n];
    const int64_t rows = s.q_len * a.group;
    for (end = n + 1; end < n_sequences; ++end)
      if (a.sequences[end].q_len != s.q_len || a.sequences[end].k_len != s.k_len) break;
    int64_t chunks = 1;
    if (a.batch_invariant) total = work[n] * n_kv_heads;  // as if it were alone
    // Tasks of the same keys run one after another, and with a causal mask the first keys have twice the average work.
    // Choose enough chunks that this chain is at most one thread's share of all work.
    if (work[n] * kAttentionThreads > total)
      chunks = std::max<int64_t>(
          1, std::min({(2 * kAttentionThreads * work[n] + total - 1) / total, rows / kTaskRows, s.k_len / kTaskKeys}));
    add_heads(a, backward_tasks_of_head(a, n, chunks), (end - n) * n_kv_heads, n_kv_heads, threads, result);
  }
  set_work_left(result.tasks);
  return result;
}

// The tasks that compute dbias if pairs share its elements. A token's rows may lie in two blocks: if the heads of a
// group share elements, a task covers whole tiles of 64 tokens.
inline std::vector<AttentionBiasTask> bias_tasks(const AttentionBackward& a, int64_t n_sequences, int64_t n_kv_heads) {
  const PairStrides& own = a.dbias_strides;  // 0: shared
  const AttentionSequence& s = a.sequences[0];
  const int64_t rows = s.q_len * a.group;
  const int64_t sequences = own.batch ? 1 : n_sequences, kv_heads = own.head ? 1 : n_kv_heads;
  const int64_t task_rows = !own.query ? rows : own.head ? kAttentionRows : kAttentionRows * a.group;
  const auto tasks_of = [&](int64_t keys) {
    std::vector<AttentionBiasTask> tasks;
    for (int64_t n = 0; n < n_sequences; n += sequences)
      for (int64_t head = 0; head < n_kv_heads; head += kv_heads)
        for (int64_t row = 0; row < rows; row += task_rows)
          for (int64_t key = 0; key == 0 || key < s.k_len; key += keys)
            tasks.push_back({n, n + sequences, head, head + kv_heads, row, std::min(row + task_rows, rows), key,
                             std::min(key + keys, s.k_len)});
    return tasks;
  };
  if (!own.key) return tasks_of(std::max<int64_t>(s.k_len, 1));
  auto tasks = tasks_of(kBiasTaskKeys);
  return int64_t(tasks.size()) < kAttentionThreads ? tasks_of(kAttentionKeys) : tasks;
}

}  // namespace foundry
