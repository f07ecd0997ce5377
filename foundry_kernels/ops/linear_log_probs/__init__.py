"""log_probs(hidden @ weight.T + bias, target) without storing the logits.

Losses of reinforcement learning, preference and distillation need the log-probability of each token, with a gradient of
its own, and often the entropy. Here the logits exist in chunks of tokens or in blocks of classes, as for
:func:`foundry_kernels.linear_cross_entropy`, and the backward pass computes them once more: four matmuls in all, and
one without gradients. The entropy and its gradient need no further matmul. See :func:`foundry_kernels.log_probs` for
the formulas.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from foundry_kernels.core import invariance
from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.checks import check_bool, check_float, constants
from foundry_kernels.core.registry import is_dtensor, resolve
from foundry_kernels.ops import log_probs as of_logits
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.linear_cross_entropy import check_linear, is_vocab_sharded
from foundry_kernels.ops.linear_cross_entropy.options import TILES
from foundry_kernels.ops.linear_log_probs import reference
from foundry_kernels.ops.linear_log_probs.options import LinearLogProbsOptions


@overload
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: Literal[False] = False,
    return_lse: Literal[False] = False,
    chunk_size: int | Literal["tiles"] | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    chunk_size: int | Literal["tiles"] | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]: ...
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
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
        logit_scale: the logits are multiplied by this, before the soft cap. 1 / temperature.
        softcap, ignore_index, return_entropy, return_lse: as for :func:`foundry_kernels.log_probs`.
        chunk_size, batch_invariant: as for :func:`foundry_kernels.linear_cross_entropy`.
        backend: "auto", "reference" (which computes all logits at once), "triton" or "native" (on the CPU): those whose
            kernel computes the log-probabilities of the logits.

    Returns:
        The log-probabilities ``[...]``, float32 (float64 for float64 inputs). With a `return_` option, a tuple
        ``(log_probs, [entropy], [lse])`` of tensors of this shape. All are differentiable.

    Raises:
        As :func:`foundry_kernels.log_probs`; ValueError if weight or bias does not fit hidden, or `chunk_size` is below
            1.

    Under autocast hidden, weight and bias are first cast to its dtype, as in a linear layer. There is no second
    derivative. Memory is that of :func:`foundry_kernels.linear_cross_entropy` with reduction "none", and a few numbers
    a token. Results have the same bits in each run. DTensors: tokens may be sharded over devices, and so may the
    classes (`weight` and `bias` as ``Shard(0)``), as for :func:`foundry_kernels.linear_cross_entropy`.
    """
    check_float("hidden", hidden)
    if (low := autocast_dtype(hidden)) is not None:
        hidden, weight = hidden.to(low), weight.to(low) if isinstance(weight, Tensor) else weight
        bias = bias.to(low) if isinstance(bias, Tensor) else bias
    logit_scale, softcap = constants(logit_scale, softcap)
    check_linear(hidden, weight, bias, logit_scale, chunk_size)
    check_bool("batch_invariant", batch_invariant)
    options = LinearLogProbsOptions(
        ignore_index, logit_scale, softcap, TILES if chunk_size == "tiles" else chunk_size,
        batch_invariant or invariance.on, return_entropy, return_lse,
    )  # fmt: skip
    if options.batch_invariant and chunk_size == "tiles":
        raise ValueError("chunk_size must be a number of tokens or None where batch_invariant is on; got 'tiles'")
    of_logits.check("hidden", hidden, target, options)
    function = resolve(LINEAR_LOG_PROBS, backend, hidden)
    if not is_vocab_sharded(weight):
        return of_logits.select(*function(hidden, weight, target, bias, options))
    from foundry_kernels.ops.linear_cross_entropy.vocab_parallel import on_mesh_of
    from foundry_kernels.ops.linear_log_probs import vocab_parallel

    for name, x in (("hidden", hidden), ("bias", bias)):
        if x is not None and not is_dtensor(x):
            raise ValueError(f"{name} must be a DTensor if weight is vocab-sharded; got a plain tensor")
    if chunk_size == "tiles":
        raise ValueError("chunk_size must be a number of tokens or None if weight is vocab-sharded; got 'tiles'")
    results = of_logits.select(*vocab_parallel.linear_log_probs(hidden, weight, target, bias, options))
    return on_mesh_of(hidden, results) if torch.compiler.is_compiling() else results


LINEAR_LOG_PROBS = register_op(linear_log_probs, reference.linear_log_probs, native_devices=("cpu",))
