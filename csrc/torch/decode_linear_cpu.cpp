// The operator foundry_kernels::decode_linear: rows times the transposes of several weights. With few rows, as in
// decoding, it reads the weights once. With many rows, each row gets the same bits as alone; batch-invariant linear
// layers use this. CPU only; no gradient.
#include "decode_linear.h"

#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>

#include "../cpu/processor.h"
#include "cpu_common.h"
#include "options.h"

namespace foundry {
namespace decode_linear_cpu {

// Multiplications that justify waking a thread, at the speed at which a thread reads weights from memory.
constexpr int64_t kReadGrain = 1 << 17;
constexpr int64_t kTaskRows = 64;  // with many rows: rows of a task, a multiple of kDecodeLinearRows

// The tasks of a matmul: each block of columns with each chunk of rows. Neighbouring tasks of one chunk form one call.
struct Tasks {
  int64_t blocks = 0, chunks, end;  // end: one past the last task, counted through all matmuls

  Tasks(const DecodeLinear& of, int64_t begin) : chunks((of.n_rows + kTaskRows - 1) / kTaskRows) {
    for (int i = 0; i < of.n_matrices; ++i) blocks += of.matrices[i].blocks();
    end = begin + blocks * chunks;
  }
  int64_t begin() const { return end - blocks * chunks; }
};

// In units of one kernel call on one block.
int64_t work_of(const DecodeLinear& of) {
  const int64_t calls = (std::min(of.n_rows, kTaskRows) + kDecodeLinearRows - 1) / kDecodeLinearRows;
  return calls * kDecodeLinearBlock * std::max<int64_t>(1, of.width);
}

// One task of many rows: a block of a weight stays in the cache for all rows of the task.
template <class Kernel>
void run_task(Kernel kernel, const DecodeLinear& of, int64_t block, int64_t chunk) {
  const int64_t first = chunk * kTaskRows;
  for (int64_t row = first; row < std::min(first + kTaskRows, of.n_rows); row += kDecodeLinearRows)
    kernel(of.few_rows(row), block, block + 1);
}

// Runs all matmuls; the threads share them.
void run_products(c10::ArrayRef<DecodeLinear> products) {
  std::vector<Tasks> tasks;
  tasks.reserve(products.size());
  int64_t count = 0, work = 0;
  for (const DecodeLinear& each : products) {
    tasks.emplace_back(each, count);
    work += (tasks.back().end - count) * work_of(each);
    count = tasks.back().end;
  }
  if (count == 0) return;
  const auto kernel = FK_CHOOSE_ISA(decode_linear);
  const int64_t grain = std::max<int64_t>(1, kReadGrain / std::max<int64_t>(1, work / count));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    size_t i = 0;
    while (begin < end) {
      while (tasks[i].end <= begin) ++i;
      const DecodeLinear& of = products[i];
      const int64_t at = begin - tasks[i].begin();
      if (of.n_rows <= kDecodeLinearRows) {
        const int64_t stop = std::min(end, tasks[i].end);
        kernel(of.few_rows(0), at, at + stop - begin);
        begin = stop;
      } else {
        run_task(kernel, of, at / tasks[i].chunks, at % tasks[i].chunks);
        ++begin;
      }
    }
  });
}

// Allocates the result. The meta device uses it as a fake.
Tensor check_and_make(const Tensor& x, at::TensorList weights) {
  TORCH_CHECK_VALUE(x.dim() > 0, "x must have at least one dimension");
  TORCH_CHECK_VALUE(!weights.empty() && weights.size() <= kDecodeLinearMatrices, "weights must be 1 to ",
                    kDecodeLinearMatrices, " matrices; got ", weights.size());
  c10::SymInt n_cols = 0;
  for (const Tensor& weight : weights) {
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(1) == x.sym_size(-1),
                      "weights must be [N, K] with x's last dimension K; got ", weight.sym_sizes(), " and x of ",
                      x.sym_sizes());
    TORCH_CHECK_TYPE(weight.scalar_type() == x.scalar_type(), "weights must have x's dtype");
    n_cols += weight.sym_size(0);
  }
  auto sizes = x.sym_sizes().vec();
  sizes.back() = n_cols;
  return at::empty_symint(sizes, x.options());
}

Tensor decode_linear_cpu(const Tensor& x_, at::TensorList weights) {
  const Tensor y = check_and_make(x_, weights);
  if (at::GradMode::is_enabled()) {
    bool needs = x_.requires_grad();
    for (const Tensor& weight : weights) needs |= weight.requires_grad();
    TORCH_CHECK_VALUE(!needs, "decode_linear has no gradient; use torch.no_grad()");
  }
  if (y.numel() == 0) return y;
  const Tensor x = x_.contiguous();
  DecodeLinear args{};
  args.x = x.const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.width = x.size(-1);
  args.n_cols = y.size(-1);
  args.type = dtype_of(x);
  args.widens = !bfloat16_choice().pairs;
  std::array<Tensor, kDecodeLinearMatrices> dense;
  for (const Tensor& weight : weights) {
    Tensor& w = dense[args.n_matrices];
    w = weight.stride(1) == 1 ? weight : weight.contiguous();
    args.matrices[args.n_matrices++] = {w.const_data_ptr(), w.stride(0), w.size(0)};
  }
  args.n_rows = y.numel() / args.n_cols;
  run_products(args);
  return y;
}

}  // namespace decode_linear_cpu

void DecodeProducts::add(const Tensor& x, const Tensor& w, const Tensor& y) {
  inputs_.push_back(x.contiguous());
  DecodeLinear args{};
  args.x = inputs_.back().const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.n_rows = y.size(0);
  args.width = x.size(1);
  args.n_cols = y.stride(0);
  args.type = dtype_of(x);
  args.widens = !bfloat16_choice().pairs;
  inputs_.push_back(w.stride(1) == 1 ? w : w.contiguous());
  args.matrices[args.n_matrices++] = {inputs_.back().const_data_ptr(), inputs_.back().stride(0), w.size(0)};
  products_.push_back(args);
}

void DecodeProducts::run() const { decode_linear_cpu::run_products(products_); }

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def("decode_linear(Tensor x, Tensor[] weights) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) { m.impl("decode_linear", &decode_linear_cpu::decode_linear_cpu); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) { m.impl("decode_linear", &decode_linear_cpu::check_and_make); }

// Without this, every call makes autograd scan the arguments only to find that there is no gradient.
TORCH_LIBRARY_IMPL(FK_LIBRARY, Autograd, m) { m.impl("decode_linear", torch::CppFunction::makeFallthrough()); }

}  // namespace foundry
