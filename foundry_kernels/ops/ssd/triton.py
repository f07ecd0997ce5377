"""The scan over linear attention in Triton, and the kernel of a step, which reads and writes the states once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_kernels._triton.devices import capability
from foundry_kernels._triton.functions import round_to
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import define
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype
from foundry_kernels._triton.tuning import choose
from foundry_kernels.ops.gated_delta_rule import triton as attention
from foundry_kernels.ops.ssd.operators import STEP, make_backend

#: Columns of x of a program's block of a state.
_COLUMNS = 32


@triton.jit
def _load_row(ptr, n, stride, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    return tl.load(ptr + cols * stride, mask=cols < n, other=0.0).to(COMPUTE)


@triton.jit
def ssd_step_kernel(
    state_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, y_ptr,
    n_heads, group, dt_min, dt_max,
    stride_sb, stride_sh, stride_sp, stride_sn, stride_xb, stride_xh, stride_tb, stride_th, stride_ah,
    stride_bb, stride_bg, stride_cb, stride_cg, stride_dh, stride_dp, stride_zb, stride_zh, stride_ib,
    SOFTPLUS: tl.constexpr, COMPUTE: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program updates a block of rows of one head's state, and computes these entries of y."""
    n_blocks = tl.cdiv(P, BLOCK_P)
    p0 = tl.program_id(0) % n_blocks * BLOCK_P
    head = (tl.program_id(0) // n_blocks % n_heads).to(tl.int64)
    batch = (tl.program_id(0) // n_blocks // n_heads).to(tl.int64)
    rows = p0 + tl.arange(0, BLOCK_P)
    cols = tl.arange(0, BLOCK_N)
    m = (rows[:, None] < P) & (cols[None, :] < N)
    p_state = state_ptr + batch * stride_sb + head * stride_sh + rows[:, None] * stride_sp + cols[None, :] * stride_sn
    b_state = tl.load(p_state, mask=m, other=0.0)
    b_x = _load_row(x_ptr + batch * stride_xb + head * stride_xh + p0, P - p0, 1, COMPUTE, BLOCK_P)
    b_B = _load_row(B_ptr + batch * stride_bb + head // group * stride_bg, N, 1, COMPUTE, BLOCK_N)
    b_C = _load_row(C_ptr + batch * stride_cb + head // group * stride_cg, N, 1, COMPUTE, BLOCK_N)
    dt = tl.load(dt_ptr + batch * stride_tb + head * stride_th).to(COMPUTE)
    if dt_bias_ptr is not None:
        dt += tl.load(dt_bias_ptr + head * stride_ib).to(COMPUTE)
    if SOFTPLUS:
        e = tl.exp(tl.minimum(dt, 20.0))
        # log(1 + e) of what 1 + e loses: e times log(u) / (u - 1) with the rounded u = 1 + e.
        u = 1.0 + e
        dt = tl.where(dt > 20.0, dt, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))))
    dt = tl.maximum(tl.minimum(dt, tl.full([], 0.0, COMPUTE) + dt_max), tl.full([], 0.0, COMPUTE) + dt_min)
    decay = tl.exp(dt * tl.load(A_ptr + head * stride_ah).to(COMPUTE))
    b_state = b_state * decay + (b_x * dt)[:, None] * b_B[None, :]
    tl.store(p_state, b_state, mask=m)
    b_y = tl.sum(b_state * b_C[None, :], 1)
    if D_ptr is not None:
        b_y += _load_row(D_ptr + head * stride_dh + p0 * stride_dp, P - p0, stride_dp, COMPUTE, BLOCK_P) * b_x
    if z_ptr is not None:
        b_z = _load_row(z_ptr + batch * stride_zb + head * stride_zh + p0, P - p0, 1, COMPUTE, BLOCK_P)
        b_y *= b_z / (1.0 + tl.exp(-b_z))
    tl.store(y_ptr + (batch * n_heads + head) * P + rows, round_to(b_y, y_ptr.dtype.element_ty), mask=rows < P)


def _configs(width: int, state_width: int, arch: int) -> list[dict[str, int]]:
    """The default launch config, then those that `tune` tries."""
    across, most = max(16, triton.next_power_of_2(state_width)), max(16, triton.next_power_of_2(width))
    widths = (_COLUMNS, 16, 64) if arch else (16, 32)
    blocks = dict.fromkeys(min(each, most) for each in widths)
    return [{"BLOCK_P": b, "BLOCK_N": across, "num_warps": max(1, min(8, across * b // 1024))} for b in blocks]


@planned
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], state_width: int, group: int, dtype: torch.dtype,
    device: torch.device, limits: tuple[float, float], softplus: bool,
) -> Plan:  # fmt: skip
    n_batch, n_heads, width = shape
    tags = f"{8 * dtype.itemsize}-bit"
    block = choose("ssd_step_kernel", tags, _configs(width, state_width, capability(device)), device)
    constants: dict[str, Any] = {"SOFTPLUS": softplus, "COMPUTE": compute_dtype(dtype), "P": width, "N": state_width}
    grid = n_batch * n_heads * triton.cdiv(width, block["BLOCK_P"])
    return Plan((grid,), (n_heads, group, *limits, *strides), constants | block)


def _launch_step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, dt_min: float, dt_max: float,
) -> Tensor:  # fmt: skip
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, B, C = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, B, C))
    z = z if z is None or z.stride(-1) == 1 else z.contiguous()
    of_D = (0, 0) if D is None else (D.stride(0), D.stride(1) if D.dim() == 2 else 0)
    of_z = (0, 0) if z is None else z.stride()[:2]
    strides = (
        *state.stride(), *x.stride()[:2], *dt.stride(), *A.stride(), *B.stride()[:2], *C.stride()[:2], *of_D, *of_z,
        0 if dt_bias is None else dt_bias.stride(0),
    )  # fmt: skip
    limits = dt_min, dt_max
    plan = _plan(x.shape, strides, B.shape[2], x.shape[1] // B.shape[1], x.dtype, x.device, limits, softplus)
    launch(ssd_step_kernel, plan, state, x, dt, A, B, C, D, z, dt_bias, y)
    if not state.is_inference():  # a direct call does not pass the dispatcher, which counts versions
        torch.autograd.graph.increment_version(state)
    return y


def _empty_step(state: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


ssd = make_backend("triton_", attention._fwd, attention._bwd)
ssd_step = define(f"triton_{STEP}", _launch_step, _empty_step)
