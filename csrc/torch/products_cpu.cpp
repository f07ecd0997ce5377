// How fast PyTorch's matmuls are in this process, and our own matmul for where they are slow. The operator
// foundry_kernels::matmul_ is that matmul: out = a b, or out += a b. Internal to other operators: no gradient, no fake.
#include "products.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "../cpu/matmul.h"
#include "../cpu/processor.h"
#include "../cpu/product_rates.h"
#include "cpu_common.h"
#include "decode_linear.h"

namespace foundry {
namespace products_cpu {

// The first AMD family with full-width AVX-512 units.
constexpr unsigned kZen5 = 0x1A;

// Multiplications that justify waking a thread.
constexpr int64_t kGrainProducts = 1 << 19;
constexpr int64_t kTileColumns = 512;  // at most; half of it if a tile's sums share the cache with the copies
// Rows and columns of a tile are multiples of these.
constexpr int64_t kRowsTogether = 16, kColumnsTogether = kMatmulColumns;

int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// How many of n rows or columns a tile has: at most `most`. The number of tiles is a multiple of `of` if there are
// enough units of `together`.
int64_t tile_size(int64_t n, int64_t most, int64_t of, int64_t together) {
  const int64_t tiles = std::min(blocks(blocks(n, most), of) * of, blocks(n, together));
  return blocks(blocks(n, tiles), together) * together;
}

// A matrix that the kernel supports: one of its strides is 1.
Tensor with_dense_lines(const Tensor& x) { return x.stride(0) == 1 || x.stride(1) == 1 ? x : x.contiguous(); }

void run(const Matmul& of) {
  const int64_t n_threads =
      std::min<int64_t>(at::get_num_threads(), blocks(of.n_rows * of.n_cols * of.depth, kGrainProducts));
  // A tile copies its part of B, and its part of A if A's rows are not contiguous. With more rows or columns per tile,
  // threads share fewer copies.
  const int64_t most_columns = of.rounds() ? kTileColumns / 2 : kTileColumns;
  int64_t rows, columns;
  if (of.a_step == 1) {
    columns = tile_size(of.n_cols, most_columns, n_threads, kColumnsTogether);
    rows = tile_size(of.n_rows, kMatmulRows, blocks(n_threads, blocks(of.n_cols, columns)), kRowsTogether);
  } else {
    rows = tile_size(of.n_rows, kMatmulRows, n_threads, kRowsTogether);
    columns = tile_size(of.n_cols, most_columns, blocks(n_threads, blocks(of.n_rows, rows)), kColumnsTogether);
  }
  const int64_t row_tiles = blocks(of.n_rows, rows), tiles = row_tiles * blocks(of.n_cols, columns);
  const auto kernel = FK_CHOOSE_ISA(matmul_tile);
  at::parallel_for(0, tiles, blocks(tiles, n_threads), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new float[matmul_scratch(of, rows, columns)]);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = tile % row_tiles * rows, column = tile / row_tiles * columns;
      kernel(of, row, std::min(row + rows, of.n_rows), column, std::min(column + columns, of.n_cols), scratch.get());
    }
  });
}

void matmul_(const Tensor& out, const Tensor& a_, const Tensor& b_, bool add) {
  TORCH_CHECK_VALUE(a_.dim() == 2 && b_.dim() == 2 && out.dim() == 2 && a_.size(1) == b_.size(0) &&
                        out.size(0) == a_.size(0) && out.size(1) == b_.size(1),
                    "out must be [M, N], a [M, K] and b [K, N]; got ", out.sizes(), ", ", a_.sizes(), " and ",
                    b_.sizes());
  const auto type = a_.scalar_type();
  TORCH_CHECK_TYPE((type == at::kFloat || type == at::kBFloat16) && b_.scalar_type() == type,
                   "a and b must both be float32 or bfloat16");
  TORCH_CHECK_TYPE(out.scalar_type() == at::kFloat || out.scalar_type() == type,
                   "out must be float32, or of the dtype of a and b");
  if (out.numel() == 0) return;
  if (a_.size(1) == 0) {
    if (!add) out.zero_();
    return;
  }
  if (out.stride(1) != 1) {
    TORCH_CHECK_VALUE(out.stride(0) == 1, "out must have dense rows or columns; got strides ", out.strides());
    return matmul_(out.t(), b_.t(), a_.t(), add);
  }
  if (!add && out.scalar_type() == type && out.size(0) <= rows_of_one_pass(type, a_.size(1)) && a_.stride(1) == 1 &&
      b_.stride(0) == 1) {
    DecodeProducts in_one_pass;  // reads b once, so b need not stay in the cache
    in_one_pass.add(a_, b_.t(), out);
    return in_one_pass.run();
  }
  const Tensor a = with_dense_lines(a_), b = with_dense_lines(b_);
  run({a.const_data_ptr(), a.stride(0), a.stride(1), b.const_data_ptr(), b.stride(0), b.stride(1),
       out.mutable_data_ptr(), out.stride(0), out.size(0), out.size(1), a.size(1), add, dtype_of(a), dtype_of(out)});
}

}  // namespace products_cpu

