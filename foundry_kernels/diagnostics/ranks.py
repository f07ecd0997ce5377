"""How many directions a matrix really has."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_float
from foundry_kernels.nn import Attention


@torch.no_grad()
def effective_rank(x: Tensor) -> Tensor:
    """Returns the exponential of the entropy of the singular values, each as a fraction of their sum.

    Args:
        x: ``[..., M, N]`` floating-point, M and N at least 1.

    Returns:
        ``[...]`` float32 (float64 for float64), from 1, where one direction holds everything, to min(M, N), where all
        are alike; 0 for a matrix of zeros, NaN for one that is not finite.

    Raises:
        TypeError: x is no floating-point tensor.
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
    """[H]: for each query head the effective rank of ``W_q^T W_k``, by which it scores two inputs before any rotation;
    at most head_dim.

    The product is dim x dim; its singular values are those of ``R_q R_k^T`` from the two factors' QR decompositions,
    which is head_dim x head_dim.
    """
    heads, width = attention.n_heads, attention.head_dim
    wide = torch.float64 if attention.wq.weight.dtype == torch.float64 else torch.float32
    r_q, r_k = (
        torch.linalg.qr(w.weight.to(wide).view(-1, width, w.weight.shape[1]).mT, mode="r").R
        for w in (attention.wq, attention.wk)
    )
    return effective_rank(r_q @ r_k.repeat_interleave(heads // attention.n_kv_heads, 0).mT)
