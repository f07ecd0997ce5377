r"""Short causal convolutions along time, one filter per channel, as in Qwen3-Next and Mamba.

With a filter :math:`w_c` of W taps for channel c, and an activation a (the identity or SiLU)

.. math:: y_{t,c} = a(z_{t,c}) + r_{t,c}, \quad z_{t,c} = b_c + \sum_{j=0}^{W-1} w_{c,j} \, x_{t-W+1+j,c}

where x before the first token is 0 or is taken from a state of W - 1 tokens, and r is a residual or 0. With
:math:`dz = dy \, a'(z)` and dr = dy

.. math:: dx_{s,c} = \sum_j w_{c,j} \, dz_{s+W-1-j,c}, \quad dw_{c,j} = \sum_t dz_{t,c} \, x_{t-W+1+j,c}, \quad
   db_c = \sum_t dz_{t,c}

The backward pass computes z again, so only the inputs are saved. Documents may be packed in one row: no tap crosses the
beginning of a document. Arithmetic is in float32 (float64 for float64 inputs); results are rounded once.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, arXiv:2412.06464.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_documents,
    check_dtype,
    check_float,
    check_rank,
    check_shape,
)
from foundry_kernels.core.inference import cut, without_backward
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import make_spec, register_op
from foundry_kernels.ops.short_conv1d import reference

MAX_TAPS = 8
#: What kernels call an activation, by its name in PyTorch and in Hugging Face's configs.
ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}


@overload
def short_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *,
    residual: Tensor | None = None, cu_seqlens: Tensor | None = None, initial_state: Tensor | None = None,
    return_final_state: Literal[False] = False, backend: str = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def short_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *,
    residual: Tensor | None = None, cu_seqlens: Tensor | None = None, initial_state: Tensor | None = None,
    return_final_state: bool = False, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def short_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    residual: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """A causal convolution along time with a filter of W taps per channel, a bias and SiLU, in one pass.

    Without a state it equals ``F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=W - 1, groups=C)`` up to
    the last token, transposed back.

    Args:
        x: ``[B, T, C]`` float32, bfloat16, float16 or float64, any strides; any dimension may be 0. ``[B, C, T]`` is
            passed as ``x.transpose(1, 2)``; if its storage has that order, it is copied.
        weight: ``[C, W]``, W in 1 .. 8: ``conv1d.weight.squeeze(1)`` of a ``torch.nn.Conv1d`` with a group per
            channel. Any of these dtypes (float64 only with a float64 x).
        bias: ``[C]``, as weight, or None.
        activation: None, "silu" or "swish" (another name of SiLU).
        residual: ``[B, T, C]`` of x's dtype, any strides, or None: it is added behind the activation, before the result
            is rounded.
        cu_seqlens: None, or ``[N + 1]`` int32 or int64: the first tokens of N documents that are packed in one row
            (``B = 1``), then T. Documents may be empty. Values are checked on the CPU. On a GPU a check would have to
            wait for them; there, invalid ones give wrong results, but nothing outside of x is read.
        initial_state: None for zeros, or ``[B, C, W - 1]`` (packed: ``[N, C, W - 1]``), of x's dtype and any strides:
            the inputs before the first token, the newest last. It is the minimum that a convolution goes on from;
            Hugging Face's cache holds W inputs, of which these are the last ones, ``conv_state[..., 1:]``.
        return_final_state: also return the last W - 1 inputs of each document, to go on from.
        backend: "auto", "reference", "triton" or "native" (on the CPU).

    Returns:
        y ``[B, T, C]``, contiguous, of x's dtype; with `return_final_state`, ``(y, final_state)``, the state as
        `initial_state`, contiguous.

    Raises:
        TypeError: an argument is not a tensor or has an unsupported dtype.
        ValueError: shapes, dtypes or devices do not match; W is not in 1 .. 8; `activation` or the backend is unknown;
            `cu_seqlens` with several rows; on the CPU, its values do not start at 0, decrease or do not end at T.
        BackendUnavailable: the named backend does not support this device or dtype.

    x, weight, bias, residual and both states are differentiable, once. Gradients of weight and bias are partial sums
    over blocks of tokens, added in a fixed order: they are bitwise deterministic. Autocast has no effect.
    """
    check_float("x", x)
    check_rank("x", x, 3, "[B, T, C]")
    batch, length, channels = x.shape
    act = _check_filter(x, channels, weight, bias, activation)
    documents = batch
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(
                f"x must be [1, T, C] with cu_seqlens, which packs documents in one row; got {tuple(x.shape)}"
            )
        documents = check_documents(cu_seqlens, "x", x, length)
    if initial_state is not None:
        which = "x's batch" if cu_seqlens is None else "documents"
        check_float("initial_state", initial_state)
        check_shape("initial_state", initial_state, (documents, channels, weight.shape[1] - 1), f"{which}, C, W - 1")
        check_dtype("initial_state", initial_state, "x", x)
        check_device("initial_state", initial_state, "x", x)
    _check_residual(residual, x)
    check_bool("return_final_state", return_final_state)
    y, final_state = resolve(SHORT_CONV1D, backend, x)(
        x, weight, bias, act, cu_seqlens, initial_state, residual, return_final_state
    )
    return y if final_state is None else (y, final_state)


def short_conv1d_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    residual: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One token of :func:`short_conv1d` for each row of a batch; the state is updated in place. For decoding: there is
    no gradient.

    Args:
        x: ``[B, C]``, dtypes as for :func:`short_conv1d`, any strides.
        state: ``[B, C, S]``, S at least W - 1, of x's dtype, any strides without overlap: the inputs before this token,
            the newest last. Afterwards they are shifted by one and x is the last. W - 1 are enough, and Hugging Face's
            cache of W fits too.
        residual: ``[B, C]`` of x's dtype, or None.
        weight, bias, activation, backend: as for :func:`short_conv1d`.

    Returns:
        y ``[B, C]``, contiguous, of x's dtype.

    Raises:
        TypeError, ValueError, BackendUnavailable: as :func:`short_conv1d`.
        RuntimeError: a backward pass reaches the result.
    """
    if not is_dynamo_compiling():
        found = SHORT_CONV1D_STEP.direct(backend, x, state, weight, bias, activation, residual)
        if found is not None:
            return found
    check_float("x", x)
    check_rank("x", x, 2, "[B, C]")
    act = _check_filter(x, x.shape[1], weight, bias, activation)
    check_float("state", state)
    check_rank("state", state, 3, "[B, C, S]")
    if state.shape[:2] != x.shape or state.shape[2] < weight.shape[1] - 1:
        least = weight.shape[1] - 1
        raise ValueError(f"state must be [*{tuple(x.shape)}, S], S at least {least}; got shape {tuple(state.shape)}")
    check_dtype("state", state, "x", x)
    check_device("state", state, "x", x)
    _check_residual(residual, x)
    wanted, (x, state, weight, bias, residual) = cut(x, state, weight, bias, residual)
    y = resolve(SHORT_CONV1D_STEP, backend, x)(x, state, weight, bias, act, residual)
    return without_backward((y,), wanted, "short_conv1d_step has no gradient; use torch.no_grad()")[0] if wanted else y


