// Sums of bfloat16 matmuls in 24 bits: the final bfloat16, and the next 8 bits of its mantissa. With 16 bits each
// addition would round to bfloat16. With 32 bits the sum would need a second buffer of the result's size, and more time
// to read and write. Also transposes the factors. The caller starts the threads.
#pragma once

#include <cstdint>

#include "isa.h"

// out[i] = the number whose upper 24 bits are high[i] and low[i].
FK_DECLARE_PER_ISA(void, sum24_widen, const uint16_t* high, const uint8_t* low, float* out, int64_t n)
// high[i], low[i] = v[i], rounded to 24 bits.
FK_DECLARE_PER_ISA(void, sum24_narrow, const float* v, uint16_t* high, uint8_t* low, int64_t n)
// out[i] = v[i], rounded to bfloat16.
FK_DECLARE_PER_ISA(void, sum24_round, const float* v, uint16_t* out, int64_t n)
// out[c][r] = in[r][c], and 0 for rows n_rows to ld_out, which is a multiple of 32.
FK_DECLARE_PER_ISA(void, transpose_words, const uint16_t* in, int64_t ld_in, int64_t n_rows, int64_t n_cols,
                   uint16_t* out, int64_t ld_out)
