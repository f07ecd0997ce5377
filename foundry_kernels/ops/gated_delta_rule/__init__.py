r"""The gated delta rule: linear attention whose state forgets and corrects itself (Gated DeltaNet, Qwen3-Next).

A head keeps a matrix S of :math:`D_k \times D_v`, which maps keys to values. A token with the query q, the key k, the
value v, the decay :math:`e^g` and the step size :math:`\beta` first decays it, then corrects what it returns for k
towards v, and reads it with q:

.. math:: S \leftarrow e^{g} S, \qquad S \leftarrow S + \beta k (v - S^T k)^T, \qquad o = s \, S^T q

with the scale s. Without g it is the delta rule. If g has a number for each dimension of a key, :math:`e^g` is a
diagonal matrix. Gated linear attention adds :math:`k v^T` instead of the correction.
The work grows linearly with the number of tokens, and decoding needs the state and no keys or values of the past.

Kernels compute chunks of tokens by matmuls: with the decays :math:`L_{ij} = e^{g_{j+1} + \dots + g_i}` from token j to
token i of a chunk, the decay :math:`L_i` from its start, and its first state :math:`S_0`, the corrections V' are the
solution of a triangular system, and

.. math:: (I + A) V' &= \mathrm{diag}(\beta) (V - \mathrm{diag}(L_i) K S_0), \quad
   A_{ij} = \beta_i L_{ij} \, k_i \cdot k_j \; (j < i) \\
   O &= s \, (\mathrm{diag}(L_i) Q S_0 + (L \odot Q K^T) V'), \quad
   S_1 = L_C S_0 + K^T \mathrm{diag}(L_{Cj}) V'

With a decay for each dimension, the products of two tokens' keys and queries are sums over dimensions of products with
the decay between them. Within 16 tokens these are computed for each pair; between blocks of 16 they are matmuls of rows
decayed from the start of the later block and of rows decayed up to it. So each factor is a product of decays, and none
overflows where decays do not.

Arithmetic is in float32 (float64 for float64 inputs), and results are rounded once.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, arXiv:2412.06464. Chunks: Yang
et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, arXiv:2406.06484. Gated
linear attention: Yang et al., 2023, arXiv:2312.06635. Kimi Delta Attention: Kimi Team, 2025, arXiv:2510.26692.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.inference import cut, without_backward
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.gated_delta_rule import reference
from foundry_kernels.ops.gated_delta_rule.checks import check_sequence, check_step


@overload
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, *,
    scale: float | None = None, initial_state: Tensor | None = None, return_final_state: Literal[False] = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, beta_limit: float | None = None,
    qk_l2norm: bool = False, chunk_size: int | None = None, backend: str = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, *,
    scale: float | None = None, initial_state: Tensor | None = None, return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, beta_limit: float | None = None,
    qk_l2norm: bool = False, chunk_size: int | None = None, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_limit: float | None = None,
    qk_l2norm: bool = False,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule over sequences of tokens.

    Args:
        q: ``[B, H_k, T, D_k]`` float32, bfloat16, float16 or float64, any strides; D_k in 1 .. 256. B and T may be 0.
        k: as q, of q's shape, dtype and device.
        v: ``[B, H_v, T, D_v]`` of q's dtype, H_v a multiple of H_k, D_v in 1 .. 512. Head h of v has the queries and
            keys of head ``h // (H_v / H_k)``.
        g: ``[B, H_v, T]``, the logarithm of each token's decay, or ``[B, H_v, T, D_k]``, a decay for each dimension of
            a key (Kimi Delta Attention), in float32 or q's dtype; None for no decay (the delta rule). Usually at most
            0; other values are computed as they are.
        beta: ``[B, H_v, T]``, the step size, in float32 or q's dtype; None for 1. Usually in 0 .. 1 or 0 .. 2; other
            values are computed as they are.
        scale: of the output, > 0; None for ``D_k ** -0.5``.
        initial_state: ``[N, H_v, D_k, D_v]`` float32 (float64 for float64 inputs), the states before the first tokens,
            N = B, or the number of documents; None for zeros.
        return_final_state: also return the states after the last tokens.
        cu_seqlens: ``[N + 1]`` int32 or int64, the ends of N documents packed one after another, starting with 0; then
            B must be 1. A document may be empty. Nothing passes from one document to another, not even NaN. The values
            are checked on the CPU; on a GPU, a check would synchronize.
        A_log: ``[H_v]``, in float32 or q's dtype: g is a gate's input, and the decay's logarithm is ``-exp(A_log) *
            softplus(g + dt_bias)``. None: g is the logarithm.
        dt_bias: ``[H_v]``, or ``[H_v, D_k]`` for a decay for each dimension, only with `A_log`, in float32 or q's
            dtype; None for 0.
        beta_limit: beta is a gate's input, and the step size is ``beta_limit * sigmoid(beta)``. None: beta is the step
            size.
        qk_l2norm: divide each query and key by its length, ``x * rsqrt(sum(x ** 2) + 1e-6)``.
        chunk_size: 16, 32, 64 or 128 tokens that a kernel computes at a time, None for its own choice. It changes
            the speed and the last bits.
        backend: "auto", "reference", "triton" or "native" (on the CPU).

    Returns:
        o ``[B, H_v, T, D_v]`` of v's dtype in v's storage order; with `return_final_state`, ``(o, final_state)`` with
        the final state ``[N, H_v, D_k, D_v]`` in float32 (float64), contiguous. Both are differentiable, with respect
        to all tensors but `cu_seqlens`. A head's results do not depend on what else is in the batch.

    Raises:
        TypeError: an argument is not a tensor or has an unsupported dtype.
        ValueError: shapes, dtypes or devices do not match, an option is out of range, or the backend's name is unknown.
        BackendUnavailable: the named backend does not support this device or dtype.

    Under ``torch.autocast``, q, k and v (unless float64) are cast to its dtype first. There is no second derivative.
    Heads with D_v above 256 run as two; in training, 16-bit ones are computed in float32.
    """
    q, k, v, options = check_sequence(
        q, k, v, g, beta, initial_state, scale, return_final_state, cu_seqlens, qk_l2norm, chunk_size, True, A_log,
        dt_bias, beta_limit,
    )  # fmt: skip
    out, final = resolve(GATED_DELTA_RULE, backend, v)(q, k, v, g, beta, initial_state, A_log, dt_bias, options)
    return (out, final) if return_final_state else out


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    beta_limit: float | None = None,
    qk_l2norm: bool = False,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The delta rule (DeltaNet): :func:`gated_delta_rule` without a decay."""
    return gated_delta_rule(
        q,
        k,
        v,
        None,
        beta,
        scale=scale,
        initial_state=initial_state,
        return_final_state=return_final_state,
        cu_seqlens=cu_seqlens,
        beta_limit=beta_limit,
        qk_l2norm=qk_l2norm,
        chunk_size=chunk_size,
        backend=backend,
    )


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    qk_l2norm: bool = False,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention with a decay for each head and token (RetNet, Mamba-2), or for each dimension of a key (GLA),
    without the delta rule's correction: ``S = exp(g) S + k v^T``, ``o = scale S^T q``.

    All arguments, results and errors are those of :func:`gated_delta_rule`, which has `beta` and `beta_limit` besides.
    """
    q, k, v, options = check_sequence(
        q, k, v, g, None, initial_state, scale, return_final_state, cu_seqlens, qk_l2norm, chunk_size, False, A_log,
        dt_bias,
    )  # fmt: skip
    out, final = resolve(GATED_LINEAR_ATTENTION, backend, v)(q, k, v, g, None, initial_state, A_log, dt_bias, options)
    return (out, final) if return_final_state else out


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_limit: float | None = None,
    qk_l2norm: bool = False,
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`gated_delta_rule` for each sequence: a step of decoding, without gradients.

    Args:
        q: ``[B, H_k, D_k]`` float32, bfloat16, float16 or float64, any strides.
        k: as q, of q's shape, dtype and device.
        v: ``[B, H_v, D_v]`` of q's dtype, H_v a multiple of H_k.
        g: ``[B, H_v]`` or ``[B, H_v, D_k]`` in float32 or q's dtype, or None.
        beta: ``[B, H_v]`` in float32 or q's dtype, or None.
        state: ``[B, H_v, D_k, D_v]`` float32 (float64 for float64 inputs), whose last two dimensions are contiguous. It
            is overwritten by the states after the token.
        scale, A_log, dt_bias, beta_limit, qk_l2norm, backend: as for :func:`gated_delta_rule`.

    Returns:
        o ``[B, H_v, D_v]`` of v's dtype, contiguous.

    Raises:
        RuntimeError: a backward pass reaches the result, which has no gradient.
        TypeError, ValueError, BackendUnavailable: as for :func:`gated_delta_rule`.
    """
    if not is_dynamo_compiling():
        found = GATED_DELTA_RULE_STEP.direct(
            backend, q, k, v, g, beta, state, A_log, dt_bias, scale, qk_l2norm, beta_limit
        )
        if found is not None:
            return found
    wanted, (q, k, v, g, beta, state, A_log, dt_bias) = cut(q, k, v, g, beta, state, A_log, dt_bias)
    q, k, v, scale, beta_limit = check_step(q, k, v, g, beta, state, scale, qk_l2norm, A_log, dt_bias, beta_limit)
    backend_step = resolve(GATED_DELTA_RULE_STEP, backend, v)
    out = backend_step(q, k, v, g, beta, state, A_log, dt_bias, scale, qk_l2norm, beta_limit)
    why = "gated_delta_rule_step has no gradient; use torch.no_grad()"
    return without_backward((out,), wanted, why)[0] if wanted else out


GATED_DELTA_RULE = register_op(gated_delta_rule, reference.gated_delta_rule, native_devices=("cpu",))
GATED_LINEAR_ATTENTION = register_op(gated_linear_attention, reference.gated_delta_rule, native_devices=("cpu",))
GATED_DELTA_RULE_STEP = register_op(gated_delta_rule_step, reference.gated_delta_rule_step, native_devices=("cpu",))
