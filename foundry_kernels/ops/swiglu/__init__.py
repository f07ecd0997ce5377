r"""Gated linear units: SwiGLU and GEGLU.

With the logistic function :math:`\sigma` and the normal distribution's :math:`\Phi` and density :math:`\varphi`

.. math:: \mathrm{swiglu} = a(g) \, u, \quad a(g) = g \, \sigma(g), \quad a'(g) = \sigma(g) (1 + g (1 - \sigma(g)));
   \qquad \mathrm{geglu} = a(g) \, u, \quad a(g) = g \, \Phi(g), \quad a'(g) = \Phi(g) + g \, \varphi(g)

and in GEGLU's "tanh" form :math:`a(g) = \tfrac12 g (1 + \tanh(\sqrt{2/\pi} (g + 0.044715 g^3)))`. The gradients of g
and u are :math:`dy \, u \, a'(g)` and :math:`dy \, a(g)`, so the backward pass needs only the inputs. Arithmetic is
in float32 (float64 for float64 inputs); results are rounded once.

GPT-OSS clamps both and shifts u: with a limit c, a slope alpha and an offset b

.. math:: y = a_\alpha(\min(g, c)) \, (\operatorname{clamp}(u, -c, c) + b), \quad
   a_\alpha(g) = g \, \sigma(\alpha g), \quad
   a_\alpha'(g) = \sigma(\alpha g) + \alpha g \, \sigma(\alpha g) (1 - \sigma(\alpha g))

where a gradient passes a clamp inside its bounds and at them, as that of ``torch.clamp`` does.

Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202; Hendrycks and Gimpel, "Gaussian Error Linear
Units", 2016, arXiv:1606.08415.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import (
    check_device,
    check_dtype,
    check_float,
    check_number,
    check_positive,
    check_shape,
)
from foundry_kernels.core.registry import Impl, OpSpec, register, resolve
from foundry_kernels.ops._register import register_op
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
    backend: str = "auto",
) -> Tensor:
    """``silu(gate) * up``, with ``silu(x) = x / (1 + exp(-x))``; with options, GPT-OSS's form of it.

    Args:
        gate: ``[..., N]`` float32, bfloat16, float16 or float64, any strides, at least one dimension; any of them may
            be 0. If `up` is None, ``[..., 2N]`` holds both: the gate in the first half, up in the second.
        up: ``[..., N]``, of gate's shape, dtype and device, or None.
        alpha: the activation is ``gate * sigmoid(alpha * gate)`` (GPT-OSS: 1.702).
        limit: both are clamped first, gate to at most `limit`, up to ``-limit .. limit`` (GPT-OSS: 7); None for no
            clamp. A value beyond a bound gets no gradient, one at it does; NaN stays NaN, and gets none.
        up_offset: added to up after the clamp (GPT-OSS: 1).
        interleaved: whether a packed argument has the gate in its even columns and up in the odd ones.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``[..., N]``, contiguous, of gate's dtype.

    Raises:
        TypeError: an argument is not a tensor or does not have a floating-point dtype.
        ValueError: `gate` is a scalar, or its last dimension is odd and `up` None; `up` does not match `gate`; `alpha`
            or `up_offset` is not finite, `limit` not positive and finite; `interleaved` with an `up`; the backend is
            unknown.
        BackendUnavailable: the named backend does not support this device or dtype.

    Autocast has no effect: arithmetic is in float32 anyway. Only the inputs are saved for backward, which computes
    nothing for an input that needs no gradient and writes a packed gradient directly. Kernels have no second
    derivative.
    """
    if not is_dynamo_compiling():
        y = SWIGLU.direct(backend, gate, up, alpha, limit, up_offset, interleaved)
        if y is not None:
            return y
    _check(gate, up)
    _check_options(up, alpha, limit, up_offset, interleaved)
    if alpha == 1.0 and limit is None and up_offset == 0.0 and not interleaved:
        return resolve(SWIGLU, backend, gate)(gate, up)
    return resolve(SWIGLU, backend, gate)(gate, up, alpha, limit, up_offset, interleaved)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none", backend: str = "auto") -> Tensor:
    """``gelu(gate) * up``.

    Args:
        gate, up, backend: as for :func:`swiglu`.
        approximate: "none" for ``gelu(x) = x * Phi(x)`` with the error function, "tanh" for the tanh approximation
            (Gemma).

    Returns:
        ``[..., N]``, contiguous, of gate's dtype.

    Raises:
        As :func:`swiglu`; ValueError if `approximate` is neither of the two.
    """
    if not is_dynamo_compiling() and (y := GEGLU.direct(backend, gate, up, approximate)) is not None:
        return y
    _check(gate, up)
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate must be one of {', '.join(APPROXIMATIONS)}; got {approximate!r}")
    return resolve(GEGLU, backend, gate)(gate, up, approximate)


def glu(gate: Tensor, up: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """``sigmoid(gate) * up``.

    Of a packed argument the gate is the first half, as for :func:`swiglu`; in ``torch.nn.functional.glu`` it is the
    second.

    Args:
        gate, up, backend: as for :func:`swiglu`.

    Returns:
        ``[..., N]``, contiguous, of gate's dtype.

    Raises:
        As :func:`swiglu`.

    Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2016, arXiv:1612.08083.
    """
    _check(gate, up)
    return resolve(GLU, backend, gate)(gate, up)


def reglu(gate: Tensor, up: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """``relu(gate) * up``; the gradient of relu at 0 is 0.

    Args:
        gate, up, backend: as for :func:`swiglu`.

    Returns:
        ``[..., N]``, contiguous, of gate's dtype.

    Raises:
        As :func:`swiglu`.
    """
    _check(gate, up)
    return resolve(REGLU, backend, gate)(gate, up)


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


SWIGLU = register_op(swiglu, reference.swiglu)
GEGLU = register_op(geglu, reference.geglu)
GLU = register(OpSpec("glu", glu, (Impl("reference", reference.glu),), __name__))
REGLU = register(OpSpec("reglu", reglu, (Impl("reference", reference.reglu),), __name__))
