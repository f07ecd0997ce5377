"""Linear attention and its layers with the signatures of flash-linear-attention (fla 0.6): tokens before heads, ``[B,
T, H, D]``, and H_v, which may be a multiple of H, heads of values.

Functions of linear attention return ``(o, final_state)``, the state None unless `output_final_state`. "chunk" and
"fused_recurrent" are one computation here, and both have gradients. Decays are logarithms, and `scale` is ``D_k **
-0.5`` by default. States are ``[N, H_v, D_k, D_v]`` float32 (float64 for float64 inputs). Arguments whose place differs
between fla's releases are passed by name (:class:`Options`).
"""

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from torch import Tensor

from foundry_kernels.compat._fla_layers import (
    FusedRMSNormGated,
    ShortConvolution,
    causal_conv1d,
    refuse,
    rms_norm_gated,
)
from foundry_kernels.core.checks import check_bool, check_float, check_rank
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_delta_rule import gated_delta_rule, gated_linear_attention

__all__ = [
    "FusedRMSNormGated",
    "ShortConvolution",
    "causal_conv1d",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
    "rms_norm_gated",
]

Results = tuple[Tensor, Tensor | None]


class Options(TypedDict, total=False):
    """What functions of linear attention take by name.

    Keys:
        use_qk_l2norm_in_kernel: divide each query and key by its length.
        use_gate_in_kernel: g is the gate's input, and the decay's logarithm is ``-exp(A_log) * softplus(g + dt_bias)``.
            Without it, the next three are not used.
        A_log: H_v numbers.
        dt_bias: H_v numbers, or ``H_v * D_k`` for a decay for each dimension of a key; None for 0.
        lower_bound: a number below 0: the logarithm is ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, where
            A_log may be None for 0.
        use_beta_sigmoid_in_kernel: the step size is the sigmoid of beta.
        allow_neg_eigval: it is twice the sigmoid.
        state_v_first: states are ``[N, H_v, D_v, D_k]``.
        cu_seqlens: ``[N + 1]``, the ends of N packed documents, starting with 0.
        backend: "auto", "reference", "triton" or "native".
        safe_gate, chunk_size, chunk_indices, cu_seqlens_cpu, disable_recompute: have no effect here.
        reverse, cp_context, return_intermediate_states, use_graph, max_num_seqs: are refused.
    """

    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    cu_seqlens: Tensor | None
    backend: str
    safe_gate: bool
    chunk_size: int | None
    chunk_indices: Tensor | None
    cu_seqlens_cpu: Tensor | None
    disable_recompute: bool
    reverse: bool
    cp_context: Any
    return_intermediate_states: bool
    use_graph: bool
    max_num_seqs: int | None


_FLAGS = tuple(name for name, kind in Options.__annotations__.items() if kind is bool)
_REFUSED = ("reverse", "cp_context", "return_intermediate_states", "use_graph", "max_num_seqs")


def _heads_first(x: Any) -> Any:
    return x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() > 2 else x


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    state: Tensor | None,
    output_final_state: bool,
    options: Mapping[str, Any],
    delta: bool = True,
    gv: Tensor | None = None,
) -> Results:
    if unknown := [name for name in options if name not in Options.__annotations__]:
        raise TypeError(f"{unknown[0]} is not an argument; got {', '.join(unknown)}")
    for name in _FLAGS:
        check_bool(name, options.get(name, False))
    check_bool("output_final_state", output_final_state)
    refuse(gv=gv, **{name: options.get(name) for name in _REFUSED})
    check_float("v", v)
    given = {name: options[name] for name in ("cu_seqlens", "backend") if name in options}
    given |= _gates(g, v, options) if options.get("use_gate_in_kernel") else {"g": g}
    twice = options.get("allow_neg_eigval", False)
    if options.get("use_beta_sigmoid_in_kernel"):
        if beta is None:
            raise ValueError("beta must be given with use_beta_sigmoid_in_kernel; got None")
        given["beta_limit"] = 2.0 if twice else 1.0
    elif twice:
        raise ValueError("allow_neg_eigval must be False without use_beta_sigmoid_in_kernel; got True")
    if delta:
        given["beta"] = _heads_first(beta)
    turned = options.get("state_v_first", False)
    if isinstance(state, Tensor):
        state = (state.mT if turned and state.dim() > 1 else state).to(wide_dtype(v.dtype))
    given |= {"g": _heads_first(given["g"]), "initial_state": state, "return_final_state": output_final_state}
    given |= {"scale": scale, "qk_l2norm": options.get("use_qk_l2norm_in_kernel", False)}
    found: Any = (gated_delta_rule if delta else gated_linear_attention)(*map(_heads_first, (q, k, v)), **given)
    out, final = found if isinstance(found, tuple) else (found, None)
    return out.transpose(1, 2), final.mT if final is not None and turned else final


