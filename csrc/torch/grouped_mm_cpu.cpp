// The CPU launches of foundry_kernels::grouped_mm_fwd and grouped_mm_bwd; see grouped_mm.cpp for the operators. Groups
// of few rows, as in decoding, use decode_linear's kernel: one pass over their matrices, with the threads sharing all
// groups. Other float32 matmuls are those of products.h, and other 16-bit matmuls are PyTorch's. Where oneDNN is slow
// at 16 bits they run in float32, or for bfloat16 in the kernel of products.h if it applies. Each thread runs small
// matmuls alone, because waking all threads for each of them takes a part of the time.
#include "grouped_mm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu_common.h"
#include "decode_linear.h"
#include "products.h"

namespace foundry {
namespace grouped_mm_cpu {

// Columns of a float32 matmul whose copies stay small.
constexpr int64_t kWidenedColumns = 4096;

// out = a b
void multiply(const Tensor& a, const Tensor& b, Tensor out) {
  if (a.size(1) == 0) {
    out.zero_();
  } else if (a.scalar_type() == at::kFloat) {
    multiply_float32(a, b, out);
  } else if (fast_products(a.scalar_type())) {
    at::mm_out(out, a, b);
  } else if (a.scalar_type() == at::kBFloat16 && own_bfloat16_products()) {
    multiply_bfloat16(a, b, out);
  } else {
    const Tensor left = a.to(at::kFloat);
    const Tensor memory = at::empty({a.size(0), std::min(kWidenedColumns, b.size(1))}, left.options());
    for (int64_t first = 0; first < b.size(1); first += kWidenedColumns) {
      const int64_t count = std::min(kWidenedColumns, b.size(1) - first);
      const Tensor wide = memory.narrow(1, 0, count);
      multiply_float32(left, b.narrow(1, first, count).to(at::kFloat), wide);
      out.narrow(1, first, count).copy_(wide);
    }
  }
}

// Matmuls that do not depend on each other.
class Matmuls {
 public:
  void add(const Tensor& a, const Tensor& b, const Tensor& out) {
    if (out.numel() > 0) all_.push_back({a, b, out});
  }

  void run() {
    if (all_.empty()) return;
    const int64_t n_threads = at::get_num_threads();
    const auto small = std::partition(all_.begin(), all_.end(), [](const One& one) { return one.work() > kSmall; });
    const int64_t n_small = all_.end() - small;
    const auto type = all_.front().a.scalar_type();
    // Parts of PyTorch's matmuls do not pay off in oneDNN, which takes long to begin, and have other bits in MKL.
    const bool divisible = (type == at::kBFloat16 && own_bfloat16_products()) ||
                           (!fast_float32_products() && (type == at::kFloat || !fast_products(type)));
    const bool shared = n_threads > 1 && n_small >= (divisible ? 2 : 2 * n_threads);
    for (auto one = all_.begin(); one != (shared ? small : all_.end()); ++one) multiply(one->a, one->b, one->out);
    if (shared)
      share(&*small, n_small, n_threads, divisible ? (kTasksOfThread * n_threads + n_small - 1) / n_small : 1);
  }

 private:
  // Multiplications of a matmul that one thread runs alone; a tenth of a millisecond or two.
  static constexpr int64_t kSmall = 1 << 24;
  // Of a part of a matmul, at least.
  static constexpr int64_t kSmallest = 1 << 20, kColumns = 64;
  static constexpr int64_t kTasksOfThread = 4;

  struct One {
    Tensor a, b, out;
    int64_t work() const { return out.numel() * a.size(1); }
  };
  struct Task {
    const One* of;
    int64_t begin, columns;
  };

  // The threads take parts of the columns, the largest first.
  static void share(const One* ones, int64_t n, int64_t n_threads, int64_t most_parts) {
    std::vector<Task> tasks;
    for (const One* one = ones; one != ones + n; ++one) {
      const int64_t columns = one->out.size(1), parts = std::clamp<int64_t>(one->work() / kSmallest, 1, most_parts);
      const int64_t step = ((columns + parts - 1) / parts + kColumns - 1) / kColumns * kColumns;
      for (int64_t begin = 0; begin < columns; begin += step)
        tasks.push_back({one, begin, std::min(step, columns - begin)});
    }
    const auto work = [](const Task& task) { return task.of->work() / task.of->out.size(1) * task.columns; };
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& x, const Task& y) { return work(x) > work(y); });
    std::atomic<size_t> next{0};
    at::parallel_for(0, std::min<int64_t>(n_threads, tasks.size()), 1, [&](int64_t, int64_t) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;  // other threads do not inherit the caller's
      for (size_t i; (i = next.fetch_add(1)) < tasks.size();) {
        const auto& [of, begin, columns] = tasks[i];
        multiply(of->a, of->b.narrow(1, begin, columns), of->out.narrow(1, begin, columns));
      }
    });
  }

  std::vector<One> all_;
};

