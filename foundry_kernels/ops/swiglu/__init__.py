r"""Gated linear units: SwiGLU, GEGLU, GLU and ReGLU.

With the logistic function :math:`\sigma` and the normal distribution's :math:`\Phi` and density :math:`\varphi`

.. math:: \mathrm{swiglu} = a(g) \, u, \quad a(g) = g \, \sigma(g), \quad a'(g) = \sigma(g) (1 + g (1 - \sigma(g)));
   \qquad \mathrm{geglu} = a(g) \, u, \quad a(g) = g \, \Phi(g), \quad a'(g) = \Phi(g) + g \, \varphi(g)

and in GEGLU's "tanh" form :math:`a(g) = \tfrac12 g (1 + \tanh(\sqrt{2/\pi} (g + 0.044715 g^3)))`. In GLU
:math:`a(g) = \sigma(g)`, in ReGLU :math:`a(g) = \max(g, 0)`, with a slope of 0 at 0. The gradients of g and u are
:math:`dy \, u \, a'(g)` and :math:`dy \, a(g)`, so the backward pass needs only the inputs. Arithmetic is in float32
(float64 for float64 inputs); results are rounded once.

GPT-OSS clamps both and shifts u: with a limit c, a slope alpha and an offset b

.. math:: y = a_\alpha(\min(g, c)) \, (\operatorname{clamp}(u, -c, c) + b), \quad
   a_\alpha(g) = g \, \sigma(\alpha g), \quad
   a_\alpha'(g) = \sigma(\alpha g) + \alpha g \, \sigma(\alpha g) (1 - \sigma(\alpha g))

where a gradient passes a clamp inside its bounds and at them, as that of ``torch.clamp`` does before PyTorch 2.14
(since then, inside alone).

Dropout, :math:`y \odot k / (1 - p)` with a mask :math:`k` of zeros and ones, is in the same pass, before the result is
rounded. The mask is a function of a seed (`foundry_kernels.core.dropout`), and the backward pass makes it again.

Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202; Hendrycks and Gimpel, "Gaussian Error Linear
Units", 2016, arXiv:1606.08415.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import dropout
from foundry_kernels.core.checks import (
    check_device,
    check_dtype,
    check_float,
    check_number,
    check_positive,
    check_shape,
    constants,
)
from foundry_kernels.core.registry import OpSpec, resolve
from foundry_kernels.ops._register import NATIVE_FIRST, register_op
from foundry_kernels.ops.swiglu import reference

APPROXIMATIONS = ("none", "tanh")


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    backend: str = "auto",
) -> Tensor:
    """``silu(gate) * up``, with ``silu(x) = x / (1 + exp(-x))``; with options, GPT-OSS's form of it.

    Args:
        gate: ``[..., N]`` float32, bfloat16, float16 or float64, any strides, at least one dimension; any of them may
            be 0. If `up` is None, ``[..., 2N]`` holds both: the gate in the first half, up in the second.
        up: ``[..., N]``, of gate's shape, dtype and device, or None.
        alpha: the activation is ``gate * sigmoid(alpha * gate)`` (GPT-OSS: 1.702).
        limit: both are clamped first, gate to at most `limit`, up to ``-limit .. limit`` (GPT-OSS: 7); None for no
            clamp. A value beyond a bound gets no gradient, a value at the bound does; NaN stays NaN and gets none.
        up_offset: added to up after the clamp (GPT-OSS: 1).
        interleaved: whether a packed argument has the gate in its even columns and up in the odd ones.
        dropout_p: in [0, 1). Each element of the result is set to 0 with this probability and is otherwise divided by
            ``1 - dropout_p``. Pass 0 in evaluation.
        dropout_seed: determines which elements are dropped, as in :func:`foundry_kernels.add_rms_norm`: equal seeds
            drop the same elements of results with the same width on every backend and device. None draws a seed from
            the default generator.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``[..., N]``, contiguous, of gate's dtype.

    Raises:
        TypeError: an argument is not a tensor or does not have a floating-point dtype; `dropout_p` or `dropout_seed`
            has another type.
        ValueError: `gate` is a scalar, or its last dimension is odd and `up` None; `up` does not match `gate`; `alpha`
            or `up_offset` is not finite, `limit` not positive and finite; `interleaved` with an `up`; `dropout_p` or
            `dropout_seed` is out of range or the seed on another device; the backend is unknown.
        BackendUnavailable: the named backend does not support this device or dtype.

    Autocast has no effect: arithmetic is in float32 anyway. Only the inputs are saved for the backward pass, which
    computes nothing for an input that needs no gradient and writes a packed gradient directly. Kernels have no second
    derivative.
    """
    if is_dynamo_compiling():
        alpha, limit, up_offset = constants(alpha, limit, up_offset)
    elif dropout_p == 0.0 and dropout_seed is None:
        y = SWIGLU.direct(backend, gate, up, alpha, limit, up_offset, interleaved)
        if y is not None:
            return y
    _check(gate, up)
    _check_options(up, alpha, limit, up_offset, interleaved)
    drop = dropout.arguments(gate, dropout_p, dropout_seed, "gate")
    if alpha == 1.0 and limit is None and up_offset == 0.0 and not interleaved and not drop:
        return resolve(SWIGLU, backend, gate)(gate, up)
    return resolve(SWIGLU, backend, gate)(gate, up, alpha, limit, up_offset, interleaved, *drop)


def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: str = "none",
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    backend: str = "auto",
) -> Tensor:
    """``gelu(gate) * up``.

    Args:
        gate, up, dropout_p, dropout_seed, backend: as for :func:`swiglu`.
        approximate: "none" for ``gelu(x) = x * Phi(x)`` with the error function, "tanh" for the tanh approximation
            (Gemma).

    Returns:
        ``[..., N]``, contiguous, of gate's dtype.

    Raises:
        As :func:`swiglu`; ValueError if `approximate` is neither of the two.
    """
    if not is_dynamo_compiling() and dropout_p == 0.0 and dropout_seed is None:
        y = GEGLU.direct(backend, gate, up, approximate)
        if y is not None:
            return y
    _check(gate, up)
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate must be one of {', '.join(APPROXIMATIONS)}; got {approximate!r}")
    drop = dropout.arguments(gate, dropout_p, dropout_seed, "gate")
    return resolve(GEGLU, backend, gate)(gate, up, approximate, *drop)


def glu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    backend: str = "auto",
) -> Tensor:
    """``sigmoid(gate) * up``.

    Of a packed argument the gate is the first half, as for :func:`swiglu`; in ``torch.nn.functional.glu`` it is the
    second.

    Args:
        gate, up, dropout_p, dropout_seed, backend: as for :func:`swiglu`.

    Returns:
        ``[..., N]``, contiguous, of gate's dtype.

    Raises:
        As :func:`swiglu`.

    Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2016, arXiv:1612.08083.
    """
    if not is_dynamo_compiling() and dropout_p == 0.0 and dropout_seed is None:
        y = GLU.direct(backend, gate, up)
        if y is not None:
            return y
    return _call(GLU, gate, up, dropout_p, dropout_seed, backend)


def reglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    backend: str = "auto",
) -> Tensor:
    """``relu(gate) * up``; the gradient of relu at 0 is 0.

    Args:
        gate, up, dropout_p, dropout_seed, backend: as for :func:`swiglu`.

    Returns:
        ``[..., N]``, contiguous, of gate's dtype.

    Raises:
        As :func:`swiglu`.
    """
    if not is_dynamo_compiling() and dropout_p == 0.0 and dropout_seed is None:
        y = REGLU.direct(backend, gate, up)
        if y is not None:
            return y
    return _call(REGLU, gate, up, dropout_p, dropout_seed, backend)


def _call(
    op: OpSpec, gate: Tensor, up: Tensor | None, dropout_p: float, dropout_seed: Tensor | int | None, backend: str
) -> Tensor:
    """The part of a gate without options that the direct path does not support."""
    _check(gate, up)
    return resolve(op, backend, gate)(gate, up, *dropout.arguments(gate, dropout_p, dropout_seed, "gate"))


def _check(gate: Tensor, up: Tensor | None) -> None:
    check_float("gate", gate)
    if gate.dim() == 0:
        raise ValueError("gate must have at least one dimension; got a scalar")
    if up is None:
        if gate.shape[-1] % 2 != 0:
            raise ValueError(f"gate must be [..., 2N] where up is None; got shape {tuple(gate.shape)}")
        return
    check_float("up", up)
    check_shape("up", up, gate.shape, "that of gate")
    check_dtype("up", up, "gate", gate)
    check_device("up", up, "gate", gate)


def _check_options(up: Tensor | None, alpha: float, limit: float | None, up_offset: float, interleaved: bool) -> None:
    check_number("alpha", alpha)
    check_number("up_offset", up_offset)
    if limit is not None:
        check_positive("limit", limit)
    if not isinstance(interleaved, bool):
        raise TypeError(f"interleaved must be a bool; got {type(interleaved).__name__}")
    if interleaved and up is not None:
        raise ValueError("interleaved is for a packed gate, whose columns alternate: up must be None")


SWIGLU = register_op(swiglu, reference.swiglu, cuda_order=NATIVE_FIRST)
GEGLU = register_op(geglu, reference.geglu)
GLU = register_op(glu, reference.glu)
REGLU = register_op(reglu, reference.reglu)
