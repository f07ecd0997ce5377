"""Functions of flash-linear-attention (fla), with its signatures and layouts: tokens before heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from foundry_kernels.core.checks import check_tensor
from foundry_kernels.ops.gated_delta_rule import delta_rule
from foundry_kernels.ops.gated_delta_rule import gated_delta_rule as rule
from foundry_kernels.ops.gated_delta_rule import gated_linear_attention as attention


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """``fla.ops.gated_delta_rule.chunk_gated_delta_rule`` on :func:`foundry_kernels.gated_delta_rule`.

    Args:
        q: ``[B, T, H, D_k]``.
        k: as q.
        v: ``[B, T, H_v, D_v]``.
        g: ``[B, T, H_v]``.
        beta: ``[B, T, H_v]``.
        scale, cu_seqlens, backend: as for `gated_delta_rule`.
        initial_state: ``[N, H_v, D_k, D_v]`` float32, or None.
        output_final_state: also return the states after the last tokens.
        use_qk_l2norm_in_kernel: divide queries and keys by their lengths.

    Returns:
        ``(o, final_state)``: ``[B, T, H_v, D_v]``, and ``[N, H_v, D_k, D_v]`` or None.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    given = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens, "backend": backend}
    return _run(rule, (q, k, v, g, beta), output_final_state, **given, qk_l2norm=use_qk_l2norm_in_kernel)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """``fla.ops.delta_rule.chunk_delta_rule`` on :func:`foundry_kernels.delta_rule`; see `chunk_gated_delta_rule`."""
    given = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens, "backend": backend}
    return _run(delta_rule, (q, k, v, beta), output_final_state, **given, qk_l2norm=use_qk_l2norm_in_kernel)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """``fla.ops.simple_gla.chunk_simple_gla`` on :func:`foundry_kernels.gated_linear_attention`; see
    `chunk_gated_delta_rule`."""
    given = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens, "backend": backend}
    return _run(attention, (q, k, v, g), output_final_state, **given)


#: fla's names for the same function, of which it has two algorithms.
fused_recurrent_gated_delta_rule = chunk_gated_delta_rule


def _run(
    function: Callable[..., Any], tensors: tuple[Tensor | None, ...], output_final_state: bool, **given: Any
) -> tuple[Tensor, Tensor | None]:
    for name, x in zip(("q", "k", "v"), tensors, strict=False):
        check_tensor(name, x)
        if x is not None and x.dim() != 4:
            raise ValueError(f"{name} must be [B, T, H, D]; got shape {tuple(x.shape)}")
    rows = (x if x is None or x.dim() < 3 else x.transpose(1, 2) for x in tensors)
    found = function(*rows, return_final_state=output_final_state, **given)
    out, final = found if isinstance(found, tuple) else (found, None)
    return out.transpose(1, 2), final
