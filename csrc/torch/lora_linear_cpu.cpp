// The CPU launches of the operators of lora_linear.cpp.
#include "../cpu/lora_linear.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"
#include "lora_linear.h"

namespace foundry {
namespace lora_linear_cpu {

// Multiplications that justify waking a thread.
constexpr int64_t kGrainProducts = 1 << 18;

int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

Tensor with_dense_rows(const Tensor& x) { return x.stride(1) == 1 || x.size(1) == 1 ? x : x.contiguous(); }

template <class Kernel, class Args> void run(Kernel kernel, const Args& args, int64_t tasks) {
  const int64_t work = std::max<int64_t>(1, args.n_rows * args.width * args.rank / tasks);
  at::parallel_for(0, tasks, std::max<int64_t>(1, kGrainProducts / work),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

// A matrix of an adapter; `dense` keeps the copy of one whose strides are both large.
LoraMatrix matrix(const Tensor& in, Tensor& dense) {
  dense = in.stride(0) == 1 || in.stride(1) == 1 ? in : in.contiguous();
  return {dense.const_data_ptr(), dense.stride(0), dense.stride(1), dtype_of(dense)};
}

Tensor down_cpu(const Tensor& x_, const Tensor& a, double scale, const DropoutOptions& dropout) {
  const Tensor t = empty_lora_down(x_, a, dropout);
  if (t.numel() == 0) return t;
  const Tensor x = with_dense_rows(x_);
  Tensor dense;
  run(FK_CHOOSE_ISA(lora_down),
      LoraDown{x.const_data_ptr(), x.stride(0), x.size(0), x.size(1), dtype_of(x), matrix(a.t(), dense), a.size(0),
               t.mutable_data_ptr<float>(), static_cast<float>(scale), make_dropout(dropout)},
      blocks(x.size(0), kLoraDownRows));
  return t;
}

void up(const Tensor& y, const Tensor& base, const Tensor& t_, const Tensor& b, double scale,
        const DropoutOptions& dropout) {
  if (y.numel() == 0) return;
  TORCH_CHECK_TYPE(t_.scalar_type() == at::kFloat, "t must be float32; got ", t_.scalar_type());
  const Tensor t = with_dense_rows(t_);
  Tensor dense;
  run(FK_CHOOSE_ISA(lora_up),
      LoraUp{base.const_data_ptr(), base.stride(0), base.size(0), base.size(1), dtype_of(base),
             t.const_data_ptr<float>(), t.stride(0), t.size(1), matrix(b.t(), dense), y.mutable_data_ptr(), y.stride(0),
             static_cast<float>(scale), make_dropout(dropout)},
      blocks(base.size(0), kLoraUpRows) * blocks(base.size(1), kLoraUpColumns));
}

Tensor up_cpu(const Tensor& base, const Tensor& t, const Tensor& b, double scale, const DropoutOptions& dropout) {
  check_lora_up(base, t, b, dropout);
  const Tensor y = at::empty(base.sizes(), base.options());
  up(y, with_dense_rows(base), t, b, scale, dropout);
  return y;
}

void up_in_place_cpu(const Tensor& base, const Tensor& t, const Tensor& b, double scale,
                     const DropoutOptions& dropout) {
  check_lora_up(base, t, b, dropout);
  TORCH_CHECK_VALUE(base.stride(1) == 1 || base.size(1) == 1, "base must have dense rows");
  up(base, base, t, b, scale, dropout);
}

Tensor outer_cpu(const Tensor& t_, const Tensor& x_, double scale, bool transposed, const DropoutOptions& dropout) {
  const Tensor out = empty_lora_outer(t_, x_, transposed, dropout);
  if (out.numel() == 0 || x_.size(0) == 0) return out.zero_();
  TORCH_CHECK_TYPE(t_.scalar_type() == at::kFloat, "t must be float32; got ", t_.scalar_type());
  const Tensor t = with_dense_rows(t_), x = with_dense_rows(x_), view = transposed ? out.t() : out;
  run(FK_CHOOSE_ISA(lora_outer),
      LoraOuter{t.const_data_ptr<float>(), t.stride(0), t.size(1), x.const_data_ptr(), x.stride(0), x.size(0),
                x.size(1), dtype_of(x), out.mutable_data_ptr<float>(), view.stride(0), view.stride(1),
                static_cast<float>(scale), make_dropout(dropout)},
      blocks(x.size(1), kLoraOuterColumns));
  return out;
}

}  // namespace lora_linear_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("lora_down", flat_kernel<&lora_linear_cpu::down_cpu>);
  m.impl("lora_up", flat_kernel<&lora_linear_cpu::up_cpu>);
  m.impl("lora_up_", flat_kernel<&lora_linear_cpu::up_in_place_cpu>);
  m.impl("lora_outer", flat_kernel<&lora_linear_cpu::outer_cpu>);
}

}  // namespace foundry
