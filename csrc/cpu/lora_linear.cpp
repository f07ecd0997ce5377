// The thin matmuls of linear layers with low-rank adapters, on the register blocks of attention's matmuls. Compiled
// once per instruction set (see isa.h).
#include "lora_linear.h"

#include <algorithm>
#include <memory>

#include "dispatch.h"
#include "dropout.h"
#include "flash_attention_gemm.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

namespace {

// Rows of x that are widened together, and the depth of the sums that registers hold. Rows of scratch are not a power
// of two apart, which would be few cache sets.
constexpr int64_t kWidened = 24, kDepth = 256, kScratchRow = kDepth + 16;
constexpr int64_t kOuterRows = 32;  // rows whose outer products registers sum

// Numbers of an adapter that are packed together: they stay in the L2 cache.
constexpr int64_t kPacked = 1 << 14;

int64_t whole(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The rows of a block of so many registers of columns: as many as registers can hold.
#if defined(__AVX512F__)
template <int kVecs> constexpr int kRowsOf = kVecs == 1 ? 12 : kVecs == 2 ? 8 : kBlockRows;
#else
template <int kVecs> constexpr int kRowsOf = kVecs == 1 ? 8 : kBlockRows;
#endif

// Columns [n, n + count) of a row of x in float, after dropout.
template <class X>
void widen(const X* x, int64_t row, int64_t first, int64_t count, const Dropout& dropout, float* out) {
  if (!dropout.seed) {
    for_each_vec(count, [&](int64_t i, auto at, int) FK_INLINE { at.store(out + i, at.load(x + first + i)); });
    return;
  }
  float factors[kDepth];
  static_assert(kDepth % kDropoutStep == 0, "factors are written in whole steps");
  dropout_factors<false>(dropout, row, first, count, factors);
  for_each_vec(count, [&](int64_t i, auto at, int) FK_INLINE {
    at.store(out + i, at.load(x + first + i) * at.load(factors + i));
  });
}

template <int kVecs>
void multiply_narrow(int64_t rows, const float* a, int64_t a_row, const float* b, int64_t ldb, int64_t depth, float* c,
                     int64_t ldc, Start start) {
  constexpr int kRows = kRowsOf<kVecs>;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    multiply_block<kRows, kVecs, float>({a + i * a_row, a_row, 1}, b, ldb, depth, c + i * ldc, ldc, start, nullptr);
  multiply_rest<kRows - 1, kVecs, float>(int(rows - i), {a + i * a_row, a_row, 1}, b, ldb, depth, c + i * ldc, ldc,
                                         start, nullptr);
}

// As `multiply`, with more rows at a time where the columns are few.
void multiply_thin(int64_t rows, int64_t vecs, const float* a, int64_t a_row, const float* b, int64_t ldb,
                   int64_t depth, float* c, int64_t ldc, Start start) {
  const int64_t wide = vecs / kBlockVecs * kBlockVecs;
  if (wide > 0) multiply<float>(rows, wide, {a, a_row, 1}, b, ldb, depth, c, ldc, start);
  b += wide * kLanes, c += wide * kLanes, vecs -= wide;
  if (kBlockVecs > 2 && vecs >= 2) {
    multiply_narrow<2>(rows, a, a_row, b, ldb, depth, c, ldc, start);
    b += 2 * kLanes, c += 2 * kLanes, vecs -= 2;
  }
  if (vecs > 0) multiply_narrow<1>(rows, a, a_row, b, ldb, depth, c, ldc, start);
}

// Rows and columns from (row, column) on as floats, rows `ld` apart. Columns up to a whole register are 0.
template <class T>
void pack(const LoraMatrix& of, int64_t row, int64_t column, int64_t rows, int64_t columns, float* out, int64_t ld) {
  const T* in = static_cast<const T*>(of.data) + row * of.row + column * of.column;
  if (of.column == 1) {
    for (int64_t r = 0; r < rows; ++r) {
      for_each_vec(columns, [&](int64_t i, auto at, int) FK_INLINE {
        Whole::store(out + r * ld + i, at.load(in + r * of.row + i));
      });
    }
    return;
  }
  const int64_t whole_rows = rows / kLanes * kLanes, whole_columns = columns / kLanes * kLanes;
  if constexpr (std::is_same_v<T, float>) transpose(in, of.column, whole_columns, whole_rows, out, ld);
  for (int64_t r = 0; r < rows; r += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, rows - r));
    const bool done = std::is_same_v<T, float> && r < whole_rows;
    for (int64_t c = done ? whole_columns : 0; c < columns; c += kLanes) {
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const T* line = in + r + (c + i) * of.column;
        block[i] = c + i >= columns ? Vec{} : count == kLanes ? Whole::load(line) : Part{count}.load(line);
      }
      exchange<1>(block);
      for (int i = 0; i < count; ++i) Whole::store(out + (r + i) * ld + c, block[i]);
    }
  }
}

