"""The gated feed-forward block as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foundry_kernels.nn import _decode
from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._decode import is_plain
from foundry_kernels.ops.swiglu import swiglu

RECOMPUTE = ("none", "product", "projections")


class SwiGLU(torch.nn.Module):
    """``w2(silu(w1 x) * w3 x)``, without biases; the names are those of Meta's Llama.

    Args:
        dim: width D of the input and the output.
        hidden_dim: width N between.
        recompute: what the backward pass recomputes instead of saving it in the forward pass. In elements per token,
            with all weights trained, "none" saves x, w1 x, w3 x and their gated product: ``D + 3N``. "product" saves
            ``D + 2N`` and recomputes the gated product, one pass over memory. "projections" saves ``D``, and repeats
            the products with w1 and w3. The results are bitwise the same. Layers that were replaced or have hooks are
            called as they are, and save what they save.
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
        w1, w2, w3, backend = self.w1, self.w2, self.w3, self.backends["swiglu"]
        if _decode.serves(x, backend) and (both := _decode.project(x, w1, w3)) is not None:
            product = swiglu(both, backend=backend)
            y = _decode.project(product, w2)
            return w2(product) if y is None else y
        again = self.recompute if torch.is_grad_enabled() else "none"
        if again == "projections" and all(map(is_plain, (w1, w2, w3))):
            return _recomputed(self._whole, x, w1.weight, w2.weight, w3.weight)
        gate, up = w1(x), w3(x)
        # A frozen w2 would not keep the product in any case.
        if again == "product" and is_plain(w2) and w2.weight.requires_grad:
            return _recomputed(self._down, gate, up, w2.weight)
        return w2(swiglu(gate, up, backend=backend))

    def _whole(self, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return self._down(F.linear(x, w1), F.linear(x, w3), w2)

    def _down(self, gate: Tensor, up: Tensor, w2: Tensor) -> Tensor:
        return F.linear(swiglu(gate, up, backend=self.backends["swiglu"]), w2)

    def extra_repr(self) -> str:
        return f"recompute={self.recompute!r}, backend={describe(self.backends)}"


def _recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """function(*inputs), of which only the inputs are kept. The backward pass runs it again up to its last matrix
    product, whose result nothing needs. The weights are inputs too: the layers may hold others by then, as they do
    after `torch.func.functional_call`."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
