"""A process-wide switch for batch-invariant results."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from foundry_kernels.compat._replace import Replacement, Switch
from foundry_kernels.core import invariance
from foundry_kernels.ops._linear import TORCHS, chosen


def batch_invariant() -> BatchInvariantSwitch:
    """Makes the results of a sequence, and the gradients of its inputs, independent of the rest of the batch.

    The bits are the same whether a sequence is alone, anywhere in a batch or packed with others; whether a query is
    part of decoding, of a chunk of a prompt or of the whole prompt (not with linear attention, where decoding and
    prompts round differently); and for any number of threads. Gradients of
    weights, which are sums over the batch, have the same bits for the same batch and any number of threads.

    It applies from the call on, to every thread of the process, until :meth:`BatchInvariantSwitch.undo`; or for a
    block::

        with fk.batch_invariant():
            logits = model(tokens)

    Within, :func:`foundry_kernels.flash_attention`, its packed form, :func:`foundry_kernels.grouped_mm` and
    :func:`foundry_kernels.linear_cross_entropy` behave as with ``batch_invariant=True``, all other operations of the
    package as usual, and `torch.nn.functional.linear`, with `torch.nn.Linear` among its callers, is computed by
    `grouped_mm` in tiles of one size (on a CPU, row by row in `decode_linear`'s kernel). The state at the forward call
    also applies to its backward pass. Activation checkpointing repeats the forward call, so run its backward pass
    within the switch too. `torch.compile` traces the switch; code that was compiled before is recompiled.

    Linear layers are routed for plain tensors in float32, bfloat16 and float16 on a CPU (with the compiled extension)
    and on CUDA's GPUs; another dtype there raises an error, as does a CPU without the extension. Subclasses of Tensor
    (DTensor), other devices, TorchScript and `torch.func` transforms run on PyTorch, and so do matmuls that are written
    ``x @ w`` and other layers (convolutions, `torch.nn.Bilinear`).

    It is slower: decoding does not split the keys, and linear layers do not use BLAS.

    Returns:
        A handle, which is a context manager. Several may be active at a time.

    He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.
    """
    return BatchInvariantSwitch()


def routed(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """The batch-invariant linear layer while a switch is on. A module that imports it then keeps it afterwards, so it
    checks the switch."""
    if has_torch_function((input, weight, bias)):
        return handle_torch_function(routed, (input, weight, bias), input, weight, bias)
    return chosen()(input, weight, bias)


class BatchInvariantSwitch(Switch):
    """The handle that :func:`batch_invariant` returns; it is active when it is created."""

    replacement = Replacement(TORCHS, routed)
    active: ClassVar[list[Any]] = []

    @classmethod
    def changed(cls) -> None:
        invariance.on = bool(cls.active)
