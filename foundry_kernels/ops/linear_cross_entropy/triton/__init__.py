"""Two forms, with PyTorch's matmuls and two kernels between them (`launchers.py`).

All rows at once: a matmul computes all logits, one kernel computes the loss and overwrites the logits with their
gradient, and one matmul each computes hidden's gradient and weight's. Nothing of the logits' size exists beside them,
and no sum of weight's gradient. Blocks of classes ("tiles", `vocabulary_blocks.py`): one more matmul, and little
memory. Chunks of rows, which a caller may ask for, are the first form with a float32 sum of weight's gradient, to which
a matmul adds.
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
