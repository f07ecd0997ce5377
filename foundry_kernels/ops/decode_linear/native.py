"""decode_linear of the compiled extension: `csrc/torch/decode_linear_cpu.cpp` over `csrc/cpu/decode_linear.*`; and the
operator of a whole block, `csrc/torch/decode_block_cpu.cpp`."""

import torch

from foundry_kernels.core.extension import _C

decode_linear = torch.ops.foundry_kernels.decode_linear.default
#: A block of a decoder, of few rows: its new branch and stream, and new keys and values in a cache.
decode_block = torch.ops.foundry_kernels.decode_block.default
#: The same without torch's binding, "auto" first and each weight by itself; None where the call is not a common one.
decode_block_direct = _C.direct.decode_block
