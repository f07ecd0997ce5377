"""What the operators of gated linear units are told beside their tensors and the activation."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.core.options import Options


class GatedOptions(Options):
    """Those of SwiGLU, which with the defaults is the plain one, and dropout (`core.dropout`), which all have."""

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