def _gates(g: Tensor | None, v: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the rule takes of a gate: its parameters, or the decay if it has a lower bound."""
    check_rank("v", v, 4, "[B, T, H_v, D_v]")
    check_float("g", g)  # type: ignore[arg-type]  # which refuses None
    A_log, dt_bias, bound = (options.get(name) for name in ("A_log", "dt_bias", "lower_bound"))
    heads = v.shape[2]
    for name, x, per_head in (("A_log", A_log, 1), ("dt_bias", dt_bias, g.shape[3] if g.dim() == 4 else 1)):  # type: ignore[union-attr]
        if x is None:
            continue
        check_float(name, x)
        if x.numel() != heads * per_head:
            raise ValueError(f"{name} must have {heads * per_head} numbers; got shape {tuple(x.shape)}")
    A_log = None if A_log is None else A_log.reshape(heads)
    dt_bias = None if dt_bias is None else dt_bias.reshape(g.shape[2:])  # type: ignore[union-attr]
    if bound is None:
        if A_log is None:
            raise ValueError("A_log must be given with use_gate_in_kernel; got None")
        return {"g": g, "A_log": A_log, "dt_bias": dt_bias}
    if not isinstance(bound, (int, float)) or not bound < 0:
        raise ValueError(f"lower_bound must be a number below 0; got {bound!r}")
    decay = g.to(wide_dtype(v.dtype))  # type: ignore[union-attr]
    decay = decay if dt_bias is None else decay + dt_bias
    if A_log is not None:
        decay = decay * A_log.to(decay.dtype).exp().view(-1, *[1] * (decay.dim() - 3))
    return {"g": decay.sigmoid() * bound}


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, **options: Unpack[Options],
) -> Results:  # fmt: skip
    """:func:`foundry_kernels.gated_delta_rule` with fla's signature: q, k ``[B, T, H, D_k]``, v ``[B, T, H_v, D_v]``, g
    and beta ``[B, T, H_v]``."""
    return _run(q, k, v, g, beta, scale, initial_state, output_final_state, options)


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, **options: Unpack[Options],
) -> Results:  # fmt: skip
    """Computes :func:`chunk_gated_delta_rule`, with a step size of 1 unless `beta` is given. gk: ``[B, T, H_v, D_k]``,
    a decay for each dimension of a key, which is added to g. gv is not supported."""
    if gk is not None:
        if options.get("use_gate_in_kernel"):
            raise ValueError("gk must be None with use_gate_in_kernel; got a tensor")
        g = gk if g is None else g[..., None] + gk
    return _run(q, k, v, g, beta, scale, initial_state, output_final_state, options, gv=gv)


chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, **options: Unpack[Options],
) -> Results:  # fmt: skip
    """:func:`foundry_kernels.delta_rule` with fla's signature: beta ``[B, T, H_v]``."""
    return _run(q, k, v, None, beta, scale, initial_state, output_final_state, options)


def fused_recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, **options: Unpack[Options],
) -> Results:  # fmt: skip
    """Computes :func:`chunk_delta_rule`, with a step size of 1 unless `beta` is given."""
    return _run(q, k, v, None, beta, scale, initial_state, output_final_state, options)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, **options: Unpack[Options],
) -> Results:  # fmt: skip
    """Kimi Delta Attention: :func:`chunk_gated_delta_rule` with a decay for each dimension of a key, g ``[B, T, H_v,
    D_k]``."""
    return _run(q, k, v, g, beta, scale, initial_state, output_final_state, options)


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, **options: Unpack[Options],
) -> Results:  # fmt: skip
    """Computes :func:`chunk_kda`."""
    return _run(q, k, v, g, beta, scale, initial_state, output_final_state, options)


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, **options: Unpack[Options],
) -> Results:  # fmt: skip
    """:func:`foundry_kernels.gated_linear_attention` with fla's signature: g ``[B, T, H, D_k]``."""
    return _run(q, k, v, g, None, scale, initial_state, output_final_state, options, delta=False)


def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, **options: Unpack[Options],
) -> Results:  # fmt: skip
    """Computes :func:`chunk_gla`, with the decays in `gk`, None for no decay. `gv` is not supported."""
    return _run(q, k, v, gk, None, scale, initial_state, output_final_state, options, delta=False, gv=gv)


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    **options: Unpack[Options],
) -> Results:  # fmt: skip
    """:func:`foundry_kernels.gated_linear_attention` with a decay for each head and token, g ``[B, T, H]``, or
    `g_gamma`, a decay for each head, ``[H]``, or none."""
    if g_gamma is not None:
        if g is not None:
            raise ValueError("g must be None with g_gamma; got both")
        g = g_gamma.expand(v.shape[:3])
    return _run(q, k, v, g, None, scale, initial_state, output_final_state, options, delta=False)


fused_recurrent_simple_gla = chunk_simple_gla
