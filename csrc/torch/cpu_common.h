// Shared by the CPU launches: the weights of norms, and how much work justifies a thread.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#include "../cpu/rms_norm.h"
#include "common.h"

namespace foundry {

// Elements that justify waking a thread. The chunks in which weight gradients are summed derive from it too, so another
// value changes the last bits of results.
constexpr int64_t kGrain = 1 << 15;
// Same for work with one exponential per element: half as many elements justify a thread.
constexpr int64_t kExpGrain = kGrain / 2;

// Runs kernel(args, begin, end) over 0 .. n - 1, each of which has `elements`, of which `grain` justify a thread.
template <class Args>
void in_parallel(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t n, int64_t grain,
                 int64_t elements) {
  at::parallel_for(0, n, std::max<int64_t>(1, grain / elements),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

// The weight in float with its offset added, split (see vec2.h) if requested. Returns the tensor itself if nothing
// changes.
inline Tensor float_weight(const Tensor& weight, double offset, bool split = false) {
  if (!weight.defined()) return weight;
  const Tensor in = weight.contiguous();
  if (in.scalar_type() == at::kFloat && offset == 0.0 && !split) return in;
  Tensor out = at::empty({in.numel()}, in.options().dtype(at::kFloat));
  FK_CHOOSE_ISA(widen_weight)
  (WidenWeight{in.const_data_ptr(), dtype_of(in), static_cast<float>(offset), out.mutable_data_ptr<float>(), in.numel(),
               split});
  return out;
}

// Rows are cut into chunks, each summed by one thread. The chunk size depends only on the shape, so the gradient of a
// weight does not depend on the number of threads.
inline int64_t rows_a_chunk(int64_t n_rows, int64_t n_cols) {
  return std::max<int64_t>({1, std::min<int64_t>(64, kGrain / n_cols), (n_rows + 127) / 128});
}

// The gradient of a weight: float chunks [n_chunks, n_cols], summed in order and rounded once.
inline void sum_chunks_into(const Tensor& dw, const Tensor& chunks) {
  const int64_t n_chunks = chunks.size(0), n_cols = chunks.size(1);
  const Tensor total = dw.scalar_type() == at::kFloat ? dw : at::empty({n_cols}, chunks.options());
  const SumChunks sum{chunks.const_data_ptr<float>(), n_chunks, n_cols, total.mutable_data_ptr<float>()};
  in_parallel(FK_CHOOSE_ISA(sum_chunks), sum, n_cols, kGrain, std::min<int64_t>(n_chunks, kGrain / 64));
  if (!total.is_same(dw)) dw.copy_(total);
}

}  // namespace foundry
