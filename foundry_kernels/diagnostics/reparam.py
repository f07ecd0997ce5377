"""Sigma-Reparam: query and key projections whose spectral norm is a parameter, so that their growth cannot make
attention collapse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from foundry_kernels.core.registry import is_dtensor, wide_dtype
from foundry_kernels.diagnostics.projections import PAIRS, pairs_of, whole

#: Steps of the power iteration at the start; each forward pass in training does one more.
_FIRST_STEPS = 20


class SpectralScale(nn.Module):
    """``gamma / sigma(W) * W``, with sigma the largest singular value ``u^T W v``; a parametrization of a weight.

    The buffers u and v follow the weight by one step of the power iteration in each forward pass in training that
    records gradients. The gradient includes sigma, with u and v as constants. The computation is in float32 or float64,
    also under autocast.

    Args:
        weight: ``[N, K]``, the weight for which u and v are estimated.
        gamma: the initial spectral norm; None is the weight's.
    """

    def __init__(self, weight: Tensor, gamma: float | None = 1.0, eps: float = 1e-12) -> None:
        super().__init__()
        self.eps = eps
        dtype, weight = weight.dtype, weight.to(wide_dtype(weight.dtype))
        generator = torch.Generator().manual_seed(0)  # does not change the caller's generator
        u, v = (torch.randn(n, generator=generator).to(weight) for n in weight.shape)
        u, v = F.normalize(u, dim=0, eps=eps), F.normalize(v, dim=0, eps=eps)
        with torch.no_grad():
            for _ in range(_FIRST_STEPS):
                u, v = self._step(weight, v)
            norm = u @ (weight @ v) if gamma is None else weight.new_tensor(gamma)
            self.gamma = nn.Parameter(norm[None].to(dtype))  # fully_shard does not support scalars, or several dtypes
        self.register_buffer("u", u)
        self.register_buffer("v", v)
        self.u: Tensor
        self.v: Tensor

    def _step(self, weight: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        u = F.normalize(weight @ v, dim=0, eps=self.eps)
        return u, F.normalize(weight.mT @ u, dim=0, eps=self.eps)

    def forward(self, weight: Tensor) -> Tensor:
        weight, gamma = whole(weight), whole(self.gamma)  # outside of its forward pass, fully_shard has shards
        wide = weight.to(wide_dtype(weight.dtype))
        with torch.autocast(weight.device.type, enabled=False):
            u, v = self.u.to(wide.dtype), self.v.to(wide.dtype)
            if self.training and torch.is_grad_enabled():
                with torch.no_grad():
                    u, v = self._step(wide, v)
                    self.u.copy_(u)
                    self.v.copy_(v)
            sigma = u @ (wide @ v)
            scaled = wide * (gamma / sigma.clamp_min(self.eps))
        return scaled.to(weight.dtype)


class SigmaReparam:
    """Reparametrizes the query and key projections of `model` as ``gamma / sigma(W) * W``. Each has a parameter gamma,
    its spectral norm.

        reparam = SigmaReparam(model)  # before the optimizer, which needs the gammas
        ...
        reparam.remove()  # leaves plain weights with the current values

    Logits are at most gamma_q gamma_k |x|^2 / sqrt(head_dim), and gamma, one number for a matrix, learns slowly. So
    attention cannot collapse to single tokens within a few steps, as it does if these weights grow. sigma follows the
    weights by one step of the power iteration in each forward pass in training. The state dict has the parts of each
    weight, so it can only be loaded into a reparametrized model.

    Args:
        model: any model with linear layers of queries and of keys that `diagnostics` recognises: `wq` and `wk`,
            `q_proj` and `k_proj`, `query` and `key`, and the like. Fused layers, as in GPT-2, are not supported.
        gamma: the initial spectral norms; None keeps each weight's, and so the model's outputs.

    Raises:
        TypeError: model is not a module.
        ValueError: gamma is not positive; or no such layers were found; or one is already reparametrized, on the
            meta device or sharded (apply `fully_shard` and DDP after this).

    Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse", 2023, arXiv:2303.06296.
    """

    def __init__(self, model: nn.Module, gamma: float | None = 1.0) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
        if gamma is not None and not 0.0 < gamma < float("inf"):
            raise ValueError(f"gamma must be None or finite and above 0; got {gamma}")
        layers = dict(pairs_of(model))
        if not layers:
            names = ", ".join("/".join(pair) for pair in PAIRS)
            raise ValueError(f"model must have linear layers of queries and keys, named {names}; got none")
        for name, layer in layers.items():
            if layer.weight.is_meta or is_dtensor(layer.weight):
                kind = "no values yet" if layer.weight.is_meta else "shards on several devices"
                raise ValueError(
                    f"model must have whole weights: {name} has {kind}; reparametrize it before or after that"
                )
            if parametrize.is_parametrized(layer, "weight"):
                raise ValueError(f"model must have plain weights; {name} is reparametrized already")
        self.layers = layers
        for layer in layers.values():
            scale = SpectralScale(layer.weight.detach(), gamma)
            with torch.no_grad():  # runs the parametrization, which must not update u and v
                parametrize.register_parametrization(layer, "weight", scale)

    @torch.no_grad()
    def remove(self) -> None:
        """Makes the weights plain parameters again, with their current values."""
        for layer in self.layers.values():
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)

    @staticmethod
    def is_in(state_dict: Iterable[str]) -> bool:
        """Whether a state dict is from a reparametrized model."""
        return any(name.endswith(".parametrizations.weight.0.gamma") for name in state_dict)
