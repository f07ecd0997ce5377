"""flash-attn's rotary embedding: of one tensor, and in place of the queries and keys of a packed one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, SupportsIndex

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
        inplace: write the result into `x`, and return `x`. A leaf that requires a gradient is overwritten too, as in
            flash-attn: the result is another tensor on the graph that shares x's memory, and `x` stays a leaf, whose
            gradient belongs to its previous values (`torch.compile` does not support this).
        seqlen_offsets: the position of the first token of every sequence, or ``[B]`` int32 or int64, one for each.
        cu_seqlens: ``[B + 1]`` int32 or int64: where each packed sequence begins, and the total.
        max_seqlen: at least the length of the longest sequence; must be given with `cu_seqlens`.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        A tensor of x's shape and dtype: a new one, or `x` itself. Gradients flow in both cases.

    Raises:
        TypeError: an argument is not a tensor or has the wrong kind of dtype.
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
    return _store(x, [(..., out)]) if inplace else out


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: SupportsIndex | Tensor = 0,
    num_heads_q: SupportsIndex | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """:func:`apply_rotary_emb` in place of the queries and keys in one tensor; the values stay as they are.

    Args:
        qkv: ``[B, T, 3, H, D]``, or ``[B, T, H + 2 Hk, D]`` with `num_heads_q`: heads of queries, keys, then values.
        cos, sin: ``[P, R/2]``, the tables of the queries and, without `cos_k` and `sin_k`, of the keys.
        cos_k, sin_k: tables of the keys, given together.
        num_heads_q: H, for a `qkv` of four dimensions.
        others: as for :func:`apply_rotary_emb`.

    Returns:
        `qkv`, or a tensor with its memory where it is a leaf that requires a gradient.

    Raises:
        As :func:`apply_rotary_emb`; nothing is written then.
    """
    check_float("qkv", qkv)
    if (cos_k is None) != (sin_k is None):
        raise ValueError("cos_k and sin_k must be given together; got one of them")
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv must be [B, T, 3, H, D]; got shape {tuple(qkv.shape)}")
        n_q, ends = 1, (1, 2)
    else:
        check_rank("qkv", qkv, 4, "[B, T, 3, H, D], or [B, T, H + 2 Hk, D] with num_heads_q")
        if num_heads_q is None:
            raise ValueError("num_heads_q must be given for qkv of [B, T, H + 2 Hk, D]; got None")
        n_q = as_int("num_heads_q", num_heads_q)
        if n_q < 1 or n_q >= qkv.shape[2] or (qkv.shape[2] - n_q) % 2:
            raise ValueError(f"num_heads_q must leave an even number of qkv's {qkv.shape[2]} heads; got {n_q}")
        ends = (n_q, n_q + (qkv.shape[2] - n_q) // 2)
    tables = [(slice(0, ends[1]), cos, sin)]  # both at once
    if cos_k is not None and sin_k is not None:
        tables = [(slice(0, n_q), cos, sin), (slice(*ends), cos_k, sin_k)]
    return _rotate_parts(qkv, tables, interleaved, seqlen_offsets, backend)


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: SupportsIndex | Tensor = 0,
    *,
    backend: str = "auto",
) -> Tensor:
    """:func:`apply_rotary_emb` in place of the keys in ``kv [B, S, 2, Hk, D]``; the values stay as they are.

    Returns `kv`, or a tensor with its memory where it is a leaf that requires a gradient. Arguments and errors are as
    for :func:`apply_rotary_emb`.
    """
    check_float("kv", kv)
    check_rank("kv", kv, 5, "[B, S, 2, Hk, D]")
    if kv.shape[2] != 2:
        raise ValueError(f"kv must be [B, S, 2, Hk, D]; got shape {tuple(kv.shape)}")
    return _rotate_parts(kv, [(slice(0, 1), cos, sin)], interleaved, seqlen_offsets, backend)


def _rotate_parts(
    x: Tensor,
    tables: list[tuple[slice, Tensor, Tensor]],
    interleaved: bool,
    seqlen_offsets: SupportsIndex | Tensor,
    backend: str,
) -> Tensor:
    """Rotates these parts of dimension 2 of x in place, each by its tables."""
    parts: list[tuple[Any, Tensor]] = []
    for of, cos, sin in tables:
        part = x[:, :, of]
        heads = part if x.dim() == 4 else part.flatten(2, 3)
        out = apply_rotary_emb(heads, cos, sin, interleaved, seqlen_offsets=seqlen_offsets, backend=backend)
        parts.append(((slice(None), slice(None), of), out.view(part.shape)))
    return _store(x, parts)


def _store(x: Tensor, parts: list[tuple[Any, Tensor]]) -> Tensor:
    """Writes each tensor to its place in x, and returns x with their gradients."""
    if torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling() and _of_leaf(x):
        places, outs = zip(*parts, strict=True)
        return _StoreInLeaf.apply(x.detach(), x, places, *outs)
    for place, out in parts:
        x[place] = out
    return x


def _of_leaf(x: Tensor) -> bool:
    return x.is_leaf or (x._base is not None and x._base.is_leaf)


class _StoreInLeaf(torch.autograd.Function):
    """Writes to a leaf in place, which autograd forbids because the leaf would lose its place on the graph. Here the
    leaf keeps it, and the result shares its memory."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, leaf: Tensor, places: tuple[Any, ...], *outs: Tensor) -> Tensor:
        for place, out in zip(places, outs, strict=True):
            memory[place] = out
        ctx.places = places
        ctx.mark_dirty(memory)
        return memory

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        stayed = None
        if ctx.places != (...,):
            stayed = dout.clone()
            for place in ctx.places:
                stayed[place] = 0.0
        return None, stayed, None, *(dout[place] for place in ctx.places)


def _check_lengths(cu_seqlens: Tensor, max_seqlen: int, x: Tensor) -> None:
    check_integer("cu_seqlens", cu_seqlens, 1, "[B + 1]")
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
