"""Two forms, with PyTorch's products and two kernels between them (`launchers.py`).

All rows at once: a product makes all logits, one kernel finds the loss and writes the logits' gradient over them, and a
product each makes hidden's gradient and weight's. Nothing of the logits' size exists beside them, and no sum of weight's
gradient. Blocks of classes ("tiles", `vocabulary_blocks.py`): a product more, and little memory. Chunks of rows, which a
caller may ask for, are the first form with a float32 sum of weight's gradient, to which a product adds.
"""

from __future__ import annotations

from torch import Tensor

from foundry_kernels._triton.devices import total_memory
from foundry_kernels._triton.operators import define
from foundry_kernels.ops.linear_cross_entropy.calls import Kernels, Needs
from foundry_kernels.ops.linear_cross_entropy.operators import Strategy, make_backend
from foundry_kernels.ops.linear_cross_entropy.options import ALL, TILES, LinearLossOptions
from foundry_kernels.ops.linear_cross_entropy.triton import launchers

#: The part of the device's memory that all logits may take, where there are gradients.
SHARE = 32
#: Bytes of a block's logits, classes that it has at least, and what their number is a multiple of. On an H100, of 8192
#: tokens, blocks of 16032 classes were the fastest of 4008 to 32064. With many tokens fewer classes would spend more
#: time on hidden's float32 sum, which each block reads and writes, than on the product.
BLOCK, LEAST, MULTIPLE = 1 << 28, 2048, 128


def chunk_size(hidden: Tensor, weight: Tensor, options: LinearLossOptions, needs: Needs) -> int | None:
    """By the shape and the device's memory, never by what is free. Without gradients blocks take no product more."""
    n_tokens, asked = hidden.numel() // hidden.shape[-1], options.chunk_size
    if asked is not None:
        return ALL if asked not in (ALL, TILES) and asked >= n_tokens else asked
    logits = n_tokens * weight.shape[0] * hidden.element_size()
    if logits <= (total_memory(hidden.device) // SHARE if any(needs) else BLOCK):
        return ALL
    # Tiles sum hidden's gradient over blocks of classes whose number depends on that of the tokens.
    return None if options.batch_invariant else TILES


def classes(n_tokens: int, n_classes: int, itemsize: int) -> int:
    """Of a block: all blocks but the last have as many, so that they are nearly of one size."""
    n_blocks = -(-n_classes * n_tokens * itemsize // BLOCK)
    even = -(-n_classes // max(n_blocks, 1))
    return max(LEAST, -(-even // MULTIPLE) * MULTIPLE)


linear_cross_entropy = make_backend(
    "triton_",
    define,
    Strategy(
        Kernels(
            launchers.forward,
            launchers.gradients_,
            cpu=False,
            classes=lambda *shape: classes(*shape),  # which tests make smaller
            losses=launchers.Losses,
        ),
        chunk_size,
        launchers.scale_,
    ),
)
