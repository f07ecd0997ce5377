"""Checks of the arguments of both attention functions, in the order of the signature; they only compare attributes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import dropout, invariance
from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_dtype,
    check_float,
    check_int,
    check_integer,
    check_positive,
    check_rank,
    check_shape,
    check_tensor,
    constants,
)
from foundry_kernels.core.registry import FLOATS, is_dtensor
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.pages import NO_PAGES, Pages, check_pages

ALIGNMENTS = ("bottom_right", "top_left")
MAX_HEAD_DIM = 512


def check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_kind(q, k, v)
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    if not len(shape_q) == len(shape_k) == len(shape_v) == 4:
        check_rank("q", q, 4, "[B, H, T, D]")
        check_rank("k", k, 4, "[B, Hk, S, D]")
        check_rank("v", v, 4, "[B, Hk, S, Dv]")
    batch, n_heads, _, head_dim = shape_q
    batch_k, n_kv_heads, seqlen_k, head_dim_k = shape_k
    batch_v, n_heads_v, seqlen_v, head_dim_v = shape_v
    if batch_k != batch:
        raise ValueError(f"k must have q's batch size {batch}; got shape {tuple(k.shape)}")
    if batch_v != batch or n_heads_v != n_kv_heads or seqlen_v != seqlen_k:
        raise ValueError(f"v must be [B, Hk, S, Dv] with k's {tuple(k.shape[:3])} in front; got shape {tuple(v.shape)}")
    check_heads(n_heads, n_kv_heads, head_dim, head_dim_k, head_dim_v)


def check_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    if cu_seqlens_k is None:
        raise TypeError("cu_seqlens_k must be a torch.Tensor: it may be None only where block_table is given")
    check_kind(q, k, v)
    check_rank("q", q, 3, "[total_q, H, D]")
    check_rank("k", k, 3, "[total_k, Hk, D]")
    check_rank("v", v, 3, "[total_k, Hk, Dv]")
    _, n_heads, head_dim = q.shape
    total_k, n_kv_heads, head_dim_k = k.shape
    total_v, n_heads_v, head_dim_v = v.shape
    if total_v != total_k or n_heads_v != n_kv_heads:
        raise ValueError(f"v must be [total_k, Hk, Dv] with k's {tuple(k.shape[:2])} in front; got {tuple(v.shape)}")
    check_heads(n_heads, n_kv_heads, head_dim, head_dim_k, head_dim_v)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "k", k)
    check_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "that of cu_seqlens_q")
    check_int("max_seqlen_q", max_seqlen_q, minimum=0)
    check_int("max_seqlen_k", max_seqlen_k, minimum=0)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        check_lengths("cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlen_q, q.shape[0])
        check_lengths("cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlen_k, k.shape[0])


def check_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
) -> Pages:
    """Checks the same of keys and values in pages; returns where those of each sequence are."""
    check_kind(q, k, v)
    check_rank("q", q, 3, "[total_q, H, D]")
    layout = "[num_blocks, page_block_size, Hk, D] with block_table"
    check_rank("k", k, 4, layout)
    check_rank("v", v, 4, layout)
    check_shape("v", v, (*k.shape[:3], v.shape[3]), "k's pages and heads")
    if k.shape[1] == 0:
        raise ValueError(f"k must have pages of at least one position; got shape {tuple(k.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name} must have a last stride of 1: pages are read where they are; got {x.stride()}")
    check_heads(q.shape[1], k.shape[2], q.shape[2], k.shape[3], v.shape[3])
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", q)
    check_int("max_seqlen_q", max_seqlen_q, minimum=0)
    check_int("max_seqlen_k", max_seqlen_k, minimum=0)
    if (cu_seqlens_k is None) == (seqused_k is None):
        given = "neither" if seqused_k is None else "both"
        raise ValueError(f"one of cu_seqlens_k and seqused_k must be given with block_table; got {given}")
    if cu_seqlens_k is not None:
        check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "k", k)
        check_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "that of cu_seqlens_q")
        seqused_k = cu_seqlens_k.diff()
    assert seqused_k is not None
    lengths = "seqused_k" if cu_seqlens_k is None else "the lengths in cu_seqlens_k"
    pages = check_pages(block_table, seqused_k, leftpad_k, cu_seqlens_q.shape[0] - 1, k, (lengths, "leftpad_k", "k"))
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        check_lengths("cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlen_q, q.shape[0])
        if type(seqused_k) is Tensor and seqused_k.numel() and (longest := int(seqused_k.max())) > max_seqlen_k:
            raise ValueError(f"max_seqlen_k must be at least the longest sequence, {longest}; got {max_seqlen_k}")
    return pages


def check_cu_seqlens(name: str, cu_seqlens: Tensor, packed_name: str, packed: Tensor) -> None:
    check_integer(name, cu_seqlens, 1, "[B + 1]")
    check_device(name, cu_seqlens, packed_name, packed)
    if cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} must be [B + 1], starting with 0; got shape (0,)")


def check_lengths(name: str, cu_seqlens: Tensor, max_name: str, max_seqlen: int, total: int) -> None:
    """The values of `cu_seqlens`; call this where reading them does not wait for a GPU."""
    if type(cu_seqlens) is not Tensor:  # a DTensor or a fake tensor has no values to read
        return
    values = cu_seqlens.tolist()
    lengths = [after - before for before, after in pairwise(values)]
    if values[0] != 0 or values[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(f"{name} must start at 0, never decrease and end at the {total} packed tokens; got {values}")
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"{max_name} must be at least the longest sequence, {max(lengths)}; got {max_seqlen}")


def check_kind(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Tensors of one floating-point dtype on one device."""
    check_float("q", q)
    check_tensor("k", k)
    check_tensor("v", v)
    if not q.dtype == k.dtype == v.dtype:
        check_dtype("k", k, "q", q)
        check_dtype("v", v, "q", q)
    if not (q.is_cpu and k.is_cpu and v.is_cpu):  # which is known sooner than whether two devices are equal
        check_device("k", k, "q", q)
        check_device("v", v, "q", q)


