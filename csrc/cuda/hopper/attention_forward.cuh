// Attention forward on compute capability 9.0.
//
// A block has one warpgroup whose first thread copies tiles by TMA, and two or three that compute 64 rows of queries
// each. There are as many blocks as multiprocessors; they take tiles of rows until none is left. K and V go through
// rings of stages. Each stage has two barriers: full, and free again once all have read it.
//
// Tiles of keys go from the last that the rows see to the first. The scores S = Q K^T of a tile are computed beside the
// sums O += P V of the tile before. While O is in flight, P = exp2(S scale - max) is computed from S in registers,
// where it is the left operand of the next matmul. O is rescaled only when a row's maximum grows by more than a factor
// of 2^8 ("lazily"). Until then weights are relative to an older maximum, which changes results only by rounding.
//
//   copies    | K n-1       | V n           | K n-2         | ...
//   matmuls   | S n-1, O n        .. waits for S | .. for O | S n-2, O n-1
//   registers |                   | P n-1 from S | rescale O
#pragma once

#include "packed_order.cuh"

namespace foundry {
namespace cuda {
namespace hopper {
namespace forward {

// Two ways to compute that the kernel of 64 columns may be compiled with, 1 and 2 or their sum 3: the maxima of scores
// as integers, three at a time; and turns, in which the warpgroups begin their matmuls.
#ifndef FK_HOPPER_WAYS_OF_64
#define FK_HOPPER_WAYS_OF_64 0
#endif

// What queries and keys of up to kDim columns and values of up to kDimV need. `kGroups` warpgroups compute; a tile has
// kKeys keys.
template <int kDim_, int kDimV_ = kDim_, int kWays = kDim_ == 64 ? FK_HOPPER_WAYS_OF_64 : 0>
struct Shape {
  static constexpr int kDim = kDim_, kDimV = kDimV_, kGroups = kDim == 64 ? 3 : 2;
  static constexpr int kKeys = kDim == 256 ? 80 : kDimV == 192 ? 112 : 128;
  static constexpr bool kIntegerMaxima = kWays & 1, kTurns = kWays & 2;
  static constexpr int kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  static constexpr int kPanels = (kDim + kPanel - 1) / kPanel, kPanelsV = (kDimV + kPanel - 1) / kPanel;
  static constexpr bool kKeepQ = kDim == 96 || kDim == 128;  // in registers; otherwise it is read from shared memory
  // Whether registers hold which tile of rows this is. Otherwise it is read again where needed, and Q's buffer is kept
  // until the end.
  static constexpr bool kKeepWork = kGroups == 2;
  static constexpr int kQueues = kDim == 64 ? 2 : 1;  // buffers for Q
  static constexpr int kStages = kDim == 64 ? 3 : 2;  // of K, and of V
  // Whether a warpgroup may have to skip the last tile of keys, because all of its rows end before it.
  static constexpr bool kSkips = kRows != kKeys;
  static_assert(kRows - 64 <= kKeys, "never two tiles");
  static constexpr int kProducer = kGroups == 3 ? 32 : 24, kConsumer = kGroups == 3 ? 160 : 240;  // registers
  // Bytes of shared memory.
  static constexpr uint32_t kQPanel = kRows * kPanelBytes, kKPanel = kKeys * kPanelBytes;
  static constexpr uint32_t kQBytes = kPanels * kQPanel;
  static constexpr uint32_t kKBytes = kPanels * kKPanel, kVBytes = kPanelsV * kKPanel;
  static constexpr uint32_t kQ = 0, kK = kQueues * kQBytes, kV = kK + kStages * kKBytes;
  static constexpr uint32_t kQFull = kV + kStages * kVBytes, kQEmpty = kQFull + 8 * kQueues;
  static constexpr uint32_t kKFull = kQEmpty + 8 * kQueues, kKEmpty = kKFull + 8 * kStages;
  static constexpr uint32_t kVFull = kKEmpty + 8 * kStages, kVEmpty = kVFull + 8 * kStages;
  static constexpr uint32_t kTurn = kVEmpty + 8 * kStages;                // one barrier per warpgroup
  static constexpr uint32_t kWork = kTurn + (kTurns ? 16 * kGroups : 0);  // one Work per buffer of Q
  static constexpr uint32_t kShared = kWork + 16 * kQueues;
  static_assert(kShared <= (227 << 10), "shared memory");
};

// The order of the tiles of rows: in groups of heads whose K and V fit in the L2 cache, and within a group row by row.
// The last rows go first, because they see the most keys under a causal mask; of packed sequences see packed_order.cuh.
struct Order {
  int tiles, row_tiles, heads, heads_at_once;
  int* counter;  // counts tiles taken beyond each block's first; null if there are none
  Log2Score score;
};

// A tile of rows: of a sequence and head, from row `first` on. sequence < 0: no tile is left.
struct Work {
  int sequence, head, first;
};

template <int kRows>
__device__ __forceinline__ Work work_of(const AttentionForward& a, const Order& order, uint32_t sequences, int tile) {
  const int each = order.heads_at_once * order.row_tiles, group = tile / each, rest = tile % each;
  const int heads = min(order.heads_at_once, order.heads - group * order.heads_at_once);
  const int position = rest / heads, row_tile = order.row_tiles - 1 - position,
            head = group * order.heads_at_once + rest % heads;
  const int n_heads = static_cast<int>(a.n_heads);
  if (!a.starts_q) return {head / n_heads, head % n_heads, row_tile * kRows};
  const TileOf found = has_order(a) ? tile_at(a, sequences, position)
                                    : find_tile<2>(a.starts_q, a.total_q, a.n_sequences, 0, kRows, row_tile);
  return {found.sequence, head, found.tile < kFar ? found.tile * kRows : kFar};
}

// The tiles of keys [begin, end) that rows [first, last] see. At least one, even if it is fully hidden.
struct KeyTiles {
  int begin, end;
  __device__ KeyTiles(const Head& h, int first, int last, int size) {
    const int from = h.first_key(first), to = h.end_key(last);
    end = max(1, (max(to, 0) + size - 1) / size);
    begin = min(from / size, end - 1);
  }
};

// A stage of a ring, and the parity of the phase to wait for there.
template <int kStages>
struct Place {
  uint32_t stage, parity;
  __device__ void next() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
  __device__ Place before() const { return stage > 0 ? Place{stage - 1, parity} : Place{kStages - 1, parity ^ 1}; }
};

// --- the producer ----------------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void produce(const AttentionForward& a, const TensorMap* q, const TensorMap* k,
                                        const TensorMap* v, const Order& order, uint32_t base) {
  Place<S::kStages> in_k{0, 1}, in_v{0, 1};
  Place<S::kQueues> in_q{0, 1};
  const auto load = [&](const TensorMap* map, uint32_t to, uint32_t barrier, int panels, uint32_t panel_bytes,
                        int64_t token, int head, int batch) {
    mbarrier_expect(barrier, panels * panel_bytes);
    FK_UNROLL for (int panel = 0; panel < panels; ++panel)
        tma_load(to + panel * panel_bytes, map, barrier, panel * kPanel, static_cast<int>(token), head, batch);
  };
  for (int tile = blockIdx.x;;) {
    Work work = tile < order.tiles ? work_of<S::kRows>(a, order, base + S::kShared, tile) : Work{-1, 0, 0};
    const Head h(a, max(work.sequence, 0), work.head);
    if (work.sequence < 0 || work.first < h.q_len) {
      mbarrier_wait(base + S::kQEmpty + 8 * in_q.stage, in_q.parity);
      const uint32_t full = base + S::kQFull + 8 * in_q.stage, at = base + S::kWork + 16 * in_q.stage;
      store_shared(at, work.sequence);
      store_shared(at + 4, work.head);
      store_shared(at + 8, work.first);
      if (work.sequence < 0) {
        mbarrier_arrive(full);
        break;
      }
      const int batch = batch_of(a, h);
      load(q, base + S::kQ + in_q.stage * S::kQBytes, full, S::kPanels, S::kQPanel, h.q_start + work.first, h.head,
           batch);
      in_q.next();
      // K of a tile, then V of the tile before: the order in which they are used.
      const KeyTiles keys(h, work.first, min(work.first + S::kRows, h.q_len) - 1, S::kKeys);
      for (int n = keys.end - 1; n >= keys.begin - 1; --n) {
        if (n >= keys.begin) {
          mbarrier_wait(base + S::kKEmpty + 8 * in_k.stage, in_k.parity);
          load(k, base + S::kK + in_k.stage * S::kKBytes, base + S::kKFull + 8 * in_k.stage, S::kPanels, S::kKPanel,
               h.k_start + n * S::kKeys, h.kv_head, batch);
          in_k.next();
        }
        if (n + 1 < keys.end) {
          mbarrier_wait(base + S::kVEmpty + 8 * in_v.stage, in_v.parity);
          load(v, base + S::kV + in_v.stage * S::kVBytes, base + S::kVFull + 8 * in_v.stage, S::kPanelsV, S::kKPanel,
               h.k_start + (n + 1) * S::kKeys, h.kv_head, batch);
          in_v.next();
        }
      }
    }
    // While the others still work through the stages.
    const int taken = order.counter ? atomicAdd(order.counter, 1) : tile;
    if (order.counter && taken == order.tiles - 1)
      *order.counter = 0;  // each block adds once more than it finds a tile
    tile = gridDim.x + taken;
  }
}

// --- softmax ---------------------------------------------------------------------------------------------------------

// The softmax state of a thread's two rows, g and g + 8 of its warp: the maximum that weights are relative to
// (unscaled), their sum so far, and the factor for older sums.
struct Rows {
  float max[2], sum[2], shrink[2];
};

constexpr float kLazy = 8.f;  // a maximum may be exceeded by this power of 2 before it is replaced

// The maxima of the rows. kIntegers: compares bits, three at a time; if all of a row's scores are negative, the result
// is negative, but wrong.
template <int kKeys, bool kIntegers>
__device__ __forceinline__ void find_maxima(const float (&s)[kKeys / 2], float (&top)[2]) {
  FK_UNROLL for (int r = 0; r < 2; ++r) {
    if constexpr (kIntegers) {
      int most[2] = {__float_as_int(s[2 * r]), __float_as_int(s[4 + 2 * r])};
      most[0] = max(most[0], __float_as_int(s[2 * r + 1]));
      most[1] = max(most[1], __float_as_int(s[4 + 2 * r + 1]));
      FK_UNROLL for (int j = 2; j < kKeys / 8; ++j) most[j % 2] =
          max(max(most[j % 2], __float_as_int(s[4 * j + 2 * r])), __float_as_int(s[4 * j + 2 * r + 1]));
      top[r] = __int_as_float(max(most[0], most[1]));
    } else {
      float even = s[2 * r], odd = s[2 * r + 1];
      FK_UNROLL for (int j = 1; j < kKeys / 8; ++j) {
        even = fmaxf(even, s[4 * j + 2 * r]);
        odd = fmaxf(odd, s[4 * j + 2 * r + 1]);
      }
      top[r] = fmaxf(even, odd);
    }
  }
  FK_UNROLL for (int r = 0; r < 2; ++r) {
    FK_UNROLL for (int lanes = 1; lanes < 4; lanes *= 2) top[r] =
        fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], lanes));
  }
}

