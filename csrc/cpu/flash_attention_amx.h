// Products of bfloat16 pairs by AMX: eight tiles of 16 rows and 64 bytes, which are state of the thread.
#pragma once

#include "flash_attention.h"
#include "transpose.h"
#include "vec.h"

namespace foundry {
namespace FK_ISA {

#if defined(__AMX_BF16__)
constexpr bool kTiles = true;
constexpr int kTileRows = 16, kTilePairs = 16;  // and 16 columns of floats

// Tiles for as long as this lives. A thread that leaves them in use has 8 KB more to save when it is interrupted.
struct TileRegisters {
  TileRegisters() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = kTileRows;
    // GCC's _tile_loadconfig says that it reads eight bytes, and what is written to the others may be left out.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
};

// C [kRows, kCols tiles] += or = A [kRows tiles, depth] B [depth, kCols tiles], in steps of kTilePairs pairs. Strides
// are in bytes.
template <int kRows, int kCols>
inline void multiply_tile_block(const char* a, int64_t lda, const char* b, int64_t ldb, int64_t depth, char* c,
                                int64_t ldc, bool add) {
  char *const c_right = c + 64, *const c_below = c + kTileRows * ldc, *const c_last = c_below + 64;
  if (add) {
    _tile_loadd(0, c, ldc);
    if constexpr (kCols > 1) _tile_loadd(1, c_right, ldc);
    if constexpr (kRows > 1) _tile_loadd(2, c_below, ldc);
    if constexpr (kRows > 1 && kCols > 1) _tile_loadd(3, c_last, ldc);
  } else {
    _tile_zero(0);
    if constexpr (kCols > 1) _tile_zero(1);
    if constexpr (kRows > 1) _tile_zero(2);
    if constexpr (kRows > 1 && kCols > 1) _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += kTilePairs, a += 64, b += kTilePairs * ldb) {
    _tile_loadd(4, a, lda);
    _tile_loadd(6, b, ldb);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kCols > 1) {
      _tile_loadd(7, b + 64, ldb);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows > 1) {
      _tile_loadd(5, a + kTileRows * lda, lda);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kCols > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, ldc);
  if constexpr (kCols > 1) _tile_stored(1, c_right, ldc);
  if constexpr (kRows > 1) _tile_stored(2, c_below, ldc);
  if constexpr (kRows > 1 && kCols > 1) _tile_stored(3, c_last, ldc);
}

// As multiply of flash_attention_gemm.h, of whole tiles: rows and depth are multiples of 16, and depth is no more than
// kAttentionKeys / 2 where A's rows are not those of memory. Sums over several tiles have C as their first term.
inline void multiply_tiles(int64_t rows, int64_t vecs, const BFloat16* a, int64_t row, int64_t step, const float* b,
                           int64_t ldb, int64_t depth, float* c, int64_t ldc, bool add, const float* factor) {
  static_assert(kLanes == kTilePairs && kAttentionKeys / 2 % kTilePairs == 0);
  alignas(64) float transposed[2 * kTileRows * kAttentionKeys / 2];
  for (int64_t i = 0; i < rows; i += 2 * kTileRows) {
    const bool two = i + kTileRows < rows;
    const char* left = reinterpret_cast<const char*>(a + i * row);
    int64_t lda = row * int64_t(sizeof(BFloat16));
    if (step != 2) {  // A's pairs of neighbours along the depth lie in columns
      transpose(reinterpret_cast<const float*>(left), step / 2, depth, two ? 2 * kTileRows : kTileRows, transposed,
                kAttentionKeys / 2);
      left = reinterpret_cast<const char*>(transposed);
      lda = kAttentionKeys / 2 * sizeof(float);
    }
    if (factor)
      for (int64_t r = i; r < i + (two ? 2 : 1) * kTileRows; ++r)
        for (int64_t v = 0; v < vecs * kLanes; v += kLanes)
          Whole::store(c + r * ldc + v, Whole::load(c + r * ldc + v) * Whole::load(factor + v));
    asm volatile("" ::: "memory");  // the loads of tiles do not say that they read memory
    for (int64_t v = 0; v < vecs; v += 2) {
      const auto run = [&](auto kernel) {
        kernel(left, lda, reinterpret_cast<const char*>(b + v * kLanes), ldb * int64_t(sizeof(float)), depth,
               reinterpret_cast<char*>(c + i * ldc + v * kLanes), ldc * int64_t(sizeof(float)), add);
      };
      if (v + 1 < vecs) two ? run(multiply_tile_block<2, 2>) : run(multiply_tile_block<1, 2>);
      else two ? run(multiply_tile_block<2, 1>) : run(multiply_tile_block<1, 1>);
    }
    asm volatile("" ::: "memory");
  }
}
#else
constexpr bool kTiles = false;
struct TileRegisters {};
#endif

}  // namespace FK_ISA
}  // namespace foundry
