"""One token of decoding. It reads and writes the states once, which is all of its time."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_kernels._triton.devices import capability
from foundry_kernels._triton.functions import round_to
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, contiguous, strides_of
from foundry_kernels._triton.tuning import choose
from foundry_kernels.ops.gated_delta_rule.triton.gates import open_beta, softplus
from foundry_kernels.ops.gated_delta_rule.triton.prepare import reciprocal_norm

#: Columns of a program's block of a state.
_COLUMNS = 32


@triton.jit
def _load_row(ptr, n, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    return tl.load(ptr + cols, mask=cols < n, other=0.0).to(COMPUTE)


@triton.jit
def gated_delta_rule_step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, decay_log_ptr, dt_bias_ptr, state_ptr, out_ptr,
    n_heads, group, scale,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh, stride_bb, stride_bh,
    stride_sb, stride_sh,
    L2NORM: tl.constexpr, CHANNELS: tl.constexpr, BETA_LIMIT: tl.constexpr, COMPUTE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program updates a block of columns of one head's state, and computes the output's."""
    scale = tl.full([], 0.0, COMPUTE) + scale
    n_blocks = tl.cdiv(DV, BLOCK_V)
    v0 = tl.program_id(0) % n_blocks * BLOCK_V
    head = (tl.program_id(0) // n_blocks % n_heads).to(tl.int64)
    batch = (tl.program_id(0) // n_blocks // n_heads).to(tl.int64)
    rows = tl.arange(0, BLOCK_D)[:, None]
    cols = v0 + tl.arange(0, BLOCK_V)[None, :]
    m = (rows < D) & (cols < DV)
    p_state = state_ptr + batch * stride_sb + head * stride_sh + rows * DV + cols
    b_state = tl.load(p_state, mask=m, other=0.0)
    b_q = _load_row(q_ptr + batch * stride_qb + head // group * stride_qh, D, COMPUTE, BLOCK_D)
    b_k = _load_row(k_ptr + batch * stride_kb + head // group * stride_kh, D, COMPUTE, BLOCK_D)
    if L2NORM:
        b_q *= reciprocal_norm(tl.sum(b_q * b_q, 0))
        b_k *= reciprocal_norm(tl.sum(b_k * b_k, 0))
    b_v = _load_row(v_ptr + batch * stride_vb + head * stride_vh + v0, DV - v0, COMPUTE, BLOCK_V)
    if g_ptr is not None:
        p_g = g_ptr + batch * stride_gb + head * stride_gh
        if CHANNELS:
            b_g = _load_row(p_g, D, COMPUTE, BLOCK_D)
            if dt_bias_ptr is not None:
                b_g += _load_row(dt_bias_ptr + head * D, D, COMPUTE, BLOCK_D)
        else:
            b_g = tl.load(p_g).to(COMPUTE)
            if dt_bias_ptr is not None:
                b_g += tl.load(dt_bias_ptr + head).to(COMPUTE)
        if decay_log_ptr is not None:
            b_g = -tl.exp(tl.load(decay_log_ptr + head).to(COMPUTE)) * softplus(b_g)
        if CHANNELS:
            b_state *= tl.exp(b_g)[:, None]
        else:
            b_state *= tl.exp(b_g)
    b_u = b_v - tl.sum(b_state * b_k[:, None], 0)
    if beta_ptr is not None:
        b_beta = tl.load(beta_ptr + batch * stride_bb + head * stride_bh).to(COMPUTE)
        b_u *= b_beta if BETA_LIMIT is None else open_beta(b_beta, BETA_LIMIT)
    b_state += b_k[:, None] * b_u[None, :]
    tl.store(p_state, b_state, mask=m)
    b_out = tl.sum(b_state * b_q[:, None], 0)[None, :] * scale
    p_out = out_ptr + (batch * n_heads + head) * DV + cols
    tl.store(p_out, round_to(b_out, out_ptr.dtype.element_ty), mask=cols < DV)


def _configs(head_dim: int, head_dim_v: int, arch: int) -> list[dict[str, int]]:
    """The default launch config, then those that `tune` tries."""
    down = max(16, triton.next_power_of_2(head_dim))
    most = max(16, triton.next_power_of_2(head_dim_v))
    widths = (_COLUMNS, 16, 64) if arch else (16, 32)
    blocks = dict.fromkeys(min(width, most) for width in widths)
    return [{"BLOCK_D": down, "BLOCK_V": block, "num_warps": max(1, min(8, down * block // 1024))} for block in blocks]


@planned
def _plan(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...] | None, ...], head_dim: int, group: int,
    dtype: torch.dtype, device: torch.device, scale: float, l2norm: bool, channels: bool,
    beta_limit: float | None,
) -> Plan:  # fmt: skip
    n_batch, n_heads, head_dim_v = shape
    tags = f"{8 * dtype.itemsize}-bit"
    configs = _configs(head_dim, head_dim_v, capability(device))
    block = choose("gated_delta_rule_step_kernel", tags, configs, device)
    constants: dict[str, Any] = {"L2NORM": l2norm, "CHANNELS": channels, "COMPUTE": compute_dtype(dtype)}
    constants |= {"D": head_dim, "DV": head_dim_v, "BETA_LIMIT": beta_limit}
    numbers = (n_heads, group, scale, *(s for each in strides for s in (each or (0, 0))[:2]))
    grid = n_batch * n_heads * triton.cdiv(head_dim_v, block["BLOCK_V"])
    return Plan((grid,), numbers, constants | block)


def launch_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, scale: float, l2norm: bool, beta_limit: float | None,
) -> Tensor:  # fmt: skip
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel() == 0:
        return out
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    channels = g is not None and g.dim() == 3
    if g is not None and channels and g.stride(-1) != 1:
        g = g.contiguous()
    strides = tuple(map(strides_of, (q, k, v, g, beta, state)))
    group = v.shape[1] // q.shape[1]
    plan = _plan(v.shape, strides, q.shape[2], group, v.dtype, v.device, scale, l2norm, channels, beta_limit)
    gates = contiguous(A_log), contiguous(dt_bias)
    launch(gated_delta_rule_step_kernel, plan, q, k, v, g, beta, *gates, state, out)
    if not state.is_inference():  # a direct call does not pass the dispatcher, which counts versions
        torch.autograd.graph.increment_version(state)
    return out


def empty_step(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)
