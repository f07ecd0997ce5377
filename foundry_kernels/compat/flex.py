"""PyTorch's flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from foundry_kernels.compat.flex_mask import attention_mask
from foundry_kernels.compat.scalars import as_bool, as_float
from foundry_kernels.compat.sdpa import positive_scale
from foundry_kernels.core.checks import check_float, check_rank
from foundry_kernels.ops.flash_attention import flash_attention

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    backend: str = "auto",
) -> Any:
    """``torch.nn.attention.flex_attention.flex_attention`` on this package's kernels, with all gradients on a CPU too.

    Args:
        query: ``[B, H, T, D]``, any strides.
        key: ``[B, Hk, S, D]``; a batch of 1 is the same for all queries.
        value: ``[B, Hk, S, Dv]``, likewise.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, see :func:`foundry_kernels.flash_attention`. It is not
            compiled, but read once as an expression.
        block_mask: a `BlockMask`, as `create_block_mask` makes it, with blocks of any size. The first call makes an
            :class:`foundry_kernels.AttentionMask` of it, which is kept until the BlockMask is freed. Where a tensor
            that its `mask_mod` reads was changed in place, it is made again.
        scale: factor on the scores before `score_mod`; ``1 / sqrt(D)`` if None.
        enable_gqa: whether H may be a multiple of Hk.
        return_lse: whether to return lse too.
        kernel_options: a dict, not used: it tunes PyTorch's kernels.
        return_aux: an `AuxRequest`: which of lse and max_scores to return.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``out [B, H, T, Dv]`` of query's dtype; ``(out, lse)`` with `return_lse`; ``(out, AuxOutput(lse, max_scores))``
        with `return_aux`. Both are ``[B, H, T]`` float32 (float64 for float64), lse a natural logarithm. A query that
        sees no key gives 0, and -inf for both.

    Raises:
        TypeError, ValueError: an argument does not fit. BackendUnavailable: the named backend does not support this.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_float(name, x)
        check_rank(name, x, 4, "[B, H, T, D]" if name == "query" else "[B, Hk, S, D]")
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(f"kernel_options must be a dict or None; got {type(kernel_options).__name__}")
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux must be an AuxRequest or None; got {type(return_aux).__name__}")
    with_lse = as_bool("return_lse", return_lse)
    if with_lse and return_aux is not None:
        raise ValueError("return_lse must be False with return_aux: ask for AuxRequest(lse=True)")
    if not as_bool("enable_gqa", enable_gqa) and key.shape[1] != query.shape[1]:
        raise ValueError(f"key must have query's {query.shape[1]} heads unless enable_gqa=True; got {key.shape[1]}")
    if key.shape[0] == 1 == value.shape[0] and query.shape[0] != 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    mask = None
    if block_mask is not None:
        mask = attention_mask(block_mask, (*query.shape[:3], key.shape[2]))
    query, factor = positive_scale(query, None if scale is None else as_float("scale", scale))
    max_scores = return_aux is not None and return_aux.max_scores
    with_lse = with_lse or (return_aux is not None and return_aux.lse)
    options: dict[str, Any] = {} if score_mod is None else {"score_mod": score_mod}
    found = flash_attention(
        query, key, value, attn_mask=mask, scale=factor, align="top_left", return_lse=with_lse,
        return_stats=max_scores, backend=backend, **options,
    )  # fmt: skip
    if return_aux is None:
        return found
    out, *others = found if isinstance(found, tuple) else (found,)
    return out, AuxOutput(lse=others[0] if with_lse else None, max_scores=others[-1] if max_scores else None)
