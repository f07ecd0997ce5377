"""decode_linear of the compiled extension: `csrc/torch/decode_linear_cpu.cpp` over `csrc/cpu/decode_linear.*`; and the
operator of a whole block, `csrc/torch/decode_block_cpu.cpp`."""

import torch

from foundry_kernels.core.extension import _C

decode_linear = torch.ops.foundry_kernels.decode_linear.default
#: A block of a decoder, of few rows: its new branch and stream, and new keys and values in a cache.
decode_block = torch.ops.foundry_kernels.decode_block.default
#: Blocks that follow each other: "auto", branch, stream, and a list with the other arguments of each, in a tuple with
#: weights and norms one by one. Without torch's binding; None where the call is not a common one.
decode_blocks_direct = _C.direct.decode_blocks