// The ends of the groups on the host, checked. Checked in backward too: the memory may have changed.
Tensor checked(const Tensor& offs_, int64_t n_rows) {
  const Tensor offs = offs_.contiguous();
  const int32_t* end = offs.const_data_ptr<int32_t>();
  for (int64_t group = 0, before = 0; group < offs.numel(); before = end[group++])
    TORCH_CHECK_VALUE(before <= end[group] && end[group] <= n_rows, "offs must never decrease and lie in 0 .. ", n_rows,
                      ", the rows of x; got ", end[group], " for group ", group, ", after ", before);
  return offs;
}

// Calls f(group, first row, rows) for each group, and for the rows after the last one as a group of their own.
template <class F>
void each_group(const Tensor& offs, int64_t n_rows, F f) {
  const int32_t* end = offs.const_data_ptr<int32_t>();
  int64_t first = 0;
  for (int64_t group = 0; group < offs.numel(); first = end[group++]) f(group, first, end[group] - first);
  f(offs.numel(), first, n_rows - first);
}

// y = x weight[e] for the rows of group e.
void product(const Tensor& x, const Tensor& weight, const Tensor& offs, bool batch_invariant, const Tensor& y) {
  if (y.numel() == 0) return;
  const int64_t few = rows_of_one_pass(x.scalar_type(), x.size(1));
  DecodeProducts in_one_pass;
  Matmuls others;
  each_group(offs, x.size(0), [&](int64_t group, int64_t first, int64_t n) {
    if (n == 0) return;
    Tensor out = y.narrow(0, first, n);
    if (group == weight.size(0) || x.size(1) == 0) {
      out.zero_();
      return;
    }
    const Tensor rows = x.narrow(0, first, n), matrix = weight.select(0, group);
    // The kernel reads the transpose row by row: another memory order needs a copy.
    if (batch_invariant || (n <= few && matrix.stride(0) == 1)) in_one_pass.add(rows, matrix.t(), out);
    else others.add(rows, matrix, out);
  });
  in_one_pass.run();
  others.run();
}

// The transpose [N, rows padded with zeros], so that each of its rows fills whole registers.
Tensor padded_transpose(const Tensor& x) {
  constexpr int64_t kMultiple = 32;
  const int64_t n = x.size(0), padded = (n + kMultiple - 1) / kMultiple * kMultiple;
  const Tensor out = at::empty({x.size(1), padded}, x.options());
  out.narrow(1, 0, n).copy_(x.t());
  out.narrow(1, n, padded - n).zero_();
  return out;
}

// out[e] = a^T b over the rows of group e. out is contiguous.
void gradient(const Tensor& a, const Tensor& b, const Tensor& offs, bool batch_invariant, const Tensor& out) {
  Matmuls all;
  each_group(offs, a.size(0), [&](int64_t group, int64_t first, int64_t n) {
    if (group == out.size(0) || out.numel() == 0) return;
    const Tensor left = a.narrow(0, first, n), right = b.narrow(0, first, n), into = out.select(0, group);
    if (n == 0 || !batch_invariant) return all.add(left.t(), right, into);
    DecodeProducts alone;  // frees its copies before the next group's
    alone.add(padded_transpose(left), padded_transpose(right), into);
    alone.run();
  });
  all.run();
}

Tensor fwd_cpu(const Tensor& x, const Tensor& weight, const Tensor& offs, bool batch_invariant) {
  const Tensor y = empty_grouped_mm_fwd(x, weight, offs);
  product(x, weight, checked(offs, x.size(0)), batch_invariant, y);
  return y;
}

std::tuple<Tensor, Tensor> bwd_cpu(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& offs_,
                                   bool batch_invariant, bool need_dx, bool need_dweight) {
  const auto [dx, dweight] = empty_grouped_mm_bwd(x, weight, offs_, need_dx, need_dweight);
  const Tensor offs = checked(offs_, x.size(0));
  if (need_dx) product(dy, weight.transpose(1, 2), offs, batch_invariant, dx);
  if (need_dweight && is_transposed(weight)) gradient(dy, x, offs, batch_invariant, dweight.transpose(1, 2));
  else if (need_dweight) gradient(x, dy, offs, batch_invariant, dweight);
  return {dx, dweight};
}

}  // namespace grouped_mm_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("grouped_mm_fwd", &grouped_mm_cpu::fwd_cpu);
  m.impl("grouped_mm_bwd", &grouped_mm_cpu::bwd_cpu);
}

}  // namespace foundry
