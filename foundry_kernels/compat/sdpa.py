"""PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from foundry_kernels.compat.scalars import as_bool, as_float
from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.checks import check_dtype, check_float
from foundry_kernels.core.registry import is_subclass
from foundry_kernels.ops.flash_attention import flash_attention
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.checks import MAX_HEAD_DIM

#: PyTorch's own function, even if `torch.nn.functional` is patched.
TORCHS: Any = torch._C._nn.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | AttentionMask | None = None,
    dropout_p: SupportsFloat = 0.0,
    is_causal: bool = False,
    scale: SupportsFloat | None = None,
    enable_gqa: bool = False,
    *,
    backend: str = "auto",
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` on this package's kernels.

    Args:
        query: ``[..., H, T, D]`` or ``[T, D]``, any strides.
        key: ``[..., Hk, S, D]``.
        value: ``[..., Hv, S, Dv]``. The dimensions in front of the heads are broadcast between all three.
        attn_mask: bool, True where a query sees a key, or a floating bias of the scores, of any shape that broadcasts
            to ``[..., H, T, S]``; a bias that requires a gradient gets one. Or an
            :class:`foundry_kernels.AttentionMask`, whose B is that of all dimensions in front of the heads together, or
            a ``CausalBias`` of `torch.nn.attention.bias`, which is not materialized.
        dropout_p: in [0, 1]: the probability that a weight is dropped, whatever the mode of a module. The seed
            comes from torch's default generator of the query's device; it drops other weights than PyTorch.
        is_causal: query i sees keys 0 .. i, the first query being aligned with the first key. Not with `attn_mask`, as
            in PyTorch; :func:`foundry_kernels.flash_attention` takes both.
        scale: factor on the scores; ``1 / sqrt(D)`` if None. It may be negative; 0 weights all keys alike.
        enable_gqa: whether H may be any multiple of Hk and of Hv, consecutive query heads sharing a key or value head;
            otherwise heads are broadcast like the dimensions in front of them.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``[..., H, T, Dv]`` of query's dtype, dense in the storage order of the query. A query that sees no key gives 0
        and contributes to no gradient. (PyTorch 2.13 gives 0 on the CPU; other kernels and versions of it give NaN.)

    Raises:
        TypeError, ValueError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype.

    Broadcasting copies nothing where there is at most one dimension in front of the heads. With several, a mask is not
    copied if it is the same along all of them, or if they can be viewed as one dimension. With ``enable_gqa=True`` and
    Hk unlike Hv, keys or values are repeated in memory. A negative `scale` costs a copy of the query.

    Nested tensors, and D or Dv of 0 or more than 512, run on PyTorch's own function with ``backend="auto"``, because no
    backend here has a kernel for them; a named backend refuses them.
    """
    if backend == "auto" and no_kernel(query, key, value):
        return TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_float(name, x)
        if autocast_dtype(query) is None:
            check_dtype(name, x, "query", query)
        if x.dim() < 2:
            raise ValueError(
                f"{name} must be [..., heads, tokens, head_dim] or [tokens, head_dim]; got {tuple(x.shape)}"
            )
    is_causal = as_bool("is_causal", is_causal)
    if attn_mask is not None and is_causal:
        raise ValueError(
            "attn_mask must be None with is_causal=True, as in PyTorch; foundry_kernels.flash_attention takes both "
            '(causal=True, align="top_left" for the same alignment)'
        )
    align = "top_left"
    if isinstance(attn_mask, Tensor) and is_subclass(attn_mask):
        attn_mask, is_causal, align = _causal_bias(attn_mask, query, key)
    p = as_float("dropout_p", dropout_p)
    without_heads = max(query.dim(), key.dim(), value.dim()) == 2
    q, k, v = (x.unsqueeze(0) if x.dim() == 2 else x for x in (query, key, value))
    q, k, v = _grouped_heads(q, k, v) if enable_gqa else _broadcast_heads(q, k, v)
    batch = _broadcast_batch(q, k, v)
    q, k, v = (_four_dimensions(x, batch) for x in (q, k, v))
    q, factor = positive_scale(q, None if scale is None else as_float("scale", scale))
    if isinstance(attn_mask, Tensor) and len(batch) > 1:
        attn_mask = _folded_mask(attn_mask, batch)
    out = flash_attention(
        q, k, v, attn_mask=attn_mask, causal=is_causal, scale=factor, align=align,
        dropout_p=0.0 if p == 1 else p, backend=backend,
    )  # fmt: skip
    if p == 1:  # the kernels divide by 1 - p; here nothing remains that could be divided
        out = torch.nn.functional.dropout(out, 1.0)
    if without_heads:
        return out[0, 0]
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])


