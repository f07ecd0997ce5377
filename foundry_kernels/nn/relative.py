"""Relative positions: for each head and bucket of distances a learned number that is added to the scores (T5)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_int
from foundry_kernels.core.choices import why_no_buckets
from foundry_kernels.nn._scripting import refuse_scripting


def relative_buckets(distances: Tensor, buckets: int, max_distance: int, causal: bool) -> Tensor:
    """The bucket of each distance (key's position less query's), an int64 tensor of the same shape.

    Without `causal`, keys after the query use the second half of the buckets. In each direction, the first half of the
    buckets holds one distance each. The other buckets grow by a constant factor up to `max_distance`; larger distances
    use the last bucket.
    """
    if causal:
        first, steps = torch.zeros_like(distances), (-distances).clamp_min(0)
    else:
        buckets //= 2
        first, steps = (distances > 0).long() * buckets, distances.abs()
    exact = buckets // 2
    grown = (steps.clamp_min(1).float() / exact).log() / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + grown.long()).clamp_max(buckets - 1)
    return first + torch.where(steps < exact, steps, far)


class RelativeBias(torch.nn.Module):
    """The bias ``weight[bucket(j - i), h]`` of query i and key j in head h, which layers share: parameter `weight`
    ``[buckets, H]``.

    Args:
        n_heads: query heads H.
        buckets: rows of the weight; see :func:`relative_buckets`.
        max_distance: the distance from which on all have the last bucket of their direction.
        causal: whether no query sees a key behind it, so that all buckets are for keys before it.

    Raises:
        TypeError, ValueError: a size is no int or too small, or the buckets cannot be shared out.

    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2019,
    arXiv:1910.10683.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        n_heads: int,
        buckets: int = 32,
        max_distance: int = 128,
        *,
        causal: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("n_heads", n_heads), ("buckets", buckets), ("max_distance", max_distance)):
            check_int(name, value, minimum=1)
        if reason := why_no_buckets(buckets, max_distance, causal):
            raise ValueError(reason)
        self.buckets, self.max_distance, self.causal = buckets, max_distance, causal
        self.weight = torch.nn.Parameter(torch.empty(buckets, n_heads, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Weights from N(0, std)."""
        torch.nn.init.normal_(self.weight, 0.0, std, generator=generator)

    def forward(self, n_queries: int, n_keys: int) -> Tensor:
        """The bias ``[1, H, T, S]`` of the last T of S positions, as `attn_mask` of
        :func:`foundry_kernels.flash_attention` takes it."""
        # First one number for each distance, then windows of these, so that the gradient is summed over diagonals
        # first.
        distances = torch.arange(1 - n_keys, n_queries, device=self.weight.device)
        by_distance = self.weight[relative_buckets(distances, self.buckets, self.max_distance, self.causal)]
        windows = by_distance.t().unfold(1, n_keys, 1)  # [H, T, S], the last query first
        return windows.flip(1).unsqueeze(0)

    def extra_repr(self) -> str:
        heads = self.weight.shape[1]
        return f"{heads}, buckets={self.buckets}, max_distance={self.max_distance}, causal={self.causal}"
