// Attention forward with tensor cores (mma.sync, ldmatrix, cp.async; sm_80 and later): 16-bit inputs, head dimensions
// up to 256.
//
// A block of 4 warps has 64 * kTilesM rows of one head and all keys that they see. A warp has 16 * kTilesM of the rows
// with all these keys, so softmax needs no other warp. With few queries, the rows of all heads of a group are packed
// (row = query * pack + head in group), because they read the same keys, and the keys are split over several blocks,
// whose results attention_combine adds in a fixed order. Keys go from the last tile to the first. The edge of the
// window crosses only the first few, so the loop over the others has no masks.
#include "flash_attention_forward.cuh"
#include "flash_attention_tiles.cuh"

namespace foundry {
namespace cuda {
namespace {

using namespace tiles;

// Which calls a kernel supports. whole: no options, head dimension kDim, one head per block and all keys that its rows
// see. plain: other calls without options. all: any call.
enum class Calls { whole, plain, all };

template <int kDim, int kTilesM>
struct Shape {
  static constexpr int kBlockM = 64 * kTilesM, kBlockN = kDim <= 128 ? 64 : 32;
  static constexpr bool kKeepQ = kTilesM == 1 && kDim <= 128;  // in registers; it arrives in V's buffer
  static constexpr int kRow = kDim * 2, kTile = kBlockN * kRow;
  // Byte offsets. K has two buffers, which differ in one bit and alternate; V and Q have one each.
  static constexpr uint32_t kK = 0, kV = 2 * kTile, kQ = kKeepQ ? kV : kV + kTile;
  static constexpr int kShared = kQ + kBlockM * kRow;
};

// A block's rows: a tile of `size` rows, of `pack` heads from `h` on, with a part of the keys.
struct Block {
  int split;
  int64_t place;  // index among all sequences and heads
  Head h;
  int first_row, n_rows;

  __device__ Block(const AttentionForward& a, const Splits& s, int size, unsigned index)
      : Block(a, s, static_cast<int>(index % s.count), index / s.count, (a.n_queries * s.pack + size - 1) / size,
              size) {}

 private:
  __device__ Block(const AttentionForward& a, const Splits& s, int split, int64_t index, int64_t tiles, int size)
      : split(split),
        place(index / tiles),
        h(a, static_cast<int>(place / (a.n_heads / s.pack)), static_cast<int>(place % (a.n_heads / s.pack) * s.pack)),
        first_row(static_cast<int>(tiles - 1 - index % tiles) * size),  // rows that see the most keys go first
        n_rows(h.q_len * s.pack) {}
};

template <class T, int kDim, int kTilesM, Calls kCalls>
__global__ void __launch_bounds__(kThreads, kCalls == Calls::all || kDim > 128 ? 1 : 2)
    attention_forward_tiles(AttentionForward a, Splits given) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900  // it would spill there: see plan_forward
  if constexpr (kDim == 128 && kTilesM == 2) return;
#endif
  using S = Shape<kDim, kTilesM>;
  constexpr int kBlockM = S::kBlockM, kBlockN = S::kBlockN;
  constexpr bool kOptions = kCalls == Calls::all, kWhole = kCalls == Calls::whole;
  FK_DYNAMIC_SHARED(uint4, shared);
  const Splits splits = kWhole ? Splits{1, 1, true, 0, nullptr} : given;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pack_heads = splits.pack;
  const Block block(a, splits, kBlockM, blockIdx.x);
  const Head& h = block.h;
  const int first_row = block.first_row, n_rows = block.n_rows;
  if (first_row >= n_rows) return;
  const int first_query = first_row / pack_heads;
  const int last_query = (min(first_row + kBlockM, n_rows) - 1) / pack_heads;

  // The tiles of keys that some row sees, and among them those that every row sees fully.
  const int begin = h.first_key(first_query), end = h.end_key(last_query);
  int first_tile = begin / kBlockN, end_tile = end > begin ? (end + kBlockN - 1) / kBlockN : first_tile;
  const int first_whole = (h.first_key(last_query) + kBlockN - 1) / kBlockN;
  const int end_whole = max(h.end_key(first_query), 0) / kBlockN;
  if (splits.count > 1) {
    const int each = (end_tile - first_tile + splits.count - 1) / splits.count;
    first_tile += block.split * each;
    end_tile = min(end_tile, first_tile + each);
  }
  // The next tile below `tile` that the mask does not hide from all rows; below first_tile if there is none.
  const auto visible = [&](int tile) {
    if (kOptions && a.tiles.index)
      while (tile >= first_tile && is_hidden(a, h, first_query, last_query, pack_heads, tile * kBlockN)) --tile;
    return tile;
  };

