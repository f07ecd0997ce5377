"""Options of the rotation, besides tensors."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.core.options import Options


class RopeOptions(Options):
    interleaved: bool
    positions: Tensor | None
