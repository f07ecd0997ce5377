"""Linear attention with the signatures of flash-linear-attention (fla): tokens before heads, ``[B, T, H, D]``.

Each returns ``(o, final_state)``, the state None unless `output_final_state`. "chunk" and "fused_recurrent" are one
function here, and both have gradients. States are ``[N, H, D_k, D_v]`` float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_delta_rule import gated_delta_rule, gated_linear_attention

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
]

Results = tuple[Tensor, Tensor | None]


def _heads_first(x: Tensor | None) -> Tensor | None:
    return x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() > 2 else x


def _run(
    rule: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: dict[str, Tensor | None],
    initial_state: Tensor | None,
    output_final_state: bool,
    **options: Any,
) -> Results:
    rows = {name: _heads_first(x) for name, x in rows.items()}
    state = initial_state
    if isinstance(state, Tensor) and isinstance(v, Tensor):
        state = state.to(wide_dtype(v.dtype))
    found = rule(
        *map(_heads_first, (q, k, v)),
        **rows,
        initial_state=state,
        return_final_state=output_final_state,
        **options,
    )
    out, final = found if isinstance(found, tuple) else (found, None)
    return out.transpose(1, 2), final


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported; got {value if not isinstance(value, Tensor) else 'a tensor'}")


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Results:
    """:func:`foundry_kernels.gated_delta_rule` with fla's signature: q, k ``[B, T, H_k, D_k]``, v ``[B, T, H_v, D_v]``,
    g and beta ``[B, T, H_v]``."""
    return _run(
        gated_delta_rule, q, k, v, {"g": g, "beta": beta}, initial_state, output_final_state,
        scale=scale, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Results:
    """Computes :func:`chunk_gated_delta_rule`. gk: ``[B, T, H_v, D_k]``, a decay for each dimension of a key instead
    of g. gv is not supported."""
    _refuse(gv=gv)
    if g is not None and gk is not None:
        raise ValueError("g must be None with gk; got both")
    return _run(
        gated_delta_rule, q, k, v, {"g": g if gk is None else gk, "beta": beta}, initial_state, output_final_state,
        scale=scale, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Results:
    """:func:`foundry_kernels.delta_rule` with fla's signature: beta ``[B, T, H]``."""
    return chunk_gated_delta_rule(
        q, k, v, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        backend=backend,
    )  # fmt: skip


fused_recurrent_delta_rule = chunk_delta_rule


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Results:
    """Kimi Delta Attention: :func:`foundry_kernels.gated_delta_rule` with a decay for each dimension of a key, g ``[B,
    T, H, D_k]``, and fla's signature.

    With `use_gate_in_kernel`, g is the gate's input: the decay's logarithm is ``-exp(A_log) * softplus(g + dt_bias)``,
    with A_log ``[H]`` and dt_bias ``[H D_k]`` or None. With `use_beta_sigmoid_in_kernel`, the step size is the sigmoid
    of beta, twice that with `allow_neg_eigval`. `safe_gate` promises that g is above -5 and has no effect here.
    `lower_bound` is not supported.
    """
    _refuse(lower_bound=lower_bound)
    gates: dict[str, Any] = {}
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError("A_log must be given with use_gate_in_kernel; got None")
        gates = {"A_log": A_log.flatten(), "dt_bias": None if dt_bias is None else dt_bias.view(g.shape[2], -1)}
    if use_beta_sigmoid_in_kernel:
        gates["beta_limit"] = 2.0 if allow_neg_eigval else 1.0
    return _run(
        gated_delta_rule, q, k, v, {"g": g, "beta": beta}, initial_state, output_final_state,
        scale=scale, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, backend=backend, **gates,
    )  # fmt: skip


fused_recurrent_kda = chunk_kda


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Results:
    """:func:`foundry_kernels.gated_linear_attention` with fla's signature: g ``[B, T, H, D_k]``."""
    return _run(
        gated_linear_attention, q, k, v, {"g": g}, initial_state, output_final_state,
        scale=scale, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Results:
    """Computes :func:`chunk_gla`, with the decays in `gk`. `gv` and `reverse` are not supported."""
    _refuse(gv=gv, reverse=reverse)
    return _run(
        gated_linear_attention, q, k, v, {"g": gk}, initial_state, output_final_state,
        scale=scale, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Results:
    """:func:`foundry_kernels.gated_linear_attention` with a decay for each head and token, g ``[B, T, H]``. `g_gamma`,
    a decay for each head, ``[H]``, instead of g."""
    if g_gamma is not None:
        if g is not None:
            raise ValueError("g must be None with g_gamma; got both")
        g = g_gamma.expand(v.shape[:3])
    return _run(
        gated_linear_attention, q, k, v, {"g": g}, initial_state, output_final_state,
        scale=scale, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


fused_recurrent_simple_gla = chunk_simple_gla