def no_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether no backend of this package has a kernel for tensors that PyTorch's own function takes."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if query.is_nested or key.is_nested or value.is_nested:
        return True
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        return False
    return not (1 <= query.shape[-1] <= MAX_HEAD_DIM and 1 <= value.shape[-1] <= MAX_HEAD_DIM)


def _causal_bias(mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool, str]:
    """(attn_mask, is_causal, align) of a mask of another class than Tensor."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(mask, CausalBias):
        return mask, False, "top_left"
    sizes = (mask.seq_len_q, mask.seq_len_kv)
    if sizes != (query.shape[-2], key.shape[-2]):
        raise ValueError(f"attn_mask must be of {query.shape[-2]} queries and {key.shape[-2]} keys; got {sizes}")
    return None, True, "top_left" if mask.variant == CausalVariant.UPPER_LEFT else "bottom_right"


def positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """The kernels only support positive scales. A sign, 0 or NaN is multiplied into the query, which is exact."""
    if scale is None or 0.0 < scale < math.inf:
        return q, scale
    if -math.inf < scale < 0.0:
        return -q, -scale
    return q * (0.0 if scale == 0.0 else math.nan), 1.0


def _grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeats each head of k, and each of v, until there are as many as of q, as `enable_gqa` says."""
    heads, of_k, of_v = q.shape[-3], k.shape[-3], v.shape[-3]
    for name, n in (("key", of_k), ("value", of_v)):
        if n == 0 or heads % n:
            raise ValueError(f"query must have a multiple of {name}'s {n} heads with enable_gqa=True; got {heads}")
    if of_k != of_v:  # to what both divide: the kernels repeat the rest, in registers
        both = math.lcm(of_k, of_v)
        k, v = k.repeat_interleave(both // of_k, -3), v.repeat_interleave(both // of_v, -3)
    return q, k, v


def _broadcast_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = q.shape[-3]
    if k.shape[-3] == heads == v.shape[-3] or k.shape[-3] == 1 == v.shape[-3]:  # one head for any number of queries
        return q, k, v
    heads = next((n for n in (heads, k.shape[-3], v.shape[-3]) if n != 1), 1)
    for name, x in (("key", k), ("value", v)):
        if x.shape[-3] not in (1, heads):
            raise ValueError(
                f"{name} must have query's {heads} heads unless enable_gqa=True; got shape {tuple(x.shape)}"
            )
    expanded = (x.expand(*x.shape[:-3], heads, *x.shape[-2:]) for x in (q, k, v))
    q, k, v = expanded
    return q, k, v


def _broadcast_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Returns the dimensions in front of the heads, as all three are broadcast to."""
    batch = tuple(q.shape[:-3])
    for name, x in (("key", k), ("value", v)):
        own = tuple(x.shape[:-3])
        if own == batch:
            continue
        rank = max(len(own), len(batch))
        pairs = list(zip((1,) * (rank - len(batch)) + batch, (1,) * (rank - len(own)) + own, strict=True))
        if any(a != b and a != 1 and b != 1 for a, b in pairs):
            raise ValueError(f"{name} must have query's batch {batch}, or one that broadcasts; got {tuple(x.shape)}")
        batch = tuple(b if a == 1 else a for a, b in pairs)
    return batch


def _four_dimensions(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    if x.shape[:-3] != batch:
        x = x.expand(*batch, *x.shape[-3:])
    if len(batch) == 1:
        return x
    return x.flatten(0, -4) if batch else x.unsqueeze(0)


def _folded_mask(mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A mask of several dimensions in front of the heads as one of the dimension that they are folded to."""
    own = tuple(mask.shape[:-3])
    if all(n == 1 for n in own):
        return mask[(0,) * len(own)]
    if len(own) > len(batch) or any(n not in (1, m) for n, m in zip(own[::-1], batch[::-1], strict=False)):
        raise ValueError(f"attn_mask must broadcast to the batch {batch}; got shape {tuple(mask.shape)}")
    return mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
