// The backward pass: which calls it supports, the order of its work and its launches.
#include "backward_order.cuh"

namespace foundry {
namespace cuda {
namespace hopper {
namespace {

int64_t count_query_tiles(const AttentionBackward& a) {
  return count_tiles(a.starts_q, a.total_q, a.n_sequences, a.n_queries, query_tile_of(width_of(a)));
}
int64_t count_key_tiles(const AttentionBackward& a) {
  return count_tiles(a.starts_k, a.total_k, a.n_sequences, a.n_keys, kKeyTile);
}
int64_t count_units(const AttentionBackward& a, bool pairs) {
  return pairs ? count_tiles(nullptr, 0, a.n_sequences, a.n_keys, 2 * kKeyTile) : count_key_tiles(a);
}
int first_upper_of(const AttentionBackward& a) {
  return static_cast<int>((a.n_keys + 2 * kKeyTile - 1) / (2 * kKeyTile)) * (kKeyTile / query_tile_of(width_of(a)));
}
// Of a sequence of a pass in pairs, the tiles of queries from first_upper on. A single tile of keys has none.
int64_t count_upper_tiles(const AttentionBackward& a) {
  return std::max<int64_t>(0, count_query_tiles(a) / a.n_sequences - first_upper_of(a));
}
// Tiles of queries, of all heads, with sums of dq; pairs in order have second sums of the upper ones.
int64_t count_sums(const AttentionBackward& a, const BackwardPlan& plan) {
  const int64_t upper = plan.in_order && plan.pairs ? a.n_sequences * count_upper_tiles(a) : 0;
  return a.n_heads * (count_query_tiles(a) + upper);
}
int64_t count_shares(const AttentionBackward& a, const BackwardPlan& plan) {
  return a.n_heads / a.group * plan.splits();
}
// Floats of parts of dk and dv.
int64_t count_parts(const AttentionBackward& a, const BackwardPlan& plan) {
  return plan.splits() > 1 ? 2 * count_shares(a, plan) * count_key_tiles(a) * kKeyTile * width_of(a) : 0;
}
// Integers that begin as zeros: done, ticket and turns.
int64_t count_counters(const AttentionBackward& a, const BackwardPlan& plan) {
  return count_shares(a, plan) * a.n_sequences + (plan.in_order ? 1 + count_sums(a, plan) * pieces_of(width_of(a)) : 0);
}

}  // namespace

bool takes(const AttentionBackward& a) {
  const auto fits = [&](const void* p, const HeadStrides& s, int width) {
    return tiles::rows_are_aligned(p, s, width, a.type);
  };
  return takes_inputs(a) && can_map(a.dout, a.dout_strides, a, a.n_heads, a.head_dim_v) && a.dq && a.dk && a.dv &&
         !a.dbias && fits(a.out, a.out_strides, a.head_dim_v) && fits(a.dq, a.dq_strides, a.head_dim) &&
         fits(a.dk, a.dk_strides, a.head_dim) && fits(a.dv, a.dv_strides, a.head_dim_v) &&
         a.scale > 0.f &&  // hidden scores become -infinity before scaling
         (a.batch_invariant || hopper_choice::backward_is_faster(shape_of(a)));
}

BackwardPlan plan_backward(const AttentionBackward& a, bool deterministic) {
  const int width = width_of(a), rows = query_tile_of(width);
  BackwardPlan plan{};
  plan.in_order = deterministic || width > 128;  // at width 256 another order would be no faster
  // Each query sees all keys up to its own.
  plan.pairs = !a.starts_q && a.n_queries == a.n_keys && a.window_right == 0 && a.window_left >= a.n_queries - 1;
  plan.blocks = a.n_heads / a.group * count_units(a, plan.pairs) * column_blocks_of(width);
  const int64_t window = std::min(a.window_left, a.n_keys) + std::min(a.window_right, a.n_keys) + kKeyTile;
  const int64_t visited = plan.pairs ? a.n_queries + kKeyTile : std::min(a.n_queries, window);
  const bool uneven = !plan.pairs && (a.window_left < a.n_keys) != (a.window_right < a.n_keys);
  const int64_t splits = a.batch_invariant ? 1
                                           : hopper_choice::backward_splits(plan.blocks, a.group,
                                                                            (visited + rows - 1) / rows, rows, uneven);
  plan.head_splits = static_cast<int>(std::min(splits, a.group));
  plan.row_splits = static_cast<int>(splits / plan.head_splits);
  plan.blocks *= splits;
  return plan;
}

BackwardSpace backward_space(const AttentionBackward& a, const BackwardPlan& plan) {
  const int width = width_of(a), rows = query_tile_of(width);
  return {count_sums(a, plan) * pieces_of(width) * kPieceFloats + a.n_heads * count_query_tiles(a) * rows * 2 +
              count_parts(a, plan),
          count_counters(a, plan) + (a.starts_k ? 2 * count_units(a, plan.pairs) : 0)};
}

cudaError_t attention_backward(const AttentionBackward& a, const BackwardPlan& plan, float* floats, int* integers,
                               cudaStream_t stream) {
  const int width = width_of(a);
  const int64_t query_tiles = count_query_tiles(a), rows = a.n_heads * query_tiles * query_tile_of(width);
  BackwardWork work{};
  work.in_order = plan.in_order;
  work.pairs = plan.pairs;
  const int64_t units = count_units(a, plan.pairs);
  if (std::max({query_tiles, units, count_key_tiles(a)}) > kMaxBlocks) return cudaErrorInvalidConfiguration;
  work.query_tiles = static_cast<int>(query_tiles);
  work.key_tiles = static_cast<int>(count_key_tiles(a));
  work.units = static_cast<int>(units);
  work.first_upper = first_upper_of(a);
  work.upper_tiles = static_cast<int>(count_upper_tiles(a));
  work.writers = column_blocks_of(width) * (work.in_order ? 2 : 8);
  work.splits = plan.splits();
  work.row_splits = plan.row_splits;
  work.heads = static_cast<int>(a.group) / plan.head_splits;
  work.dq = floats;
  work.lse = floats + count_sums(a, plan) * pieces_of(width) * kPieceFloats;
  work.delta = work.lse + rows;
  work.parts = work.delta + rows;
  work.counters = count_counters(a, plan);
  work.places = integers + work.counters;
  work.done = integers;
  work.ticket = integers + count_shares(a, plan) * a.n_sequences;
  work.turns = work.ticket + 1;
  work.score.set(a);

  cudaError_t error = launch_before_backward(a, work, stream);
  if (error == cudaSuccess)
    error = width == 64    ? launch_backward_of_width<64>(a, work, stream)
            : width == 128 ? launch_backward_of_width<128>(a, work, stream)
            : width == 192 ? launch_backward_of_width<192>(a, work, stream)
                           : launch_backward_of_width<256>(a, work, stream);
  return error == cudaSuccess ? launch_after_backward(a, work, stream) : error;
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
