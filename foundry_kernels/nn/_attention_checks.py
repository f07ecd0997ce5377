"""Checks of the arguments of :class:`foundry_kernels.nn.Attention`."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.core.checks import check_bool, check_int, check_integer, check_positive, check_rank, check_tensor
from foundry_kernels.nn.positions import AlibiSlopes
from foundry_kernels.nn.rotary import RotaryEmbedding

#: Valid values of `qk_norm_over`.
NORMS = ("head", "projection")


def check_sizes(dim: int, n_heads: int, n_kv_heads: int, head_dim: int | None, context_dim: int) -> int:
    """Returns head_dim, which None leaves to the others."""
    sizes = (("dim", dim), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads), ("context_dim", context_dim))
    for name, value in sizes:
        check_int(name, value)
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    if n_heads % n_kv_heads:
        raise ValueError(f"n_heads must be a multiple of n_kv_heads={n_kv_heads}; got {n_heads}")
    if head_dim is None:
        if dim % n_heads:
            raise ValueError(f"dim must be a multiple of n_heads={n_heads} unless head_dim is given; got {dim}")
        return dim // n_heads
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1; got {head_dim}")
    return head_dim


def check_options(
    n_heads: int, head_dim: int, rope: RotaryEmbedding | None, alibi: AlibiSlopes | None, causal: bool,
    sliding_window: int | None, scale: float | None, qk_norm_over: str, dropout: float,
) -> None:  # fmt: skip
    if rope is not None and rope.dim > head_dim:
        raise ValueError(f"rope must rotate at most head_dim={head_dim} dimensions; got {rope.dim}")
    if alibi is not None and alibi.n_heads != n_heads:
        raise ValueError(f"alibi must have a slope for each of n_heads={n_heads}; got {alibi.n_heads}")
    if sliding_window is not None:
        check_int("sliding_window", sliding_window)
        if sliding_window < 1 and sliding_window != -1:
            raise ValueError(f"sliding_window must be None or at least 1; got {sliding_window}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1); got {dropout}")
    check_bool("causal", causal)
    if scale is not None:
        check_positive("scale", scale)
    if qk_norm_over not in NORMS:
        raise ValueError(f"qk_norm_over must be one of {', '.join(NORMS)}; got {qk_norm_over!r}")


def check_input(x: Tensor, dim: int, cache: object, cu_seqlens: Tensor | None, max_seqlen: int | None) -> None:
    """Checks the arguments that all calls have."""
    check_tensor("x", x)
    check_rank("x", x, 3, f"[B, T, {dim}]")
    if x.shape[-1] != dim:
        raise ValueError(f"x must have dim={dim} as its last dimension; got shape {tuple(x.shape)}")
    if cu_seqlens is not None:
        check_integer("cu_seqlens", cu_seqlens)
        if x.shape[0] != 1:
            raise ValueError(f"x must be [1, total, {dim}] with cu_seqlens; got shape {tuple(x.shape)}")
        if cache is not None:
            raise ValueError("cu_seqlens and cache exclude each other; got both")
    elif max_seqlen is not None:
        raise ValueError(f"max_seqlen needs cu_seqlens; got max_seqlen={max_seqlen} alone")
