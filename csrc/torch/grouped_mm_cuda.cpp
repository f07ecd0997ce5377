// The GPU launches of foundry_kernels::grouped_mm_fwd and grouped_mm_bwd; see grouped_mm.cpp for the operators.
#include "../cuda/grouped_mm.h"

#include <torch/library.h>

#include <algorithm>

#include "cuda_common.h"
#include "grouped_mm.h"

namespace foundry {
namespace grouped_mm_cuda {

void check_sizes(const Tensor& x, const Tensor& weight) {
  const int64_t most = std::max({x.size(0), x.size(1), weight.size(0), weight.size(2)});
  TORCH_CHECK_VALUE(most < cuda::kMostRows, "grouped_mm supports up to ", cuda::kMostRows - 1,
                    " rows, columns and matrices; got ", most);
}

// Input for the 16-bit kernels: a copy unless rows (or, with or_columns, columns) are contiguous.
Tensor readable(const Tensor& x, bool or_columns) {
  const bool side_by_side = x.stride(-1) == 1 || (or_columns && x.stride(-2) == 1);
  return x.scalar_type() == at::kFloat || side_by_side ? x : x.contiguous();
}

void product(const Tensor& x_, const Tensor& weight_, const Tensor& offs, const Tensor& y, const OnDevice& device) {
  if (y.numel() == 0) return;
  if (x_.size(1) == 0) {
    y.zero_();
    return;
  }
  const Tensor x = readable(x_, false), weight = readable(weight_, true);
  cuda::GroupedMm args{};
  args.x = x.const_data_ptr();
  args.weight = weight.const_data_ptr();
  args.offs = offs.const_data_ptr<int32_t>();
  args.y = y.mutable_data_ptr();
  std::copy_n(x.strides().begin(), 2, args.x_strides);
  std::copy_n(weight.strides().begin(), 3, args.weight_strides);
  args.n_rows = static_cast<int>(x.size(0));
  args.n_groups = static_cast<int>(weight.size(0));
  args.n_in = static_cast<int>(x.size(1));
  args.n_out = static_cast<int>(weight.size(2));
  args.type = dtype_of(x);
  check_cuda(cuda::grouped_mm(args, device.stream()), "grouped_mm");
}

// out[e] = a^T b over the rows of group e. out is contiguous.
void gradient(const Tensor& a_, const Tensor& b_, const Tensor& offs, const Tensor& out, const OnDevice& device) {
  if (out.numel() == 0) return;
  if (a_.size(0) == 0) {
    out.zero_();
    return;
  }
  const Tensor a = readable(a_, false), b = readable(b_, false);
  cuda::GroupedMmGradient args{};
  args.a = a.const_data_ptr();
  args.b = b.const_data_ptr();
  args.offs = offs.const_data_ptr<int32_t>();
  args.out = out.mutable_data_ptr();
  std::copy_n(a.strides().begin(), 2, args.a_strides);
  std::copy_n(b.strides().begin(), 2, args.b_strides);
  args.n_rows = static_cast<int>(a.size(0));
  args.n_groups = static_cast<int>(out.size(0));
  args.n_a = static_cast<int>(a.size(1));
  args.n_b = static_cast<int>(b.size(1));
  args.type = dtype_of(a);
  check_cuda(cuda::grouped_mm_gradient(args, device.stream()), "grouped_mm, the gradient of the matrices");
}

// Tiles of all sizes multiply in the same order, so a row has the same bits in any batch. But unaligned rows take
// another path, so alignment must not depend on the tensor that the rows are a view of.
Tensor fwd_cuda(const Tensor& x, const Tensor& weight, const Tensor& offs, bool batch_invariant) {
  const Tensor y = empty_grouped_mm_fwd(x, weight, offs);
  check_sizes(x, weight);
  const OnDevice device(x);
  product(batch_invariant ? x.contiguous() : x, weight, offs.contiguous(), y, device);
  return y;
}

std::tuple<Tensor, Tensor> bwd_cuda(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& offs_,
                                    bool batch_invariant, bool need_dx, bool need_dweight) {
  const auto [dx, dweight] = empty_grouped_mm_bwd(x, weight, offs_, need_dx, need_dweight);
  check_sizes(x, weight);
  const OnDevice device(x);
  const Tensor offs = offs_.contiguous();
  if (need_dx) product(batch_invariant ? dy.contiguous() : dy, weight.transpose(1, 2), offs, dx, device);
  if (need_dweight && is_transposed(weight)) gradient(dy, x, offs, dweight.transpose(1, 2), device);
  else if (need_dweight) gradient(x, dy, offs, dweight, device);
  return {dx, dweight};
}

}  // namespace grouped_mm_cuda

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("grouped_mm_fwd", &grouped_mm_cuda::fwd_cuda);
  m.impl("grouped_mm_bwd", &grouped_mm_cuda::bwd_cuda);
}

}  // namespace foundry
