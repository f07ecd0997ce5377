// Times attention's matmul of tiles. Compiled once per instruction set (see isa.h).
#include "product_rates.h"

#include "flash_attention_gemm.h"

namespace foundry {
namespace FK_ISA {

namespace {

// The matmul that computes scores from a tile's keys and queries.
template <class E>
double seconds_of() {
  constexpr int64_t n = kProductSize;
  alignas(64) float a[n * n] = {}, b[n * n] = {}, c[n * n];
  return fastest_round([&] {
    multiply<E>(n, n / kLanes, {reinterpret_cast<const E*>(a), n, kPer<E>}, b, n, steps_of<E>(n), c, n, Start::zero);
  });
}

}  // namespace

ProductSeconds product_seconds() {
  ProductSeconds found{seconds_of<float>(), -1.0};
  if constexpr (kPairs) found.pairs = seconds_of<BFloat16>();
  return found;
}

}  // namespace FK_ISA
}  // namespace foundry
