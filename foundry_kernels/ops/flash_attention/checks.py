"""What the arguments of both attention functions must be; attribute comparisons only, in the order of the signature."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from foundry_kernels._checks import (
    check_device,
    check_dtype,
    check_float,
    check_int,
    check_integer,
    check_rank,
    check_shape,
    check_tensor,
)

ALIGNMENTS = ("bottom_right", "top_left")
MAX_WIDTH = 256


def check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    _check_kind(q, k, v)
    check_rank("q", q, 4, "[B, H, T, D]")
    check_rank("k", k, 4, "[B, Hk, S, D]")
    check_rank("v", v, 4, "[B, Hk, S, Dv]")
    batch, heads, _, width = q.shape
    batch_k, kv_heads, keys, width_k = k.shape
    batch_v, heads_v, values, width_v = v.shape
    if batch_k != batch:
        raise ValueError(f"k must have q's batch size {batch}; got shape {tuple(k.shape)}")
    if batch_v != batch or heads_v != kv_heads or values != keys:
        raise ValueError(f"v must be [B, Hk, S, Dv] with k's {tuple(k.shape[:3])} in front; got shape {tuple(v.shape)}")
    _check_heads(heads, kv_heads, width, width_k, width_v)


def check_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    _check_kind(q, k, v)
    check_rank("q", q, 3, "[total_q, H, D]")
    check_rank("k", k, 3, "[total_k, Hk, D]")
    check_rank("v", v, 3, "[total_k, Hk, Dv]")
    _, heads, width = q.shape
    keys, kv_heads, width_k = k.shape
    values, heads_v, width_v = v.shape
    if values != keys or heads_v != kv_heads:
        raise ValueError(f"v must be [total_k, Hk, Dv] with k's {tuple(k.shape[:2])} in front; got {tuple(v.shape)}")
    _check_heads(heads, kv_heads, width, width_k, width_v)
    _check_starts("cu_seqlens_q", cu_seqlens_q, "q", q)
    _check_starts("cu_seqlens_k", cu_seqlens_k, "k", k)
    check_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "that of cu_seqlens_q")
    check_int("max_seqlen_q", max_seqlen_q, minimum=0)
    check_int("max_seqlen_k", max_seqlen_k, minimum=0)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_lengths("cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlen_q, q.shape[0])
        _check_lengths("cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlen_k, k.shape[0])


def _check_starts(name: str, starts: Tensor, packed_name: str, packed: Tensor) -> None:
    check_integer(name, starts)
    check_rank(name, starts, 1, "[B + 1]")
    check_device(name, starts, packed_name, packed)
    if starts.shape[0] == 0:
        raise ValueError(f"{name} must be [B + 1], starting with 0; got shape (0,)")


def _check_lengths(name: str, starts: Tensor, max_name: str, longest: int, total: int) -> None:
    """What stands in `starts`: to be called where reading it waits for no GPU."""
    if type(starts) is not Tensor:  # of a DTensor, a fake tensor, the values are not at hand
        return
    values = starts.tolist()
    lengths = [after - before for before, after in pairwise(values)]
    if values[0] != 0 or values[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(f"{name} must start at 0, never decrease and end at the {total} packed tokens; got {values}")
    if max(lengths, default=0) > longest:
        raise ValueError(f"{max_name} must be at least the longest sequence, {max(lengths)}; got {longest}")


def _check_kind(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Tensors of one floating-point dtype on one device."""
    check_float("q", q)
    check_tensor("k", k)
    check_tensor("v", v)
    check_dtype("k", k, "q", q)
    check_dtype("v", v, "q", q)
    check_device("k", k, "q", q)
    check_device("v", v, "q", q)


def _check_heads(heads: int, kv_heads: int, width: int, width_k: int, width_v: int) -> None:
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"q must have a multiple of k's {kv_heads} heads; got {heads}")
    if width == 0 or width_v == 0:
        raise ValueError(f"q and v must have a head dimension of at least 1; got {width} and {width_v}")
    if width > MAX_WIDTH:
        raise ValueError(f"q must have a head dimension of at most {MAX_WIDTH}; got {width}")
    if width_v > MAX_WIDTH:
        raise ValueError(f"v must have a head dimension of at most {MAX_WIDTH}; got {width_v}")
    if width_k != width:
        raise ValueError(f"k must have q's head dimension {width}; got {width_k}")


def check_options(
    q: Tensor,
    batch: int,
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    align: str,
) -> None:
    """The keyword options; heads are the second dimension of `q` in both layouts."""
    if scale is not None:
        check_positive("scale", scale)
    if softcap is not None:
        check_positive("softcap", softcap)
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q, batch, q.shape[1])
    if sinks is not None:
        check_float("sinks", sinks)
        check_shape("sinks", sinks, (q.shape[1],), "one logit a query head")
        check_device("sinks", sinks, "q", q)
        if sinks.dtype == torch.float64 != q.dtype:
            raise TypeError(f"sinks may be float64 only where q is; got q of {q.dtype}")
    if align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {', '.join(ALIGNMENTS)}; got {align!r}")


def _check_slopes(slopes: Tensor, q: Tensor, batch: int, heads: int) -> None:
    check_float("alibi_slopes", slopes)
    if slopes.dtype != torch.float32 and not slopes.dtype == q.dtype == torch.float64:
        raise TypeError(f"alibi_slopes must be float32 (or float64 where q is); got {slopes.dtype}")
    if slopes.shape != (heads,) and slopes.shape != (batch, heads):
        raise ValueError(
            f"alibi_slopes must be [H] = ({heads},) or [B, H] = ({batch}, {heads}); got {tuple(slopes.shape)}"
        )
    check_device("alibi_slopes", slopes, "q", q)
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes take no gradient; got a tensor that requires one (pass alibi_slopes.detach())")


def sides(window: tuple[int | None, int | None] | None, causal: bool) -> tuple[int | None, int | None]:
    """(left, right) of the window, a causal mask being a right side of 0."""
    if window is None:
        return None, (0 if causal else None)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right) or None; got {window!r}")
    left, right = window
    if left is not None:
        check_int("window's left side", left, minimum=0)
    if right is not None:
        check_int("window's right side", right, minimum=0)
    return left, (0 if causal else right)


def check_positive(name: str, value: float) -> None:
    if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a float or None; got {type(value).__name__}")
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be finite and > 0; got {value}")
