// Two bfloat16 in each lane: how memory and registers of floats become the pairs that a product takes.
#pragma once

#include "flash_attention_tile_io.h"

namespace foundry {
namespace FK_ISA {

#if defined(__AVX512BF16__)
constexpr VecI kColumn = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Of two rows of 32 numbers, a lane for each column of the first 16 (kHalf 0) or the last: the first row's number and
// the second's.
template <int kHalf>
inline Vec columns_paired(Vec a, Vec b) {
  return (Vec)_mm512_permutex2var_epi16((__m512i)a, (__m512i)(kColumn * 0x10001 + 0x200000 + kHalf * 0x100010),
                                        (__m512i)b);
}
#endif

// The tile for a product along its rows: itself, or with pairs a lane for each column of two rows, [n / 2, width] in
// `scratch`, zero in place of a last row that is missing.
template <class E>
inline Tile<E> pack_pairs(Tile<E> tile, int64_t n, int64_t width, float* scratch) {
#if defined(__AVX512BF16__)
  if constexpr (kPer<E> == 2) {
    const int64_t ld = round_up(width, kAttentionPad);
    for (int64_t i = 0; i < n; i += 2) {
      const E *a = tile.data + i * tile.ld, *b = i + 1 < n ? a + tile.ld : nullptr;
      float* out = scratch + i / 2 * ld;
      for (int64_t c = 0; c < width; c += 32) {
        const __mmask32 mask = width - c >= 32 ? ~__mmask32(0) : (__mmask32(1) << (width - c)) - 1;
        const Vec x = (Vec)_mm512_maskz_loadu_epi16(mask, a + c);
        const Vec y = b ? (Vec)_mm512_maskz_loadu_epi16(mask, b + c) : Vec{};
        Whole::store(out + c, columns_paired<0>(x, y));
        if (width - c > 16) Whole::store(out + c + 16, columns_paired<1>(x, y));
      }
    }
    return {reinterpret_cast<const E*>(scratch), 2 * ld};
  }
#endif
  return tile;
}

// Two registers rounded to bfloat16: as one of pairs, and if wanted each as a row of its own.
inline void store_pairs(float* pairs, Vec a, Vec b, BFloat16* row_a = nullptr, BFloat16* row_b = nullptr) {
#if defined(__AVX512BF16__)
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
  if (pairs) _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16((__m512i)(kColumn * 0x10001 + 0x100000), halves));
  if (row_a) _mm256_storeu_si256((__m256i*)row_a, _mm512_castsi512_si256(halves));
  if (row_b) _mm256_storeu_si256((__m256i*)row_b, _mm512_extracti64x4_epi64(halves, 1));
#endif
}

}  // namespace FK_ISA
}  // namespace foundry
