// Sums of bfloat16 matmuls over many calls. torch's CPU matmul would round every partial sum to bfloat16.
// foundry_kernels::accumulate_product_ keeps the sum in float32: sum += a b. foundry_kernels::accumulate_product24_
// keeps it in 24 bits (csrc/cpu/sum24.h), which become a bfloat16 in place: high, low += a^T b; it takes float32
// matrices too. Internal to other operators: no gradient, no fake.
#include "../cpu/sum24.h"

#include <ATen/native/CPUBlas.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "cpu_common.h"
#include "products.h"

namespace foundry {

namespace accumulate_product_cpu {

// Rows of a at a time.
constexpr int64_t kRows = 64;

// Interleaves pairs of rows, as the instructions need them: [ceil(K / 2), N, 2].
Tensor in_pairs(const Tensor& b) {
  Tensor even = b;
  if (b.size(0) % 2 != 0) even = at::cat({b, at::zeros({1, b.size(1)}, b.options())});
  return even.view({even.size(0) / 2, 2, b.size(1)}).transpose(1, 2).contiguous();
}

// sum += a b
void of_rows(const at::BFloat16* a, int64_t ld_a, int64_t n_rows, const Tensor& b, float* into) {
  const int64_t depth = 2 * b.size(0), width = b.size(1);
  const auto* right = b.const_data_ptr<at::BFloat16>();
  at::parallel_for(0, (n_rows + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kRows, count = std::min(kRows, n_rows - first);
      at::native::cpublas::brgemm(count, width, depth, ld_a, width, width, true, a + first * ld_a, right,
                                  into + first * width);
    }
    at::native::cpublas::brgemm_release();
  });
}

// Rows of a sum in float32 whose copies stay small.
constexpr int64_t kWidenedRows = 4096;

// sum += a b, computed in float32.
void widened(const Tensor& sum, const Tensor& a, const Tensor& b) {
  const Tensor right = b.to(at::kFloat);
  for (int64_t first = 0; first < a.size(0); first += kWidenedRows) {
    const int64_t count = std::min(kWidenedRows, a.size(0) - first);
    multiply_float32(a.narrow(0, first, count).to(at::kFloat), right, sum.narrow(0, first, count), true);
  }
}

void accumulate_product_(const Tensor& sum, const Tensor& a_, const Tensor& b_) {
  TORCH_CHECK_VALUE(sum.dim() == 2 && a_.dim() == 2 && b_.dim() == 2 && a_.size(1) == b_.size(0) &&
                        sum.size(0) == a_.size(0) && sum.size(1) == b_.size(1),
                    "sum must be [M, N], a [M, K] and b [K, N]; got ", sum.sizes(), ", ", a_.sizes(), " and ",
                    b_.sizes());
  TORCH_CHECK_TYPE(
      sum.scalar_type() == at::kFloat && a_.scalar_type() == at::kBFloat16 && b_.scalar_type() == at::kBFloat16,
      "sum must be float32, a and b bfloat16");
  TORCH_CHECK_VALUE(sum.is_contiguous(), "sum must be contiguous");
  if (a_.size(1) == 0 || sum.numel() == 0) return;
  if (own_bfloat16_products()) return multiply_bfloat16(a_, b_, sum, true);
  if (!fast_bfloat16_products()) return widened(sum, a_, b_);
  const Tensor b = in_pairs(b_.contiguous());
  float* into = sum.mutable_data_ptr<float>();
  Tensor a = a_;  // pad an odd last column with a zero, to form pairs
  if (a.size(1) % 2 != 0) a = at::cat({a, at::zeros({a.size(0), 1}, a.options())}, 1);
  if (a.stride(1) != 1) a = a.contiguous();
  of_rows(a.const_data_ptr<at::BFloat16>(), a.stride(0), a.size(0), b, into);
}

// A float32 tile of the sum has kTileRows rows. Its columns are as many as keep the matching part of b within
// kTileInputs numbers, so that both stay in the cache; at least 64 and at most kTileColumns.
constexpr int64_t kTileRows = 64, kTileColumns = 512, kTileInputs = 1 << 17;
// The row length of a's transpose in memory is a multiple of this.
constexpr int64_t kPadding = 32;

// The sum. `first` initialises it and `last` completes it.
struct Sum24 {
  uint16_t* high;
  uint8_t* low;
  int64_t width;
  bool first, last;
  decltype(&FK_LOWEST::sum24_widen) widen = FK_CHOOSE_ISA(sum24_widen);
  decltype(&FK_LOWEST::sum24_narrow) narrow = FK_CHOOSE_ISA(sum24_narrow);
  decltype(&FK_LOWEST::sum24_round) round = FK_CHOOSE_ISA(sum24_round);

