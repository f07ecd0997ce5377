"""flash-attn's rotary embedding of one tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import SupportsIndex

import torch
from torch import Tensor

from foundry_kernels.compat.scalars import as_int
from foundry_kernels.core.checks import check_device, check_float, check_integer, check_rank, check_shape
from foundry_kernels.ops.rope import rope


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: SupportsIndex | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: SupportsIndex | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """:func:`foundry_kernels.rope` of one tensor, by flash-attn's signature.

    Args:
        x: ``[B, T, H, D]``, or ``[total, H, D]`` with `cu_seqlens`; float32, bfloat16, float16 or float64, any strides.
        cos: ``[P, R/2]``, 2 <= R <= D: a table over positions, which has a row for each one that occurs. Any
            floating-point dtype. Takes no gradient. Dimensions from R on stay as they are.
        sin: of cos's shape and dtype.
        interleaved: False rotates the pairs ``(i, i + R/2)``, True ``(2i, 2i + 1)``.
        inplace: write the result into `x`, and return `x`.
        seqlen_offsets: the position of the first token of every sequence, or ``[B]`` int32 or int64, one for each.
        cu_seqlens: ``[B + 1]`` int32 or int64: where each packed sequence begins, and the total.
        max_seqlen: at least the length of the longest sequence; must be given with `cu_seqlens`.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        A tensor of x's shape and dtype: a new one, or `x` itself. Gradients flow in both cases; as with every
        operation in place, not where `x` is a leaf that requires one.

    Raises:
        TypeError: an argument is no tensor or has the wrong kind of dtype.
        ValueError: shapes or devices do not fit together, the tables are too short or require a gradient.
        IndexError: on the CPU, an offset in a tensor that leads outside of the tables.
        BackendUnavailable: the named backend does not support this device or dtype.
    """
    check_float("x", x)
    if cu_seqlens is None:
        check_rank("x", x, 4, "[B, T, H, D] without cu_seqlens")
        batch, tokens, layout = x.shape[0], x.shape[1], x
    else:
        check_rank("x", x, 3, "[total, H, D] with cu_seqlens")
        if max_seqlen is None:
            raise ValueError("max_seqlen must be given with cu_seqlens; got None")
        _check_lengths(cu_seqlens, as_int("max_seqlen", max_seqlen), x)
        batch, tokens, layout = cu_seqlens.shape[0] - 1, x.shape[0], x[None]
    for name, table in (("cos", cos), ("sin", sin)):
        check_float(name, table)
        check_rank(name, table, 2, "[P, R/2]")
    check_shape("sin", sin, cos.shape, "that of cos")

    positions: Tensor | None = None
    if isinstance(seqlen_offsets, Tensor) and seqlen_offsets.dim() > 0:
        check_integer("seqlen_offsets", seqlen_offsets)
        check_shape("seqlen_offsets", seqlen_offsets, (batch,), "one for each sequence")
        check_device("seqlen_offsets", seqlen_offsets, "x", x)
        firsts: Tensor | None = seqlen_offsets.long()
    else:
        first, firsts = as_int("seqlen_offsets", seqlen_offsets), None
        if first < 0:
            raise ValueError(f"seqlen_offsets must be >= 0; got {first}")
        if cu_seqlens is None and first + tokens > cos.shape[0]:
            raise ValueError(f"cos must have a row for each of {first + tokens} positions; got {tuple(cos.shape)}")
        cos, sin = cos[first:], sin[first:]
    token = torch.arange(tokens, device=x.device)
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens[1:].long().contiguous(), token, right=True).clamp(max=batch - 1)
        begins = cu_seqlens[:-1].long()
        positions = token + (-begins if firsts is None else firsts - begins)[sequence]
    elif firsts is not None:
        positions = firsts[:, None] + token

    heads_first = layout.transpose(1, 2)
    none = heads_first[:, :0]
    out, _ = rope(heads_first, none, cos, sin, interleaved=interleaved, positions=positions, backend=backend)
    out = out.transpose(1, 2) if cu_seqlens is None else out.transpose(1, 2)[0]
    return x.copy_(out) if inplace else out


def _check_lengths(cu_seqlens: Tensor, max_seqlen: int, x: Tensor) -> None:
    check_integer("cu_seqlens", cu_seqlens)
    check_rank("cu_seqlens", cu_seqlens, 1, "[B + 1]")
    check_device("cu_seqlens", cu_seqlens, "x", x)
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens must be [B + 1], starting with 0; got shape (0,)")
    if x.device.type != "cpu" or torch.compiler.is_compiling():  # reading it would wait for the GPU
        return
    values = cu_seqlens.tolist()
    lengths = [after - before for before, after in pairwise(values)]
    if values[0] != 0 or values[-1] != x.shape[0] or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at the {x.shape[0]} packed tokens; got {values}"
        )
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"max_seqlen must be at least the longest sequence, {max(lengths)}; got {max_seqlen}")
