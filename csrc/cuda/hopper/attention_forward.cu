// The launches of the forward kernel.
#include "attention_forward_kernel.cuh"

#include <algorithm>

namespace foundry {
namespace cuda {
namespace hopper {
namespace {

using namespace forward;

int rows_of_kernel(const AttentionInputs& a) { return width_of(a) == 64 ? Shape<64>::kRows : Shape<128>::kRows; }

int64_t count_row_tiles(const AttentionInputs& a) {
  return a.starts_q ? count_tiles(a.starts_q, a.total_q, a.n_sequences, 0, rows_of_kernel(a))
                    : (a.n_queries + rows_of_kernel(a) - 1) / rows_of_kernel(a);
}
int64_t count_heads(const AttentionInputs& a) { return a.starts_q ? a.n_heads : a.n_sequences * a.n_heads; }

Order order_of(const AttentionForward& a, int* counter) {
  Order order{};
  order.row_tiles = static_cast<int>(count_row_tiles(a));
  order.heads = static_cast<int>(count_heads(a));
  order.tiles = order.row_tiles * order.heads;
  order.counter = counter;
  order.score.set(a);
  // K and V of the heads in flight take at most this much of the L2 cache. Groups of heads have about equal size.
  constexpr int64_t kCache = 32 << 20;
  const int64_t bytes = 2 * a.n_keys * (a.head_dim + a.head_dim_v);
  const int64_t fit = std::max<int64_t>(1, kCache / bytes) * a.group, groups = (order.heads + fit - 1) / fit;
  const int64_t each = (order.heads + groups - 1) / groups, whole = (each + a.group - 1) / a.group * a.group;
  order.heads_at_once = static_cast<int>(a.starts_q ? order.heads : std::min<int64_t>(order.heads, whole));
  return order;
}

template <class T, class S, bool kOptions>
cudaError_t launch_kernel(const AttentionForward& a, const Order& order, int blocks, cudaStream_t stream) {
  static_assert(S::kShared + 8 * (kMostOrdered + 1) <= (227 << 10), "shared memory");
  TensorMap q, k, v;
  cudaError_t error = map_queries(q, a, a.q, a.q_strides, a.head_dim, S::kRows);
  if (error == cudaSuccess) error = map_keys(k, a, a.k, a.k_strides, a.head_dim, S::kKeys);
  if (error == cudaSuccess) error = map_keys(v, a, a.v, a.v_strides, a.head_dim_v, S::kKeys);
  if (error != cudaSuccess) return error;
  return launch_hopper(attention_forward<T, S, kOptions>, dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads),
                       S::kShared + order_bytes(a), stream, false, q, k, v, a, order);
}

template <class T>
cudaError_t launch_of_type(const AttentionForward& a, const Order& order, int blocks, cudaStream_t stream) {
  const auto of = [&](auto shape) {
    using S = FK_TYPE(shape);
    return has_score_options(a) ? launch_kernel<T, S, true>(a, order, blocks, stream)
                                : launch_kernel<T, S, false>(a, order, blocks, stream);
  };
  const int width = max(a.head_dim, a.head_dim_v);
  if (width <= 64) return of(Tag<Shape<64>>{});
  if (width <= 96) return of(Tag<Shape<96>>{});
  if (width <= 128) return of(Tag<Shape<128>>{});
  if (width > 192) return of(Tag<Shape<256>>{});
  return a.head_dim_v <= 128 ? of(Tag<Shape<192, 128>>{}) : of(Tag<Shape<192>>{});
}

}  // namespace

bool takes(const AttentionForward& a) {
  return takes_inputs(a) && !a.entropy && !a.max_logit &&
         tiles::rows_are_aligned(a.out, a.out_strides, a.head_dim_v, a.type) &&
         count_row_tiles(a) * count_heads(a) <= kMaxBlocks / 2 &&
         (a.batch_invariant || hopper_choice::forward_is_faster(shape_of(a)));
}

bool forward_counts(const AttentionForward& a, int multiprocessors) {
  return count_row_tiles(a) * count_heads(a) > multiprocessors;
}

cudaError_t attention_forward(const AttentionForward& a, int multiprocessors, int* counter, cudaStream_t stream) {
  const Order order = order_of(a, counter);
  const int blocks = std::min(order.tiles, multiprocessors);
  return a.type == Dtype::bf16 ? launch_of_type<__nv_bfloat16>(a, order, blocks, stream)
                               : launch_of_type<__half>(a, order, blocks, stream);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
