r"""Log-probabilities of given tokens, and the entropy of each token's distribution.

Of a token with logits :math:`x` of V classes and target t, with :math:`y = s x` for the `logit_scale` s (and
:math:`y = c \tanh(s x / c)` where there is a soft cap c)

.. math:: \mathrm{lse} = \log \sum_j e^{y_j}, \quad \log p_t = y_t - \mathrm{lse}, \quad
   H = -\sum_j p_j \log p_j, \quad p_j = e^{y_j - \mathrm{lse}}

The three share one pass over the logits. For gradients :math:`g, h, l` of the log-probability, the entropy and the lse,
that of :math:`y_j` is

.. math:: g \, [j = t] + p_j \left(l - g - h (H + y_j - \mathrm{lse})\right)

so the backward pass needs the logits and a few numbers a token, and no softmax is stored. The lse is kept as the sum of
two floats, and the target's own terms use log1p and expm1: log-probabilities near 0 and their gradients are accurate.
Arithmetic is in float32 (float64 for float64 logits).
"""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_float,
    check_int,
    check_integer,
    check_number,
    check_positive,
    check_shape,
    constants,
)
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.log_probs import reference
from foundry_kernels.ops.log_probs.options import LogProbsOptions, by_name


@overload
def log_probs(
    logits: Tensor, target: Tensor, *, logit_scale: float = 1.0, softcap: float | None = None,
    ignore_index: int = -100, return_entropy: Literal[False] = False, return_lse: Literal[False] = False,
    return_stats: Literal[False] = False, backend: str = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def log_probs(
    logits: Tensor, target: Tensor, *, logit_scale: float = 1.0, softcap: float | None = None,
    ignore_index: int = -100, return_entropy: bool = False, return_lse: bool = False, return_stats: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def log_probs(
    logits: Tensor,
    target: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_stats: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """``log_softmax(logit_scale * logits)`` at the classes `target`, in one pass over the logits.

    Args:
        logits: ``[..., V]`` float32, bfloat16, float16 or float64, any strides, V at least 1.
        target: ``[...]`` int32 or int64, in 0 .. V - 1 or `ignore_index`.
        logit_scale: the logits are multiplied by this, before the soft cap. 1 / temperature.
        softcap: None, or c > 0 for logits ``c * tanh(logit_scale * logits / c)``.
        ignore_index: tokens with this target are ignored. Their results and gradients are 0, whatever their logits are.
        return_entropy: also return the entropy of each token's distribution, in nats.
        return_lse: also return the log-sum-exp of each token's (scaled, capped) logits.
        return_stats: also return three numbers of each token, without gradients: the token accuracy (1 if no class has
            a larger logit than the target and none before it an equal one, else 0), the mean of the (scaled, capped)
            logits, and the logarithm of the sum of the squared probabilities.
        backend: "auto", "reference", "triton" or "native" (on the CPU).

    Returns:
        The log-probabilities ``[...]``, float32 (float64 for float64 logits). With a `return_` option, a tuple
        ``(log_probs, [entropy], [lse], [token_accuracy, mean_logits, log_sum_sq_probs])`` of tensors of this shape. All
        but the last three are differentiable.

    Raises:
        TypeError: an argument is not a tensor or has an unsupported dtype.
        ValueError: shapes or devices do not match, V is 0, `logit_scale` is 0 or not finite, or the backend's name is
            unknown.
        IndexError: on the CPU, a target is out of range. On a GPU the check would wait for the device; there the
            token's results and gradient are NaN.
        BackendUnavailable: the named backend does not support this device or dtype.

    Autocast does not change the computation. Nothing of the logits' size is made but their gradient, in their dtype.
    There is no second derivative.
    """
    if (
        return_entropy is return_lse is return_stats is False
        and not is_dynamo_compiling()
        and (found := LOG_PROBS.direct(backend, logits, target, ignore_index, logit_scale, softcap)) is not None
    ):
        return found
    check_float("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have a last dimension of at least 1; got shape {tuple(logits.shape)}")
    logit_scale, softcap = constants(logit_scale, softcap)
    options = LogProbsOptions(ignore_index, logit_scale, softcap, return_entropy, return_lse, return_stats)
    check("logits", logits, target, options)
    *found, stats = resolve(LOG_PROBS, backend, logits)(logits, target, options)
    return select(*found, *by_name(stats).values())


def check(name: str, x: Tensor, target: Tensor, options: Any) -> None:
    """Checks all arguments except `x`, which is the logits or the hidden states, with the tokens in all dimensions but
    the last. The options are those of this operation or of linear_log_probs."""
    check_integer("target", target)
    check_shape("target", target, x.shape[:-1], f"that of {name} without the last dimension")
    check_device("target", target, name, x)
    check_int("ignore_index", options.ignore_index)
    check_number("logit_scale", options.logit_scale)
    if options.logit_scale == 0.0:
        raise ValueError("logit_scale must not be 0: it is 1 / temperature")
    if options.softcap is not None:
        check_positive("softcap", options.softcap)
    for flag in ("return_entropy", "return_lse", "return_stats"):
        check_bool(flag, getattr(options, flag))


def select(*found: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """The requested results, of which the first is always one."""
    results = tuple(x for x in found if x is not None)
    return results if len(results) > 1 else results[0]


LOG_PROBS = register_op(log_probs, reference.log_probs, native_devices=("cpu",))