// Turns s, the scores of a tile (or logits in powers of 2, with scale 1), into weights. kMasked: some may be -inf.
template <int kKeys, bool kIntegers, bool kMasked, bool kFirst>
__device__ __forceinline__ void soften(float (&s)[kKeys / 2], Rows& rows, float scale) {
  float top[2], base[2];
  find_maxima<kKeys, kIntegers>(s, top);
  if constexpr (kIntegers) {
    FK_UNROLL for (int r = 0; r < 2; ++r) base[r] = kFirst ? top[r] : fmaxf(top[r], rows.max[r]);
    if (__any_sync(0xFFFFFFFFu, base[0] < 0.f || base[1] < 0.f)) find_maxima<kKeys, false>(s, top);
  }
  FK_UNROLL for (int r = 0; r < 2; ++r) {
    if constexpr (!kFirst) {
      const float before = rows.max[r], larger = fmaxf(before, top[r]);
      top[r] = (top[r] - before) * scale <= kLazy ? before : larger;  // before = -inf: not so, or NaN
    }
    base[r] = __fmul_rn(top[r], scale);  // not fused, so that an unchanged maximum gives a shrink of exactly 1
    if constexpr (kMasked) base[r] = top[r] == kNone ? 0.f : base[r];  // exp2(-inf - 0) is 0, not NaN
    if constexpr (!kFirst) rows.shrink[r] = exp2_fast(__fsub_rn(__fmul_rn(rows.max[r], scale), base[r]));
    rows.max[r] = top[r];
  }
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  FK_UNROLL for (int i = 0; i < kKeys / 2; ++i) {
    s[i] = exp2_fast(fmaf(s[i], scale, -base[i / 2 % 2]));
    sums[i % 4] += s[i];
  }
  FK_UNROLL for (int r = 0; r < 2; ++r) {
    const float sum = sums[2 * r] + sums[2 * r + 1];
    rows.sum[r] = kFirst ? sum : fmaf(rows.sum[r], rows.shrink[r], sum);
  }
}

