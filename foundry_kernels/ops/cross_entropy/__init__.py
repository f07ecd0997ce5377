r"""Cross-entropy of class indices, with label smoothing, the z-loss and a soft cap of the logits.

Of a token with logits :math:`x` of V classes (:math:`y = c \tanh(x / c)` where there is a soft cap c), target t, class
weights w and label smoothing :math:`\epsilon`

.. math:: \mathrm{lse} = \log \sum_j e^{y_j}, \quad
   \ell = w_t \left((1 - \epsilon)(\mathrm{lse} - y_t) + z \, \mathrm{lse}^2\right)
   + \frac{\epsilon}{V} \sum_j w_j (\mathrm{lse} - y_j)

and the mean divides the sum over the tokens that count by the sum of their :math:`w_t`. The gradient of y is
:math:`\ell'` times :math:`a \, p_j - (1 - \epsilon) w_t [j = t] - \frac{\epsilon}{V} w_j` with :math:`p_j = e^{y_j -
\mathrm{lse}}` and :math:`a = (1 - \epsilon) w_t + \frac{\epsilon}{V} \sum_j w_j + 2 z w_t \mathrm{lse}`, so the
backward pass needs the logits and one number a token in place of a copy of the softmax. That number is kept as the sum
of two floats, and the target's own terms use log1p and expm1, so that the loss and gradient of confident tokens and of
logits in the thousands stay accurate. Arithmetic is in float32 (float64 for float64 logits).

Szegedy et al., "Rethinking the Inception Architecture", 2015, arXiv:1512.00567 (label smoothing); Chowdhery et al.,
"PaLM", 2022, arXiv:2204.02311 (z-loss); Gemma Team, "Gemma 2", 2024, arXiv:2408.00118 (soft cap).
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_float,
    check_int,
    check_integer,
    check_not_negative,
    check_positive,
    check_shape,
    constants,
)
from foundry_kernels.core.registry import is_dtensor, resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops._sums import sum_of
from foundry_kernels.ops.cross_entropy import reference, tokens
from foundry_kernels.ops.cross_entropy.options import LossOptions

REDUCTIONS = ("none", "mean", "sum")


class Options(TypedDict, total=False):
    """The keyword arguments except those that select the results."""

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    token_scaling: bool
    backend: str


@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, return_lse: Literal[False] = False, return_z_loss: Literal[False] = False,
    return_token_accuracy: Literal[False] = False, return_predicted_tokens: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, return_lse: bool = False, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, **options: Unpack[Options],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    token_scaling: bool = False,
    return_lse: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """The loss of `logits` for the classes `target`: ``torch.nn.functional.cross_entropy`` of class indices.

    Args:
        logits: ``[..., V]`` float32, bfloat16, float16 or float64, any strides, V at least 1. The classes are the last
            dimension whatever the rank (torch's function has them second).
        target: ``[...]`` int32 or int64, in 0 .. V - 1 or `ignore_index`. Probabilities are refused.
        weight: ``[V]``, a floating-point weight of each class, or None. It takes no gradient.
        ignore_index: tokens with this target are ignored. Their loss and gradient are 0, whatever their logits are.
        reduction: "none", "sum" or "mean" (the weighted mean over the tokens that are not ignored; 0 if all are
            ignored, where torch returns NaN).
        label_smoothing: 0 .. 1, the fraction of the target that is spread evenly over all classes.
        z_loss: a factor; ``z_loss * lse ** 2`` is added to each token's loss before the reduction.
        softcap: None, or c > 0 for logits ``c * tanh(logits / c)``.
        token_scaling: multiply each token's loss, including its z-loss, by the probability of its target. No gradient
            flows through this factor. The divisor of the mean does not change.
        return_lse: also return the log-sum-exp of each token's (capped) logits.
        return_z_loss: also return the z-loss part of the loss.
        return_token_accuracy: also return the fraction of tokens that are not ignored and whose largest logit is the
            target's. With reduction "none", 1 or 0 for each token.
        return_predicted_tokens: also return the class of each token's largest logit.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        The loss, float32 (float64 for float64 logits): a scalar, or ``[...]`` where reduction is "none". With any of
        the `return_` options, a tuple ``(loss, [lse], [z_loss], [token_accuracy], [predicted_tokens])``: lse ``[...]``,
        0 for ignored tokens; z_loss of the loss's shape; token_accuracy float32 of that shape, 0 for ignored tokens;
        predicted_tokens ``[...]`` int64, -1 for ignored tokens. Only the loss is differentiable.

    Raises:
        TypeError: an argument is not a tensor or has an unsupported dtype.
        ValueError: shapes or devices do not match, V is 0, an option is out of its range, `weight` requires a gradient,
            or the backend's name is unknown.
        IndexError: on the CPU, a target is out of range. On a GPU the check would wait for the device; there the
            token's loss and gradient are NaN.
        BackendUnavailable: the named backend does not support this device or dtype.

    Autocast does not change the computation. The backward pass needs the logits and two floats per token, and writes
    the gradient once. Inputs are not modified. There is no second derivative. Accuracy and predictions cost one more
    pass over the logits, by PyTorch's argmax; scaling reads one logit per token.
    """
    if (
        return_lse is return_z_loss is return_token_accuracy is return_predicted_tokens is token_scaling is False
        and not is_dynamo_compiling()
        and (
            loss := CROSS_ENTROPY.direct(
                backend, logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap
            )
        )
        is not None
    ):
        return loss
    check_float("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have a last dimension of at least 1; got shape {tuple(logits.shape)}")
    label_smoothing, z_loss, softcap = constants(label_smoothing, z_loss, softcap)
    options = LossOptions(ignore_index, reduction, label_smoothing, z_loss, softcap, return_lse, return_z_loss)
    for name, flag in (
        ("return_lse", return_lse), ("return_z_loss", return_z_loss), ("return_token_accuracy", return_token_accuracy),
        ("return_predicted_tokens", return_predicted_tokens), ("token_scaling", token_scaling),
    ):  # fmt: skip
        check_bool(name, flag)
    check("logits", logits, logits.shape[-1], target, "weight", weight, options)
    function = resolve(CROSS_ENTROPY, backend, logits)
    if token_scaling:
        found = function(logits, target, weight, *options._replace(reduction="none", return_lse=True))
        p = tokens.probabilities(logits, target, found[1], ignore_index, softcap)
        found = (found[0] * p, found[1], found[2] * p if return_z_loss else None)
        found = found if reduction == "none" else reduced(*found, target, weight, options)
    elif reduction != "none" and is_dtensor(logits):  # whose sums torch reduces over devices
        each, lse, zs = function(logits, target, weight, *options._replace(reduction="none"))
        found = reduced(each, lse, zs, target, weight, options)
    else:
        found = function(logits, target, weight, *options)
    results = options.select(*found)
    if not (return_token_accuracy or return_predicted_tokens):
        return results
    predicted = tokens.predictions(logits, target, ignore_index)
    more = (return_token_accuracy, return_predicted_tokens)
    return tokens.with_predictions(results, predicted, target, ignore_index, reduction, *more)


def reduced(
    losses: Tensor, lse: Tensor | None, zs: Tensor | None,
    target: Tensor, weight: Tensor | None, options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Reduces the losses and z-losses of the tokens with torch's own operations. Across devices these are two or three
    numbers."""
    loss, z = sum_of(losses), None if zs is None else sum_of(zs)
    if options.reduction == "sum":
        return loss, lse, z
    counts = target != options.ignore_index
    total = counts.sum().to(losses.dtype)
    if weight is not None:
        total = (weight.to(losses.dtype)[torch.where(counts, target, 0)] * counts).sum()
    loss, total = _whole(loss), _whole(total)
    return reference.mean(loss, total), lse, None if z is None else reference.mean(_whole(z), total)


def _whole(x: Any) -> Tensor:
    """Sums a partial DTensor over the devices once, because each later operation on it would repeat the reduction."""
    if not hasattr(x, "device_mesh"):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def check(
    name: str, x: Tensor, n_classes: int, target: Tensor, weight_name: str, weight: Tensor | None, options: Any
) -> None:
    """Checks all arguments except `x`, which is the logits or the hidden states, with the tokens in all dimensions but
    the last. The options are those of this operation or of linear_cross_entropy."""
    if isinstance(target, Tensor) and target.is_floating_point():
        raise TypeError(
            f"target must be class indices, int32 or int64; got {target.dtype}: probabilities of classes as targets "
            "are not supported here (foundry_kernels.compat.cross_entropy takes them)"
        )
    check_integer("target", target)
    check_shape("target", target, x.shape[:-1], f"that of {name} without the last dimension")
    check_device("target", target, name, x)
    ignore_index, reduction, label_smoothing, z_loss, softcap = options[:5]
    check_classes(name, x, n_classes, weight_name, weight, reduction, label_smoothing)
    if weight is not None and weight.requires_grad:
        raise ValueError(f"{weight_name} must not require a gradient: the weights of classes are constants here")
    check_int("ignore_index", ignore_index)
    check_not_negative("z_loss", z_loss)
    if softcap is not None:
        check_positive("softcap", softcap)


def check_classes(
    name: str,
    x: Tensor,
    n_classes: int,
    weight_name: str,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
) -> None:
    """Checks that are the same for class indices and probabilities."""
    if weight is not None:
        check_float(weight_name, weight)
        check_shape(weight_name, weight, (n_classes,), "a value for each class")
        check_device(weight_name, weight, name, x)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    check_not_negative("label_smoothing", label_smoothing)
    if label_smoothing > 1.0:
        raise ValueError(f"label_smoothing must be in 0 .. 1; got {label_smoothing}")


CROSS_ENTROPY = register_op(cross_entropy, reference.cross_entropy)
