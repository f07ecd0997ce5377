"""Checks of the arguments of both attention functions, in the order of the signature; they only compare attributes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import dropout, invariance
from foundry_kernels.core.autocast import autocast_dtype
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
from foundry_kernels.ops.flash_attention.options import AttentionArguments, AttentionOptions
from foundry_kernels.ops.flash_attention.pages import NO_PAGES, Pages, check_pages
from foundry_kernels.ops.flash_attention.score_program.arguments import program_of

ALIGNMENTS = ("bottom_right", "top_left")
MAX_HEAD_DIM = 512


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the dtype of an enabled ``torch.autocast``; float64 is not cast, as in autocast itself."""
    if not isinstance(q, Tensor):
        check_tensor("q", q)
    if (dtype := autocast_dtype(q)) is not None:
        castable = [isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 for x in (q, k, v)]
        q, k, v = [x.to(dtype) if yes else x for x, yes in zip((q, k, v), castable, strict=True)]
    return q, k, v


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
    if not isinstance(q, Tensor) or q.dtype not in FLOATS:
        check_float("q", q)
    if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
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


class Scores(NamedTuple):
    """What tensors among the options must fit: the sizes of the scores ``[B, H, T, S]``, and the dtype and the device
    of the tensor `name`."""

    batch: int
    n_heads: int
    n_queries: int
    n_keys: int
    dtype: torch.dtype
    device: torch.device
    name: str = "q"

    def check_device(self, name: str, x: Tensor | AttentionMask) -> None:
        if x.device != self.device:
            raise ValueError(f"{name} must be on {self.name}'s device {self.device}; got {x.device}")

    def refuse_float64(self, name: str, x: Tensor) -> None:
        if x.dtype == torch.float64 != self.dtype:
            raise TypeError(f"{name} may be float64 only where {self.name} is; got {self.name} of {self.dtype}")


#: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; the first two are None for dense tensors.
Lengths = tuple[Tensor | None, Tensor | None, int, int]


def dense_options(q: Tensor, k: Tensor, **given: Any) -> AttentionOptions:
    """The options of a dense call with these keyword arguments, checked."""
    return make_options(q, (None, None, q.shape[2], k.shape[2]), AttentionArguments(**given))


def make_options(q: Tensor, lengths: Lengths, given: AttentionArguments, pages: Pages = NO_PAGES) -> AttentionOptions:
    """The options of a call, checked; the tensors and lengths are those of `check_dense` or `check_varlen`."""
    for name in ("causal", "deterministic", "batch_invariant", "return_lse", "return_stats"):
        flag = getattr(given, name)
        if flag is not True and flag is not False:
            check_bool(name, flag)
    left, right = window_sides(given.window, given.causal)
    scale, softcap, dropout_p = given.scale, given.softcap, given.dropout_p
    if is_dynamo_compiling():
        scale, softcap, dropout_p = constants(scale, softcap, dropout_p)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        check_positive("scale", scale)
    if given.align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {', '.join(ALIGNMENTS)}; got {given.align!r}")
    if softcap is not None:
        check_positive("softcap", softcap)
        check_positive("scale / softcap", scale / softcap)  # which kernels multiply by
    alibi_slopes, sinks, attn_mask = given.alibi_slopes, given.sinks, given.attn_mask
    bias = tiles = bits = seed = heads = mesh = None
    drops = dropout_p != 0.0 or given.dropout_seed is not None or type(dropout_p) is not float
    if drops or not alibi_slopes is sinks is attn_mask is given.score_mod is None:
        packed, n_heads = lengths[0] is not None, q.shape[1]
        batch = q.shape[0] if lengths[0] is None else lengths[0].shape[0] - 1
        scores = Scores(batch, n_heads, lengths[2], lengths[3], q.dtype, q.device)
        mesh = q.device_mesh if type(q) is not Tensor and is_dtensor(q) else None  # type: ignore[attr-defined]
        if alibi_slopes is not None:
            check_alibi_slopes(alibi_slopes, scores)
        if sinks is not None:
            _check_sinks(sinks, scores)
        if attn_mask is not None:
            bias, tiles, bits = _mask_tensors(attn_mask, scores, packed, mesh)
    drop = dropout.arguments(q, dropout_p, given.dropout_seed, "q") if drops else ()
    if drop and pages is not NO_PAGES:
        raise ValueError(
            f"dropout_p must be 0, and dropout_seed None, with block_table; got {dropout_p} and {given.dropout_seed}"
        )
    if drop:
        seed = drop[1]
    if mesh is not None and (drop or given.score_mod is not None):
        heads = _global_heads(scores, mesh)
    code = captured = None
    if given.score_mod is not None:
        code, captured = program_of(given.score_mod, q, scores[:4], mesh)
    batch_invariant = given.batch_invariant or invariance.on
    return AttentionOptions(
        *lengths,
        *pages,
        scale=scale,
        window_left=left,
        window_right=right,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        attn_mask=bias,
        mask_tiles=tiles,
        mask_bits=bits,
        dropout_p=drop[0] if drop else None,
        dropout_seed=seed,
        dropout_heads=heads,
        score_mod=code,
        score_tensors=captured,
        bottom_right=given.align == "bottom_right",
        deterministic=given.deterministic or batch_invariant,
        batch_invariant=batch_invariant,
        return_lse=given.return_lse,
        return_stats=given.return_stats,
    )


