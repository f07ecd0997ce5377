// Turns the matmul of a query and a key into its weight: common/score.h, masks and dropout. All attention kernels use
// this, one pair at a time.
#pragma once

#include "dispatch.cuh"
#include "dropout.cuh"
#include "flash_attention.h"

namespace foundry {
namespace cuda {

constexpr float kNone = -INFINITY;
constexpr int kFar = 1 << 30;  // beyond any position

// A query head of a sequence.
struct Head {
  int n;  // the sequence
  int head, kv_head;
  int64_t q_start, k_start;  // first token in packed tensors
  int q_len, k_len;
  int offset;  // the position of query 0 among the keys
  int left, right;
  float slope;
  uint32_t drop_head, drop_batch;  // seed the dropout of this head

  __device__ static int clamped(int64_t x) { return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x); }

  // The start or end of a sequence, clamped to the tensor for any cu_seqlens.
  __device__ static int64_t bounded(int64_t x, int64_t total) { return x < 0 ? 0 : x > total ? total : x; }

  __device__ Head(const AttentionInputs& a, int n, int head)
      : n(n),
        head(head),
        kv_head(static_cast<int>(head / a.group)),
        q_start(0),
        k_start(0),
        q_len(static_cast<int>(a.n_queries)),
        k_len(static_cast<int>(a.n_keys)),
        slope(0.f),
        drop_head(head),
        drop_batch(n) {
    if (a.starts_q) {
      q_start = bounded(a.starts_q[n], a.total_q);
      k_start = bounded(a.starts_k[n], a.total_k);
      const int64_t q_end = bounded(a.starts_q[n + 1], a.total_q), k_end = bounded(a.starts_k[n + 1], a.total_k);
      q_len = static_cast<int>(q_end > q_start ? q_end - q_start : 0);
      k_len = static_cast<int>(k_end > k_start ? k_end - k_start : 0);
    }
    offset = a.bottom_right ? k_len - q_len : 0;
    left = clamped(a.window_left);
    right = clamped(a.window_right);
    if (a.alibi_slopes) slope = a.alibi_slopes[n * a.alibi_slopes_batch_stride + head];
    if (a.dropout.heads) {
      const int64_t place = a.dropout.heads[n * a.n_heads + head];
      drop_head = static_cast<uint32_t>(place);
      drop_batch = static_cast<uint32_t>(static_cast<uint64_t>(place) >> 32);
    }
  }

  // Query i sees keys [first_key, end_key) unless a mask hides them. The range is empty if end_key <= first_key.
  __device__ int first_key(int i) const { return max(0, i + offset - left); }
  __device__ int end_key(int i) const { return min(k_len, i + offset + right + 1); }
  // Queries [first_query, end_query) that see key j.
  __device__ int first_query(int j) const { return max(0, j - offset - right); }
  __device__ int end_query(int j) const { return min(q_len, j - offset + left + 1); }

  // Element offset of a query (with q's strides) or a key (with k's).
  __device__ int64_t query_at(const HeadStrides& s, int i) const {
    return n_batch(s) + head * s.head + (q_start + i) * s.token;
  }
  // Element offset of a query's lse and other per-row numbers, which are contiguous.
  __device__ int64_t row_at(const AttentionInputs& a, int i) const {
    return n_batch(a.row_strides) + head * a.row_strides.head + (q_start + i);
  }
  __device__ int64_t key_at(const HeadStrides& s, int j) const {
    return n_batch(s) + kv_head * s.head + (k_start + j) * s.token;
  }