  const uint64_t seed = kOptions && a.dropout.threshold ? static_cast<uint64_t>(*a.dropout.seed) : 0;

  float out[kTilesM][kDim / 8][4] = {};
  RowSums rows[kTilesM][2];  // unscaled without options; sums are of this lane's columns
  FK_UNROLL for (int m = 0; m < kTilesM; ++m) rows[m][0] = rows[m][1] = {kNone, 0.f, 0.f};
  const auto row_of = [&](int m, int half) { return first_row + (warp * kTilesM + m) * 16 + half * 8 + lane / 4; };

  const uint32_t q_lane = S::kQ + left_lane<kDim>(warp * 16 * kTilesM, lane);
  const uint32_t v_lane = S::kV + summed_lane<kDim>(lane);
  uint32_t k_lane = S::kK + right_lane<kDim>(lane), k_next = S::kK + S::kTile;
  uint32_t q_kept[S::kKeepQ ? kDim / 16 : 1][4];

  int tile = visible(end_tile - 1);
  // Each is positioned at the end of the tile to copy next.
  Walker<kDim, kWhole> k(static_cast<const T*>(a.k) + h.key_at(a.k_strides, 0), a.k_strides.token, a.head_dim,
                         (tile + 1) * kBlockN);
  Walker<kDim, kWhole> v(static_cast<const T*>(a.v) + h.key_at(a.v_strides, 0), a.v_strides.token, a.head_dim_v,
                         (tile + 1) * kBlockN);
  if (tile >= first_tile) {
    copy_queries<T, kDim, kBlockM>(shared, S::kQ, a, h, first_row, n_rows, pack_heads);
    cp_async_commit();
    FK_UNROLL for (int two = 0; two < 2; ++two) k.template clear<kBlockN>(shared, S::kK + two * S::kTile);
    k.template copy<kBlockN, true>(shared, S::kK, h.k_len - tile * kBlockN);
    cp_async_commit();
    if constexpr (S::kKeepQ) {
      cp_async_wait<1>();
      __syncthreads();
      FK_UNROLL for (int d = 0; d < kDim / 16; ++d) ldmatrix(q_kept[d], shared, q_lane ^ (d * 32));
      __syncthreads();
    }
    v.template clear<kBlockN>(shared, S::kV);
  }

