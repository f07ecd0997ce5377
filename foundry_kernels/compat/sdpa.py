"""PyTorch's scaled_dot_product_attention, without masks in memory."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels._checks import check_tensor
from foundry_kernels.compat.flash_attn import check_no_dropout
from foundry_kernels.ops.flash_attention import flash_attention

_NO_MASK = (
    "attn_mask must be None: masks that lie in memory are not supported. For a causal mask pass is_causal=True; for a "
    "window, ALiBi or a causal mask aligned to the last key call foundry_kernels.flash_attention (window=, "
    "alibi_slopes=, causal=); for padding or packed documents foundry_kernels.flash_attention_varlen; for any other "
    "mask torch.nn.functional.scaled_dot_product_attention. Got {}"
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str = "auto",
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` on this package's kernels.

    Args:
        query: ``[..., H, T, D]`` or ``[T, D]``, any strides.
        key: ``[..., Hk, S, D]``, the dimensions in front as query's: they are not broadcast.
        value: ``[..., Hk, S, Dv]``.
        attn_mask: must be None; the error says what serves which mask.
        dropout_p: must be 0.
        is_causal: query i sees keys 0 .. i, the first query being aligned with the first key.
        scale: factor on the scores, > 0; ``1 / sqrt(D)`` if None.
        enable_gqa: whether H may be a multiple of Hk; otherwise they must be equal.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``[..., H, T, Dv]`` of query's dtype, dense in the storage order of the query.

    Raises:
        TypeError, ValueError: an argument does not fit.
        BackendUnavailable: the named backend cannot serve this device or dtype.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() < 2 or x.dim() != query.dim():
            raise ValueError(
                f"{name} must be [..., heads, tokens, head_dim] with as many dimensions as query, at least 2; "
                f"got shape {tuple(x.shape)}, query {tuple(query.shape)}"
            )
        if x.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} must have query's batch {tuple(query.shape[:-3])}; got shape {tuple(x.shape)}")
    if attn_mask is not None:
        kind = f"{attn_mask.dtype} {tuple(attn_mask.shape)}" if isinstance(attn_mask, Tensor) else type(attn_mask)
        raise ValueError(_NO_MASK.format(kind))
    check_no_dropout(dropout_p)
    if not enable_gqa and query.dim() > 2 and key.shape[-3] != query.shape[-3]:
        raise ValueError(
            f"key must have query's {query.shape[-3]} heads unless enable_gqa=True; got shape {tuple(key.shape)}"
        )
    out = flash_attention(
        *map(_four_dimensions, (query, key, value)), causal=is_causal, scale=scale, align="top_left", backend=backend
    )
    return out.reshape(*query.shape[:-1], value.shape[-1]) if query.dim() != 4 else out


def _four_dimensions(x: Tensor) -> Tensor:
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x.flatten(0, -4) if x.dim() > 4 else x
