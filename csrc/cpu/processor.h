// Which processor this is, and how products of bfloat16 are made on it. What is faster follows from the processor and
// not from the names of its instructions: foundry_kernels/core/bfloat16.py chooses, once, when the extension is loaded.
#pragma once

#include <string>

#include "isa.h"

namespace foundry {

// As its CPUID instruction names it; an empty vendor where there is none.
struct Processor {
  std::string vendor;
  unsigned family = 0, model = 0, stepping = 0;
};
Processor processor();

// Whether products of bfloat16 are made by the instructions that there are for them. Otherwise their numbers are
// widened to float32.
struct Bfloat16Choice {
  bool tiles = true;     // attention's by matrix instructions (AMX), where the kernels of these are chosen
  bool pairs = true;     // attention's and decode_linear's by dot products of pairs (vdpbf16ps, bfdot)
  bool products = true;  // oneDNN's take part
};
Bfloat16Choice bfloat16_choice();
void choose_bfloat16(const Bfloat16Choice& choice);

// Whose kernels do attention's products. AMX takes sixteen keys at a time and leaves the rest to registers, which add
// in another order: how many are left depends on what else is in the tile.
inline Isa attention_isa(bool batch_invariant) {
  const Isa isa = chosen_isa();
  const bool tiles = bfloat16_choice().tiles && !batch_invariant;
  return isa == Isa::amx_bf16 && !tiles ? Isa::avx512_bf16 : isa;
}
inline bool attention_widens(bool batch_invariant) {
  return attention_isa(batch_invariant) != Isa::amx_bf16 && !bfloat16_choice().pairs;
}

}  // namespace foundry
