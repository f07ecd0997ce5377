"""The effective rank of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_float
from foundry_kernels.diagnostics.projections import whole
from foundry_kernels.nn import Attention


@torch.no_grad()
def effective_rank(x: Tensor) -> Tensor:
    """Returns the exponential of the entropy of the singular values, as fractions of their sum.

    Args:
        x: ``[..., M, N]`` floating-point, M and N at least 1.

    Returns:
        ``[...]`` float32 (float64 for float64), from 1 for a single direction to min(M, N) for equal singular values; 0
        for a matrix of zeros, NaN for one that is not finite.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: x has fewer than two dimensions, or an empty last one.

    Roy and Vetterli, "The effective rank: a measure of effective dimensionality", 2007, EUSIPCO.
    """
    check_float("x", x)
    if x.dim() < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"x must be [..., M, N] with M and N at least 1; got shape {tuple(x.shape)}")
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    finite = wide.isfinite().all(-1).all(-1)
    values = torch.linalg.svdvals(wide.masked_fill(~finite[..., None, None], 0.0))
    total = values.sum(-1, keepdim=True)
    fraction = values / total.masked_fill(total == 0, 1.0)
    rank = torch.special.entr(fraction).sum(-1).exp().masked_fill(total.squeeze(-1) == 0, 0.0)
    return rank.masked_fill(~finite, torch.nan)


@torch.no_grad()
def qk_ranks(attention: Attention) -> Tensor:
    """[H]: for each query head, the effective rank of ``W_q^T W_k``, at most head_dim. The scores before any rotation
    are a bilinear form with this matrix."""
    if not isinstance(attention, Attention):
        raise TypeError(f"attention must be an Attention; got {type(attention).__name__}")
    heads, width = attention.n_heads, attention.head_dim
    q, k = (whole(layer.weight).unflatten(0, (-1, width)) for layer in (attention.wq, attention.wk))
    return product_ranks(q, k, heads)


@torch.no_grad()
def product_ranks(q: Tensor, k: Tensor, heads: int) -> Tensor:
    """[H]: the effective ranks of ``q_h^T k_h`` for ``[H, D, N]`` and ``[Hk, D, N']``, NaN if these are not finite.

    The product is N x N'. It has the singular values of ``R_q R_k^T``, from the QR decompositions of both factors,
    which is at most D x D.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    finite = q.isfinite().all() & k.isfinite().all()
    r_q, r_k = (torch.linalg.qr(x.to(wide).nan_to_num(0.0, 0.0, 0.0).mT, mode="r").R for x in (q, k))
    ranks = effective_rank(r_q @ r_k.repeat_interleave(heads // k.shape[0], 0).mT)
    return ranks.masked_fill(~finite, torch.nan)
