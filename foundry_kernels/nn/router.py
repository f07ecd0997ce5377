"""The router of a mixture of experts, and its auxiliary losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.checks import check_positive
from foundry_kernels.core.choices import SCORINGS, why_no_groups
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.nn._scripting import refuse_scripting


class Routing(NamedTuple):
    """The choice of a router for T tokens: `experts` ``[T, k]`` int64, the chosen ones, the highest score first;
    `weights` ``[T, k]``, what their outputs are multiplied by; `logits` ``[T, E]``."""

    experts: Tensor
    weights: Tensor
    logits: Tensor


class RouterStats(NamedTuple):
    """The statistics from which a router's losses are computed, over the tokens of one call.

    Attributes:
        shares: ``[E]``, the fraction of the tokens that chose each expert; they sum to k, and have no gradient.
        probabilities: ``[E]``, the mean over tokens of the router's probability of each expert.
        z: scalar, the mean over tokens of ``logsumexp(logits) ** 2``.
    """

    shares: Tensor
    probabilities: Tensor
    z: Tensor


class Router(nn.Module):
    r"""Chooses the experts of each token.

    With the logits :math:`l = W x + b` and scores :math:`s = \mathrm{softmax}(l)` or :math:`\sigma(l)`, the chosen set
    :math:`C` is that of the `top_k` largest :math:`s_e + \beta_e` (of equal ones those with the lowest index), and the
    weights are

    .. math:: w_e = c \, \frac{s_e}{\sum_{i \in C} s_i} \quad\text{renormalised, or}\quad w_e = c \, s_e, \qquad e \in C

    :math:`\beta`, the selection bias, is not a parameter: it affects the choice of experts but not their weights
    (:meth:`update_selection_bias`). Logits, scores and weights are float32 (float64 for float64 inputs), under autocast
    too.

    Args:
        dim: width D of the tokens.
        n_experts: E.
        top_k: experts of a token, at most E.
        scoring: "softmax" (Mixtral, Qwen3-MoE) or "sigmoid" (DeepSeek-V3, Llama 4).
        renormalize: whether the weights of a token are divided by their sum. With top_k=1 they are then 1, and the
            router only gets the gradient of its losses.
        scale: the factor c of the weights (`routed_scaling_factor` of DeepSeek-V3).
        bias: whether the logits have one (GPT-OSS).
        selection_bias: whether there is a selection bias, a buffer of float32, 0 at first.
        n_groups, top_groups: the experts form `n_groups` consecutive groups of equal size, and a token chooses among
            the experts of its `top_groups` best groups. A group is ranked by the sum of its two highest scores,
            selection biases included (DeepSeek-V3). None means no groups.

    Raises:
        ValueError: a size below 1, top_k > n_experts, an unknown `scoring`, a `scale` that is not positive, groups that
            do not divide the experts or hold too few.

    Shazeer et al., "Outrageously Large Neural Networks", 2017, arXiv:1701.06538; Jiang et al., "Mixtral of Experts",
    2024, arXiv:2401.04088; Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024,
    arXiv:2408.15664; DeepSeek-AI, "DeepSeek-V3", 2024, arXiv:2412.19437.
    """

    __prepare_scriptable__ = refuse_scripting

    selection_bias: Tensor | None
    chosen: Tensor | None

    def __init__(
        self,
        dim: int,
        n_experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        bias: bool = False,
        selection_bias: bool = False,
        n_groups: int | None = None,
        top_groups: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("n_experts", n_experts), ("top_k", top_k)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if top_k > n_experts:
            raise ValueError(f"top_k must be at most n_experts={n_experts}; got {top_k}")
        if scoring not in SCORINGS:
            raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}; got {scoring!r}")
        check_positive("scale", scale)
        if reason := why_no_groups(n_experts, top_k, n_groups, top_groups):
            raise ValueError(reason)
        self.n_groups, self.top_groups = n_groups, top_groups
        self.dim, self.n_experts, self.top_k = dim, n_experts, top_k
        self.scoring, self.renormalize, self.scale = scoring, renormalize, scale
        self.weight = nn.Parameter(torch.empty(n_experts, dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(n_experts, device=device, dtype=dtype)) if bias else None
        per_expert = torch.zeros(n_experts, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", per_expert)
        # The number of tokens that chose each expert since the last update. It is not part of a checkpoint or a graph.
        self.register_buffer("chosen", None if per_expert is None else per_expert.clone(), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float | None = None, generator: torch.Generator | None = None) -> None:
        """Weights from N(0, std), or as `nn.Linear` has them; biases 0."""
        bound = self.dim**-0.5
        if std is None:
            nn.init.uniform_(self.weight, -bound, bound, generator=generator)
        else:
            nn.init.normal_(self.weight, 0.0, std, generator=generator)
        for zeroed in (self.bias, self.selection_bias, self.chosen):
            if zeroed is not None:
                zeroed.zero_()

    def forward(self, x: Tensor) -> Routing:
        """x ``[T, D]``."""
        logits = self._logits(x)
        experts = self._choose(logits)
        if self.scoring == "softmax" and self.renormalize:  # that of the chosen logits alone is the same
            weights = logits.gather(1, experts).softmax(-1)
        elif self.scoring == "softmax":
            weights = logits.softmax(-1).gather(1, experts)
        else:
            weights = logits.gather(1, experts).sigmoid()
            if self.renormalize:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights if self.scale == 1.0 else weights * self.scale, logits)

    def _logits(self, x: Tensor) -> Tensor:
        wide = wide_dtype(x.dtype)
        bias = None if self.bias is None else self.bias.to(wide)
        with no_autocast(x):
            return F.linear(x.to(wide), self.weight.to(wide), bias)

    @torch.no_grad()
    def _choose(self, logits: Tensor) -> Tensor:
        # A stable sort is used because `topk` does not specify which of equal scores it returns.
        key = logits
        if self.selection_bias is not None or self.n_groups is not None:
            key = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        if self.selection_bias is not None:
            key = key + self.selection_bias
        if self.n_groups is not None and self.top_groups is not None:
            groups = key.unflatten(-1, (self.n_groups, -1))
            best = groups.topk(2, dim=-1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
            kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best[:, : self.top_groups], True)
            key = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
        return key.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]

    def stats(self, logits: Tensor, counts: Tensor) -> RouterStats:
        """The statistics of tokens with logits ``[T, E]``; counts ``[E]`` of them chose each expert. With "sigmoid" the
        probabilities are the scores divided by their sum."""
        tokens = max(logits.shape[0], 1)
        if self.scoring == "softmax":
            probabilities = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        z = logits.logsumexp(-1).square().sum() / tokens
        return RouterStats(counts.to(logits.dtype) / tokens, probabilities.sum(0) / tokens, z)

    @torch.no_grad()
    def count(self, counts: Tensor) -> None:
        """Adds counts ``[E]`` to those that the next :meth:`update_selection_bias` uses."""
        if self.chosen is not None:
            self.chosen.add_(counts)

    @torch.no_grad()
    def update_selection_bias(self, rate: float = 1e-3) -> None:
        """Updates the selection bias from the tokens since the last call in training: ``bias += rate *
        sign(mean(counts) - counts)``. This raises the bias of experts with fewer tokens than the mean and lowers that
        of the others.

        Activation checkpointing counts each token twice, which does not change the sign. With data on several devices,
        sum `chosen` over them first.

        Raises:
            RuntimeError: there is no selection bias.
        """
        if self.selection_bias is None or self.chosen is None:
            raise RuntimeError("update_selection_bias needs a router with selection_bias=True")
        self.selection_bias.add_((self.chosen.mean() - self.chosen).sign(), alpha=rate)
        self.chosen.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Every move or cast goes through here. A cast is skipped: it would round the selection bias more coarsely than
        # its updates.
        before = {name: self._buffers[name] for name in ("selection_bias", "chosen")}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None:
                continue
            if old.is_meta and not new.is_meta:  # `to_empty`: without values
                self._buffers[name] = torch.zeros_like(new, dtype=torch.float32)
            elif new.dtype != torch.float32:
                self._buffers[name] = old.to(new.device)
        return self

    def extra_repr(self) -> str:
        changed: dict[str, tuple[Any, Any]] = {"renormalize": (self.renormalize, True), "scale": (self.scale, 1.0)}
        changed |= {"n_groups": (self.n_groups, None), "top_groups": (self.top_groups, None)}
        text = f"dim={self.dim}, n_experts={self.n_experts}, top_k={self.top_k}, scoring={self.scoring!r}"
        text += "".join(f", {name}={value}" for name, (value, default) in changed.items() if value != default)
        present = {"bias": self.bias, "selection_bias": self.selection_bias}
        return text + "".join(f", {name}=True" for name, tensor in present.items() if tensor is not None)


def update_selection_biases(model: nn.Module, rate: float = 1e-3) -> None:
    """:meth:`Router.update_selection_bias` of every router in `model` that has a selection bias: after each step of the
    optimizer, ``optimizer.register_step_post_hook(lambda *_: update_selection_biases(model))``."""
    for module in model.modules():
        if isinstance(module, Router) and module.selection_bias is not None:
            module.update_selection_bias(rate)


def load_balancing_loss(stats: RouterStats | Sequence[RouterStats]) -> Tensor:
    r"""The auxiliary loss that makes a router use its experts evenly.

    .. math:: E \sum_e f_e \, P_e

    with the fraction :math:`f_e` of tokens that chose expert e and its mean probability :math:`P_e`; of several layers,
    f and P are their means, as transformers computes it. It is k where all experts are used alike. The gradient flows
    through P alone.

    Args:
        stats: of one layer, or of each layer.

    Returns:
        A scalar, without the coefficient.

    Lepikhin et al., "GShard", 2020, arXiv:2006.16668; Fedus et al., "Switch Transformers", 2021, arXiv:2101.03961.
    """
    layers = _layers(stats)
    shares = torch.stack([layer.shares for layer in layers]).mean(0)
    return shares.numel() * (shares * torch.stack([layer.probabilities for layer in layers]).mean(0)).sum()


def router_z_loss(stats: RouterStats | Sequence[RouterStats]) -> Tensor:
    """The mean over tokens, and layers, of ``logsumexp(logits) ** 2``: it keeps logits from growing.

    Zoph et al., "ST-MoE: Designing Stable and Transferable Sparse Expert Models", 2022, arXiv:2202.08906.
    """
    return torch.stack([layer.z for layer in _layers(stats)]).mean()


def _layers(stats: RouterStats | Sequence[RouterStats]) -> Sequence[RouterStats]:
    layers = [stats] if isinstance(stats, RouterStats) else stats
    if not layers:
        raise ValueError("stats must be those of at least one layer; got none")
    return layers
