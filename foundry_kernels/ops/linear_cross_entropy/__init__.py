r"""cross_entropy(hidden @ weight.T + bias, target) without storing the logits.

The logits are by far the largest tensor of a training step: ``[tokens, V]``. Here they are never stored for the
backward pass. There are two strategies.

*Rows*: the logits of all classes are computed for a chunk of tokens at a time, go through the kernel of
:func:`foundry_kernels.cross_entropy`, and are freed before the next chunk. If the loss is reduced, each chunk's
gradients are computed right after its logits, for an incoming gradient of 1, and the backward pass multiplies them by
the actual incoming gradient. So nothing is computed twice, and a loss that is scaled, added to others or differentiated
twice through one graph (``retain_graph=True``) has the correct gradients. With ``reduction="none"`` each token's loss
has its own incoming gradient, and the backward pass recomputes the logits from the saved lse (one more matmul). The
gradient of the logits overwrites them. With several chunks the gradients of weight and bias are summed in float32 or,
for a bfloat16 weight on a CPU, in 24 bits; those of a single chunk are matmuls that are rounded once.

*Tiles*: blocks of the classes, for all tokens. The forward pass adds the logits of a block to each token's running
log-sum-exp. The backward pass recomputes them, and each row of the weight's gradient is complete at once, so there is
no float32 copy of it (see `_linear_loss/class_blocks.py`). On the CPU tiles use the forward pass of chunks.

The matmuls are PyTorch's own, at sizes for which they are fast. A kernel that multiplied tiles of logits without
writing them took 20.5 ms on an H100; PyTorch's matmuls and a pass over their results took 13.9 ms (8192 tokens, 4096 x
128256, forward).

Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, arXiv:2411.09009; Hsu et al., "Liger
Kernel", 2024, arXiv:2410.10989.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import invariance
from foundry_kernels.core.checks import check_bool, constants
from foundry_kernels.core.registry import is_dtensor, resolve
from foundry_kernels.ops import cross_entropy as losses
from foundry_kernels.ops._linear_loss.checks import (
    check_linear,
    check_pair,
    check_vocab_sharded,
    is_vocab_sharded,
    strategy,
    under_autocast,
)
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.cross_entropy.tokens import with_predictions
from foundry_kernels.ops.linear_cross_entropy import reference
from foundry_kernels.ops.linear_cross_entropy.options import LinearCrossEntropyOptions


class Options(TypedDict, total=False):
    """The keyword arguments except those that select the results."""

    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None
    class_weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    chunk_size: int | Literal["tiles"] | None
    token_scaling: bool
    batch_invariant: bool
    backend: str


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, return_lse: Literal[False] = False,
    return_z_loss: Literal[False] = False, return_token_accuracy: Literal[False] = False,
    return_predicted_tokens: Literal[False] = False, **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, return_lse: bool = False, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, **options: Unpack[Options],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    low: Tensor | None = None,
    up: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_size: int | Literal["tiles"] | None = None,
    token_scaling: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """``cross_entropy(logit_scale * (hidden @ weight.T + bias), target)``, without storing the logits.

    Args:
        hidden: ``[..., D]`` float32, bfloat16, float16 or float64, any strides, D at least 1.
        weight: ``[V, D]``, of hidden's dtype and device; V at least 1. It may be tied to the embedding.
        target: ``[...]`` int32 or int64, in 0 .. V - 1 or `ignore_index`.
        bias: ``[V]``, of hidden's dtype and device, or None.
        low, up: ``[..., r]`` and ``[V, r]``, of hidden's dtype or float32, or None: ``low @ up.T`` is added to
            ``hidden @ weight.T``, as of a head with an adapter: LoRA's ``low = scale * dropout(hidden) @ A.T``, up = B.
        class_weight: ``[V]``, the `weight` of :func:`foundry_kernels.cross_entropy`, or None. It takes no gradient.
        ignore_index, reduction, label_smoothing, z_loss, softcap: as there. On the CPU ignored tokens are dropped
            before the matmul. On a GPU reading their number would wait, so they are computed and ignored.
        token_scaling: as there, in each chunk. With tiles the targets' logits are computed once more, 2048 tokens at a
            time.
        return_lse, return_z_loss, return_token_accuracy, return_predicted_tokens: as there, but the lse is
            differentiable too, except with sharded classes under torch.compile. Its gradient computes the logits once
            more. Predictions are taken from the logits while they exist.
        logit_scale: the logits are multiplied by this, before the soft cap.
        chunk_size: the number of tokens whose logits exist at a time. "tiles" uses blocks of classes: less memory, but
            a fourth matmul (the reference treats it as None). None chooses (see `Memory`).
        batch_invariant: whether a token's loss, and the gradient of its hidden state unless the reduction is a mean,
            has the same bits whatever other tokens there are, and the gradients of weight and bias have the same bits
            for any number of threads. It uses rows, all at once or in chunks, and the matmuls of a batch-invariant
            :func:`foundry_kernels.grouped_mm`, in float32 on a CPU. Always on within
            :func:`foundry_kernels.batch_invariant`.
        backend: "auto", "reference" (which computes all logits at once), "triton" or "native": those whose
            cross-entropy kernel computes the chunks.

    Returns:
        As :func:`foundry_kernels.cross_entropy`.

    Raises:
        As :func:`foundry_kernels.cross_entropy`; ValueError if weight or bias does not fit hidden, `logit_scale` is not
            finite, or `chunk_size` below 1.

    Under autocast hidden, weight and bias are first cast to its dtype, as in a linear layer. There is no second
    derivative.

    Memory, beyond inputs and the returned gradients. Nothing is allocated for an input that needs no gradient.

    Triton needs a copy of hidden (0 for ignored tokens), and:

    - all rows at once: the logits, ``tokens * V`` numbers of hidden's dtype, which become their own gradient. Three
      matmuls, or four with reduction "none". The default if these logits take at most a 32nd of the device's total
      memory; free memory does not matter. With float16 the weight's gradient in float32 is added, and counts in the
      same way.
    - tiles: the logits of a block of classes, 256 MiB (2048 classes at least), and hidden's gradient in float32. Four
      matmuls, or one without gradients. The default if all logits would take more than that; without gradients, if they
      would take more than a block.
    - chunks: the logits of one chunk, and the weight's gradient in float32, to which a matmul of each chunk adds. With
      a reduced loss it is stored until the backward pass. Three matmuls, or four with "none".

    Of 8192 tokens over Llama 3's head, 4096 x 128256 in bfloat16, that is 2.0 GiB, 0.4 GiB, and 2.5 GiB in chunks of
    2048 tokens; PyTorch's operations, which store the logits and their gradient, took 4.8 GiB on an H100.

    On a CPU chunks take the logits of one chunk, by default of a 16th of the tokens (an 8th in 16 bits) but of 512 at
    least; with gradients and a reduced loss the gradients in float32, which for float32 inputs and a loss that is the
    root of a graph that is not retained are the ones returned. With reduction "none": lse and its rounding error. With
    bfloat16, chunks have 256 tokens by default, and the weight's gradient is summed in 24 bits. The returned gradient
    holds the first 16 of these, so the sum takes one additional byte per element. If oneDNN has no instructions for
    such matmuls, logits are float32, and the weights of a few classes at a time are copied to float32. Tiles take the
    logits of one chunk forward; backward two million logits at a time, or those of 256 classes, and hidden's gradient
    in float32.

    Gradients that are rounded when they are made (of 16 bits: on a GPU hidden's, and with all rows at once the
    weight's; on a CPU in bfloat16 those of more than 500,000 multiplications) are multiplied by the loss's own
    gradient and rounded again, where that is not 1.

    By default the CPU makes all logits of up to 256 tokens at once if they need no gradient. With gradients it does so,
    and keeps the logits for the backward pass, if the tokens are at most a 16th of D or, with reduction "none", at most
    D, and none of them is ignored. Otherwise it takes chunks; but of a bfloat16 weight that gets a gradient, if oneDNN
    has instructions for such matmuls and the loss is reduced, a single chunk if all logits fit into 32 MiB, and with
    matrix instructions (AMX) tiles if they do not. Where it is not reduced it takes tiles.

    Results have the same bits in each run. Matmuls are PyTorch's own, so bits may differ with another number of threads
    or another strategy. The gradient of weight is summed over the chunks; for bfloat16 on a CPU by oneDNN's kernel. In
    float32 on a CPU matmuls are the extension's where PyTorch's leave half of the processor unused (MKL on AMD from Zen
    5 on). Matmuls have the inputs' dtype. On a CPU, small matmuls, and all of them if oneDNN has no instructions for
    bfloat16 or float16, use float32 copies of hidden and weight, with logits of float32 accuracy.

    DTensors: tokens may be sharded over devices, and so may the classes (`weight` and `bias` as ``Shard(0)``). With
    sharded classes every backend runs on the same code of PyTorch operations: each device computes the logits of its
    own classes, and two small all-reduces give the loss, in chunks of tokens (`_linear_loss/vocab_parallel.py`).
    `target` may be a plain tensor then, the same on all devices.
    """
    if (
        return_lse is return_z_loss is return_token_accuracy is return_predicted_tokens is token_scaling is False
        and chunk_size is low is up is None
        and batch_invariant is invariance.on is False
        and not is_dynamo_compiling()
        and (
            loss := LINEAR_CROSS_ENTROPY.direct(
                backend, hidden, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, z_loss,
                softcap, logit_scale,
            )
        )
        is not None
    ):  # fmt: skip
        return loss
    hidden, weight, bias = under_autocast(hidden, weight, bias)
    label_smoothing, z_loss, softcap, logit_scale = constants(label_smoothing, z_loss, softcap, logit_scale)
    check_linear(hidden, weight, bias, logit_scale, chunk_size)
    check_pair(hidden, weight, low, up)
    for name, flag in (
        ("return_lse", return_lse), ("return_z_loss", return_z_loss), ("return_token_accuracy", return_token_accuracy),
        ("return_predicted_tokens", return_predicted_tokens), ("token_scaling", token_scaling),
    ):  # fmt: skip
        check_bool(name, flag)
    size, batch_invariant = strategy(chunk_size, batch_invariant)
    options = LinearCrossEntropyOptions(
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, size, token_scaling, batch_invariant,
        return_lse, return_z_loss, return_token_accuracy or return_predicted_tokens,
    )  # fmt: skip
    losses.check("hidden", hidden, weight.shape[0], target, "class_weight", class_weight, options)
    function = resolve(LINEAR_CROSS_ENTROPY, backend, hidden)
    reduces = reduction != "none" and is_dtensor(hidden)  # torch reduces over devices
    vocab_sharded = is_vocab_sharded(weight)
    if vocab_sharded:
        from foundry_kernels.ops._linear_loss.vocab_parallel import on_mesh_of, sharded_loss
        from foundry_kernels.ops.linear_cross_entropy.vocab_parallel import CrossEntropyOfOwnClasses

        check_vocab_sharded(chunk_size, hidden=hidden, bias=bias, class_weight=class_weight, low=low, up=up)
        found, target = sharded_loss(
            CrossEntropyOfOwnClasses, hidden, weight, target, bias, low, up, class_weight, options
        )
        if return_lse and torch.compiler.is_compiling():
            found["lse"] = found["lse"].detach()  # AOTAutograd wants gradients of all DTensors (pytorch#172556)
    else:
        of_call = options._replace(reduction="none") if reduces else options
        found = function(hidden, weight, target, bias, low, up, class_weight, of_call)
    each, lse, zs = found["loss"], found.get("lse"), found.get("z_loss")
    if reduces:
        each, lse, zs = losses.reduced(each, lse, zs, target, class_weight, options)
    results = options.select(each, lse, zs)
    if options.return_predictions:
        more = (return_token_accuracy, return_predicted_tokens)
        results = with_predictions(results, found["predicted"], target, ignore_index, reduction, *more)
    return on_mesh_of(hidden, results) if vocab_sharded and torch.compiler.is_compiling() else results


LINEAR_CROSS_ENTROPY = register_op(linear_cross_entropy, reference.linear_cross_entropy, native_devices=("cpu",))
