// Two bfloat16 in each lane: builds the pairs that a matmul takes from memory and from float registers.
#pragma once

#include "flash_attention_tile_io.h"

namespace foundry {
namespace FK_ISA {

#if defined(__AVX512BF16__)
constexpr VecI kColumn = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

#if defined(FK_PAIRS)
// Interleaves two rows of 2 * kLanes numbers: each lane holds the first row's number and the second's, for the first
// half of the columns (kHalf 0) or the second.
template <int kHalf>
inline Vec columns_paired(Vec a, Vec b) {
#if defined(__AVX512BF16__)
  return (Vec)_mm512_permutex2var_epi16((__m512i)a, (__m512i)(kColumn * 0x10001 + 0x200000 + kHalf * 0x100010),
                                        (__m512i)b);
#else
  return (Vec)(kHalf ? vzip2q_u16((uint16x8_t)a, (uint16x8_t)b) : vzip1q_u16((uint16x8_t)a, (uint16x8_t)b));
#endif
}

// Loads the first `count` of 2 * kLanes numbers. The others are not read and are zero.
inline Vec load_columns(const BFloat16* p, int64_t count) {
#if defined(__AVX512BF16__)
  const __mmask32 mask = count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
  return (Vec)_mm512_maskz_loadu_epi16(mask, p);
#else
  Vec bits{};
  if (count >= 2 * kLanes) std::memcpy(&bits, p, sizeof(bits));
  else if (count > 0) std::memcpy(&bits, p, count * sizeof(*p));
  return bits;
#endif
}
#endif

// The tile for a matmul along its rows. Without pairs it is the tile itself. With pairs `scratch` receives [n / 2,
// width] lanes, each with the numbers of two rows; a missing last row is zero.
template <class E>
inline Tile<E> pack_pairs(Tile<E> tile, int64_t n, int64_t width, float* scratch) {
#if defined(FK_PAIRS)
  if constexpr (kPer<E> == 2) {
    const int64_t ld = round_up(width, kAttentionPad);
    for (int64_t i = 0; i < n; i += 2) {
      const E *a = tile.data + i * tile.ld, *b = i + 1 < n ? a + tile.ld : nullptr;
      float* out = scratch + i / 2 * ld;
      for (int64_t c = 0; c < ld; c += 2 * kLanes) {
        const Vec x = load_columns(a + c, width - c), y = b ? load_columns(b + c, width - c) : Vec{};
        Whole::store(out + c, columns_paired<0>(x, y));
        if (ld - c > kLanes) Whole::store(out + c + kLanes, columns_paired<1>(x, y));
      }
    }
    return {reinterpret_cast<const E*>(scratch), 2 * ld};
  }
#endif
  return tile;
}

// Rounds two registers to bfloat16 and stores them as pairs and, if requested, each as a row of its own.
inline void store_pairs(float* pairs, Vec a, Vec b, BFloat16* row_a = nullptr, BFloat16* row_b = nullptr) {
#if defined(__AVX512BF16__)
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
  if (pairs) _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16((__m512i)(kColumn * 0x10001 + 0x100000), halves));
  if (row_a) _mm256_storeu_si256((__m256i*)row_a, _mm512_castsi512_si256(halves));
  if (row_b) _mm256_storeu_si256((__m256i*)row_b, _mm512_extracti64x4_epi64(halves, 1));
#elif defined(FK_PAIRS)
  const auto x = (uint16x4_t)Convert<BFloat16>::round(a), y = (uint16x4_t)Convert<BFloat16>::round(b);
  const auto both = vcombine_u16(vzip1_u16(x, y), vzip2_u16(x, y));
  if (pairs) std::memcpy(pairs, &both, sizeof(both));
  if (row_a) std::memcpy(row_a, &x, sizeof(x));
  if (row_b) std::memcpy(row_b, &y, sizeof(y));
#endif
}

}  // namespace FK_ISA
}  // namespace foundry
