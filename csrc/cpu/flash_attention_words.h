// Which pairs of a block's rows and a tile's keys a mask shows and dropout keeps: one bit per pair.
//
// A row's word has one bit for each of the tile's 64 keys. A key's word, which the kernels read, has one bit for each
// of the block's 64 rows. Tiles begin at multiples of 64 keys. All rows of a block belong to one tile of 64 queries: 64
// rows from a multiple of 64 on lie within 64 queries for any group size.
#pragma once

#include "dropout.h"
#include "flash_attention_mask.h"

namespace foundry {
namespace FK_ISA {

static_assert(kAttentionRows == 64 && kAttentionKeys == 64 && kAttentionDecodeKeys == 64);

// --- bits and lanes -----------------------------------------------------------------------------------------------

// The lanes of register v, selected by the words of keys.
struct PickedLanes {
  int v;
#if !defined(__AVX512F__)
  VecU bit;
#endif

  explicit PickedLanes(int v) : v(v) {
#if !defined(__AVX512F__)
    for (int i = 0; i < kLanes; ++i) bit[i] = 1u << (v * kLanes % 32 + i);
#endif
  }

  // x in the lanes whose rows have their bit set in the word, `other` elsewhere.
  Vec pick(const uint64_t* word, Vec x, float other) const {
#if defined(__AVX512F__)
    __mmask16 mask;
    std::memcpy(&mask, reinterpret_cast<const char*>(word) + v * 2, sizeof(mask));
    return (Vec)_mm512_mask_blend_ps(mask, (__m512)splat(other), (__m512)x);
#else
    uint32_t half;
    std::memcpy(&half, reinterpret_cast<const char*>(word) + v * kLanes / 32 * 4, sizeof(half));
    return ((VecU{} + half) & bit) != 0u ? x : splat(other);
#endif
  }
};

// One bit per lane: whether x is at least `least`. Both are below 2^31.
inline uint32_t bits_at_least(VecU x, uint32_t least) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epu32_mask((__m512i)x, _mm512_set1_epi32(int(least)));
#else
  const VecI found = (VecI)x > int32_t(least) - 1;
#if defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps((__m256)found));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_ps((__m128)found));
#elif defined(__aarch64__)
  return vaddvq_u32((uint32x4_t)(found & VecI{1, 2, 4, 8}));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= found[i] ? 1u << i : 0u;
  return bits;
#endif
#endif
}

// Swaps bits between words kStep apart: the odd groups of kStep bits of the first with the even ones of the second.
template <int kStep, int... kLane>
inline FK_INLINE void exchange_bits(VecL* words, std::integer_sequence<int, kLane...>) {
  constexpr uint64_t kAll = ~uint64_t(0), kEven = kAll / ((uint64_t(1) << kStep) + 1);
  constexpr int kVecs = 64 / kCounters;
  if constexpr (kStep >= kCounters) {
    constexpr int kApart = kStep / kCounters;
    for (int i = 0; i < kVecs; ++i) {
      if (i & kApart) continue;
      const VecL swapped = ((words[i] >> kStep) ^ words[i + kApart]) & kEven;
      words[i] ^= swapped << kStep;
      words[i + kApart] ^= swapped;
    }
  } else {
    constexpr VecL kept = {(kLane & kStep ? ~kEven : kEven)...}, second = {(kLane & kStep ? kAll : 0)...};
    for (int i = 0; i < kVecs; ++i) {
#if defined(__clang__)
      const VecL other = __builtin_shufflevector(words[i], words[i], (kLane ^ kStep)...);
#else
      const VecL other = __builtin_shuffle(words[i], VecL{uint64_t(kLane ^ kStep)...});
#endif
      const VecL moved = ((other >> kStep) & second) | ((other << kStep) & ~second);
      words[i] = (words[i] & kept) | (moved & ~kept);
    }
  }
}

// Bit c of word r becomes bit r of word c.
inline void transpose_bits(uint64_t* words) {
  VecL v[64 / kCounters];
  std::memcpy(v, words, sizeof(v));
  constexpr auto lanes = std::make_integer_sequence<int, kCounters>{};
  exchange_bits<32>(v, lanes);
  exchange_bits<16>(v, lanes);
  exchange_bits<8>(v, lanes);
  exchange_bits<4>(v, lanes);
  exchange_bits<2>(v, lanes);
  exchange_bits<1>(v, lanes);
  std::memcpy(words, v, sizeof(v));
}

// --- what rows see ------------------------------------------------------------------------------------------------

inline uint64_t lower_bits(int64_t n) { return n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; }

// One bit for each of n <= 64 bytes: whether it is not 0.
inline uint64_t packed_bytes(const uint8_t* p, int64_t n) {
#if defined(__AVX512BW__)
  const __m512i bytes = _mm512_maskz_loadu_epi8(lower_bits(n), p);
  return _mm512_test_epi8_mask(bytes, bytes);
#else
  uint8_t padded[64];
  if (n < 64) {
    std::memset(padded, 0, sizeof(padded));
    std::memcpy(padded, p, n);
    p = padded;
  }
  uint64_t bits = 0;
#if defined(__SSE2__)
  for (int i = 0; i < 64; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i));
    bits |= uint64_t(uint16_t(~_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_setzero_si128())))) << i;
  }
