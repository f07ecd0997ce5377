"""The head of a language model and its loss as one module."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._scripting import refuse_scripting
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy


class LinearCrossEntropy(torch.nn.Linear):
    """``cross_entropy(linear(hidden), target)`` without the logits; see :func:`foundry_kernels.linear_cross_entropy`.

    A :class:`torch.nn.Linear` with its parameters, initialisation and state dict, whose call takes the targets too.
    ``torch.nn.functional.linear(hidden, head.weight, head.bias)`` are the logits, if they are needed.

    Args:
        in_features: width D of hidden.
        out_features: classes V.
        bias: whether the layer has a bias.
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, chunk_size, token_scaling: as in the
            function.
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        ValueError: an unknown backend. Options are checked by the call.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        chunk_size: int | Literal["tiles"] | None = None,
        token_scaling: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.backends = plan(backend, ("linear_cross_entropy",))
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "chunk_size": chunk_size,
            "token_scaling": token_scaling,
        }

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """hidden ``[..., D]`` and target ``[...]`` to the loss.

        Raises:
            As :func:`foundry_kernels.linear_cross_entropy`.
        """
        backend = self.backends["linear_cross_entropy"]
        return linear_cross_entropy(hidden, self.weight, target, bias=self.bias, backend=backend, **self.options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={describe(self.backends)}"
