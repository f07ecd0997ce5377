"""PyTorch's `torch.nn.attention.varlen.varlen_attn`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsFloat, SupportsIndex

from torch import Tensor

from foundry_kernels.compat.flash_attn_3 import attend_segments
from foundry_kernels.compat.kvcache import check_num_splits
from foundry_kernels.compat.scalars import as_float, as_int, as_window
from foundry_kernels.compat.sdpa import positive_scale
from foundry_kernels.core.checks import check_float, check_rank
from foundry_kernels.ops.flash_attention import Options, flash_attention_varlen


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: SupportsIndex,
    max_k: SupportsIndex,
    *,
    return_aux: Any = None,
    scale: SupportsFloat | None = None,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: SupportsIndex | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``torch.nn.attention.varlen.varlen_attn`` on this package's kernels, on CPUs too.

    Args:
        query: ``[total_q, H, D]`` float32, bfloat16, float16 or float64, any strides.
        key: ``[total_k, Hk, D]``.
        value: ``[total_k, Hk, Dv]``.
        cu_seq_q, cu_seq_k: ``[B + 1]`` int32 or int64: where each sequence begins, and the total.
        max_q, max_k: at least the length of the longest sequence.
        return_aux: an ``AuxRequest`` of that module, whose `lse` says whether to return it, or None.
        scale: factor on the scores, of any sign; ``1 / sqrt(D)`` if None.
        window_size: ``(left, right)``, -1 for unbounded: (-1, 0) is causal, the last query being where the last key is.
        enable_gqa: whether H may be any multiple of Hk; otherwise they must be equal.
        seqused_k: ``[B]`` int32 or int64, or None: only this number of each sequence's first keys is used. Gradients
            are supported.
        block_table: ``[B, max_blocks]`` int32 or int64: key is ``[num_blocks, page_block_size, Hk, D]``, value too, see
            :func:`foundry_kernels.flash_attention_varlen`. Then `seqused_k` must be given, and a backward
            pass raises RuntimeError.
        num_splits: accepted and ignored; each backend chooses how to split the work.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``[total_q, H, Dv]``, or this and the lse ``[H, total_q]`` float32. A query that sees no key has output 0 and
        lse -inf.

    Raises:
        TypeError, ValueError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype.
    """
    paged = block_table is not None
    layout = "[num_blocks, page_block_size, Hk, D]" if paged else "[total_k, Hk, D]"
    for name, x, rank, wanted in (("query", query, 3, "[total_q, H, D]"), ("key", key, 4 if paged else 3, layout)):
        check_float(name, x)
        check_rank(name, x, rank, wanted)
    if paged and seqused_k is None:
        raise ValueError("seqused_k must be given with block_table: pages do not say how many keys there are")
    if not paged and cu_seq_k is None:
        raise ValueError("cu_seq_k must be given: it may be None only with block_table")
    if not enable_gqa and query.shape[1] != key.shape[-2]:
        raise ValueError(f"key must have query's {query.shape[1]} heads unless enable_gqa=True; got {key.shape[-2]}")
    if num_splits is not None:
        check_num_splits(num_splits)
    left, right = as_window(window_size)
    query, factor = positive_scale(query, None if scale is None else as_float("scale", scale))
    options: Options = {
        "scale": factor,
        "window": None if left is None and right is None else (left, right),
        "softcap": None,
        "backend": backend,
    }
    if block_table is not None:
        longest = (as_int("max_q", max_q), as_int("max_k", max_k))
        out, lse = flash_attention_varlen(
            query, key, value, cu_seq_q, None, *longest, block_table=block_table, seqused_k=seqused_k, return_lse=True,
            **options,
        )  # fmt: skip
        return (out, lse) if return_aux is not None and return_aux.lse else out
    assert cu_seq_k is not None
    packed = (query, key, value, cu_seq_q, cu_seq_k, as_int("max_q", max_q), as_int("max_k", max_k))
    out, lse = attend_segments(packed, None, seqused_k, None, 0, options)
    return (out, lse) if return_aux is not None and return_aux.lse else out