#else
  for (int i = 0; i < 64; i += 8) {
    constexpr uint64_t kSeven = 0x7F7F7F7F7F7F7F7Fu;
    uint64_t bytes;
    std::memcpy(&bytes, p + i, sizeof(bytes));
    bytes = (((bytes & kSeven) + kSeven) | bytes) >> 7 & 0x0101010101010101u;  // 1 for each byte that is not 0
    bits |= (bytes * 0x0102040810204080u >> 56) << i;  // the multiplication moves byte i to bit 56 + i
  }
#endif
  return bits;
#endif
}

inline uint64_t packed_row(const uint8_t* p, int64_t stride, int64_t n) {
  if (stride == 1) return packed_bytes(p, n);
  if (stride == 0) return *p ? lower_bits(n) : 0;
  uint64_t bits = 0;
  for (int64_t j = 0; j < n; ++j) bits |= uint64_t(p[j * stride] != 0) << j;
  return bits;
}

enum class Seen { none, some, all };  // how much of a tile a block sees

// What a tile's index says for the rows of the block, over all heads of a group.
inline Seen seen_by_tile(const AttentionInputs& a, const int32_t* index) {
  const int32_t first = *index;
  if (first > 1) return Seen::some;
  for (int64_t h = 1; h < a.group; ++h)
    if (index[h * a.tiles.strides.head] != first) return Seen::some;
  return first == 0 ? Seen::none : Seen::all;
}

// Sets the words of the block's rows for keys [key, key + n) of the sequence. `key` is a multiple of 64; `counted` is
// the same key counted as in BlockRows. Rows beyond the block see nothing. If all or none are seen, the words need not
// be read.
inline Seen seen_rows(const AttentionInputs& a, const AttentionSequence& s, int64_t head, const BlockRows& b,
                      int64_t key, int64_t n, int32_t counted, uint64_t* words) {
  const bool edge = key < b.full_begin || key + n > b.full_end;
  const int64_t query = b.row / a.group;
  const int32_t* index = nullptr;
  Seen by_tile = Seen::all;
  if (a.tiles.index) {
    const PairStrides& t = a.tiles.strides;
    index = a.tiles.index + s.batch * t.batch + head * t.head + query / 64 * t.query + key / 64 * t.key;
    by_tile = seen_by_tile(a, index);
    if (by_tile == Seen::none) return Seen::none;
  }
  if (by_tile == Seen::all && !a.mask && !edge) return Seen::all;

  const uint64_t valid = lower_bits(n);
  const uint8_t *mask = nullptr, *read = nullptr;
  uint64_t any = 0, all = valid, row_bits = 0;
  int64_t q = query, h = b.row % a.group;
  for (int64_t r = 0; r < b.count; ++r) {
    uint64_t bits = valid;
    if (edge) {
      const int64_t first = std::max(b.first[r] - counted, 0), end = std::min<int64_t>(b.last[r] - counted + 1, n);
      bits = first < end ? lower_bits(end) & ~lower_bits(first) : 0;
    }
    if (a.mask) {
      const PairStrides& m = a.mask_strides;
      mask = a.mask + s.batch * m.batch + (head + h) * m.head + q * m.query + key * m.key;
      if (mask != read) row_bits = packed_row(mask, m.key, n), read = mask;  // the heads of a group may share it
      bits &= row_bits;
    }
    if (by_tile == Seen::some) bits &= a.tiles.words[int64_t(index[h * a.tiles.strides.head]) * 64 + q % 64];
    words[r] = bits;
    any |= bits;
    all &= bits;
    if (++h == a.group) h = 0, ++q;
  }
  if (any == 0) return Seen::none;
  if (all == valid) return Seen::all;
  std::fill(words + b.count, words + kAttentionRows, 0);
  return Seen::some;
}

// --- dropout ------------------------------------------------------------------------------------------------------

// Philox counters of a block's rows, see ops/flash_attention/dropout.py. Eight rows from a multiple of eight on lie all
// in the lower or all in the upper half of their sixteen queries. They use that half of the words; the rows 8 * group
// away use the other.
struct DropoutRows {
  alignas(64) uint64_t query[kAttentionRows], head[kAttentionRows], batch[kAttentionRows];

  void set(const AttentionInputs& a, const BlockRows& b, int64_t n, int64_t first_head) {
    for (int64_t r = 0; r < kAttentionRows; ++r) {
      const int64_t q = (b.row + r) / a.group, h = first_head + (b.row + r) % a.group;
      const uint64_t place = a.dropout.heads && r < b.count ? uint64_t(a.dropout.heads[n * a.dropout.n_heads + h])
                                                            : uint64_t(n) << 32 | uint64_t(h);
      query[r] = uint64_t(q / 16 * 8 + q % 8);
      head[r] = place & 0xFFFFFFFFu;
      batch[r] = place >> 32;
    }
  }
};