// Turns scores into logits in powers of 2, with ALiBi. i: the thread's first row; j: the key of its first column.
template <int kKeys>
__device__ __forceinline__ void add_alibi(float (&s)[kKeys / 2], float scale, const Head& h, int i, int j) {
  const float slope = h.slope * kLog2e;
  const int distance = i + h.offset - j;
  FK_UNROLL for (int x = 0; x < kKeys / 2; ++x) s[x] =
      fmaf(s[x], scale, -slope * fabsf(static_cast<float>(distance + x / 2 % 2 * 8 - x / 4 * 8 - x % 2)));
}

// Hides the columns of a tile from key `n` on that the thread's rows i and i + 8 do not see. `left`: some may be left
// of the window.
template <int kKeys>
__device__ __forceinline__ void hide(float (&s)[kKeys / 2], const Head& h, int i, int n, bool left) {
  const int column = n + threadIdx.x % 4 * 2;
  const int end[2] = {h.end_key(i) - column, h.end_key(i + 8) - column};
  FK_UNROLL for (int x = 0; x < kKeys / 2; ++x) if (x / 4 * 8 + x % 2 >= end[x / 2 % 2]) s[x] = kNone;
  if (!left) return;
  const int begin[2] = {h.first_key(i) - column, h.first_key(i + 8) - column};
  FK_UNROLL for (int x = 0; x < kKeys / 2; ++x) if (x / 4 * 8 + x % 2 < begin[x / 2 % 2]) s[x] = kNone;
}