double onednn_bfloat16_seconds() {
  constexpr int64_t n = kProductSize;
  const std::vector<at::BFloat16> a(n * n), b(n * n);
  std::vector<float> sum(n * n);
  try {
    const double seconds =
        fastest_round([&] { at::native::cpublas::brgemm(n, n, n, n, n, n, false, a.data(), b.data(), sum.data()); });
    at::native::cpublas::brgemm_release();
    return seconds;
  } catch (const std::exception&) {  // as below
    return -1.0;
  }
}

bool fast_bfloat16_products() {
  // Found by trying, because no query exists: torch offers the call from AVX-512 on, but oneDNN behind it supports it
  // only with bfloat16 instructions.
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
  if (!bfloat16_choice().products) return false;
  if (!at::globalContext().userEnabledMkldnn()) return false;  // torch.backends.mkldnn.flags(enabled=False)
  static const bool found = tried();
  return found;
}

bool fast_float16_products() { return at::native::cpublas::could_pack(at::kHalf); }  // AMX's

bool own_bfloat16_products() { return chosen_isa_has(Isa::avx512) && !fast_bfloat16_products(); }

bool fast_float32_products() {
  static const bool by_avx2 = [] {
    const Processor found = processor();
    return at::hasMKL() && found.vendor == "AuthenticAMD" && found.family >= products_cpu::kZen5;
  }();
  return !by_avx2 || !chosen_isa_has(Isa::avx512);
}

int64_t rows_of_one_pass(at::ScalarType type, int64_t width) {
  constexpr int64_t kWide = 2048;  // that kernel's rows are so far apart that they compete for the same cache sets
  if (chosen_isa() == Isa::amx_bf16 && bfloat16_choice().products) return kDecodeLinearRows;
  if (type == at::kFloat && width >= kWide && !fast_float32_products()) return kDecodeLinearRows;
  // Both widen to float32; the kernel for panels does so once for all rows.
  if (type == at::kBFloat16 && !bfloat16_choice().pairs && own_bfloat16_products()) return 2 * kDecodeLinearRows;
  return 4 * kDecodeLinearRows;
}

Tensor linear_float32(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  if (fast_float32_products()) return at::linear(x, weight, bias);
  const Tensor rows = x.reshape({-1, x.size(-1)});
  const Tensor y = at::empty({rows.size(0), weight.size(0)}, x.options());
  if (bias) y.copy_(bias->expand_as(y));
  products_cpu::matmul_(y, rows, weight.t(), bias.has_value());
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return y.view(sizes);
}

void multiply_float32(const Tensor& a, const Tensor& b, const Tensor& out, bool add) {
  const bool reads_b_once = a.size(0) == 1 && b.stride(0) != 1;  // a copy of it does not pay off
  if (!fast_float32_products() && !reads_b_once) {
    products_cpu::matmul_(out, a, b, add);
  } else if (add) {
    out.addmm_(a, b);
  } else {
    Tensor into = out;
    at::mm_out(into, a, b);
  }
}

void multiply_bfloat16(const Tensor& a, const Tensor& b, const Tensor& out, bool add) {
  products_cpu::matmul_(out, a, b, add);
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def("matmul_(Tensor(a!) out, Tensor a, Tensor b, bool add) -> ()", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) { m.impl("matmul_", &products_cpu::matmul_); }

// Without this, every call makes autograd scan the arguments only to find that there is no gradient.
TORCH_LIBRARY_IMPL(FK_LIBRARY, Autograd, m) { m.impl("matmul_", torch::CppFunction::makeFallthrough()); }

}  // namespace foundry