// Sets the words of keys: bit r of words[j] says whether row r keeps its weight of key `key` + j. `key` is a multiple
// of 64.
inline void kept_rows(const AttentionDropout& dropout, int64_t group, const BlockRows& b, const DropoutRows& rows,
                      int64_t key, uint64_t* words) {
  constexpr int kPart = kLanes < 8 ? kLanes : 8;  // rows per register of words
  constexpr int kKeys = kLanes / kPart;           // keys per register
  constexpr int kTogether = kBatches / 2 * kKeys;
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(words);
  std::memset(bytes, 0, kAttentionKeys * sizeof(*words));
  for (int64_t octet = 0; 8 * octet < b.count; ++octet) {
    const bool upper = (b.row / 8 + octet) / group % 2;
    if (upper && octet >= group) continue;  // done together with its other half
    const int64_t other = octet + group;
    for (int part = 0; part < 8; part += kPart)
      for (int c = 0; c < 16; c += kTogether) {
        Counters counters[kBatches];
        for (int i = 0; i < kBatches; ++i) {
          const int64_t row = 8 * octet + part + i * kCounters % kPart;
          counters[i][0] = VecL{} + uint64_t(key / 4 + c + i * kCounters / kPart);
          std::memcpy(&counters[i][1], rows.query + row, sizeof(VecL));
          std::memcpy(&counters[i][2], rows.head + row, sizeof(VecL));
          std::memcpy(&counters[i][3], rows.batch + row, sizeof(VecL));
        }
        philox(counters, dropout.seed);
        for (int i = 0; i < kBatches; i += 2)
          for (int w = 0; w < 4; ++w) {
            const Vec2 two{(Vec)counters[i][w], (Vec)counters[i + 1][w]};
            const VecU word = (VecU)split(two, std::make_integer_sequence<int, kLanes>{}).a;
            const uint32_t low = bits_at_least(word & 0xFFFFu, dropout.threshold) << part;
            const uint32_t high = bits_at_least(word >> 16, dropout.threshold) << part;
            for (int n = 0; n < kKeys; ++n) {
              const int at = c + i / 2 * kKeys + n;
              uint8_t* of_key = bytes + 8 * (at / 8 * 32 + w * 8 + at % 8);
              of_key[octet] |= uint8_t((upper ? high : low) >> (8 * n));
              if (!upper && other < 8) of_key[other] |= uint8_t(high >> (8 * n));
            }
          }
      }
  }
}

// --- a tile's options ---------------------------------------------------------------------------------------------

// How a tile's hidden pairs are given; edge: by the first and last key of each row.
enum class Hidden { nothing, edge, words };

// Inputs of the tile functions besides scores.
struct TileOptions {
  const uint64_t *seen, *kept;  // words of keys
  const float* bias;            // [keys, kAttentionRows], or null
  float* dbias;                 // same for its gradient
  // In the backward pass with a score function, the same or null: the derivatives of the result by the score and of the
  // score by the product, and, written, the gradient of the result.
  const float *slope, *bend;
  float* dresult;
};

template <Hidden hidden> using HiddenBy = std::integral_constant<Hidden, hidden>;

// Calls f(HiddenBy, std::bool_constant). Kernels are specialised on what hides pairs and on dropout; with dropout,
// edges are words too.
template <class F>
void with_hidden(Hidden hidden, bool drops, F&& f) {
  if (drops)
    hidden == Hidden::nothing ? f(HiddenBy<Hidden::nothing>{}, std::true_type{})
                              : f(HiddenBy<Hidden::words>{}, std::true_type{});
  else if (hidden == Hidden::nothing) f(HiddenBy<Hidden::nothing>{}, std::false_type{});
  else if (hidden == Hidden::edge) f(HiddenBy<Hidden::edge>{}, std::false_type{});
  else f(HiddenBy<Hidden::words>{}, std::false_type{});
}

// The words of one block for one tile.
struct BlockWords {
  alignas(64) uint64_t seen[kAttentionKeys], kept[kAttentionKeys];
  Seen all;
  DropoutRows dropout;

  // Computes the words of rows; finish() turns them into the words of keys. Returns whether any pair is seen.
  bool look(const AttentionInputs& a, const AttentionSequence& s, int64_t head, const BlockRows& b, int64_t key,
            int64_t n, int32_t counted) {
    all = seen_rows(a, s, head, b, key, n, counted, seen);
    return all != Seen::none;
  }

  Hidden finish(const AttentionInputs& a, const BlockRows& b, int64_t key) {
    if (a.drops()) kept_rows(a.dropout, a.group, b, dropout, key, kept);
    if (all == Seen::all) return Hidden::nothing;
    transpose_bits(seen);
    return Hidden::words;
  }
};

}  // namespace FK_ISA
}  // namespace foundry
