"""linear_cross_entropy in two forms: PyTorch's matmuls, with this package's kernels between them (`launchers.py`).

All rows at once: a matmul computes all logits, one kernel computes the loss and overwrites the logits with their
gradient, and two matmuls compute the gradients of hidden and weight. No other memory of the logits' size is needed.

Blocks of classes ("tiles", `vocabulary_blocks.py`): these need one more matmul, and little memory.

Chunks of rows, on the caller's request: as the first form, but matmuls add to a float32 sum of weight's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels._triton import INTERPRET
from foundry_kernels._triton.devices import total_memory
from foundry_kernels._triton.operators import define
from foundry_kernels.ops.linear_cross_entropy.calls import Kernels, Needs
from foundry_kernels.ops.linear_cross_entropy.operators import Strategy, make_backend
from foundry_kernels.ops.linear_cross_entropy.options import ALL, TILES, LinearLossOptions
from foundry_kernels.ops.linear_cross_entropy.triton import launchers

#: With gradients, all logits may take 1 / SHARE of the device's memory.
SHARE = 32
#: Bytes of a block's logits; the fewest and the most classes of a block, and a divisor of their number. On an H100 with
#: 8192 tokens, 16032 classes were the fastest between 4008 and 32064. With many tokens and fewer classes, hidden's
#: float32 sum, which each block reads and writes, would take longer than the matmul.
BLOCK, LEAST, MOST, MULTIPLE = 1 << 28, 2048, 1 << 15, 128


def _at_most(size: int, limit: int) -> bool:
    """size <= limit; False if it is unknown because torch.compile traces a data-dependent number of tokens."""
    if not torch.compiler.is_compiling():
        return size <= limit
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size <= limit)


def chunk_size(hidden: Tensor, weight: Tensor, options: LinearLossOptions, needs: Needs) -> int | None:
    """Depends on the shape and the device's memory, never on its free memory. Without gradients, blocks need no
    additional matmul."""
    n_tokens, asked = hidden.numel() // hidden.shape[-1], options.chunk_size
    if asked is not None:
        return ALL if asked not in (ALL, TILES) and _at_most(n_tokens, asked) else asked
    takes = n_tokens * weight.shape[0] * hidden.element_size()
    if needs.weight and hidden.dtype == torch.float16:  # its gradient is float32 before the mean
        takes += 4 * weight.numel()
    if _at_most(takes, total_memory(hidden.device) // SHARE if any(needs) else BLOCK):
        return ALL
    # Tiles sum hidden's gradient over blocks of classes. The number of blocks depends on the number of tokens.
    return None if options.batch_invariant else TILES


def classes(n_tokens: int, n_classes: int, itemsize: int) -> int:
    """The number of classes in a block. All blocks but the last have as many, so that their sizes are nearly equal."""
    if INTERPRET:  # small cases must have several blocks
        return max(32, -(-n_classes // 4))
    n_blocks = -(-n_classes // min(max(LEAST, BLOCK // (n_tokens * itemsize)), MOST))
    return -(-n_classes // (n_blocks * MULTIPLE)) * MULTIPLE


KERNELS = Kernels(launchers.forward, launchers.gradients_, cpu=False, classes=classes, losses=launchers.Losses)

linear_cross_entropy = make_backend("triton_", define, Strategy(KERNELS, chunk_size, launchers.scale_))