  const auto step = [&](auto masked, int next) {
    constexpr bool kMasked = decltype(masked)::value;
    const uint32_t q_at = kMasked ? hidden(q_lane) : q_lane, v_at = kMasked ? hidden(v_lane) : v_lane;
    cp_async_wait<0>();
    __syncthreads();  // K's tile has arrived; V's buffer and K's other buffer are no longer read
    v.template copy<kBlockN, kMasked>(shared, S::kV, h.k_len - tile * kBlockN);
    if (kOptions) v.move((next + 1 - tile) * kBlockN);
    cp_async_commit();
    if (kOptions) k.move((next + 1 - tile) * kBlockN);
    if (next >= first_tile) k.template copy<kBlockN, false>(shared, k_next);
    cp_async_commit();  // an empty group keeps the count

    float s[kTilesM][kBlockN / 8][4] = {};
    FK_UNROLL for (int d = 0; d < kDim / 16; ++d) {
      uint32_t left[kTilesM][4];
      FK_UNROLL for (int m = 0; m < kTilesM; ++m) {
        if constexpr (S::kKeepQ) FK_UNROLL for (int i = 0; i < 4; ++i) left[m][i] = q_kept[d][i];
        else ldmatrix(left[m], shared, (q_at ^ (d * 32)) + m * 16 * S::kRow);
      }
      FK_UNROLL for (int n = 0; n < kBlockN / 16; ++n) {
        uint32_t right[4];
        ldmatrix(right, shared, (k_lane ^ (d * 32)) + n * 16 * S::kRow);
        FK_UNROLL for (int m = 0; m < kTilesM; ++m) {
          mma<T>(s[m][2 * n], left[m], right[0], right[1]);
          mma<T>(s[m][2 * n + 1], left[m], right[2], right[3]);
        }
      }
    }
    k_lane ^= S::kTile;
    k_next ^= S::kTile;

    // Logits with a bias may be so large that their product with kLog2e overflows, and its rounding error is not small.
    // So the maximum is subtracted first. Scores need only one operation.
    const float scale = a.scale * kLog2e;
    const auto power = [&](float x, float base) { return kOptions ? (x - base) * kLog2e : x * scale - base; };
    uint32_t p[kTilesM][kBlockN / 16][4];
    FK_UNROLL for (int m = 0; m < kTilesM; ++m) FK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = row_of(m, half), column = tile * kBlockN + lane % 4 * 2;
      const int i = row / pack_heads;
      if constexpr (kOptions) {
        Head own = h;
        if (pack_heads > 1) own = Head(a, h.n, h.head + row % pack_heads);
        FK_UNROLL for (int n = 0; n < kBlockN / 8; ++n) FK_UNROLL for (int e = 0; e < 2; ++e) {
          const int j = column + n * 8 + e;
          float& x = s[m][n][2 * half + e];
          float unused;
          x = row < n_rows && j >= h.first_key(i) && j < h.end_key(i) ? logit(a, own, x, i, j, unused) : kNone;
        }
      } else if (kMasked) {
        const int at = static_cast<int>(hidden(i));
        const int from = h.first_key(at) - column, to = h.end_key(at) - column;
        FK_UNROLL for (int n = 0; n < kBlockN / 8; ++n)
            FK_UNROLL for (int e = 0; e < 2; ++e) if (n * 8 + e < from || n * 8 + e >= to) s[m][n][2 * half + e] =
                kNone;
      }
      RowSums& r = rows[m][half];
      float top = r.max;
      FK_UNROLL for (int n = 0; n < kBlockN / 8; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
      const bool empty = (kMasked || kOptions) && top == kNone;  // sees nothing so far
      const float base = empty ? 0.f : kOptions ? top : top * scale, fall = power(r.max, base);
      const float shrink = exp2_fast(fall);
      if (kOptions && a.entropy) r.entropy = shrink > 0.f ? shrink * (r.entropy + fall / kLog2e * r.sum) : 0.f;
      r.max = top;
      float sum = r.sum * shrink;
      FK_UNROLL for (int n = 0; n < kBlockN / 8; ++n) {
        const float x0 = power(s[m][n][2 * half], base), x1 = power(s[m][n][2 * half + 1], base);
        const float p0 = exp2_fast(x0), p1 = exp2_fast(x1);
        sum += p0 + p1;
        if (kOptions && a.entropy)
          r.entropy += (p0 > 0.f ? p0 * x0 / kLog2e : 0.f) + (p1 > 0.f ? p1 * x1 / kLog2e : 0.f);
        if (kOptions && a.dropout.threshold) {
          s[m][n][2 * half] = p0, s[m][n][2 * half + 1] = p1;
        } else {
          p[m][n / 2][n % 2 * 2 + half] = pack<T>(p0, p1);  // the scores' layout is that of the next left operand
        }
      }
      r.sum = sum;
      FK_UNROLL for (int n = 0; n < kDim / 8; ++n) FK_UNROLL for (int e = 0; e < 2; ++e) out[m][n][2 * half + e] *=
          shrink;
    }
    if (kOptions && a.dropout.threshold)
      FK_UNROLL for (int m = 0; m < kTilesM; ++m)
          drop<T>(s[m], p[m], a, seed, h, row_of(m, 0), n_rows, pack_heads, tile * kBlockN, lane);

    cp_async_wait<1>();
    __syncthreads();  // V's tile has arrived
    add_product<T, kDim>(out, p, shared, v_at);
    tile = next;
  };
  const int last_whole = max(first_whole, first_tile);
  while (tile >= first_tile) {
    if (kOptions || tile >= end_whole || tile < last_whole) {
      step(std::true_type(), visible(tile - 1));
    } else {
#if !defined(FK_CUDA_ON_CPU)
#pragma unroll 1
#endif
      while (tile >= last_whole) step(std::false_type(), tile - 1);
    }
  }
  cp_async_wait<0>();
  cp_async_finished();

