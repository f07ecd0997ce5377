// bfloat16 matmuls with AMX: eight tile registers of 16 rows of 64 bytes. They are thread state.
#pragma once

#include "flash_attention.h"
#include "transpose.h"
#include "vec.h"

namespace foundry {
namespace FK_ISA {

constexpr int kTileBlock = 32;  // rows and columns of two by two tiles, and numbers per row of a factor's tile

#if defined(__AMX_BF16__)
constexpr bool kTiles = true;
constexpr int kTileRows = 16, kTilePairs = 16;  // and 16 columns of floats

// Configures the tiles for its lifetime. While they are in use, every context switch of the thread saves 8 KB more.
struct TileRegisters {
  TileRegisters() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = kTileRows;
    // GCC's _tile_loadconfig claims to read only eight bytes, so the compiler may drop the writes to the others.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
};

// C [kRows, kCols tiles] = or += A [kRows tiles, depth] B [depth, kCols tiles], in steps of kTilePairs pairs. Strides
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

// As multiply of flash_attention_gemm.h, for whole tiles: rows and depth are multiples of 16. If A is not row-major,
// depth is at most kAttentionKeys / 2. Sums over several tiles start from C.
inline void multiply_tiles(int64_t rows, int64_t vecs, const BFloat16* a, int64_t row, int64_t step, const float* b,
                           int64_t ldb, int64_t depth, float* c, int64_t ldc, bool add) {
  static_assert(kLanes == kTilePairs && kAttentionKeys / 2 % kTilePairs == 0);
  alignas(64) float transposed[2 * kTileRows * kAttentionKeys / 2];
  for (int64_t i = 0; i < rows; i += 2 * kTileRows) {
    const bool two = i + kTileRows < rows;
    const char* left = reinterpret_cast<const char*>(a + i * row);
    int64_t lda = row * int64_t(sizeof(BFloat16));
    if (step != 2) {  // A's pairs along the depth lie in columns
      transpose(reinterpret_cast<const float*>(left), step / 2, depth, two ? 2 * kTileRows : kTileRows, transposed,
                kAttentionKeys / 2);
      left = reinterpret_cast<const char*>(transposed);
      lda = kAttentionKeys / 2 * sizeof(float);
    }
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler that they read memory
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

// A matmul as multiply_tiles computes it, in blocks of two by two tiles: `rows` and `columns` count blocks, `steps`
// counts kTilePairs pairs. Strides are in bytes.
struct TileProduct {
  const char *a, *b;
  char* c;
  int64_t lda, ldb, ldc;
  int rows, columns, steps;
  bool add;
};

// Matmuls that run step by step between other instructions, in the order added: the tile unit works while the vector
// units do something else. Nothing may write to the factors meanwhile.
class TileQueue {
 public:
  void add(const TileProduct& product) {
    asm volatile("" ::: "memory");  // as in multiply_tiles
    products_[count_++] = product;
  }

  FK_INLINE void step() {
    if (next_ < count_) multiply();
  }

  void finish() {
    while (next_ < count_) multiply();
    count_ = next_ = 0;
    asm volatile("" ::: "memory");
  }

 private:
  __attribute__((noinline)) void multiply() {
    const TileProduct& p = products_[next_];
    char* const c = p.c + row_ * kTileBlock * p.ldc + column_ * 128;
    char* const below = c + kTileRows * p.ldc;
    if (step_ == 0) {
      if (p.add) {
        _tile_loadd(0, c, p.ldc);
        _tile_loadd(1, c + 64, p.ldc);
        _tile_loadd(2, below, p.ldc);
        _tile_loadd(3, below + 64, p.ldc);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    const char* a = p.a + row_ * kTileBlock * p.lda + step_ * 64;
    const char* b = p.b + step_ * kTilePairs * p.ldb + column_ * 128;
    _tile_loadd(4, a, p.lda);
    _tile_loadd(6, b, p.ldb);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 64, p.ldb);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kTileRows * p.lda, p.lda);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (++step_ < p.steps) return;
    step_ = 0;
    _tile_stored(0, c, p.ldc);
    _tile_stored(1, c + 64, p.ldc);
    _tile_stored(2, below, p.ldc);
    _tile_stored(3, below + 64, p.ldc);
    if (++column_ < p.columns) return;
    column_ = 0;
    if (++row_ < p.rows) return;
    row_ = 0;
    ++next_;
  }

  TileProduct products_[2];
  int count_ = 0, next_ = 0, row_ = 0, column_ = 0, step_ = 0;
};
#else
constexpr bool kTiles = false;
struct TileRegisters {};
struct TileQueue {
  void step() {}
};
#endif

}  // namespace FK_ISA
}  // namespace foundry