// --- results ---------------------------------------------------------------------------------------------------------

// Finishes a row with this maximum (in powers of 2) and sum of weights: writes lse and returns the factor for its sums
// of values.
__device__ __forceinline__ float finish(const AttentionForward& a, const Head& h, int i, float top, float sum,
                                        bool writes) {
  constexpr double kLn2 = 0.6931471805599453;
  const bool empty = sum == 0.f;
  float factor = 1.f;
  double largest = top * kLn2;
  if (a.sinks && !empty) {  // in natural units, because the product of a large sink with kLog2e overflows
    const float sink = a.sinks[h.head], before = static_cast<float>(largest), larger = fmaxf(before, sink);
    factor = exp2_fast((before - larger) * kLog2e);
    sum = fmaf(sum, factor, exp2_fast((sink - larger) * kLog2e));
    if (sink > before) largest = sink;
  }
  if (writes && a.lse) {
    // Computes exponent and mantissa separately, so that no precision is lost beside a large maximum.
    int exponent;
    const float part = log2f(frexpf(sum, &exponent));
    a.lse[h.row_at(a, i)] = empty ? static_cast<double>(kNone) : largest + (exponent + part) * kLn2;
  }
  return empty ? 0.f : factor / sum;
}

// Writes rows i and i + 8 of the thread. Two exchanges give each of a row's four threads 8 neighbouring columns of
// every 32, which it stores as 16 bytes.
template <class T, int kDim>
__device__ __forceinline__ void write(const AttentionForward& a, const Head& h, int i, const float (&o)[kDim / 2],
                                      const float (&factor)[2]) {
  const int part = threadIdx.x % 4;
  FK_UNROLL for (int r = 0; r < 2; ++r) {
    T* out = static_cast<T*>(a.out) + h.query_at(a.out_strides, i + 8 * r) + part * 8;
    FK_UNROLL for (int g = 0; g < kDim / 32; ++g) {
      uint32_t x[4];
      FK_UNROLL for (int c = 0; c < 4; ++c) {
        const int at = 4 * (4 * g + c) + 2 * r;
        x[c] = pack<T>(o[at] * factor[r], o[at + 1] * factor[r]);
      }
      FK_UNROLL for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = part & bit;
        FK_UNROLL for (int c = 0; c < 4; ++c) {
          if (c & bit) continue;
          const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? x[c] : x[c + bit], bit);
          (upper ? x[c] : x[c + bit]) = got;
        }
      }
      if (i + 8 * r < h.q_len && g * 32 + part * 8 < a.head_dim_v)
        store(out + g * 32, *reinterpret_cast<const Pack<T, 8>*>(x));
    }
  }
}

}  // namespace forward
}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