def _check_residual(residual: Tensor | None, x: Tensor) -> None:
    if residual is not None:
        check_float("residual", residual)
        check_shape("residual", residual, x.shape, "x's")
        check_dtype("residual", residual, "x", x)
        check_device("residual", residual, "x", x)


def _check_filter(x: Tensor, channels: int, weight: Tensor, bias: Tensor | None, activation: str | None) -> str:
    """Checks the arguments that both functions share; returns the activation's name in the kernels."""
    check_float("weight", weight)
    check_rank("weight", weight, 2, "[C, W]")
    if weight.shape[0] != channels or not 1 <= weight.shape[1] <= MAX_TAPS:
        raise ValueError(
            f"weight must be [C, W] with x's {channels} channels and W in 1 .. {MAX_TAPS}; got shape "
            f"{tuple(weight.shape)}"
        )
    given = [("weight", weight)]
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, (channels,), "x's channels")
        given.append(("bias", bias))
    for name, each in given:
        check_device(name, each, "x", x)
        if each.dtype == torch.float64 != x.dtype:
            raise TypeError(f"{name} may be float64 only where x is; got x of {x.dtype}")
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation must be None or a str; got {type(activation).__name__}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None, 'silu' or 'swish'; got {activation!r}")
    return ACTIVATIONS[activation]


SHORT_CONV1D = register_op(short_conv1d, reference.short_conv1d, native_devices=("cpu",))
#: Not in the registry, whose suites require that no argument is modified.
SHORT_CONV1D_STEP = make_spec(short_conv1d_step, reference.short_conv1d_step, native_devices=("cpu",))
