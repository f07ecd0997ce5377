// The order of work in the backward pass: what a block computes, and when it may add to dq.
//
// A block computes dk and dv of 128 keys for the heads of a group (at width 256: 128 columns of them), and a
// contribution to dq for each tile of queries that sees one of its keys. Query tiles go from the last to the first, and
// for each the heads one after the other. Blocks of neighbouring keys begin together and work on the same query tiles
// at the same time, so these, and the sums of dq, stay in the L2 cache.
//
// If each query sees all keys up to its own, the work of a tile of keys falls from the first tile to the last. A block
// then takes two tiles, one from either end, and visits the queries of the second upwards. All blocks of a head then
// end together and always work on the same few query tiles.
//
// If these blocks are too few for the GPU, the heads of a group, and then the query tiles of each, are split over
// blocks, whose sums of dk and dv the last launch adds in order ("shares" of a key-value head).
//
// dq is summed in any order, or in a fixed order by turns: the adders of a query tile are numbered, and each waits
// until those before it have added. First and second halves of pairs have sums of their own, which the last launch
// adds. A block waits only for blocks that began before it, whose number is lower: its number is its place in the order
// in which blocks began. So the pass ends whatever else runs on the GPU.
#pragma once

#include "attention.cuh"

namespace foundry {
namespace cuda {
namespace hopper {

constexpr int kKeyTile = 128;       // keys
constexpr int kPieceFloats = 4096;  // 64 rows x 64 columns, as the registers of a warpgroup
__host__ __device__ constexpr int query_tile_of(int width) { return width == 64 ? 128 : 64; }
// Blocks that share a tile of keys.
__host__ __device__ constexpr int column_blocks_of(int width) { return width == 256 ? 2 : 1; }
// Of dq, of a query tile. At width 192 both warpgroups have one of the last 64 columns, each from its keys.
__host__ __device__ constexpr int pieces_of(int width) {
  return width == 192 ? 4 : query_tile_of(width) * width / kPieceFloats;
}
__host__ __device__ constexpr int value_width_of(int width) { return width == 192 ? 128 : width; }

// The state of a backward pass besides its inputs.
struct BackwardWork {
  float* dq;           // [heads, query tiles, pieces, 4096]: sums, before the factor `scale`; then, in order and for
                       // pairs, [heads, sequences, query tiles from first_upper on, pieces, 4096] of second halves
  float *lse, *delta;  // [heads, query tiles, rows]: lse in powers of 2, infinite if a row sees no key, and delta
  float* parts;        // [dk and dv, shares, key tiles, pieces, 4096], if there is more than one share
  int* done;           // [shares, sequences]: finished writers of dq
  int* ticket;         // blocks that have begun
  int* turns;          // for each piece of dq: adders that have added
  int* places;         // [units, 2]: sequence and tile of each, of packed tensors
  int64_t counters;    // integers from `done` on that begin as zeros
  int query_tiles;     // of one head of all sequences
  int key_tiles;       // the same
  int units;           // tiles of keys, or pairs of them, of one head of all sequences
  int first_upper;     // the first tile of queries of a sequence that second halves visit
  int upper_tiles;     // from it on
  int writers;         // of dq, of each of these
  int splits, row_splits, heads;  // shares of a key-value head and of a query head, and heads of a share
  bool pairs, in_order;
  Log2Score score;
};

// Words in shared memory that a block's first thread computes for all.
enum BlockWord {
  kParts,  // tiles of keys: 0, 1 or 2
  kSequence,
  kKvHead,
  kFirstHead,  // of queries
  kShare,
  kColumnBlock,
  kQueryLength,
  kQueryStart,  // its tokens, in packed tensors
  kKeyStart,
  kFirstQueryTile,  // of the sequence, among those of all
  kFirstKeyTile,
  kOffset,    // as Head's
  kFirstKey,  // the first key that query i sees is i + this, if that is not negative
  kPiece0,    // the piece of dq that a warpgroup adds to next, or ~ of one that it stores
  kPiece1,
  kBlockWords
};
enum PartWord {
  kTile,  // of keys
  kStart,
  kStop,
  kStepBy,  // tiles of queries that see one of its keys: from kStart, by kStepBy, to before kStop
  kBeginWhole,
  kEndWhole,  // end of those that see all of its keys
  kLower,
  kUpper,     // queries from kLower + j to before kUpper + j see its key j
  kKeysLeft,  // how many keys are in the tile and after it
  kPartWords
};
constexpr int kAllWords = kBlockWords + 2 * kPartWords;

__device__ __forceinline__ int block_word(uint32_t words, BlockWord word) { return load_shared(words + 4 * word); }
__device__ __forceinline__ uint32_t part_words(uint32_t words, int part) {
  return words + 4 * (kBlockWords + part * kPartWords);
}
__device__ __forceinline__ int part_word(uint32_t part, PartWord word) { return load_shared(part + 4 * word); }

// `row_share`: the remainder of its query tiles by row_splits.
template <int kQueries>
__device__ __forceinline__ void write_part(const BackwardWork& work, const Head& h, uint32_t at, int tile,
                                           int row_share, bool upwards) {
  const auto write = [&](PartWord word, int value) { store_shared(at + 4 * word, value); };
  const int first = tile * kKeyTile, last = min(first + kKeyTile, h.k_len) - 1;
  const int from = h.first_query(first), end = h.end_query(last);
  const int step = work.row_splits, lowest = end > from ? from / kQueries : 0;
  const int begin = lowest + (row_share + step - lowest % step) % step;
  const int count = end > from ? max((end + kQueries - 1) / kQueries - begin + step - 1, 0) / step : 0;
  const int to = first - h.offset + h.left + 1;  // the first key is seen before this query
  const bool full = first + kKeyTile <= h.k_len;
  write(kTile, tile);
  write(kStart, upwards ? begin : begin + (count - 1) * step);
  write(kStop, upwards ? begin + count * step : begin - step);
  write(kStepBy, upwards ? step : -step);
  write(kBeginWhole, (h.first_query(last) + kQueries - 1) / kQueries);
  write(kEndWhole, !full || to < 0 ? 0 : to >= h.q_len ? kFar : to / kQueries);
  write(kLower, max(first - h.offset - h.right, -kKeyTile));  // clamped, so that row sums do not overflow
  write(kUpper, min(to, h.q_len));
  write(kKeysLeft, h.k_len - first);
}

// On one thread: finds what block `index` does.
template <int kQueries, int kColumnBlocks>
__device__ __forceinline__ void write_words(const AttentionBackward& a, const BackwardWork& work, uint32_t words,
                                            int index) {
  const auto write = [&](BlockWord word, int value) { store_shared(words + 4 * word, value); };
  const int unit = index / kColumnBlocks, of_head = unit % work.units, share = unit / work.units;
  const int kv_head = share / work.splits, part = share % work.splits;
  const int tiles = static_cast<int>((a.n_keys + kKeyTile - 1) / kKeyTile), pairs = (tiles + 1) / 2;
  const int each = work.pairs ? pairs : tiles;
  const TileOf place = a.starts_k ? TileOf{work.places[2 * of_head], work.places[2 * of_head + 1]}
                                  : TileOf{of_head / each, of_head % each};
  const int second = work.pairs ? tiles - 1 - place.tile : place.tile;
  write(kParts, place.sequence < 0 ? 0 : second == place.tile ? 1 : 2);
  if (place.sequence < 0) return;
  const int first_head = kv_head * static_cast<int>(a.group) + part / work.row_splits * work.heads;
  const Head h(a, place.sequence, first_head);
  write(kSequence, place.sequence);
  write(kKvHead, kv_head);
  write(kFirstHead, first_head);
  write(kShare, share);
  write(kColumnBlock, index % kColumnBlocks);
  write(kQueryLength, h.q_len);
  write(kQueryStart, static_cast<int>(h.q_start));
  write(kKeyStart, static_cast<int>(h.k_start));
  write(kFirstQueryTile, static_cast<int>(first_tile_of(a.starts_q, a.total_q, a.n_queries, place.sequence, kQueries)));
  write(kFirstKeyTile, static_cast<int>(first_tile_of(a.starts_k, a.total_k, a.n_keys, place.sequence, kKeyTile)));
  write(kOffset, h.offset);
  write(kFirstKey, h.offset - h.left);
  write_part<kQueries>(work, h, part_words(words, 0), place.tile, part % work.row_splits, false);
  write_part<kQueries>(work, h, part_words(words, 1), second, part % work.row_splits, true);
}

// Walks through a block's steps in order: for each of its parts the query tiles, and for each of these the heads.
class Walk {
 public:
  uint32_t part;   // address of its words
  int tile, head;  // head: of those of the block

