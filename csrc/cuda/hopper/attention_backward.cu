// The backward pass: which calls it supports, the order of its work and its launches.
#include "backward_order.cuh"

namespace foundry {
namespace cuda {
namespace hopper {
namespace {

// Whether dq is summed in a fixed order. At width 256 another order would be no faster.
bool is_in_order(const AttentionBackward& a, bool deterministic) { return deterministic || width_of(a) > 128; }

// Whether each query sees all keys up to its own, so that tiles of keys are paired. In a fixed order the blocks of a
// head wait for each other and must all run at once. They may use only half of the multiprocessors, so that two such
// passes on streams of different priority cannot block each other. The choice does not depend on the rest of the batch.
bool in_pairs(const AttentionBackward& a, bool in_order, int multiprocessors) {
  const int64_t pairs = ((a.n_keys + kKeyTile - 1) / kKeyTile + 1) / 2;
  return !a.starts_q && a.n_queries == a.n_keys && a.window_right == 0 && a.window_left >= a.n_queries - 1 &&
         (!in_order || 2 * pairs * column_blocks_of(width_of(a)) <= multiprocessors);
}

int64_t count_query_tiles(const AttentionBackward& a) {
  return count_tiles(a.starts_q, a.total_q, a.n_sequences, a.n_queries, query_tile_of(width_of(a)));
}

int64_t count_units(const AttentionBackward& a, bool pairs) {
  return pairs ? count_tiles(nullptr, 0, a.n_sequences, a.n_keys, 2 * kKeyTile)
               : count_tiles(a.starts_k, a.total_k, a.n_sequences, a.n_keys, kKeyTile);
}

}  // namespace

bool takes(const AttentionBackward& a) {
  const auto fits = [&](const void* p, const HeadStrides& s, int width) {
    return tiles::rows_are_aligned(p, s, width, a.type);
  };
  return takes_inputs(a) && can_map(a.dout, a.dout_strides, a, a.n_heads, a.head_dim_v) && a.dq && a.dk && a.dv &&
         !a.dbias && fits(a.out, a.out_strides, a.head_dim_v) && fits(a.dq, a.dq_strides, a.head_dim) &&
         fits(a.dk, a.dk_strides, a.head_dim) && fits(a.dv, a.dv_strides, a.head_dim_v) &&
         a.scale > 0.f;  // hidden scores become -infinity before scaling
}

BackwardSpace backward_space(const AttentionBackward& a, bool deterministic) {
  const int width = width_of(a);
  const bool in_order = is_in_order(a, deterministic);
  const int64_t tiles = a.n_heads * count_query_tiles(a);
  return {tiles * (pieces_of(width) * kPieceFloats + 2 * query_tile_of(width)),
          (in_order ? tiles * pieces_of(width) + 1 : 0) + a.n_heads / a.group * a.n_sequences};
}

cudaError_t attention_backward(const AttentionBackward& a, bool deterministic, int multiprocessors, float* floats,
                               int* integers, cudaStream_t stream) {
  const int width = width_of(a);
  const int64_t query_tiles = count_query_tiles(a), rows = a.n_heads * query_tiles * query_tile_of(width);
  BackwardWork work{};
  work.in_order = is_in_order(a, deterministic);
  work.pairs = in_pairs(a, work.in_order, multiprocessors);
  const int64_t units = count_units(a, work.pairs);
  if (std::max(query_tiles, units) > kMaxBlocks) return cudaErrorInvalidConfiguration;
  work.query_tiles = static_cast<int>(query_tiles);
  work.units = static_cast<int>(units);
  work.writers = column_blocks_of(width) * (work.in_order ? 2 : 8);
  work.dq = floats;
  work.lse = floats + a.n_heads * query_tiles * pieces_of(width) * kPieceFloats;
  work.delta = work.lse + rows;
  work.done = integers;
  work.ticket = integers + a.n_heads / a.group * a.n_sequences;
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
