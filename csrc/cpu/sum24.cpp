// Compiled once per instruction set (see isa.h).
#include "sum24.h"

#include <algorithm>
#include <type_traits>

#include "transpose.h"
#include "vec.h"

namespace foundry {
namespace FK_ISA {

namespace {

typedef uint8_t VecB __attribute__((vector_size(kLanes)));

// Moves the words to the upper halves of lanes.
inline VecU upper(VecH v) { return bit_cast<VecU>(Convert<BFloat16>::widen(v)); }

inline VecU widened(VecB v) {
#if defined(__AVX512F__)  // GCC converts in parts
  return (VecU)_mm512_cvtepu8_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, VecU);
#endif
}

// The lower bits of each lane.
inline VecH words(VecU v) {
#if defined(__AVX512F__)
  return (VecH)_mm512_cvtepi32_epi16((__m512i)v);
#else
  return __builtin_convertvector(v, VecH);
#endif
}

inline VecB bytes(VecU v) {
#if defined(__AVX512F__)
  return (VecB)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(v, VecB);
#endif
}

typedef std::integral_constant<int64_t, kLanes> AllLanes;

// The first `count` lanes; zero in the others.
template <class Bits, class T, class Count = AllLanes>
inline Bits bits_at(const T* p, Count count = {}) {
  Bits bits{};
  std::memcpy(&bits, p, count * sizeof(T));
  return bits;
}

// Calls f(i, count) for i = 0, kLanes, ... < n. count is AllLanes, a constant, or what is left of n.
template <class F>
inline FK_INLINE void in_registers(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, AllLanes{});
  if (i < n) f(i, n - i);
}

}  // namespace

void sum24_widen(const uint16_t* high, const uint8_t* low, float* out, int64_t n) {
  in_registers(n, [&](int64_t i, auto count) FK_INLINE {
    const VecU bits = upper(bits_at<VecH>(high + i, count)) | widened(bits_at<VecB>(low + i, count)) << 8;
    std::memcpy(out + i, &bits, count * sizeof(float));
  });
}

void sum24_narrow(const float* v, uint16_t* high, uint8_t* low, int64_t n) {
  in_registers(n, [&](int64_t i, auto count) FK_INLINE {
    const Vec value = bits_at<Vec>(v + i, count);
    const VecU bits = bit_cast<VecU>(value);
    // Rounding could carry a NaN's mantissa into infinity and beyond.
    const VecU sum = value == value ? bits + 0x7Fu + ((bits >> 8) & 1u) : bits | 0x400000u;
    const VecH first = words(sum >> 16);
    const VecB last = bytes(sum >> 8);
    std::memcpy(high + i, &first, count * sizeof(uint16_t));
    std::memcpy(low + i, &last, count);
  });
}

void sum24_round(const float* v, uint16_t* out, int64_t n) {
  auto* to = reinterpret_cast<BFloat16*>(out);
  for_each_vec(n, [&](int64_t i, auto access, int) { access.store(to + i, access.load(v + i)); });
}

void transpose_words(const uint16_t* in, int64_t ld_in, int64_t n_rows, int64_t n_cols, uint16_t* out, int64_t ld_out) {
  // Two rows at a time: their words side by side form a lane. Rows of logits are often a power of two apart, so a
  // column's elements share one L1 set; copying some rows first avoids that.
  constexpr int64_t kRows = 32, kColumns = 64;
  uint16_t rows[kRows][kColumns] = {};
  for (int64_t c0 = 0; c0 < n_cols; c0 += kColumns) {
    const int64_t n_here = std::min(kColumns, n_cols - c0);
    for (int64_t r0 = 0; r0 < ld_out; r0 += kRows) {
      for (int64_t r = 0; r < kRows; ++r) {
        if (r0 + r >= n_rows) std::fill_n(rows[r], kColumns, uint16_t(0));
        else if (n_here == kColumns) std::memcpy(rows[r], in + (r0 + r) * ld_in + c0, sizeof(rows[r]));
        else std::copy_n(in + (r0 + r) * ld_in + c0, n_here, rows[r]);
      }
      for (int64_t c = 0; c < n_here; c += kLanes)
        for (int64_t r = 0; r < kRows; r += 2 * kLanes) {
          Vec block[kLanes];
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) {
            const VecU even = upper(bits_at<VecH>(rows[r + 2 * i] + c)),
                       odd = upper(bits_at<VecH>(rows[r + 2 * i + 1] + c));
            block[i] = bit_cast<Vec>(even >> 16 | odd);
          }
          exchange<1>(block);
          const int64_t count = std::min<int64_t>(kLanes, n_here - c);
          uint16_t* to = out + (c0 + c) * ld_out + r0 + r;
          for (int i = 0; i < count; ++i) std::memcpy(to + i * ld_out, &block[i], sizeof(Vec));
        }
    }
  }
}

}  // namespace FK_ISA
}  // namespace foundry
