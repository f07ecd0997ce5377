"""The gated feed-forward block as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.ops.swiglu import swiglu


class SwiGLU(torch.nn.Module):
    """``w2(silu(w1 x) * w3 x)``, without biases; the names are those of Meta's Llama.

    Args:
        dim: width of the input and the output.
        hidden_dim: width between.
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        ValueError: a width below 1 or an unknown backend.

    Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("hidden_dim", hidden_dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        self.backends = plan(backend, ("swiglu",))
        self.w1 = torch.nn.Linear(dim, hidden_dim, bias=False, device=device, dtype=dtype)  # gate
        self.w2 = torch.nn.Linear(hidden_dim, dim, bias=False, device=device, dtype=dtype)  # down
        self.w3 = torch.nn.Linear(dim, hidden_dim, bias=False, device=device, dtype=dtype)  # up

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., dim]`` to ``[..., dim]``."""
        return self.w2(swiglu(self.w1(x), self.w3(x), backend=self.backends["swiglu"]))

    def extra_repr(self) -> str:
        return f"backend={describe(self.backends)}"
