// Attention, backward, with matrix instructions (sm_80 and later): 16-bit inputs, heads of up to 256 numbers.
//
// dq is one kernel, dk and dv another, and both are the same: a block of 4 warps owns 64 rows, 16 a warp, of two
// tensors (queries and dout, or keys and values), and reads tiles of two others (keys and values, or queries and dout).
// From the products of the first two, the scores, and of the second two come the weights and the gradients of the
// scores in the registers where the next product takes its left side: no result passes through shared memory, and
// nothing is added to by two blocks. The price is that scores are computed twice, seven products for five.
#include "flash_attention_backward.cuh"
#include "flash_attention_tiles.cuh"

namespace foundry {
namespace cuda {
namespace {

using namespace tiles;

// What a kernel makes: for the owner of queries dq; for that of keys dk and dv, or where registers are few one of them.
enum class Makes { dq, dkdv, dk, dv };

template <int kDim, Makes kMakes>
struct Shape {
  static constexpr bool kKeys = kMakes != Makes::dq;
  static constexpr bool kFirst = kMakes != Makes::dv;                            // dq or dk: sums over ds
  static constexpr bool kSecond = kMakes == Makes::dkdv || kMakes == Makes::dv;  // dv: sums over weights
  static constexpr int kOwn = 64, kRead = kDim == 64 ? 64 : kDim == 128 ? 32 : 16;
  static constexpr int kRow = kDim * 2, kTile = kRead * kRow;
  // Bytes: the two tensors owned, and two places each for those that are read, which differ in one bit.
  static constexpr uint32_t kRead0 = 0, kRead1 = 2 * kTile, kOwn0 = 4 * kTile, kOwn1 = kOwn0 + kOwn * kRow;
  static constexpr int kShared = kOwn1 + kOwn * kRow;
};

template <class T, int kDim, Makes kMakes, bool kOptions>
__global__ void __launch_bounds__(kThreads, kDim == 64 && !kOptions ? 2 : 1)
    attention_backward_tiles(AttentionBackward a) {
  using S = Shape<kDim, kMakes>;
  constexpr bool kKeys = S::kKeys;
  constexpr int kRead = S::kRead;
  FK_DYNAMIC_SHARED(uint4, shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = kKeys ? static_cast<int>(a.group) : 1;
  Place place(a.n_heads / group, kKeys ? a.n_keys : a.n_queries, S::kOwn);
  if (!kKeys) {  // the rows that see most keys first
    const int64_t tiles = (a.n_queries + S::kOwn - 1) / S::kOwn;
    place.tile = static_cast<int>(tiles) - 1 - place.tile;
  }
  const Head any(a, place.sequence, place.head * group);
  const int first = place.tile * S::kOwn, n_own = kKeys ? any.k_len : any.q_len;
  if (first >= n_own) return;
  const int last = min(first + S::kOwn, n_own) - 1, n_read = kKeys ? any.q_len : any.k_len;
  // What the owned rows see of the others: that of each row begins and ends no earlier than that of the row before.
  const auto first_seen = [&](int row) { return kKeys ? any.first_query(row) : any.first_key(row); };
  const auto end_seen = [&](int row) { return kKeys ? any.end_query(row) : any.end_key(row); };
  const int begin = first_seen(first), end = end_seen(last);
  const int first_tile = begin / kRead, end_tile = end > begin ? (end + kRead - 1) / kRead : first_tile;
  const int first_whole = (first_seen(last) + kRead - 1) / kRead, end_whole = max(end_seen(first), 0) / kRead;
  const int n_tiles = end_tile - first_tile;
  const uint64_t seed = kOptions && a.dropout.threshold ? static_cast<uint64_t>(*a.dropout.seed) : 0;

  const auto start = [&](const void* data, const HeadStrides& s, bool of_keys, int in_group) {
    const int64_t at = of_keys ? any.key_at(s, 0) : any.query_at(s, 0) + in_group * s.head;
    return static_cast<const T*>(data) + at;
  };
  const auto copy_owned = [&](const void* data, const HeadStrides& s, int width, uint32_t to) {
    Copier<kDim> copier(start(data, s, kKeys, 0), s.token, width, first + S::kOwn);
    copier.template clear<S::kOwn>(shared, to);
    copier.template copy<S::kOwn, true>(shared, to, n_own - first);
  };
  const auto copy_read = [&](const void* data, const HeadStrides& s, int width, uint32_t to, int in_group, int tile) {
    Copier<kDim> copier(start(data, s, !kKeys, in_group), s.token, width, (tile + 1) * kRead);
    if (in_group == 0 && tile < first_tile + 2) copier.template clear<kRead>(shared, to);  // each place once
    copier.template copy<kRead, true>(shared, to, n_read - tile * kRead);
  };
  // Tile number `index` of the loop: those of one head of the group after those of another.
  const auto copy_tiles = [&](int index) {
    const int in_group = index / n_tiles, tile = first_tile + index % n_tiles;
    const uint32_t at = index % 2 * S::kTile;
    if (kKeys) {
      copy_read(a.q, a.q_strides, a.head_dim, S::kRead0 + at, in_group, tile);
      copy_read(a.dout, a.dout_strides, a.head_dim_v, S::kRead1 + at, in_group, tile);
    } else {
      copy_read(a.k, a.k_strides, a.head_dim, S::kRead0 + at, 0, tile);
      copy_read(a.v, a.v_strides, a.head_dim_v, S::kRead1 + at, 0, tile);
    }
    cp_async_commit();
  };

  float sums0[1][kDim / 8][4] = {}, sums1[1][kDim / 8][4] = {};
  const uint32_t own_lane = left_lane<kDim>(warp * 16, lane);
  const int own_row = first + warp * 16 + lane / 4;  // and own_row + 8
  float2 own_numbers[2] = {};                        // of queries: their log-sum-exp in powers of 2, and delta
  if (!kKeys)
    for (int half = 0; half < 2; ++half) own_numbers[half] = row_numbers(a, any, own_row + 8 * half);

  const int n_steps = n_tiles * group;
  if (n_steps > 0) {
    copy_owned(kKeys ? a.k : a.q, kKeys ? a.k_strides : a.q_strides, a.head_dim, S::kOwn0);
    if (S::kFirst) copy_owned(kKeys ? a.v : a.dout, kKeys ? a.v_strides : a.dout_strides, a.head_dim_v, S::kOwn1);
    copy_tiles(0);
  }
  const auto step = [&](auto masked, int index) {
    constexpr bool kMasked = decltype(masked)::value;
    cp_async_wait<0>();
    __syncthreads();  // the tiles are here; nobody reads the other place any more
    if (index + 1 < n_steps) copy_tiles(index + 1);
    const int tile = first_tile + index % n_tiles;
    const uint32_t at = index % 2 * S::kTile;
    Head h = any;
    if (kKeys) {
      h.head += index / n_tiles;
      if (kOptions) h = Head(a, any.n, h.head);
    }
    if (kOptions && a.tiles.index &&
        is_hidden(a, h, first, last, tile * kRead, min(tile * kRead + kRead, n_read) - 1, kKeys))
      return;

    float s[kRead / 8][4] = {}, dp[kRead / 8][4] = {};
    multiply<T, kDim, kRead>(s, shared, S::kOwn0 + own_lane, S::kRead0 + at + right_lane<kDim>(lane));
    if constexpr (S::kFirst)
      multiply<T, kDim, kRead>(dp, shared, S::kOwn1 + own_lane, S::kRead1 + at + right_lane<kDim>(lane));

    // From scores and their products with dout to weights, in s, and gradients, in dp.
    const int column = tile * kRead + lane % 4 * 2;
    uint32_t bits[2] = {0, 0};
    FK_UNROLL for (int n = 0; n < kRead / 8; ++n) FK_UNROLL for (int e = 0; e < 2; ++e) {
      const int other = column + n * 8 + e;
      float2 numbers = own_numbers[0];
      if (kKeys) numbers = row_numbers(a, h, other);
      if (kOptions && a.dropout.threshold) {  // one call of Philox for what this lane has of it
        if (kKeys && n % 2 == 0) bits[e] = kept_weights(a.dropout, seed, h, other, own_row - own_row % 32 / 8 * 8);
        if (!kKeys && (n == 0 || other % 32 < 8))
          bits[e] = kept_weights(a.dropout, seed, h, own_row, other - other % 32 / 8 * 8);
      }
      FK_UNROLL for (int half = 0; half < 2; ++half) {
        const int row = own_row + 8 * half, i = kKeys ? other : row, j = kKeys ? row : other;
        if (!kKeys) numbers = own_numbers[half];
        float &x = s[n][2 * half + e], &dx = dp[n][2 * half + e];
        const bool seen = !kMasked || (row < n_own && other >= first_seen(row) && other < end_seen(row));
        if constexpr (kOptions) {
          float derivative = 1.f, factor = 1.f;
          const float logits = seen ? logit(a, h, x, i, j, derivative) : kNone;
          const float w = logits == kNone ? 0.f : exp2_fast(logits * kLog2e - numbers.x);
          if (a.dropout.threshold) {
            const int bit = kKeys ? n % 2 * 4 + row % 32 / 8 : half * 4 + other % 32 / 8;
            factor = bits[e] >> bit & 1u ? a.dropout.scale : 0.f;
          }
          const float ds = w != 0.f ? w * (factor * dx - numbers.y) : 0.f;
          if (!kKeys && a.dbias && seen) write_bias(a, h, i, j, ds);
          x = w * factor;
          dx = ds * derivative;
        } else {
          const float w = seen ? exp2_fast(x * (a.scale * kLog2e) - numbers.x) : 0.f;
          x = w;
          dx = w * (dx - numbers.y);
        }
      }
    }
    uint32_t left[1][kRead / 16][4];
    if (S::kSecond) {
      pack_left<T>(left[0], s);
      add_product<T, kDim>(sums1, left, shared, S::kRead1 + at + summed_lane<kDim>(lane));
    }
    if (S::kFirst) {
      pack_left<T>(left[0], dp);
      add_product<T, kDim>(sums0, left, shared, S::kRead0 + at + summed_lane<kDim>(lane));
    }
  };
  for (int index = 0; index < n_steps; ++index) {
    const int tile = first_tile + index % n_tiles;
    const bool whole = tile >= first_whole && tile < end_whole && first + S::kOwn <= n_own;
    if (kOptions || !whole) step(std::true_type(), index);
    else step(std::false_type(), index);
  }
  cp_async_wait<0>();
  cp_async_finished();

  FK_UNROLL for (int half = 0; half < 2; ++half) {
    const int row = own_row + 8 * half;
    const auto write = [&](void* data, const HeadStrides& strides, const float (&sums)[kDim / 8][4], float factor,
                           int width) {
      const int64_t at = kKeys ? any.key_at(strides, row) : any.query_at(strides, row);
      tiles::write_row<T, kDim>(row < n_own ? static_cast<T*>(data) + at : nullptr, sums, half, factor, width, lane);
    };
    if constexpr (!kKeys) write(a.dq, a.dq_strides, sums0[0], a.scale, a.head_dim);
    if constexpr (kKeys && S::kFirst) write(a.dk, a.dk_strides, sums0[0], a.scale, a.head_dim);
    if constexpr (S::kSecond) write(a.dv, a.dv_strides, sums1[0], 1.f, a.head_dim_v);
  }
}

template <class T, int kDim, Makes kMakes, bool kOptions>
cudaError_t launch_tiles(const AttentionBackward& a, cudaStream_t stream) {
  using S = Shape<kDim, kMakes>;
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
