// Which processor this is, and how bfloat16 matmuls run on it. What is faster depends on the processor, not only on the
// instructions that it has: foundry_kernels/core/bfloat16.py chooses once, when the extension is loaded.
#pragma once

#include <string>

#include "isa.h"

namespace foundry {

// The processor as its CPUID instruction describes it. The vendor is empty if there is no CPUID.
struct Processor {
  std::string vendor;
  unsigned family = 0, model = 0, stepping = 0;
};
Processor processor();

// Which bfloat16 matmuls use bfloat16 instructions. The others widen to float32.
struct Bfloat16Choice {
  bool tiles = true;     // attention with AMX, if the kernels compiled for it are chosen
  bool pairs = true;     // attention and decode_linear with dot products of pairs (vdpbf16ps, bfdot)
  bool products = true;  // oneDNN's matmuls
};
Bfloat16Choice bfloat16_choice();
void choose_bfloat16(const Bfloat16Choice& choice);

// The instruction set of attention's matmuls. AMX handles sixteen keys at a time and leaves the rest to registers,
// which add in another order. How many are left depends on the rest of the tile, so batch-invariant calls do not use
// AMX.
inline Isa attention_isa(bool batch_invariant) {
  const Isa isa = chosen_isa();
  const bool tiles = bfloat16_choice().tiles && !batch_invariant;
  return isa == Isa::amx_bf16 && !tiles ? Isa::avx512_bf16 : isa;
}
inline bool attention_widens(bool batch_invariant) {
  return attention_isa(batch_invariant) != Isa::amx_bf16 && !bfloat16_choice().pairs;
}

}  // namespace foundry
