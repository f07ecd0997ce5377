"""The gated feed-forward block of Llama as a module."""

from __future__ import annotations

from typing import Any

import torch

from foundry_kernels.nn._backend import Backend, describe
from foundry_kernels.nn.mlp import GatedMLP


class SwiGLU(GatedMLP):
    """``w2(silu(w1 x) * w3 x)``, without biases; the names are those of Meta's Llama.

    Args:
        dim: width D of the input and the output.
        hidden_dim: width N between.
        recompute: what the backward pass recomputes instead of saving it in the forward pass. In elements per token,
            with all weights trained, "none" saves x, w1 x, w3 x and their gated product: ``D + 3N``. "product" saves
            ``D + 2N`` and recomputes the gated product, one pass over memory. "projections" saves ``D``, and repeats
            the matmuls with w1 and w3. The results are bitwise the same. Layers that were replaced or have hooks are
            called as they are, and save what they need.
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        ValueError: a width below 1, an unknown `recompute` or backend.

    Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        recompute: str = "product",
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(dim, hidden_dim, recompute=recompute, device=device, dtype=dtype, backend=backend)

    def extra_repr(self) -> str:
        return f"recompute={self.recompute!r}, backend={describe(self.backends)}"