def check_heads(n_heads: int, n_kv_heads: int, head_dim: int, head_dim_k: int, head_dim_v: int) -> None:
    if n_kv_heads == 0 or n_heads % n_kv_heads != 0:
        raise ValueError(f"q must have a multiple of k's {n_kv_heads} heads; got {n_heads}")
    if head_dim == 0 or head_dim_v == 0:
        raise ValueError(f"q and v must have a head dimension of at least 1; got {head_dim} and {head_dim_v}")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"q must have a head dimension of at most {MAX_HEAD_DIM}; got {head_dim}")
    if head_dim_v > MAX_HEAD_DIM:
        raise ValueError(f"v must have a head dimension of at most {MAX_HEAD_DIM}; got {head_dim_v}")
    if head_dim_k != head_dim:
        raise ValueError(f"k must have q's head dimension {head_dim}; got {head_dim_k}")


def make_options(
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | AttentionMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    align: str = "bottom_right",
    deterministic: bool = True,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_stats: bool = False,
    pages: Pages | None = None,
) -> AttentionOptions:
    """The options of a call, checked; the tensors and lengths are those of `check_dense` or `check_varlen`."""
    flags = (
        ("causal", causal), ("deterministic", deterministic), ("batch_invariant", batch_invariant),
        ("return_lse", return_lse), ("return_stats", return_stats),
    )  # fmt: skip
    for name, flag in flags:
        if flag is not True and flag is not False:
            check_bool(name, flag)
    left, right = window_sides(window, causal)
    if is_dynamo_compiling():
        scale, softcap, dropout_p = constants(scale, softcap, dropout_p)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        check_positive("scale", scale)
    if align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {', '.join(ALIGNMENTS)}; got {align!r}")
    if softcap is not None:
        check_positive("softcap", softcap)
        check_positive("scale / softcap", scale / softcap)  # which kernels multiply by
    if invariance.on:
        batch_invariant = True
    if alibi_slopes is not None:
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        check_alibi_slopes(alibi_slopes, q, batch, n_heads=q.shape[1])
    if sinks is not None:
        _check_sinks(sinks, q, n_heads=q.shape[1])
    bias = tiles = bits = seed = heads = None
    if attn_mask is not None:
        bias, tiles, bits = _mask_tensors(attn_mask, q, cu_seqlens_q is not None, max_seqlen_k)
    drop: tuple[float, Tensor] | tuple[()] = ()
    if dropout_p != 0.0 or dropout_seed is not None or type(dropout_p) is not float:
        drop = dropout.arguments(q, dropout_p, dropout_seed, "q")
    if drop and pages is not None:
        raise ValueError(
            f"dropout_p must be 0, and dropout_seed None, with block_table; got {dropout_p} and {dropout_seed}"
        )
    if drop:
        seed = drop[1]
        if is_dtensor(q):
            heads = _global_heads(q, q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1)
    return AttentionOptions(  # by position, which takes half the time
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *(pages or NO_PAGES), scale, left, right,
        softcap, alibi_slopes, sinks,
        bias, tiles, bits, drop[0] if drop else None, seed, heads,
        align == "bottom_right", deterministic or batch_invariant, batch_invariant, return_lse, return_stats,
    )  # fmt: skip


