"""Two forms, with PyTorch's matmuls and two kernels between them (`launchers.py`).

All rows at once: a matmul computes all logits, one kernel computes the loss and overwrites the logits with their
gradient, and one matmul each computes hidden's gradient and weight's. Nothing of the logits' size exists beside them,
and no sum of weight's gradient. Blocks of classes ("tiles", `vocabulary_blocks.py`): one more matmul, and little
memory. Chunks of rows, which a caller may ask for, are the first form with a float32 sum of weight's gradient, to which
a matmul adds.
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

#: The part of the device's memory that all logits may take, where there are gradients.
SHARE = 32
#: Bytes of a block's logits, how many classes it has at least and at most, and what their number is a multiple of. On
#: an H100, of 8192 tokens, blocks of 16032 classes were the fastest of 4008 to 32064. With many tokens fewer classes
#: would spend more time on hidden's float32 sum, which each block reads and writes, than on the matmul.
BLOCK, LEAST, MOST, MULTIPLE = 1 << 28, 2048, 1 << 15, 128


def _at_most(size: int, limit: int) -> bool:
    """size <= limit; False while a compiler traces a number of tokens that depends on data, and cannot tell."""
    if not torch.compiler.is_compiling():
        return size <= limit
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size <= limit)


def chunk_size(hidden: Tensor, weight: Tensor, options: LinearLossOptions, needs: Needs) -> int | None:
    """By the shape and the device's memory, never by what is free. Without gradients blocks need no additional
    matmul."""
    n_tokens, asked = hidden.numel() // hidden.shape[-1], options.chunk_size
    if asked is not None:
        return ALL if asked not in (ALL, TILES) and _at_most(n_tokens, asked) else asked
    takes = n_tokens * weight.shape[0] * hidden.element_size()
    if needs.weight and hidden.dtype == torch.float16:  # in float32 until it is divided by the number of tokens
        takes += 4 * weight.numel()
    if _at_most(takes, total_memory(hidden.device) // SHARE if any(needs) else BLOCK):
        return ALL
    # Tiles sum hidden's gradient over blocks of classes whose number depends on that of the tokens.
    return None if options.batch_invariant else TILES


def classes(n_tokens: int, n_classes: int, itemsize: int) -> int:
    """Of a block: all but the last have as many, so that they are nearly of one size."""
    if INTERPRET:  # so that small cases have several
        return max(32, -(-n_classes // 4))
    n_blocks = -(-n_classes // min(max(LEAST, BLOCK // (n_tokens * itemsize)), MOST))
    return -(-n_classes // (n_blocks * MULTIPLE)) * MULTIPLE


KERNELS = Kernels(launchers.forward, launchers.gradients_, cpu=False, classes=classes, losses=launchers.Losses)

linear_cross_entropy = make_backend("triton_", define, Strategy(KERNELS, chunk_size, launchers.scale_))