void pack_any(const LoraMatrix& of, int64_t row, int64_t column, int64_t rows, int64_t columns, float* out,
              int64_t ld) {
  with_type(of.type,
            [&](auto* t) { pack<std::remove_pointer_t<decltype(t)>>(of, row, column, rows, columns, out, ld); });
}

template <class X> void down(const LoraDown& of, int64_t task_begin, int64_t task_end) {
  const int64_t ld = whole(of.rank);
  const int64_t most = std::clamp<int64_t>(kPacked / ld / 16 * 16, 32, kDepth);
  const std::unique_ptr<float[]> right(new float[most * ld]), sums(new float[kLoraDownRows * ld]);
  alignas(64) float left[kWidened * kScratchRow];
  const bool in_place = std::is_same_v<X, float> && !of.dropout.seed;
  for (int64_t task = task_begin; task < task_end; ++task) {
    const int64_t first = task * kLoraDownRows, rows = std::min(kLoraDownRows, of.n_rows - first);
    if (of.width == 0) std::fill_n(sums.get(), rows * ld, 0.0f);
    for (int64_t k = 0; k < of.width; k += most) {
      const int64_t depth = std::min(most, of.width - k);
      pack_any(of.a, k, 0, depth, of.rank, right.get(), ld);
      for (int64_t row = 0; row < rows; row += kWidened) {
        const int64_t count = std::min(kWidened, rows - row);
        const X* x = static_cast<const X*>(of.x) + (first + row) * of.x_row;
        const float* a = reinterpret_cast<const float*>(x) + k;
        if (!in_place) {
          a = left;
          for (int64_t r = 0; r < count; ++r)
            widen(x + r * of.x_row, first + row + r, k, depth, of.dropout, left + r * kScratchRow);
        }
        multiply_thin(count, ld / kLanes, a, in_place ? of.x_row : kScratchRow, right.get(), ld, depth,
                      sums.get() + row * ld, ld, k > 0 ? Start::add : Start::zero);
      }
    }
    for (int64_t r = 0; r < rows; ++r)
      for_each_vec(of.rank, [&](int64_t i, auto at, int) FK_INLINE {
        at.store(of.t + (first + r) * of.rank + i, Whole::load(sums.get() + r * ld + i) * splat(of.scale));
      });
  }
}

// y = base + scale t b of a block that registers hold. `factors`, rows kLoraUpColumns apart, may be null; `columns` are
// those of the block that exist.
template <int kRows, int kVecs, class X>
inline void add_block(const float* t, int64_t t_row, int64_t rank, const float* b, int64_t ldb, Vec scale,
                      const float* factors, const X* base, int64_t base_row, X* y, int64_t y_row, int64_t columns) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) acc[i][v] = Vec{};
  for (int64_t k = 0; k < rank; ++k, b += ldb) {
    Vec right[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) right[v] = Whole::load(b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec left = splat(t[i * t_row + k]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) acc[i][v] += left * right[v];
    }
  }
  const auto add = [&](int i, int v, auto at) FK_INLINE {
    const int64_t j = v * kLanes;
    Vec sum = acc[i][v] * scale;
    if (factors) sum *= Whole::load(factors + i * kLoraUpColumns + j);
    at.store(y + i * y_row + j, at.load(base + i * base_row + j) + sum);
  };
  if (columns >= kVecs * kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) add(i, v, Whole{});
  } else {  // the last register of a row
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kVecs; ++v)
        if (columns > v * kLanes) add(i, v, Part{static_cast<int>(std::min<int64_t>(kLanes, columns - v * kLanes))});
  }
}

template <int kRows, class X>
inline void add_rows(int64_t rows, const LoraUp& of, int64_t row, int64_t column, int64_t columns, const float* b,
                     int64_t ldb, const float* factors) {
  if constexpr (kRows > 0) {
    if (rows < kRows) return add_rows<kRows - 1, X>(rows, of, row, column, columns, b, ldb, factors);
    const float* t = of.t + row * of.t_row;
    const X* base = static_cast<const X*>(of.base) + row * of.base_row + column;
    X* y = static_cast<X*>(of.y) + row * of.y_row + column;
    const Vec scale = splat(of.scale);
    int64_t j = 0;
    const auto block = [&](auto vecs) FK_INLINE {
      constexpr int kVecs = decltype(vecs)::value;
      add_block<kRows, kVecs>(t, of.t_row, of.rank, b + j, ldb, scale, factors ? factors + j : nullptr, base + j,
                              of.base_row, y + j, of.y_row, columns - j);
      j += kVecs * kLanes;
    };
    while (j + kBlockVecs * kLanes <= columns) block(std::integral_constant<int, kBlockVecs>{});
    while (j < columns) block(std::integral_constant<int, 1>{});
  }
}