def _mask_tensors(
    attn_mask: Tensor | AttentionMask, q: Tensor, packed: bool, n_keys: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`attn_mask`, `mask_tiles` and `mask_bits` of the options."""
    if packed:
        raise ValueError(
            "attn_mask must be None for packed sequences, whose tokens have no common place in a mask; pad them, or "
            "put them in one row with AttentionMask.documents"
        )
    wanted = (*q.shape[:3], n_keys)
    check_mask(attn_mask, wanted, q, "q")
    if isinstance(attn_mask, AttentionMask):
        tiles, bits = attn_mask.at(*wanted[2:])
        return None, _replicated(tiles, q), _replicated(bits, q)
    rank = attn_mask.dim()
    return attn_mask[(None,) * (4 - rank)] if rank < 4 else attn_mask, None, None


def check_mask(attn_mask: Tensor | AttentionMask, wanted: tuple[int, int, int, int], x: Tensor, name: str) -> None:
    """A mask or bias of scores ``[B, H, T, S]`` of the sizes `wanted`, for x, which is called `name` in errors."""
    if isinstance(attn_mask, AttentionMask):
        b, h, t, s = attn_mask.shape
        # Compared one by one: to torch.compile, a size that varies is in no tuple.
        fits = (b == 1 or b == wanted[0]) and (h == 1 or h == wanted[1])
        if not (fits and (t is None or t == wanted[2]) and (s is None or s == wanted[3])):
            raise ValueError(f"attn_mask must broadcast to [B, H, T, S] = {wanted}; got a mask of {attn_mask.shape}")
        if attn_mask.device != x.device:
            raise ValueError(f"attn_mask must be on {name}'s device {x.device}; got {attn_mask.device}")
        return
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor or an AttentionMask; got {type(attn_mask).__name__}")
    if attn_mask.dtype != torch.bool:
        if attn_mask.dtype not in FLOATS:
            raise TypeError(f"attn_mask must be bool, float32, bfloat16, float16 or float64; got {attn_mask.dtype}")
        if attn_mask.dtype == torch.float64 != x.dtype:
            raise TypeError(f"attn_mask may be float64 only where {name} is; got {name} of {x.dtype}")
    check_device("attn_mask", attn_mask, name, x)
    shape = attn_mask.shape
    if len(shape) > 4 or any(n != 1 and n != m for n, m in zip(shape[::-1], wanted[::-1], strict=False)):
        raise ValueError(f"attn_mask must broadcast to [B, H, T, S] = {tuple(wanted)}; got shape {tuple(shape)}")


def _global_heads(q: Tensor, n_batch: int) -> Tensor:
    """``batch << 32 | head`` of each head of the whole, of which each device then gets its own: q is a DTensor."""
    batch, head = torch.arange(n_batch, device=q.device), torch.arange(q.shape[1], device=q.device)
    return _replicated((batch[:, None] << 32) + head, q)


def _replicated(x: Tensor, q: Tensor) -> Tensor:
    """x, which is the same on all devices, as a DTensor where q is one."""
    if not is_dtensor(q) or is_dtensor(x):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh = q.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def check_alibi_slopes(alibi_slopes: Tensor, q: Tensor, batch: int, n_heads: int) -> None:
    check_float("alibi_slopes", alibi_slopes)
    if alibi_slopes.dtype != torch.float32 and not alibi_slopes.dtype == q.dtype == torch.float64:
        raise TypeError(f"alibi_slopes must be float32 (or float64 where q is); got {alibi_slopes.dtype}")
    if alibi_slopes.shape != (n_heads,) and alibi_slopes.shape != (batch, n_heads):
        raise ValueError(
            f"alibi_slopes must be [H] = ({n_heads},) or [B, H] = ({batch}, {n_heads}); got {tuple(alibi_slopes.shape)}"
        )
    check_device("alibi_slopes", alibi_slopes, "q", q)
    if alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes take no gradient; got a tensor that requires one (pass alibi_slopes.detach())")


def _check_sinks(sinks: Tensor, q: Tensor, n_heads: int) -> None:
    check_float("sinks", sinks)
    check_shape("sinks", sinks, (n_heads,), "one logit a query head")
    check_device("sinks", sinks, "q", q)
    if sinks.dtype == torch.float64 != q.dtype:
        raise TypeError(f"sinks may be float64 only where q is; got q of {q.dtype}")


def window_sides(window: tuple[int | None, int | None] | None, causal: bool) -> tuple[int | None, int | None]:
    """(left, right) of the window, None where there is no bound; a causal mask bounds it by 0 on the right."""
    if window is None:
        return None, (0 if causal else None)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right) or None; got {window!r}")
    left, right = _window_side("left", window[0]), _window_side("right", window[1])
    return left, (0 if causal else right)


def _window_side(name: str, side: int | None) -> int | None:
    if side is None:
        return None
    check_int(f"window's {name} side", side)
    if side < -1:
        raise ValueError(f"window's {name} side must be >= 0, or None or -1 for no bound; got {side}")
    return None if side == -1 else side