  __device__ Walk(uint32_t words, int heads)
      : part(part_words(words, 0)),
        head(0),
        end_(part_words(words, block_word(words, kParts))),
        heads_(heads) {
    enter();
  }
  __device__ bool at_end() const { return part == end_; }
  __device__ bool begins_part() const { return begins_; }
  __device__ void next() {
    begins_ = false;
    if (++head < heads_) return;
    head = 0;
    tile += part_word(part, kStepBy);
    if (tile != part_word(part, kStop)) return;
    part += 4 * kPartWords;
    enter();
  }

 private:
  uint32_t end_;
  int heads_;
  bool begins_;

  // The next part with steps.
  __device__ void enter() {
    begins_ = true;
    for (; part != end_; part += 4 * kPartWords) {
      tile = part_word(part, kStart);
      if (tile != part_word(part, kStop)) return;
    }
  }
};

// The turn of a tile of keys at a tile of queries: the order in which blocks began, of second halves too.
template <int kQueries>
__device__ __forceinline__ int turn_of(const BackwardWork& work, uint32_t words, const Walk& walk) {
  const int first = walk.tile * kQueries, key_tile = part_word(walk.part, kTile);
  if (work.pairs && walk.part != part_words(words, 0)) return (first + kQueries - 1) / kKeyTile - key_tile;
  return key_tile - max(first + block_word(words, kFirstKey), 0) / kKeyTile;
}

// The index of a head's query tile among all of them, for dq, the per-row numbers and turns.
__device__ __forceinline__ int64_t query_tile_at(const BackwardWork& work, int head, int first_tile, int tile) {
  return static_cast<int64_t>(head) * work.query_tiles + first_tile + tile;
}
// The same of sums of second halves.
__device__ __forceinline__ int64_t upper_tile_at(const AttentionBackward& a, const BackwardWork& work, int head,
                                                 int sequence, int tile) {
  return a.n_heads * work.query_tiles + (head * a.n_sequences + sequence) * work.upper_tiles + tile - work.first_upper;
}
// The first piece of parts of dk (or dv) of a share's tile of keys.
template <int kWidth>
__device__ __forceinline__ float* part_at(const AttentionBackward& a, const BackwardWork& work, bool of_dv, int share,
                                          int key_tile) {
  const int64_t shares = a.n_heads / a.group * work.splits;
  return work.parts + ((of_dv * shares + share) * work.key_tiles + key_tile) * (kKeyTile * kWidth);
}

// The value that BackwardWork::done reaches for a sequence.
__device__ __forceinline__ int writers_of(const BackwardWork& work, const Head& h) {
  const int tiles = (h.k_len + kKeyTile - 1) / kKeyTile;
  return work.writers * (work.pairs ? (tiles + 1) / 2 : tiles);
}

// The launches before the main one (per-row numbers, and zeros for sums in any order) and after it (dq).
cudaError_t launch_before_backward(const AttentionBackward& a, const BackwardWork& work, cudaStream_t stream);
cudaError_t launch_after_backward(const AttentionBackward& a, const BackwardWork& work, cudaStream_t stream);
// The main launch. Each width has its own file, because it takes long to compile.
template <int kWidth>
cudaError_t launch_backward_of_width(const AttentionBackward& a, const BackwardWork& work, cudaStream_t stream);

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
