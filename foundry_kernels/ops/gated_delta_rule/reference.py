"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal.

It is the recurrence itself, token by token, so a kernel's chunks are compared with a definition that has none. For
training with long sequences it is slow, and autograd keeps a state for each token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.core.layout import inverse, storage_order
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_delta_rule.options import DeltaRuleOptions

#: Added to the sum of squares by which `qk_l2norm` divides.
L2NORM_EPS = 1e-6


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    options: DeltaRuleOptions,
) -> tuple[Tensor, Tensor | None]:
    wide, order = wide_dtype(v.dtype), storage_order(v)
    g, beta = opened(g, beta, A_log, dt_bias, options.beta_limit, wide, tokens=True)
    q, k = _heads_of(q, v, options.qk_l2norm), _heads_of(k, v, options.qk_l2norm)
    tokens, n_documents = v.shape[2], v.shape[0]
    starts: Tensor | None = None
    if options.cu_seqlens is not None:
        cu_seqlens, n_documents = options.cu_seqlens.long(), options.cu_seqlens.shape[0] - 1
        index = torch.arange(tokens, device=v.device)
        document = torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)
        starts = index == cu_seqlens[document]
    shape = (n_documents, v.shape[1], k.shape[-1], v.shape[-1])
    initial = v.new_zeros(shape, dtype=wide) if initial_state is None else initial_state.to(wide)
    nothing = v.to(wide)
    steps = 0 if v.is_meta else tokens  # without values, only shapes and the graph matter
    if steps == 0:  # results on the graph of what they would be made of
        for x in (g, beta):
            if x is not None:
                nothing = nothing * (x.sum(-1) if x.dim() == 4 else x).to(wide)[..., None]
        initial = initial + k.transpose(-1, -2) @ nothing

    state = initial if starts is None else v.new_zeros((1, *shape[1:]), dtype=wide)
    outs, states = [], [state]
    for t in range(steps):
        if starts is not None:  # selected and not multiplied by 0, so that NaN stays in its document
            state = torch.where(starts[t], initial[document[t : t + 1]], state)
        out, state = advance(
            state,
            q[:, :, t],
            k[:, :, t],
            v[:, :, t].to(wide),
            None if g is None else g[:, :, t],
            None if beta is None else beta[:, :, t],
            options.delta,
        )
        outs.append(out)
        if starts is not None and options.return_final_state:
            states.append(state)
    out = torch.stack(outs, 2) if outs else nothing + q @ initial.sum(0, keepdim=True)
    out = out * options.scale
    out = out.to(v.dtype).permute(order).contiguous().permute(inverse(order))
    if not options.return_final_state:
        return out, None
    if starts is not None:
        length = cu_seqlens.diff()[:, None, None, None]
        state = torch.where(length == 0, initial, torch.cat(states)[cu_seqlens[1:]])
    return out, state.contiguous()


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    beta_limit: float | None,
) -> Tensor:
    g, beta = opened(g, beta, A_log, dt_bias, beta_limit, wide_dtype(v.dtype), tokens=False)
    out, after = advance(
        state, _heads_of(q, v, qk_l2norm), _heads_of(k, v, qk_l2norm), v.to(wide_dtype(v.dtype)), g, beta, delta=True
    )
    state.copy_(after)
    return (out * scale).to(v.dtype)


def opened(
    g: Tensor | None, beta: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, beta_limit: float | None,
    wide: torch.dtype, tokens: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """g and beta from what is before the gates. tokens: they have a dimension of tokens after that of heads."""
    if g is not None and A_log is not None:
        g, rate, channels = g.to(wide), A_log.to(wide).exp(), g.dim() - 2 - tokens
        if dt_bias is not None:
            g = g + (dt_bias.to(wide).unsqueeze(1) if tokens else dt_bias.to(wide))
        g = -rate.view(-1, *[1] * (tokens + channels)) * F.softplus(g)
    if beta is not None and beta_limit is not None:
        beta = beta_limit * beta.to(wide).sigmoid()
    return g, beta


def advance(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, delta: bool
) -> tuple[Tensor, Tensor]:
    """One token: ``[B, H, D]`` vectors, decays ``[B, H]`` or ``[B, H, D_k]``, and betas ``[B, H]``. Returns the output
    without scale, and the state after the token. `g` may also have a decay for each entry of the state, by which the
    tests find the terms of g's gradient."""
    if g is not None:
        decay = g.to(state.dtype).exp()
        while decay.dim() < state.dim():
            decay = decay[..., None]
        state = state * decay
    value = v - _read(state, k) if delta else v
    if beta is not None:
        value = value * beta.to(state.dtype)[..., None]
    state = state + k[..., :, None] * value[..., None, :]
    return _read(state, q), state


def _read(state: Tensor, x: Tensor) -> Tensor:
    """``S^T x``."""
    return (x[..., None, :] @ state).squeeze(-2)


def _heads_of(x: Tensor, v: Tensor, l2norm: bool) -> Tensor:
    """Queries or keys in the dtype of the arithmetic, one head for each of v's."""
    x = x.to(wide_dtype(v.dtype))
    if l2norm:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)
    return x.repeat_interleave(v.shape[1] // x.shape[1], 1)
