"""Makers of sample inputs: dense and packed sequences, slopes, masks and biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.bench import CuSeqlens
from foundry_kernels.testing import Arg, Case, Values, normal

_NORMAL = normal()

ALL_OPTIONS: dict[str, Any] = {"causal": True, "window": (20, 3), "softcap": 3.0, "scale": 0.3, "return_lse": True}
DROPOUT: dict[str, Any] = {"dropout_p": 0.2, "dropout_seed": 2**40 + 7}


def alibi_slopes_of(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """A geometric series over the heads, another for each sequence."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, shape[-1] + 1, dtype=torch.float64) / shape[-1])
    return slopes if len(shape) == 1 else slopes * torch.arange(1, shape[0] + 1, dtype=torch.float64)[:, None]


def bool_mask(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Two thirds of the pairs see each other; the third query sees nothing, the second everything."""
    seen = torch.rand(shape, generator=g, dtype=torch.float64) < 0.67
    if seen.dim() > 1 and shape[-2] > 2:
        seen[..., 1, :], seen[..., 2, :] = True, False
    return seen


def blocks(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Tiles of 64 that are empty, full or neither, in turns: all but the first tile of a row of them."""
    i, j = torch.arange(shape[-2])[:, None] // 64, torch.arange(shape[-1]) // 64
    random = torch.rand(shape, generator=g, dtype=torch.float64) < 0.5
    return torch.where((i + j) % 3 == 0, random, (i + j) % 3 == 1)


def bias_with_gaps(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """A normal bias, -inf for a third of the pairs and for all of the third query's."""
    return torch.randn(shape, generator=g, dtype=torch.float64).masked_fill(~bool_mask(g, shape), -torch.inf)


#: In an argument, the largest number of its dtype: the usual value of a mask that is a tensor of numbers.
LARGEST = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class PartlyBiased:
    """A bias that is `value` or 0. In turns, a query has `value` on the first 64 keys, which are the first tile of most
    kernels; on all others; on all; and on a random half."""

    value: float

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        wide = (1, 1, *shape)[-max(len(shape), 2) :]
        turn, first = torch.arange(wide[-2])[:, None] % 4, torch.arange(wide[-1]) < 64
        half = torch.rand(wide, generator=g, dtype=torch.float64) < 0.5
        biased = torch.where(turn == 0, first, torch.where(turn == 1, ~first, (turn == 2) | half))
        return (self.value * biased.double()).view(shape)


@dataclass(frozen=True)
class Alternating:
    """`value` and minus `value` in turns."""

    value: float

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        signs = 1.0 - 2.0 * (torch.arange(shape[-1]) % 2)
        return (self.value * signs.double()).expand(shape)


def one_huge(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Normal values, one key a hundred times as large: its row of scores decides every softmax."""
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    x[:, :, shape[2] // 3] *= 100.0
    return x


def dense_case(
    b: int,
    heads: tuple[int, int],
    tokens: tuple[int, int],
    head_dim: int,
    note: str = "",
    *,
    head_dim_v: int | None = None,
    layout: str = "contiguous",
    k_layout: str | None = None,
    v_layout: str | None = None,
    cotangent: str = "contiguous",
    q_values: Values | None = None,
    k_values: Values | None = None,
    alibi_slopes: tuple[int, ...] | None = None,
    sinks: Values | None = None,
    attn_mask: Arg | AttentionMask | None = None,
    frozen: str = "",
    interpreted: bool = True,
    **options: Any,
) -> Case:
    """heads: (H, Hk); tokens: (T, S); alibi_slopes: their shape; frozen: letters of inputs without gradient."""
    (h, hk), (t, s), dv = heads, tokens, head_dim_v or head_dim
    normal_values = normal()
    args: dict[str, Arg | None] = {
        "q": Arg((b, h, t, head_dim), layout, q_values or normal_values, grad="q" not in frozen),
        "k": Arg((b, hk, s, head_dim), k_layout or layout, k_values or normal_values, grad="k" not in frozen),
        "v": Arg((b, hk, s, dv), v_layout or layout, grad="v" not in frozen),
    }
    if alibi_slopes is not None:
        args["alibi_slopes"] = Arg(alibi_slopes, values=alibi_slopes_of, dtype=torch.float32, grad=False)
    if sinks is not None:
        args["sinks"] = Arg((h,), values=sinks, grad="s" not in frozen)
    if isinstance(attn_mask, AttentionMask):
        options["attn_mask"] = attn_mask
    elif attn_mask is not None:
        args["attn_mask"] = attn_mask
    id = f"{b}x{h}.{hk}x{t}.{s}x{head_dim}" + ("-" + note if note else "")
    return Case(id, args, options, cotangent, interpreted)


def packed_case(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int,
    note: str = "",
    *,
    head_dim_v: int | None = None,
    layout: str = "contiguous",
    index: torch.dtype = torch.int32,
    alibi_slopes: tuple[int, ...] | None = None,
    sinks: Values | None = None,
    slack: int = 0,
    **options: Any,
) -> Case:
    """`slack` is added to the maximal lengths, which need only be bounds."""
    h, hk = heads
    shape = (len(lengths_q) + 1,)
    args: dict[str, Arg | None] = {
        "q": Arg((sum(lengths_q), h, head_dim), layout),
        "k": Arg((sum(lengths_k), hk, head_dim), layout),
        "v": Arg((sum(lengths_k), hk, head_dim_v or head_dim), layout),
        "cu_seqlens_q": Arg(shape, values=CuSeqlens(lengths_q), dtype=index, grad=False),
        "cu_seqlens_k": Arg(shape, values=CuSeqlens(lengths_k), dtype=index, grad=False),
    }
    if alibi_slopes is not None:
        args["alibi_slopes"] = Arg(alibi_slopes, values=alibi_slopes_of, dtype=torch.float32, grad=False)
    if sinks is not None:
        args["sinks"] = Arg((h,), values=sinks)
    options["max_seqlen_q"] = max(lengths_q, default=0) + slack
    options["max_seqlen_k"] = max(lengths_k, default=0) + slack
    sizes = f"{'+'.join(map(str, lengths_q))}.{'+'.join(map(str, lengths_k))}x{h}.{hk}x{head_dim}"
    return Case(sizes + ("-" + note if note else ""), args, options)


def mask_arg(*shape: int, layout: str = "contiguous", values: Values = bool_mask) -> Arg:
    return Arg(shape, layout, values, torch.bool, grad=False)


def bias_arg(
    *shape: int,
    layout: str = "contiguous",
    values: Values = _NORMAL,
    dtype: torch.dtype | None = None,
    grad: bool = True,
) -> Arg:
    return Arg(shape, layout, values, dtype, grad)


#: Options of a score alone, in small cases; and those that the cases of every length take in turns.
SCORE_OPTIONS = (
    dense_case(1, (2, 1), (33, 65), 32, "softcap", softcap=5.0, return_lse=True),
    dense_case(1, (2, 1), (65, 65), 32, "softcap-saturated", softcap=2.0, causal=True, q_values=normal(30.0)),
)
BENT: dict[str, dict[str, Any]] = {"": {}, "-softcap": {"softcap": 15.0}}
