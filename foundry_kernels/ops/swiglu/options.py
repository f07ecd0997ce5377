"""Options of gated linear units, besides tensors and the activation."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.core.options import Options


class GatedOptions(Options):
    """SwiGLU's options, with the plain SwiGLU as the default, and the dropout of all activations (`core.dropout`)."""

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