  const Block b(a, splits, kBlockM, block_index_again());
  FK_UNROLL for (int m = 0; m < kTilesM; ++m) FK_UNROLL for (int half = 0; half < 2; ++half) {
    RowSums r = rows[m][half];
    FK_UNROLL for (int other = 1; other <= 2; other *= 2) {
      r.sum += __shfl_xor_sync(kAll, r.sum, other);
      if (kOptions) r.entropy += __shfl_xor_sync(kAll, r.entropy, other);
    }
    if (!kOptions && r.max != kNone) r.max *= a.scale;
    const int row = b.first_row + (warp * kTilesM + m) * 16 + half * 8 + lane / 4, i = row / splits.pack;
    const bool writes = row < b.n_rows;
    if (splits.count > 1) {
      const int64_t at = b.split * splits.rows + b.place * (a.n_queries * splits.pack) + row;
      float* to = splits.sums + at * splits.row_floats(a.head_dim_v);
      write_split<kDim>(writes ? to : nullptr, out[m], half, r, a.head_dim_v, lane);
      continue;
    }
    Head own = b.h;
    own.head += row % splits.pack;
    const float factor = writes ? finish_row(a, own, i, r, lane % 4 == 0) : 0.f;
    T* to = writes ? static_cast<T*>(a.out) + own.query_at(a.out_strides, i) : nullptr;
    write_row<T, kDim>(to, out[m], half, factor, a.head_dim_v, lane);
  }
}

template <class T, int kDim, int kTilesM, Calls kCalls>
cudaError_t launch_tiles(const AttentionForward& a, const Splits& splits, cudaStream_t stream) {
  using S = Shape<kDim, kTilesM>;
  const int64_t rows = a.n_queries * splits.pack, heads = a.n_heads / splits.pack;
  const int64_t blocks = a.n_sequences * heads * ((rows + S::kBlockM - 1) / S::kBlockM) * splits.count;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const auto kernel = attention_forward_tiles<T, kDim, kTilesM, kCalls>;
  const cudaError_t error = allow_shared(kernel, S::kShared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), S::kShared, stream, a, splits);
}

template <class T, int kDim>
cudaError_t launch_of_width(const AttentionForward& a, const Splits& splits, cudaStream_t stream) {
  if (has_options(a) || a.entropy) return launch_tiles<T, kDim, 1, Calls::all>(a, splits, stream);
  if (a.head_dim != kDim || a.head_dim_v != kDim || splits.pack > 1 || splits.count > 1)
    return launch_tiles<T, kDim, 1, Calls::plain>(a, splits, stream);
  if constexpr (kDim <= 128)
    if (splits.large) return launch_tiles<T, kDim, 2, Calls::whole>(a, splits, stream);
  return launch_tiles<T, kDim, 1, Calls::whole>(a, splits, stream);
}

}  // namespace

bool forward_in_tiles(const AttentionForward& a) {
  return a.type != Dtype::f32 && a.head_dim <= 256 && a.head_dim_v <= 256 &&
         rows_are_aligned(a.q, a.q_strides, a.head_dim, a.type) &&
         rows_are_aligned(a.k, a.k_strides, a.head_dim, a.type) &&
         rows_are_aligned(a.v, a.v_strides, a.head_dim_v, a.type) &&
         rows_are_aligned(a.out, a.out_strides, a.head_dim_v, a.type);
}

cudaError_t forward_tiles(const AttentionForward& a, const Splits& splits, cudaStream_t stream) {
  const int width = max(a.head_dim, a.head_dim_v);
  const auto of_type = [&](auto type) {
    using T = FK_TYPE(type);
    if (width <= 64) return launch_of_width<T, 64>(a, splits, stream);
    if (width <= 128) return launch_of_width<T, 128>(a, splits, stream);
    return launch_of_width<T, 256>(a, splits, stream);
  };
  return a.type == Dtype::bf16 ? of_type(Tag<__nv_bfloat16>{}) : of_type(Tag<__half>{});
}

}  // namespace cuda
}  // namespace foundry
