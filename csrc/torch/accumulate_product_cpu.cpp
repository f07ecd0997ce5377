// The operator foundry_kernels::accumulate_product_: sum += a b of bfloat16 a and b, with sum in float32. torch's own
// product on a CPU rounds its result to bfloat16, which a sum over many calls must not. For inside other operators: it
// has no gradient and no fake.
#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "cpu_common.h"
#include "products.h"

namespace foundry {

bool fast_bfloat16_products() {
  // Tried, because there is nothing to ask: torch offers the kernel from AVX-512 on, and oneDNN, to which torch passes
  // the call, has none without instructions for bfloat16.
  const auto tried = [] {
    const at::BFloat16 a[2] = {}, b[2] = {};
    float sum = 0.0f;
    try {
      at::native::cpublas::brgemm(1, 1, 2, 2, 1, 1, true, a, b, &sum);
      at::native::cpublas::brgemm_release();
    } catch (const std::exception&) {
      return false;
    }
    return true;
  };
  if (!at::globalContext().userEnabledMkldnn()) return false;  // torch.backends.mkldnn.flags(enabled=False)
  static const bool found = tried();
  return found;
}

bool fast_float16_products() { return at::native::cpublas::could_pack(at::kHalf); }  // AMX's

namespace accumulate_product_cpu {

// Rows of a at a time: where it lies transposed, a copy of them stays in the cache.
constexpr int64_t kColumns = 64;

// out[c][r] = in[r][c] of up to kColumns columns; rows beyond n_rows are 0. Rows of logits are often a power of two
// apart, and then all of a column lie in one set of the nearest cache: some are copied to where they do not.
void transpose(const at::BFloat16* in, int64_t ld_in, int64_t n_rows, int64_t n_cols, at::BFloat16* out,
               int64_t ld_out) {
  constexpr int64_t kBlock = 32;
  at::BFloat16 rows[kBlock][kColumns];
  for (int64_t r0 = 0; r0 < n_rows; r0 += kBlock) {
    const int64_t count = std::min(kBlock, n_rows - r0);
    for (int64_t r = 0; r < count; ++r) std::copy_n(in + (r0 + r) * ld_in, n_cols, rows[r]);
    for (int64_t c = 0; c < n_cols; ++c)
      for (int64_t r = 0; r < count; ++r) out[c * ld_out + r0 + r] = rows[r][c];
  }
  for (int64_t c = 0; c < n_cols; ++c) std::fill(out + c * ld_out + n_rows, out + (c + 1) * ld_out, at::BFloat16(0));
}

// Pairs of rows side by side, as the instructions take them: [ceil(K / 2), N, 2].
Tensor in_pairs(const Tensor& b) {
  Tensor even = b;
  if (b.size(0) % 2 != 0) even = at::cat({b, at::zeros({1, b.size(1)}, b.options())});
  return even.view({even.size(0) / 2, 2, b.size(1)}).transpose(1, 2).contiguous();
}

// sum += a^T b
void of_columns(const at::BFloat16* a, int64_t ld_a, int64_t n_rows, int64_t n_cols, const Tensor& b, float* into) {
  const int64_t depth = 2 * b.size(0), width = b.size(1);
  const auto* right = b.const_data_ptr<at::BFloat16>();
  at::parallel_for(0, (n_cols + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    std::vector<at::BFloat16> turned(kColumns * depth);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kColumns, count = std::min(kColumns, n_cols - first);
      transpose(a + first, ld_a, n_rows, count, turned.data(), depth);
      at::native::cpublas::brgemm(count, width, depth, depth, width, width, true, turned.data(), right,
                                  into + first * width);
    }
    at::native::cpublas::brgemm_release();
  });
}

// sum += a b
void of_rows(const at::BFloat16* a, int64_t ld_a, int64_t n_rows, const Tensor& b, float* into) {
  const int64_t depth = 2 * b.size(0), width = b.size(1);
  const auto* right = b.const_data_ptr<at::BFloat16>();
  at::parallel_for(0, (n_rows + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kColumns, count = std::min(kColumns, n_rows - first);
      at::native::cpublas::brgemm(count, width, depth, ld_a, width, width, true, a + first * ld_a, right,
                                  into + first * width);
    }
    at::native::cpublas::brgemm_release();
  });
}

// sum += a b in float32, some rows of a at a time: the copies stay small.
void widened(const Tensor& sum, const Tensor& a, const Tensor& b) {
  constexpr int64_t kRows = 4096;
  const Tensor right = b.to(at::kFloat);
  for (int64_t first = 0; first < a.size(0); first += kRows) {
    const int64_t count = std::min(kRows, a.size(0) - first);
    sum.narrow(0, first, count).addmm_(a.narrow(0, first, count).to(at::kFloat), right);
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
  if (!fast_bfloat16_products()) return widened(sum, a_, b_);
  const Tensor b = in_pairs(b_.contiguous());
  float* into = sum.mutable_data_ptr<float>();
  if (a_.stride(0) == 1 && a_.stride(1) != 1) {
    of_columns(a_.const_data_ptr<at::BFloat16>(), a_.stride(1), a_.size(1), a_.size(0), b, into);
    return;
  }
  Tensor a = a_;  // in pairs too: an odd last column has a zero beside it
  if (a.size(1) % 2 != 0) a = at::cat({a, at::zeros({a.size(0), 1}, a.options())}, 1);
  if (a.stride(1) != 1) a = a.contiguous();
  of_rows(a.const_data_ptr<at::BFloat16>(), a.stride(0), a.size(0), b, into);
}

}  // namespace accumulate_product_cpu

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def("accumulate_product_(Tensor(a!) sum, Tensor a, Tensor b) -> ()", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) { m.impl("accumulate_product_", &accumulate_product_cpu::accumulate_product_); }

}  // namespace foundry
