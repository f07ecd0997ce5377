r"""State-space duality: the recurrent layer of Mamba-2, as linear attention with a decay for each head and token.

A head keeps a matrix S of :math:`P \times N`. A token has the input x of P numbers, the input and output vectors B and
C of N numbers, which a group of heads shares, and the step size :math:`\Delta`:

.. math:: \Delta = \mathrm{clamp}(\mathrm{softplus}(dt + b_{dt})), \quad
   S \leftarrow e^{\Delta A} S + \Delta \, x B^T, \quad y = (S C + D x) \, \mathrm{silu}(z)

Sequences run on the kernels of :func:`foundry_kernels.gated_linear_attention`: C are the queries, B the keys and x the
values, with the decay :math:`\Delta A`, and a factor :math:`\Delta` of each value. What is here besides is arithmetic
on each number. Arithmetic is in float32 (float64 for float64 inputs). S C is rounded once, and y once more.

Dao, Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality",
2024, arXiv:2405.21060.
"""

from __future__ import annotations

import math
from typing import Literal, overload

from torch import Tensor

from foundry_kernels.core.inference import cut, without_backward
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.ssd import reference
from foundry_kernels.ops.ssd.checks import check_sequence, check_step

__all__ = ["SSD", "SSD_STEP", "ssd", "ssd_step"]


@overload
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, *, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None, return_final_states: Literal[False] = False,
    cu_seqlens: Tensor | None = None, chunk_size: int | None = None, backend: str = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, *, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None, return_final_states: bool = False, cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's scan over sequences of tokens, with the arguments of mamba_ssm's ``mamba_chunk_scan_combined``.

    Args:
        x: ``[B, T, H, P]`` float32, bfloat16, float16 or float64, any strides; P in 1 .. 512. B and T may be 0.
        dt: ``[B, T, H]`` in float32 or x's dtype, the step sizes before bias, softplus and limits.
        A: ``[H]`` in float32 or x's dtype, usually negative: ``-exp(A_log)``.
        B: ``[B, T, G, N]`` of x's dtype, N in 1 .. 256; H is a multiple of G. Head h has group ``h // (H / G)``.
        C: as B.
        D: ``[H]`` or ``[H, P]`` in float32 or x's dtype, or None: what of x is added to the result.
        z: as x, or None: the result is multiplied by ``silu(z)``.
        dt_bias: ``[H]`` in float32 or x's dtype, or None.
        dt_softplus: whether softplus is applied to dt and its bias.
        dt_limit: the least and the largest step size. Step sizes beyond it get no gradient.
        initial_states: ``[n, H, P, N]`` float32 (float64 for float64 inputs), the states before the first tokens, n = B
            or the number of documents; None for zeros.
        return_final_states: also return the states after the last tokens.
        cu_seqlens: ``[n + 1]`` int32 or int64, the ends of n documents packed one after another, starting with 0; then
            the batch must be 1. Nothing passes from one document to another. Values are checked on the CPU.
        chunk_size: 16, 32, 64 or 128 tokens that a kernel computes at a time, None for its own choice.
        backend: "auto", "reference", "triton" or "native" (on the CPU).

    Returns:
        y ``[B, T, H, P]`` of x's dtype in x's storage order; with `return_final_states`, ``(y, final_states)`` with the
        states ``[n, H, P, N]`` in float32 (float64), which are contiguous in the order ``[n, H, N, P]``. Both are
        differentiable with respect to all tensors but `cu_seqlens`.

    Raises:
        TypeError: an argument is not a tensor or has an unsupported dtype.
        ValueError: shapes, dtypes or devices do not match, an option is out of range, or the backend's name is unknown.
        BackendUnavailable: the named backend does not support this device or dtype.

    Under ``torch.autocast``, x, B, C and z (unless float64) are cast to its dtype first. There is no second derivative.
    """
    x, B, C, z, options = check_sequence(
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_limit,
        initial_states,
        return_final_states,
        cu_seqlens,
        chunk_size,
    )
    y, final = resolve(SSD, backend, x)(x, dt, A, B, C, D, z, dt_bias, initial_states, options)
    return (y, final) if return_final_states else y


def ssd_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`ssd` for each sequence: a step of decoding, without gradients.

    Args:
        state: ``[B, H, P, N]`` float32 (float64 for float64 inputs), dense in its last two dimensions, in either order:
            also the final states of `ssd`. It is overwritten by the states after the token.
        x: ``[B, H, P]`` float32, bfloat16, float16 or float64, any strides; P in 1 .. 512.
        dt: ``[B, H]`` in float32 or x's dtype.
        B: ``[B, G, N]`` of x's dtype, N in 1 .. 256.
        C: as B.
        z: as x, or None.
        A, D, dt_bias, dt_softplus, dt_limit, backend: as for :func:`ssd`.

    Returns:
        y ``[B, H, P]`` of x's dtype, contiguous. It is rounded once.

    Raises:
        RuntimeError: a backward pass reaches the result, which has no gradient.
        TypeError, ValueError, BackendUnavailable: as for :func:`ssd`.
    """
    wanted, (state, x, dt, A, B, C, D, z, dt_bias) = cut(state, x, dt, A, B, C, D, z, dt_bias)
    x, B, C, z, limits = check_step(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit)
    y = resolve(SSD_STEP, backend, x)(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, *limits)
    return without_backward((y,), wanted, "ssd_step has no gradient; use torch.no_grad()")[0] if wanted else y


SSD = register_op(ssd, reference.ssd, native_devices=("cpu",))
SSD_STEP = register_op(ssd_step, reference.ssd_step, native_devices=("cpu",))
