"""log_probs(hidden @ weight.T + bias, target) without storing the logits.

Losses of reinforcement learning, preference and distillation need the log-probability of each token, with a gradient of
its own, and often the entropy. Here the logits exist in chunks of tokens or in blocks of classes, as for
:func:`foundry_kernels.linear_cross_entropy`, and the backward pass computes them once more: four matmuls in all, and
one without gradients. The entropy, its gradient and the statistics need no further matmul. See
:func:`foundry_kernels.log_probs` for the formulas.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import invariance
from foundry_kernels.core.checks import constants
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops import log_probs as of_logits
from foundry_kernels.ops._linear_loss.checks import (
    check_linear,
    check_pair,
    check_vocab_sharded,
    is_vocab_sharded,
    strategy,
    under_autocast,
)
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.linear_log_probs import reference
from foundry_kernels.ops.linear_log_probs.options import LinearLogProbsOptions


class Options(TypedDict, total=False):
    """The keyword arguments except those that select the results."""

    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None
    logit_scale: float
    softcap: float | None
    ignore_index: int
    chunk_size: int | Literal["tiles"] | None
    batch_invariant: bool
    backend: str


@overload
def linear_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, *, return_entropy: Literal[False] = False,
    return_lse: Literal[False] = False, return_stats: Literal[False] = False, **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def linear_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, *, return_entropy: bool = False, return_lse: bool = False,
    return_stats: bool = False, **options: Unpack[Options],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    low: Tensor | None = None,
    up: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_stats: bool = False,
    chunk_size: int | Literal["tiles"] | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """``log_probs(logit_scale * (hidden @ weight.T + bias), target)``, without storing the logits.

    Args:
        hidden: ``[..., D]`` float32, bfloat16, float16 or float64, any strides, D at least 1.
        weight: ``[V, D]``, of hidden's dtype and device; V at least 1. It may be tied to the embedding.
        target: ``[...]`` int32 or int64, in 0 .. V - 1 or `ignore_index`.
        bias: ``[V]``, of hidden's dtype and device, or None.
        low, up: of a head with an adapter, as for :func:`foundry_kernels.linear_cross_entropy`.
        logit_scale: the logits are multiplied by this, before the soft cap. 1 / temperature.
        softcap, ignore_index, return_entropy, return_lse, return_stats: as for :func:`foundry_kernels.log_probs`.
        chunk_size, batch_invariant: as for :func:`foundry_kernels.linear_cross_entropy`.
        backend: "auto", "reference" (which computes all logits at once), "triton" or "native" (on the CPU): those whose
            kernel computes the log-probabilities of the logits.

    Returns:
        The log-probabilities ``[...]``, float32 (float64 for float64 inputs). With a `return_` option, a tuple
        ``(log_probs, [entropy], [lse], [token_accuracy, mean_logits, log_sum_sq_probs])`` of tensors of this shape. All
        but the last three are differentiable.

    Raises:
        As :func:`foundry_kernels.log_probs`; ValueError if weight or bias does not fit hidden, or `chunk_size` is below
            1.

    Under autocast hidden, weight and bias are first cast to its dtype, as in a linear layer. There is no second
    derivative. Memory is that of :func:`foundry_kernels.linear_cross_entropy` with reduction "none", and a few numbers
    a token. Results have the same bits in each run. DTensors: tokens may be sharded over devices, and so may the
    classes (`weight` and `bias` as ``Shard(0)``), as for :func:`foundry_kernels.linear_cross_entropy`.
    """
    if (
        return_entropy is return_lse is return_stats is False
        and chunk_size is low is up is None
        and batch_invariant is invariance.on is False
        and not is_dynamo_compiling()
        and (
            direct := LINEAR_LOG_PROBS.direct(backend, hidden, weight, target, bias, ignore_index, logit_scale, softcap)
        )
        is not None
    ):
        return direct
    hidden, weight, bias = under_autocast(hidden, weight, bias)
    logit_scale, softcap = constants(logit_scale, softcap)
    check_linear(hidden, weight, bias, logit_scale, chunk_size)
    check_pair(hidden, weight, low, up)
    options = LinearLogProbsOptions(
        ignore_index, logit_scale, softcap, *strategy(chunk_size, batch_invariant), return_entropy, return_lse,
        return_stats,
    )  # fmt: skip
    of_logits.check("hidden", hidden, target, options)
    function = resolve(LINEAR_LOG_PROBS, backend, hidden)
    if is_vocab_sharded(weight):
        from foundry_kernels.ops._linear_loss.vocab_parallel import on_mesh_of, sharded_loss
        from foundry_kernels.ops.linear_log_probs.vocab_parallel import LogProbsOfOwnClasses

        check_vocab_sharded(chunk_size, hidden=hidden, bias=bias, low=low, up=up)
        found, _ = sharded_loss(LogProbsOfOwnClasses, hidden, weight, target, bias, low, up, None, options)
        if torch.compiler.is_compiling():
            found = on_mesh_of(hidden, found)
    else:
        found = function(hidden, weight, target, bias, low, up, options)
    return of_logits.select(*(found[name] for name in options.results()))


LINEAR_LOG_PROBS = register_op(linear_log_probs, reference.linear_log_probs, native_devices=("cpu",))
