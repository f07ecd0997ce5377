// The operator foundry_kernels::decode_linear: rows times the transposes of several weights. Of few rows, as in
// decoding, in one pass over these; of many, a row is computed as it is alone, which is what batch-invariant linear
// layers are made of. For the CPU; it has no gradient.
#include "../cpu/decode_linear.h"

#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "cpu_common.h"

namespace foundry {
namespace decode_linear_cpu {

// Multiplications that are worth waking a thread for, at the rate at which a thread reads weights from memory.
constexpr int64_t kReadGrain = 1 << 17;
constexpr int64_t kTaskRows = 64;  // of many rows those of a task, a multiple of kDecodeLinearRows

// The result, which is also the fake of the meta device.
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
  std::array<Tensor, kDecodeLinearMatrices> dense;
  int64_t blocks = 0;
  for (const Tensor& weight : weights) {
    Tensor& w = dense[args.n_matrices];
    w = weight.stride(1) == 1 ? weight : weight.contiguous();
    auto& matrix = args.matrices[args.n_matrices++];
    matrix = {w.const_data_ptr(), w.stride(0), w.size(0)};
    blocks += matrix.blocks();
  }
  const auto kernel = FK_CHOOSE_ISA(decode_linear);
  const int64_t n_rows = args.n_rows = y.numel() / args.n_cols, size = x.element_size();
  const auto multiply = [&](int64_t row, int64_t begin, int64_t end) { kernel(args.few_rows(row, size), begin, end); };
  const int64_t grain = std::max<int64_t>(1, kReadGrain / (kDecodeLinearBlock * std::max<int64_t>(1, args.width)));
  if (n_rows <= kDecodeLinearRows) {
    at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) { multiply(0, begin, end); });
    return y;
  }
  // A block of a weight stays in the cache while all rows of a task pass by.
  const int64_t chunks = (n_rows + kTaskRows - 1) / kTaskRows;
  at::parallel_for(0, blocks * chunks, std::max<int64_t>(1, grain * kDecodeLinearRows / kTaskRows),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t task = begin; task < end; ++task) {
                       const int64_t block = task / chunks, first = task % chunks * kTaskRows;
                       for (int64_t row = first; row < std::min(first + kTaskRows, n_rows); row += kDecodeLinearRows)
                         multiply(row, block, block + 1);
                     }
                   });
  return y;
}

}  // namespace decode_linear_cpu

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def("decode_linear(Tensor x, Tensor[] weights) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) { m.impl("decode_linear", &decode_linear_cpu::decode_linear_cpu); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) { m.impl("decode_linear", &decode_linear_cpu::check_and_make); }

// Without this, autograd looks through the arguments at each call, to say that there is no gradient.
TORCH_LIBRARY_IMPL(FK_LIBRARY, Autograd, m) { m.impl("decode_linear", torch::CppFunction::makeFallthrough()); }

}  // namespace foundry
