"""What the operators of gated linear units are told beside their tensors and the activation."""

from __future__ import annotations

from foundry_kernels.core.options import Options


class GatedOptions(Options):
    """Those of SwiGLU; with the defaults it is the plain one, and GEGLU has no others."""

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False
