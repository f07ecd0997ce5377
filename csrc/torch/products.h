// Which matrices oneDNN multiplies faster than float32's in this process: what the processor has instructions for,
// unless ONEDNN_MAX_CPU_ISA holds it to older ones. torch's own queries answer for the processor alone.
#pragma once

namespace foundry {

bool fast_bfloat16_products();
bool fast_float16_products();

}  // namespace foundry