 private:
  __device__ int64_t n_batch(const HeadStrides& s) const { return n * s.batch; }  // 0 in packed tensors
};

__device__ __forceinline__ int64_t pair_at(const PairStrides& s, const Head& h, int i, int j) {
  return h.n * s.batch + h.head * s.head + i * s.query + j * s.key;
}

// Whether scores need more than the scale and a window.
inline bool has_options(const AttentionInputs& a) {
  return has_score_options(a) || a.mask || a.tiles.index || a.bias || a.dropout.threshold;
}

// Whether the mask shows key j, which lies in the window, to query i.
__device__ __forceinline__ bool shown(const AttentionInputs& a, const Head& h, int i, int j) {
  if (a.mask && !a.mask[pair_at(a.mask_strides, h, i, j)]) return false;
  if (!a.tiles.index) return true;
  const int index = a.tiles.index[pair_at(a.tiles.strides, h, i / int(kMaskTile), j / int(kMaskTile))];
  if (index <= 1) return index == 1;
  return a.tiles.words[index * kMaskTile + i % kMaskTile] >> (j % kMaskTile) & 1u;
}

__device__ __forceinline__ float bias_of(const AttentionInputs& a, const Head& h, int i, int j) {
  const int64_t at = pair_at(a.bias_strides, h, i, j);
  if (a.bias_type == Dtype::f32) return static_cast<const float*>(a.bias)[at];
  if (a.bias_type == Dtype::bf16) return to_float(static_cast<const __nv_bfloat16*>(a.bias)[at]);
  return to_float(static_cast<const __half*>(a.bias)[at]);
}

// The logit of query i and key j from their dot product. `derivative` is d logit / d (scaled product).
__device__ __forceinline__ float logit(const AttentionInputs& a, const Head& h, float product, int i, int j,
                                       float& derivative) {
  float s = bent(a, product, derivative);
  if (a.alibi_slopes) {
    const int distance = i + h.offset - j;
    s -= h.slope * static_cast<float>(distance < 0 ? -distance : distance);
  }
  if (a.bias) s += bias_of(a, h, i, j);
  return shown(a, h, i, j) ? s : kNone;
}

// Which weights dropout keeps for queries i and i + 8 and keys j, j + 8, j + 16 and j + 24, where i % 16 < 8 and j % 32
// < 8. Bit 4 r + c is for query i + 8 r and key j + 8 c. See ops/flash_attention/dropout.py.
__device__ __forceinline__ uint32_t kept_weights(const DroppedWeights& d, uint64_t seed, const Head& h, int i, int j) {
  uint32_t words[4] = {static_cast<uint32_t>(j / 32 * 8 + j % 8), static_cast<uint32_t>(i / 16 * 8 + i % 8),
                       h.drop_head, h.drop_batch};
  philox(words, seed);
  uint32_t bits = 0;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    bits |= static_cast<uint32_t>((words[c] & 0xFFFFu) >= d.threshold) << c;
    bits |= static_cast<uint32_t>((words[c] >> 16) >= d.threshold) << (4 + c);
  }
  return bits;
}

// The dropout factor of one weight.
__device__ __forceinline__ float dropout_factor(const DroppedWeights& d, uint64_t seed, const Head& h, int i, int j) {
  const uint32_t bits = kept_weights(d, seed, h, i - i % 16 / 8 * 8, j - j % 32 / 8 * 8);
  return bits >> (i % 16 / 8 * 4 + j % 32 / 8) & 1u ? d.scale : 0.f;
}

// A weight from its logit and its row's lse.
__device__ __forceinline__ float weight_of(float logit, const SplitLse& lse) {
  return logit == kNone ? 0.f : expf((logit - lse.lse) - lse.rest);
}

// The place of a block in a grid with one block per tile of `size` of n rows, per head and per sequence.
struct Place {
  int sequence, head, tile;

  __device__ Place(int64_t heads, int64_t n, int size, unsigned block) {
    const int64_t tiles = (n + size - 1) / size, index = block;
    tile = static_cast<int>(index % tiles);
    head = static_cast<int>(index / tiles % heads);
    sequence = static_cast<int>(index / tiles / heads);
  }
};

inline int64_t blocks_of(const AttentionInputs& a, int64_t heads, int64_t n, int size) {
  return a.n_sequences * heads * ((n + size - 1) / size);
}

// A row's softmax state: its largest logit and, relative to it, the sum of the weights and the sum of weights times
// their logarithms.
struct RowSums {
  float max, sum, entropy;

  // Adds another part of the row. The caller multiplies the two sums of values by `mine` and `theirs`.
  __device__ void combine(const RowSums& other, float& mine, float& theirs) {
    const float top = fmaxf(max, other.max);
    mine = max == kNone ? 0.f : expf(max - top);
    theirs = other.max == kNone ? 0.f : expf(other.max - top);
    entropy = (mine > 0.f ? mine * (entropy + (max - top) * sum) : 0.f) +
              (theirs > 0.f ? theirs * (other.entropy + (other.max - top) * other.sum) : 0.f);
    sum = sum * mine + other.sum * theirs;
    max = top;
  }
};

// Writes a row's requested outputs, on one thread. Returns the factor for its sum of values.
__device__ __forceinline__ float finish_row(const AttentionForward& a, const Head& h, int i, RowSums r, bool writes) {
  const int64_t at = h.row_at(a, i);
  const bool empty = r.sum == 0.f;  // a row with NaN has no maximum, but a sum
  if (writes && a.max_logit) a.max_logit[at] = r.sum == r.sum ? r.max : r.sum;
  float factor = 1.f, unused;
  if (a.sinks && !empty) r.combine({a.sinks[h.head], 1.f, 0.f}, factor, unused);
  if (writes && (a.lse || a.entropy)) {
    const double log_sum = empty ? 0.0 : log(static_cast<double>(r.sum));
    if (a.lse) a.lse[at] = empty ? static_cast<double>(kNone) : join_lse(r.max, log_sum);
    if (a.entropy) a.entropy[at] = empty ? 0.f : static_cast<float>(log_sum - r.entropy / r.sum);
  }
  return empty ? 0.f : factor / r.sum;
}

}  // namespace cuda
}  // namespace foundry
