// Matmuls of few rows with transposed matrices. They reuse the score kernel of attention's decoding, with weights in
// place of keys. Compiled once per instruction set (see isa.h).
#include "decode_linear.h"

#include <vector>

#include "flash_attention_dot.h"

namespace foundry {
namespace FK_ISA {

namespace {

// Columns [begin, end) of the result that one matrix gives. E is the type of the factors.
template <int kRows, class E, class T>
void multiply(const DecodeLinear& a, const DecodeLinearMatrix& matrix, const float* x, T* y, int64_t begin,
              int64_t end) {
  constexpr int64_t ld = kDecodeLinearBlock + kSums;
  float found[kRows * ld];
  const T* rows = static_cast<const T*>(matrix.data) + begin * matrix.stride;
  // Rows are contiguous, so the next ones to fetch follow the rows that the registers handle now.
  const Stream<T> stream{rows, matrix.stride, rows + kSums / kRows * matrix.stride};
  multiply_keys<kRows, kPer<E> == 2>(x, lanes_of<E>(a.width), a.width, stream, end - begin, found, ld);
  for (int64_t r = 0; r < a.n_rows; ++r)
    for_each_vec(end - begin, [&](int64_t i, auto at, int) FK_INLINE {
      at.store(y + r * a.n_cols + begin + i, Whole::load(found + r * ld + i));
    });
}

template <int kRows, class E, class T>
void multiply_all(const DecodeLinear& a, int64_t begin, int64_t end) {
  const int64_t ld = lanes_of<E>(a.width);
  const T* in = static_cast<const T*>(a.x);
  const float* x = reinterpret_cast<const float*>(in);
  std::vector<float> copy;
  if (!std::is_same_v<T, E> || a.n_rows != kRows || ld * kPer<E> != a.width) {
    copy.resize(kRows * ld);
    for (int64_t r = 0; r < a.n_rows; ++r) read_row<E>(a.type, in, r * a.width, a.width, &copy[r * ld], ld);
    if constexpr (std::is_same_v<E, float>) order_queries<T>(copy.data(), a.n_rows, a.width, ld);
    x = copy.data();
  }
  T* y = static_cast<T*>(a.y);
  for (int m = 0; m < a.n_matrices && end > 0; ++m) {
    const DecodeLinearMatrix& matrix = a.matrices[m];
    const int64_t blocks = matrix.blocks();
    for (int64_t block = std::max<int64_t>(begin, 0); block < std::min(end, blocks); ++block) {
      const int64_t first = block * kDecodeLinearBlock;
      multiply<kRows, E, T>(a, matrix, x, y, first, std::min(first + kDecodeLinearBlock, matrix.n_rows));
    }
    begin -= blocks, end -= blocks;
    y += matrix.n_rows;
  }
}

template <class E, class T>
void multiply_rows(const DecodeLinear& a, int64_t begin, int64_t end) {
  if (a.n_rows > 4) multiply_all<8, E, T>(a, begin, end);
  else if (a.n_rows > 2) multiply_all<4, E, T>(a, begin, end);
  else if (a.n_rows > 1) multiply_all<2, E, T>(a, begin, end);
  else multiply_all<1, E, T>(a, begin, end);
}

}  // namespace

void decode_linear(const DecodeLinear& a, int64_t begin, int64_t end) {
  // Uses pairs where the processor has fast instructions for them: with eight rows the arithmetic takes longer than
  // reading the weights.
  if constexpr (kPairs) {
    if (a.type == Dtype::bf16 && !a.widens) return multiply_rows<BFloat16, BFloat16>(a, begin, end);
  }
  with_type(a.type, [&](auto* type) { multiply_rows<float, std::remove_pointer_t<decltype(type)>>(a, begin, end); });
}

}  // namespace FK_ISA
}  // namespace foundry
