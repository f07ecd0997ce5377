"""The gated feed-forward block as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.ops.swiglu import swiglu

RECOMPUTE = ("none", "product", "projections")


class SwiGLU(torch.nn.Module):
    """``w2(silu(w1 x) * w3 x)``, without biases; the names are those of Meta's Llama.

    Args:
        dim: width D of the input and the output.
        hidden_dim: width N between.
        recompute: what a backward pass computes again instead of keeping it from the forward pass. In elements a token,
            with all weights trained, "none" keeps x, w1 x, w3 x and their gated product: ``D + 3N``. "product" keeps
            ``D + 2N`` and forms the product again, which costs one pass over memory. "projections" keeps ``D``, and
            costs the products with w1 and w3 again. The results are the same bits. The layers are called as modules:
            forward pre-hooks of what is computed again run again.
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
        super().__init__()
        for name, value in (("dim", dim), ("hidden_dim", hidden_dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}; got {recompute!r}")
        self.recompute = recompute
        self.backends = plan(backend, ("swiglu",))
        self.w1 = torch.nn.Linear(dim, hidden_dim, bias=False, device=device, dtype=dtype)  # gate
        self.w2 = torch.nn.Linear(hidden_dim, dim, bias=False, device=device, dtype=dtype)  # down
        self.w3 = torch.nn.Linear(dim, hidden_dim, bias=False, device=device, dtype=dtype)  # up

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., dim]`` to ``[..., dim]``."""
        if not torch.is_grad_enabled() or self.recompute == "none":
            return self._whole(x)
        if self.recompute == "projections":
            return self._recomputed(self._whole, x)
        gate, up = self.w1(x), self.w3(x)
        if not any(p.requires_grad for p in self.w2.parameters()):  # then nothing would keep the product
            return self._down(gate, up)
        return self._recomputed(self._down, gate, up)

    def _whole(self, x: Tensor) -> Tensor:
        return self._down(self.w1(x), self.w3(x))

    def _down(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.w2(swiglu(gate, up, backend=self.backends["swiglu"]))

    def _recomputed(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs), of which only the inputs are kept. The backward pass runs it again up to its last matrix
        product, whose result nothing needs."""
        # A layer that has been replaced (by one with dropout, say) may draw random numbers; a Linear does not.
        random = any(type(layer) is not torch.nn.Linear for layer in (self.w1, self.w2, self.w3))
        return checkpoint(  # type: ignore[no-any-return]
            function, *inputs, use_reentrant=False, preserve_rng_state=random, determinism_check="none"
        )

    def extra_repr(self) -> str:
        return f"recompute={self.recompute!r}, backend={describe(self.backends)}"
