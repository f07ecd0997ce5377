"""linear_cross_entropy in two forms: PyTorch's matmuls, with this package's kernels between them (`launchers.py`).

All rows at once: a matmul computes all logits, one kernel computes the loss and overwrites the logits with their
gradient, and two matmuls compute the gradients of hidden and weight. No other memory of the logits' size is needed.

Blocks of classes ("tiles", `vocabulary_blocks.py`): these need one more matmul, and little memory.

Chunks of rows, on the caller's request: as the first form, but matmuls add to a float32 sum of weight's gradient.
"""

from __future__ import annotations

from foundry_kernels._triton.operators import define
from foundry_kernels.ops.linear_cross_entropy import sizes
from foundry_kernels.ops.linear_cross_entropy.calls import Kernels
from foundry_kernels.ops.linear_cross_entropy.operators import Strategy, make_backend
from foundry_kernels.ops.linear_cross_entropy.triton import launchers

KERNELS = Kernels(
    launchers.forward, launchers.gradients_, cpu=False, classes=sizes.classes_on_gpu, losses=launchers.Losses
)

linear_cross_entropy = make_backend("triton_", define, Strategy(KERNELS, sizes.on_gpu, launchers.scale_))