template <class X> void up(const LoraUp& of, int64_t task_begin, int64_t task_end) {
  const int64_t tile = std::clamp<int64_t>(kPacked / of.rank / 64 * 64, 64, kLoraUpColumns);
  const std::unique_ptr<float[]> right(new float[of.rank * tile]);
  alignas(64) float factors[kBlockRows * kLoraUpColumns];
  static_assert(kLoraUpColumns % kDropoutStep == 0, "factors are written in whole steps");
  const int64_t down = (of.n_rows + kLoraUpRows - 1) / kLoraUpRows;
  for (int64_t task = task_begin; task < task_end; ++task) {
    const int64_t first = task % down * kLoraUpRows, end = std::min(first + kLoraUpRows, of.n_rows);
    const int64_t column_end = std::min((task / down + 1) * kLoraUpColumns, of.width);
    for (int64_t column = task / down * kLoraUpColumns; column < column_end; column += tile) {
      const int64_t columns = std::min(tile, column_end - column);
      pack_any(of.b, 0, column, of.rank, columns, right.get(), tile);
      for (int64_t row = first; row < end; row += kBlockRows) {
        const int64_t rows = std::min<int64_t>(kBlockRows, end - row);
        if (of.dropout.seed)
          for (int64_t r = 0; r < rows; ++r)
            dropout_factors<false>(of.dropout, row + r, column, columns, factors + r * kLoraUpColumns);
        add_rows<kBlockRows, X>(rows, of, row, column, columns, right.get(), tile, of.dropout.seed ? factors : nullptr);
      }
    }
  }
}

template <class X> void outer(const LoraOuter& of, int64_t task_begin, int64_t task_end) {
  // Neighbouring tasks together, so that more of a row is read at a time.
  constexpr int64_t kTogether = 4, kColumns = kTogether * kLoraOuterColumns;
  alignas(64) float right[kOuterRows * kColumns];
  const std::unique_ptr<float[]> sums(new float[of.rank * kColumns]);
  // Blocks of about as many rows each: a last one of a single row would wait for its loads.
  const int64_t blocks = (of.rank + kBlockRows - 1) / kBlockRows, block = (of.rank + blocks - 1) / blocks;
  for (int64_t task = task_begin; task < task_end; task += kTogether) {
    const int64_t first = task * kLoraOuterColumns;
    const int64_t columns = std::min(std::min(task + kTogether, task_end) * kLoraOuterColumns, of.width) - first;
    if (columns % kLanes != 0) std::fill(right, right + kOuterRows * kColumns, 0.0f);
    for (int64_t n = 0; n < of.n_rows; n += kOuterRows) {
      const int64_t rows = std::min(kOuterRows, of.n_rows - n);
      const X* x = static_cast<const X*>(of.x) + n * of.x_row;
      for (int64_t r = 0; r < rows; ++r)
        widen(x + r * of.x_row, n + r, first, columns, of.dropout, right + r * kColumns);
      for (int64_t r = 0; r < of.rank; r += block)
        multiply<float>(std::min(block, of.rank - r), whole(columns) / kLanes, {of.t + n * of.t_row + r, 1, of.t_row},
                        right, kColumns, rows, sums.get() + r * kColumns, kColumns, n > 0 ? Start::add : Start::zero);
    }
    for (int64_t r = 0; r < of.rank; ++r)
      for (int64_t k = 0; k < columns; ++k)
        of.out[r * of.out_row + (first + k) * of.out_col] = of.scale * sums[r * kColumns + k];
  }
}

}  // namespace

void lora_down(const LoraDown& of, int64_t task_begin, int64_t task_end) {
  with_type(of.type, [&](auto* x) { down<std::remove_pointer_t<decltype(x)>>(of, task_begin, task_end); });
}

void lora_up(const LoraUp& of, int64_t task_begin, int64_t task_end) {
  with_type(of.type, [&](auto* x) { up<std::remove_pointer_t<decltype(x)>>(of, task_begin, task_end); });
}

void lora_outer(const LoraOuter& of, int64_t task_begin, int64_t task_end) {
  with_type(of.type, [&](auto* x) { outer<std::remove_pointer_t<decltype(x)>>(of, task_begin, task_end); });
}

}  // namespace FK_ISA
}  // namespace foundry