  // Loads some columns of some rows into a contiguous buffer.
  void load(int64_t row, int64_t n_rows, int64_t column, int64_t n_cols, float* out) const {
    for (int64_t r = 0, at = row * width + column; r < n_rows; ++r, at += width)
      widen(high + at, low + at, out + r * n_cols, n_cols);
  }
  void store(int64_t row, int64_t n_rows, int64_t column, int64_t n_cols, const float* v) const {
    for (int64_t r = 0, at = row * width + column; r < n_rows; ++r, at += width, v += n_cols)
      last ? round(v, high + at, n_cols) : narrow(v, high + at, low + at, n_cols);
  }
};

// sum += a^T b
void multiply(const Sum24& sum, const Tensor& a, const Tensor& b_) {
  const Tensor b = in_pairs(b_);
  const int64_t n_rows = a.size(1), depth = 2 * b.size(0), ld_a = a.stride(0);
  const int64_t padded = (depth + kPadding - 1) / kPadding * kPadding;
  const int64_t at_a_time = std::clamp<int64_t>(kTileInputs / depth / 64 * 64, 64, kTileColumns);
  const auto* left = reinterpret_cast<const uint16_t*>(a.const_data_ptr<at::BFloat16>());
  const auto* right = b.const_data_ptr<at::BFloat16>();
  const auto transpose = FK_CHOOSE_ISA(transpose_words);
  at::parallel_for(0, (n_rows + kTileRows - 1) / kTileRows, 1, [&](int64_t begin, int64_t end) {
    std::vector<at::BFloat16> turned(kTileRows * padded);
    std::vector<float> tile(kTileRows * at_a_time);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block * kTileRows, count = std::min(kTileRows, n_rows - row);
      transpose(left + row, ld_a, a.size(0), count, reinterpret_cast<uint16_t*>(turned.data()), padded);
      for (int64_t column = 0; column < sum.width; column += at_a_time) {
        const int64_t n_cols = std::min(at_a_time, sum.width - column);
        if (!sum.first) sum.load(row, count, column, n_cols, tile.data());
        at::native::cpublas::brgemm(count, n_cols, depth, padded, sum.width, n_cols, !sum.first, turned.data(),
                                    right + 2 * column, tile.data());
        sum.store(row, count, column, n_cols, tile.data());
      }
    }
    at::native::cpublas::brgemm_release();
  });
}

// Same in float32, as `widened`: for processors without bfloat16 matmuls in oneDNN, and for float32 inputs.
void multiply_widened(const Sum24& sum, const Tensor& a, const Tensor& b_) {
  const Tensor b = b_.to(at::kFloat);
  const Tensor memory = at::empty({std::min(kWidenedRows, a.size(1)), sum.width}, b.options());
  for (int64_t row = 0; row < a.size(1); row += kWidenedRows) {
    const int64_t count = std::min(kWidenedRows, a.size(1) - row);
    const Tensor tile = memory.narrow(0, 0, count);
    float* values = tile.mutable_data_ptr<float>();
    const Tensor left = a.narrow(1, row, count).to(at::kFloat).t();
    const auto each_row = [&](const auto& f) {
      at::parallel_for(0, count, std::max<int64_t>(1, kGrain / sum.width),
                       [&](int64_t begin, int64_t end) { f(row + begin, end - begin, values + begin * sum.width); });
    };
    if (sum.first) {
      multiply_float32(left, b, tile);
    } else {
      each_row([&](int64_t at, int64_t n, float* out) { sum.load(at, n, 0, sum.width, out); });
      multiply_float32(left, b, tile, true);
    }
    each_row([&](int64_t at, int64_t n, const float* v) { sum.store(at, n, 0, sum.width, v); });
  }
}

void accumulate_product24_(const Tensor& high, const Tensor& low, const Tensor& a, const Tensor& b, bool first,
                           bool last) {
  TORCH_CHECK_VALUE(high.dim() == 2 && a.dim() == 2 && b.dim() == 2 && a.size(0) == b.size(0) &&
                        high.size(0) == a.size(1) && high.size(1) == b.size(1),
                    "high must be [M, N], a [K, M] and b [K, N]; got ", high.sizes(), ", ", a.sizes(), " and ",
                    b.sizes());
  const auto type = a.scalar_type();
  TORCH_CHECK_TYPE(high.scalar_type() == at::kBFloat16, "high must be bfloat16");
  TORCH_CHECK_TYPE((type == at::kBFloat16 || type == at::kFloat) && b.scalar_type() == type,
                   "a and b must both be bfloat16 or float32");
  TORCH_CHECK_TYPE(low.scalar_type() == at::kByte, "low must be uint8");
  TORCH_CHECK_VALUE(low.sizes() == high.sizes(), "low must have high's shape; got ", low.sizes());
  TORCH_CHECK_VALUE(high.is_contiguous() && low.is_contiguous(), "high and low must be contiguous");
  TORCH_CHECK_VALUE(a.size(0) > 0, "a and b must have at least one row");
  if (high.numel() == 0) return;
  const Sum24 sum{reinterpret_cast<uint16_t*>(high.mutable_data_ptr<at::BFloat16>()), low.mutable_data_ptr<uint8_t>(),
                  high.size(1), first, last};
  const Tensor left = a.stride(1) == 1 ? a : a.contiguous();
  const bool fast = type == at::kBFloat16 && fast_bfloat16_products();
  (fast ? multiply : multiply_widened)(sum, left, b.contiguous());
}

}  // namespace accumulate_product_cpu

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def("accumulate_product24_(Tensor(a!) high, Tensor(b!) low, Tensor a, Tensor b, bool first, bool last) -> ()",
        {at::Tag::pt2_compliant_tag});
  m.def("accumulate_product_(Tensor(a!) sum, Tensor a, Tensor b) -> ()", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("accumulate_product_", &accumulate_product_cpu::accumulate_product_);
  m.impl("accumulate_product24_", &accumulate_product_cpu::accumulate_product24_);
}

}  // namespace foundry
