// Attention backward with tensor cores (sm_80 and later): 16-bit inputs, head dimensions up to 256.
//
// dq has one kernel and dk with dv another, from the same template. A block of 4 warps owns 64 rows, 16 per warp, of
// two tensors (queries and dout, or keys and values), and reads tiles of the other two. It computes the scores from the
// first of each, and the gradients of the weights from the second. Weights and score gradients stay in the registers
// where the next matmul reads its left operand: no intermediate result passes through shared memory, and no two blocks
// add to the same element. The price is that scores are computed twice: seven matmuls instead of five.
#include "flash_attention_backward.cuh"
#include "flash_attention_tiles.cuh"

namespace foundry {
namespace cuda {
namespace {

using namespace tiles;

// What a kernel computes. The owner of queries: dq. The owner of keys: dk and dv, or only one of them if registers are
// scarce.
enum class Makes { dq, dkdv, dk, dv };

template <int kDim, Makes kMakes, bool kOptions>
struct Shape {
  static constexpr bool kKeys = kMakes != Makes::dq;
  static constexpr bool kFirst = kMakes != Makes::dv;  // dq or dk: sums over score gradients
  static constexpr bool kBoth = kMakes == Makes::dkdv;
  static constexpr bool kSecond = kBoth || kMakes == Makes::dv;  // dv: sums over weights
  static constexpr bool kCrowded = kOptions && kBoth;            // registers are scarce
  static constexpr int kOwn = 64, kRead = kDim == 256 ? 16 : (kDim == 64 ? 64 : 32) / (kCrowded ? 2 : 1);
  static constexpr int kRow = kDim * 2, kTile = kRead * kRow;
  // Byte offsets of the two tensors owned, and of two buffers for each tensor that is read, which differ in one bit.
  static constexpr uint32_t kRead0 = 0, kRead1 = 2 * kTile, kOwn0 = 4 * kTile, kOwn1 = kOwn0 + kOwn * kRow;
  static constexpr int kShared = kOwn1 + kOwn * kRow;
};

template <bool kKeys, int kOwn>
__device__ __forceinline__ Place place_of(const AttentionBackward& a, unsigned block) {
  if (kKeys) return Place(a.n_heads / a.group, a.n_keys, kOwn, block);
  Place place(a.n_heads, a.n_queries, kOwn, block);  // rows that see the most keys go first
  place.tile = static_cast<int>((a.n_queries + kOwn - 1) / kOwn) - 1 - place.tile;
  return place;
}

template <class T, int kDim, Makes kMakes, bool kOptions>
__global__ void __launch_bounds__(kThreads, kDim == 64 && !kOptions ? 2 : 1)
    attention_backward_tiles(AttentionBackward a) {
  using S = Shape<kDim, kMakes, kOptions>;
  constexpr bool kKeys = S::kKeys;
  constexpr int kRead = S::kRead;
  FK_DYNAMIC_SHARED(uint4, shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = kKeys ? static_cast<int>(a.group) : 1;
  const Place place = place_of<kKeys, S::kOwn>(a, blockIdx.x);
  Head h(a, place.sequence, place.head * group);  // the owner of keys loops over the heads of the group
  const int first = place.tile * S::kOwn, n_own = kKeys ? h.k_len : h.q_len, n_read = kKeys ? h.q_len : h.k_len;
  if (first >= n_own) return;
  const int last = min(first + S::kOwn, n_own) - 1;
  // The range that an owned row sees of the other tensor. Its start and its end never decrease from one row to the
  // next.
  const auto first_seen = [](const Head& h, int row) { return kKeys ? h.first_query(row) : h.first_key(row); };
  const auto end_seen = [](const Head& h, int row) { return kKeys ? h.end_query(row) : h.end_key(row); };
  // Recomputes h from a few registers, so that the rest need not stay in registers across tiles.
  const auto h_again = [&] { return Head(a, static_cast<int>(hidden(h.n)), static_cast<int>(hidden(h.head))); };
  // The tiles that some row sees, visited from last to first, and among them those that every row sees fully.
  const int begin = first_seen(h, first), end = end_seen(h, last);
  const int first_tile = begin / kRead, end_tile = end > begin ? (end + kRead - 1) / kRead : first_tile;
  const auto end_whole = [&] {
    const Head g = h_again();
    return first + S::kOwn <= (kKeys ? g.k_len : g.q_len) ? max(end_seen(g, first), 0) / kRead : 0;
  };
  const int first_whole = max((first_seen(h, last) + kRead - 1) / kRead, first_tile + 1);  // the first sets up a head
  const uint64_t seed = kOptions && a.dropout.threshold ? static_cast<uint64_t>(*a.dropout.seed) : 0;

  const auto start = [&](const void* data, const HeadStrides& s, bool of_keys) {
    return static_cast<const T*>(data) + (of_keys ? h.key_at(s, 0) : h.query_at(s, 0));
  };
  // The tensors that are read, each positioned at the end of the tile to copy next.
  const HeadStrides &strides0 = kKeys ? a.q_strides : a.k_strides, &strides1 = kKeys ? a.dout_strides : a.v_strides;
  Walker<kDim> read0(start(kKeys ? a.q : a.k, strides0, !kKeys), strides0.token, a.head_dim, end_tile * kRead);
  Walker<kDim> read1(start(kKeys ? a.dout : a.v, strides1, !kKeys), strides1.token, a.head_dim_v, end_tile * kRead);
  uint32_t place_now = 0;
  const auto copy_tiles = [&](auto check, uint32_t at) {
    constexpr bool kCheck = decltype(check)::value;
    const int n = n_read - (end_tile - 1) * kRead;  // rows of the last tile
    read0.template copy<kRead, kCheck>(shared, S::kRead0 + at, n);
    read1.template copy<kRead, kCheck>(shared, S::kRead1 + at, n);
  };
  if (end_tile > first_tile) {
    const auto copy_owned = [&](const void* data, const HeadStrides& s, int width, uint32_t to) {
      Walker<kDim> walker(start(data, s, kKeys), s.token, width, first + S::kOwn);
      walker.template clear<S::kOwn>(shared, to);
      walker.template copy<S::kOwn, true>(shared, to, n_own - first);
    };
    copy_owned(kKeys ? a.k : a.q, kKeys ? a.k_strides : a.q_strides, a.head_dim, S::kOwn0);
    if (S::kFirst) copy_owned(kKeys ? a.v : a.dout, kKeys ? a.v_strides : a.dout_strides, a.head_dim_v, S::kOwn1);
    FK_UNROLL for (uint32_t at = 0; at <= S::kTile; at += S::kTile) {
      read0.template clear<kRead>(shared, S::kRead0 + at);
      read1.template clear<kRead>(shared, S::kRead1 + at);
    }
    copy_tiles(std::true_type(), place_now);
    cp_async_commit();
  }

  float sums0[1][kDim / 8][4] = {}, sums1[1][kDim / 8][4] = {};
  const uint32_t own_lane = left_lane<kDim>(warp * 16, lane), right = right_lane<kDim>(lane);
  const uint32_t summed = summed_lane<kDim>(lane);
  const int own_row = first + warp * 16 + lane / 4;  // and own_row + 8
  constexpr RowNumbers kNoRow{INFINITY, 0.f, 0.f};   // its weights are 0
  RowNumbers own_numbers[2] = {kNoRow, kNoRow};
  if (!kKeys)
    FK_UNROLL for (int half = 0; half < 2; ++half) if (const int i = own_row + 8 * half; i < h.q_len)
        own_numbers[half] = RowNumbers::of<kOptions>(a, h.row_at(a, i));

  const auto step = [&](auto masked, int tile) {
    constexpr bool kMasked = decltype(masked)::value;
    cp_async_wait<0>();
    __syncthreads();  // the tiles have arrived; the other buffer is no longer read
    if (!kMasked || tile > first_tile) {
      copy_tiles(std::false_type(), place_now ^ S::kTile);
    } else if ((h.head + 1) % group != 0) {
      const int64_t rows = (end_tile - first_tile) * kRead;
      read0.from += (strides0.head + rows * strides0.token) * 2;
      read1.from += (strides1.head + rows * strides1.token) * 2;
      copy_tiles(std::true_type(), place_now ^ S::kTile);
    }
    cp_async_commit();
    const uint32_t at0 = S::kRead0 + place_now, at1 = S::kRead1 + place_now;
    place_now ^= S::kTile;
    if (kOptions && a.tiles.index &&
        is_hidden(a, h, first, last, tile * kRead, min(tile * kRead + kRead, n_read) - 1, kKeys))
      return;

    float s[kRead / 8][4] = {}, dp[kRead / 8][4] = {};
    const uint32_t own_at = kDim == 128 && S::kBoth ? hidden(own_lane) : own_lane;
    multiply<T, kDim, kRead, S::kFirst, S::kOwn1 - S::kOwn0, S::kRead1 - S::kRead0>(s, dp, shared, S::kOwn0 + own_at,
                                                                                    at0 + right);

    // Turns scores and the matmul with dout into weights (in s) and score gradients (in dp).
    const int column = tile * kRead + static_cast<int>(threadIdx.x % 4 * 2),
              row0 = kMasked ? static_cast<int>(hidden(own_row)) : own_row;
    const int64_t numbers_at = h.row_at(a, column);
    int from[2], to[2], n_others = 0;  // what each of the two rows sees
    if constexpr (kMasked) {
      const Head g = h_again();
      n_others = kKeys ? g.q_len : g.k_len;
      FK_UNROLL for (int half = 0; half < 2; ++half) {
        const int row = row0 + 8 * half;
        from[half] = first_seen(g, row);
        to[half] = row < (kKeys ? g.k_len : g.q_len) ? end_seen(g, row) : 0;
      }
    }
    uint32_t bits[2] = {0, 0};
    FK_UNROLL for (int n = 0; n < kRead / 8; ++n) FK_UNROLL for (int e = 0; e < 2; ++e) {
      const int other = column + n * 8 + e;
      RowNumbers numbers = kNoRow;
      if (kKeys && (!kMasked || other < n_others)) numbers = RowNumbers::of<kOptions>(a, numbers_at + n * 8 + e);
      if (kOptions && a.dropout.threshold) {  // one Philox call for all that this lane holds
        if (kKeys && n % 2 == 0) bits[e] = kept_weights(a.dropout, seed, h, other, own_row - own_row % 32 / 8 * 8);
        if (!kKeys && (n == 0 || other % 32 < 8))
          bits[e] = kept_weights(a.dropout, seed, h, own_row, other - other % 32 / 8 * 8);
      }
      FK_UNROLL for (int half = 0; half < 2; ++half) {
        const int row = own_row + 8 * half, i = kKeys ? other : row, j = kKeys ? row : other;
        if (!kKeys) numbers = own_numbers[half];
        float &x = s[n][2 * half + e], &dx = dp[n][2 * half + e];
        const bool seen = !kMasked || (other >= from[half] && other < to[half]);
        if constexpr (kOptions) {
          float derivative = 1.f, factor = 1.f;
          const float logits = seen ? logit(a, h, x, i, j, derivative) : kNone;
          const float w = logits == kNone ? 0.f : numbers.weight_of(a, logits);
          if (a.dropout.threshold) {
            const int bit = kKeys ? n % 2 * 4 + row % 32 / 8 : half * 4 + other % 32 / 8;
            factor = bits[e] >> bit & 1u ? a.dropout.scale : 0.f;
          }
          const float ds = w != 0.f ? w * (factor * dx - numbers.delta) : 0.f;
          if (!kKeys && a.dbias && seen) write_bias(a, h, i, j, ds);
          x = w * factor;
          dx = ds * derivative;
        } else {
          const float w = seen ? exp2_fast(x * (a.scale * kLog2e) - numbers.lse) : 0.f;
          x = w;
          dx = w * (dx - numbers.delta);
        }
      }
    }
    uint32_t left[1][kRead / 16][4];
    if constexpr (S::kSecond) {
      pack_left<T>(left[0], s);
      add_product<T, kDim>(sums1, left, shared, at1 + summed);
    }
    if constexpr (S::kFirst) {
      pack_left<T>(left[0], dp);
      add_product<T, kDim>(sums0, left, shared, at0 + summed);
    }
  };
  while (end_tile > first_tile) {
    int tile = end_tile - 1;
    while (tile >= first_tile) {
      if (kOptions || tile >= end_whole() || tile < first_whole) {
        step(std::true_type(), tile--);
      } else {
#if !defined(FK_CUDA_ON_CPU)
#pragma unroll 1
#endif
        for (; tile >= first_whole; --tile) step(std::false_type(), tile);
      }
    }
    if ((h.head + 1) % group == 0) break;
    if (kOptions) h = Head(a, h.n, h.head + 1);
    else ++h.head;
  }
  cp_async_wait<0>();
  cp_async_finished();

  const Place again = place_of<kKeys, S::kOwn>(a, block_index_again());
  const Head own(a, again.sequence, again.head * group);
  FK_UNROLL for (int half = 0; half < 2; ++half) {
    const int row = again.tile * S::kOwn + warp * 16 + lane / 4 + 8 * half;
    const bool writes = row < (kKeys ? own.k_len : own.q_len);
    const auto write = [&](void* data, const HeadStrides& strides, const float (&sums)[kDim / 8][4], float factor,
                           int width) {
      const int64_t at = kKeys ? own.key_at(strides, row) : own.query_at(strides, row);
      tiles::write_row<T, kDim>(writes ? static_cast<T*>(data) + at : nullptr, sums, half, factor, width, lane);
    };
    if constexpr (!kKeys) write(a.dq, a.dq_strides, sums0[0], a.scale, a.head_dim);
    if constexpr (kKeys && S::kFirst) write(a.dk, a.dk_strides, sums0[0], a.scale, a.head_dim);
    if constexpr (S::kSecond) write(a.dv, a.dv_strides, sums1[0], 1.f, a.head_dim_v);
  }
}

template <class T, int kDim, Makes kMakes, bool kOptions>
cudaError_t launch_tiles(const AttentionBackward& a, cudaStream_t stream) {
  using S = Shape<kDim, kMakes, kOptions>;
  const int64_t blocks =
      S::kKeys ? blocks_of(a, a.n_heads / a.group, a.n_keys, S::kOwn) : blocks_of(a, a.n_heads, a.n_queries, S::kOwn);
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const auto kernel = attention_backward_tiles<T, kDim, kMakes, kOptions>;
  const cudaError_t error = allow_shared(kernel, S::kShared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), S::kShared, stream, a);
}

template <class T, int kDim, bool kOptions>
cudaError_t launch_wanted(const AttentionBackward& a, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (a.dq) error = launch_tiles<T, kDim, Makes::dq, kOptions>(a, stream);
  if constexpr (kDim <= 128)
    if (error == cudaSuccess && a.dk && a.dv) return launch_tiles<T, kDim, Makes::dkdv, kOptions>(a, stream);
  if (error == cudaSuccess && a.dk) error = launch_tiles<T, kDim, Makes::dk, kOptions>(a, stream);
  if (error == cudaSuccess && a.dv) error = launch_tiles<T, kDim, Makes::dv, kOptions>(a, stream);
  return error;
}

template <class T, int kDim>
cudaError_t launch_of_width(const AttentionBackward& a, cudaStream_t stream) {
  return has_options(a) || a.dbias ? launch_wanted<T, kDim, true>(a, stream) : launch_wanted<T, kDim, false>(a, stream);
}

}  // namespace

bool backward_in_tiles(const AttentionBackward& a) {
  const auto fits = [&](const void* p, const HeadStrides& s, int width) {
    return rows_are_aligned(p, s, width, a.type);
  };
  return a.type != Dtype::f32 && a.head_dim <= 256 && a.head_dim_v <= 256 && fits(a.q, a.q_strides, a.head_dim) &&
         fits(a.k, a.k_strides, a.head_dim) && fits(a.v, a.v_strides, a.head_dim_v) &&
         fits(a.dout, a.dout_strides, a.head_dim_v) && fits(a.dq, a.dq_strides, a.head_dim) &&
         fits(a.dk, a.dk_strides, a.head_dim) && fits(a.dv, a.dv_strides, a.head_dim_v);
}

cudaError_t backward_tiles(const AttentionBackward& a, cudaStream_t stream) {
  const int width = max(a.head_dim, a.head_dim_v);
  const auto of_type = [&](auto type) {
    using T = FK_TYPE(type);
    if (width <= 64) return launch_of_width<T, 64>(a, stream);
    if (width <= 128) return launch_of_width<T, 128>(a, stream);
    return launch_of_width<T, 256>(a, stream);
  };
  return a.type == Dtype::bf16 ? of_type(Tag<__nv_bfloat16>{}) : of_type(Tag<__half>{});
}

}  // namespace cuda
}  // namespace foundry
