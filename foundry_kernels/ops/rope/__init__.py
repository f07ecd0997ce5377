r"""Rotary position embedding of queries and keys.

The first R of a head's D dimensions are rotated in pairs, pair i at position p by the angle :math:`\phi = p \theta_i`:

.. math:: y_a = x_a \cos\phi - x_b \sin\phi, \qquad y_b = x_b \cos\phi + x_a \sin\phi

with (a, b) = (i, i + R/2), or (2i, 2i + 1) if interleaved. The other D - R dimensions are copied. The gradient is the
rotation by :math:`-\phi`, so the backward pass needs only the tables. Arithmetic is in float32 (float64 for float64
inputs), whatever the dtypes of inputs and tables; results are rounded once.

`qk_norm_rope` normalises every head of q and k first, as :mod:`foundry_kernels.ops.rms_norm` does, over all D
dimensions and in the same pass. Its backward pass rotates the gradient back and continues as that of RMSNorm; it needs
q, k, the tables and one number per head and token.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, arXiv:2104.09864. Norms of queries and
keys: Henry et al., "Query-Key Normalization for Transformers", 2020, arXiv:2010.04245.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_dtype,
    check_float,
    check_integer,
    check_not_negative,
    check_number,
    check_rank,
    check_shape,
    check_tensor,
    constants,
    default_eps,
)
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import NATIVE_FIRST, register_op
from foundry_kernels.ops.rope import reference
from foundry_kernels.ops.rope.table import RopeScaling, rope_table

__all__ = ["QK_NORM_ROPE", "ROPE", "RopeScaling", "qk_norm_rope", "rope", "rope_table"]


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Args:
        q: ``[B, H, T, D]`` float32, bfloat16, float16 or float64, any strides. Any dimension may be 0.
        k: ``[B, Hk, T, D]``, of q's dtype and device, with any number of heads.
        cos: ``[P, R/2]``, a table over positions, or ``[B, T, R/2]``, a row for each token; 2 <= R <= D, or R = D = 0.
            Any floating-point dtype (float64 only with float64 inputs) on q's device. Takes no gradient. A leading
            dimension of 1 is broadcast over the sequences.
        sin: of cos's shape and dtype.
        interleaved: False rotates the pairs ``(i, i + R/2)`` ("rotate half": GPT-NeoX, Llama in Hugging Face's layout),
            True the pairs ``(2i, 2i + 1)`` (the complex form: GPT-J, Meta's Llama).
        positions: ``[T]`` or ``[B, T]`` int32 or int64 on q's device, the row of a ``[P, R/2]`` table for each token.
            Every entry must be in 0 .. P - 1. This is checked on the CPU. On a GPU a check would synchronize: nothing
            outside the table is read there, and the rotated dimensions become NaN. None means rows 0 .. T - 1 and needs
            P >= T. A leading dimension of 1 is broadcast over the sequences.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``(q', k')``, new tensors of q's and k's shapes and dtype, each dense in the storage order of its input: a
        ``[B, H, T, D]`` view of ``[B, T, H, D]`` memory gives such a view. The same holds for the gradients.

    Raises:
        TypeError: an argument is not a tensor or has the wrong kind of dtype.
        ValueError: shapes, dtypes or devices do not match, a table is too short or requires a gradient, or the backend
            is unknown.
        IndexError: on the CPU, a position is outside the table.
        BackendUnavailable: the named backend does not support this device or dtype.

    Autocast has no effect: arithmetic is in float32 anyway. Kernels have no second derivative.
    """
    if not is_dynamo_compiling():
        pair = ROPE.direct(backend, q, k, cos, sin, interleaved, positions)
        if pair is not None:
            return pair
    cos, sin, positions = _check(q, k, cos, sin, positions)
    if interleaved is not True and interleaved is not False:
        check_bool("interleaved", interleaved)
    return resolve(ROPE, backend, q)(q, k, cos, sin, interleaved, positions)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    interleaved: bool = False,
    positions: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """RMSNorm of every head of queries and keys, then the rotation, in one pass (Qwen3, Gemma 3).

    ``rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin)``, without rounding between norm and rotation.

    Args:
        q, k, cos, sin, interleaved, positions, backend: as for :func:`rope`, but D >= 2: the mean over no dimensions
            is undefined. Where R < D, the dimensions that are not rotated are normalised too.
        q_weight: ``[D]``, any floating-point dtype (float64 only with float64 q) on q's device, shared by q's heads;
            None for no scaling.
        k_weight: ``[D]``, likewise for k.
        eps, weight_offset: as for :func:`foundry_kernels.rms_norm`.
        round_before_weight: False rounds once, after the rotation. True rounds ``q / rms`` to q's dtype before it is
            multiplied by the weight (Llama, Qwen3), and the result again.

    Returns:
        ``(q', k')``, new tensors of q's and k's shapes and dtype, whatever the weights' dtypes, each dense in the
        storage order of its input, as from :func:`rope`. The same holds for the gradients.

    Raises:
        ValueError: and all others as :func:`rope`; also if D is 0, a weight does not have D elements, `eps` is
            negative, or `weight_offset` is given without both weights.

    Autocast has no effect: arithmetic is in float32 anyway. Kernels have no second derivative.
    """
    if eps is None:
        eps = default_eps("q", q)
    if is_dynamo_compiling():
        eps, weight_offset = constants(eps, weight_offset)
    else:
        pair = QK_NORM_ROPE.direct(
            backend, q, k, q_weight, k_weight, cos, sin, eps, weight_offset, round_before_weight, interleaved, positions
        )
        if pair is not None:
            return pair
    cos, sin, positions = _check(q, k, cos, sin, positions)
    if q.shape[-1] == 0:
        raise ValueError(f"q must have a last dimension of at least 2, for it is normalised; got {tuple(q.shape)}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_float(name, weight)
            check_shape(name, weight, q.shape[-1:], "one element per dimension of a head")
            check_device(name, weight, "q", q)
            if weight.dtype == torch.float64 != q.dtype:
                raise TypeError(f"{name} may be float64 only where q is; got q of {q.dtype}")
        elif weight_offset:
            raise ValueError(f"weight_offset needs weights to be added to; got {weight_offset} with {name}=None")
    check_not_negative("eps", eps)
    check_number("weight_offset", weight_offset)
    if round_before_weight is not True and round_before_weight is not False:
        check_bool("round_before_weight", round_before_weight)
    if interleaved is not True and interleaved is not False:
        check_bool("interleaved", interleaved)
    run = resolve(QK_NORM_ROPE, backend, q)
    return run(q, k, q_weight, k_weight, cos, sin, eps, weight_offset, round_before_weight, interleaved, positions)


def _check(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The checks that both functions share. Returns tables and positions without a leading dimension of 1."""
    check_float("q", q)
    check_tensor("k", k)
    check_rank("q", q, 4, "[B, H, T, D]")
    check_rank("k", k, 4, "[B, Hk, T, D]")
    check_dtype("k", k, "q", q)
    check_device("k", k, "q", q)
    batch, _, tokens, head_dim = q.shape
    batch_k, _, tokens_k, head_dim_k = k.shape
    if batch_k != batch or tokens_k != tokens or head_dim_k != head_dim:
        raise ValueError(f"k must be [B, Hk, T, D] with q's {(batch, tokens, head_dim)}; got shape {tuple(k.shape)}")
    _check_tables(q, cos, sin, head_dim)
    per_token = cos.dim() == 3
    if per_token and cos.shape[0] == 1 != batch:
        cos, sin, per_token = cos[0], sin[0], False
    if per_token:
        if positions is not None:
            raise ValueError("positions must be None where cos and sin are [B, T, R/2], which has a row for each token")
        if cos.shape[0] != batch or cos.shape[1] != tokens:
            raise ValueError(f"cos must be [P, R/2] or [B, T, R/2] with {(batch, tokens)}; got {tuple(cos.shape)}")
    elif positions is None:
        if cos.shape[0] < tokens:
            raise ValueError(f"cos must have a row for each of {tokens} positions; got shape {tuple(cos.shape)}")
    else:
        check_integer("positions", positions)
        check_device("positions", positions, "q", q)
        if positions.dim() == 2 and positions.shape[0] == 1 != batch:
            positions = positions[0]
        if positions.shape != (tokens,) and positions.shape != (batch, tokens):
            raise ValueError(
                f"positions must be [T] = ({tokens},) or [B, T] = ({batch}, {tokens}); got {tuple(positions.shape)}"
            )
    return cos, sin, positions


def _check_tables(q: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> None:
    check_float("cos", cos)
    check_tensor("sin", sin)
    if cos.dim() not in (2, 3):
        raise ValueError(f"cos must be [P, R/2] or [B, T, R/2]; got shape {tuple(cos.shape)}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin must have cos's shape {tuple(cos.shape)}; got {tuple(sin.shape)}")
    check_dtype("sin", sin, "cos", cos)
    check_device("cos", cos, "q", q)
    check_device("sin", sin, "q", q)
    if cos.dtype == torch.float64 != q.dtype:
        raise TypeError(f"cos and sin may be float64 only where q is; got q of {q.dtype}")
    half = cos.shape[-1]
    if (half == 0 and head_dim > 0) or 2 * half > head_dim:
        raise ValueError(
            f"cos must have a last dimension R/2 of 1 to D/2 with D = {head_dim}; got shape {tuple(cos.shape)}"
        )
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        raise ValueError("cos and sin take no gradient; got one that requires it (pass cos.detach(), sin.detach())")


ROPE = register_op(rope, reference.rope, cuda_order=NATIVE_FIRST)
QK_NORM_ROPE = register_op(qk_norm_rope, reference.qk_norm_rope)