def _mask_tensors(
    attn_mask: Tensor | AttentionMask, scores: Scores, packed: bool, mesh: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`attn_mask`, `mask_tiles` and `mask_bits` of the options."""
    if packed:
        raise ValueError(
            "attn_mask must be None for packed sequences, whose tokens have no common place in a mask; pad them, or "
            "put them in one row with AttentionMask.documents"
        )
    check_mask(attn_mask, scores)
    if isinstance(attn_mask, AttentionMask):
        tiles, bits = attn_mask.at(scores.n_queries, scores.n_keys)
        return None, _replicated(tiles, mesh), _replicated(bits, mesh)
    rank = attn_mask.dim()
    return attn_mask[(None,) * (4 - rank)] if rank < 4 else attn_mask, None, None


def check_mask(attn_mask: Tensor | AttentionMask, scores: Scores) -> None:
    """A mask of these scores, or a bias that is added to them."""
    wanted = scores[:4]
    if isinstance(attn_mask, AttentionMask):
        b, h, t, s = attn_mask.shape
        # Compared one by one: to torch.compile, a size that varies is in no tuple.
        fits = (b == 1 or b == wanted[0]) and (h == 1 or h == wanted[1])
        if not (fits and (t is None or t == wanted[2]) and (s is None or s == wanted[3])):
            raise ValueError(f"attn_mask must broadcast to [B, H, T, S] = {wanted}; got a mask of {attn_mask.shape}")
        scores.check_device("attn_mask", attn_mask)
        return
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor or an AttentionMask; got {type(attn_mask).__name__}")
    if attn_mask.dtype != torch.bool:
        if attn_mask.dtype not in FLOATS:
            raise TypeError(f"attn_mask must be bool, float32, bfloat16, float16 or float64; got {attn_mask.dtype}")
        scores.refuse_float64("attn_mask", attn_mask)
    scores.check_device("attn_mask", attn_mask)
    shape = attn_mask.shape
    if len(shape) > 4 or any(n != 1 and n != m for n, m in zip(shape[::-1], wanted[::-1], strict=False)):
        raise ValueError(f"attn_mask must broadcast to [B, H, T, S] = {tuple(wanted)}; got shape {tuple(shape)}")


def _global_heads(scores: Scores, mesh: Any) -> Tensor:
    """``batch << 32 | head`` of each head of the whole, of which each device of the mesh then gets its own."""
    batch = torch.arange(scores.batch, device=scores.device)
    return _replicated((batch[:, None] << 32) + torch.arange(scores.n_heads, device=scores.device), mesh)


def _replicated(x: Tensor, mesh: Any) -> Tensor:
    """x, which is the same on all devices, as a DTensor where there is a mesh."""
    if mesh is None or is_dtensor(x):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def check_alibi_slopes(alibi_slopes: Tensor, scores: Scores) -> None:
    check_float("alibi_slopes", alibi_slopes)
    if alibi_slopes.dtype != torch.float32 and not alibi_slopes.dtype == scores.dtype == torch.float64:
        raise TypeError(f"alibi_slopes must be float32 (or float64 where {scores.name} is); got {alibi_slopes.dtype}")
    batch, n_heads = scores.batch, scores.n_heads
    if alibi_slopes.shape != (n_heads,) and alibi_slopes.shape != (batch, n_heads):
        raise ValueError(
            f"alibi_slopes must be [H] = ({n_heads},) or [B, H] = ({batch}, {n_heads}); got {tuple(alibi_slopes.shape)}"
        )
    scores.check_device("alibi_slopes", alibi_slopes)
    if alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes take no gradient; got a tensor that requires one (pass alibi_slopes.detach())")


def _check_sinks(sinks: Tensor, scores: Scores) -> None:
    check_float("sinks", sinks)
    check_shape("sinks", sinks, (scores.n_heads,), "one logit a query head")
    scores.check_device("sinks", sinks)
    scores.refuse_float64("sinks", sinks)


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
