"""A switch for the same bits in any batch, for all of a process."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from foundry_kernels.compat._replace import Replacement
from foundry_kernels.core import invariance
from foundry_kernels.ops._linear import TORCHS, chosen

_switches: list[BatchInvariantSwitch] = []
_lock = threading.Lock()


def batch_invariant() -> BatchInvariantSwitch:
    """Makes what a sequence gets, and the gradients of its inputs, independent of what else is in the batch.

    The same bits whether a sequence is alone, in a batch, at any place in it or packed with others; whether a query
    comes in decoding, in a chunk of a prompt or in the whole prompt; and with any number of threads. Gradients of
    weights, which are sums over the batch, have the same bits for the same batch with any number of threads.

    It holds from the call on, for every thread of the process, until :meth:`BatchInvariantSwitch.undo`; or for a
    block::

        with fk.batch_invariant():
            logits = model(tokens)

    Within, :func:`foundry_kernels.flash_attention`, its packed form, :func:`foundry_kernels.grouped_mm` and
    :func:`foundry_kernels.linear_cross_entropy` behave as with ``batch_invariant=True``, all other operations of the
    package as always, and `torch.nn.functional.linear`, with `torch.nn.Linear` among its callers, is computed by
    `grouped_mm` in tiles of one size (on a CPU, row by row in `decode_linear`'s kernel). What was read at a forward
    call counts for its backward pass, wherever that runs. Activation checkpointing calls the function again: run the
    backward pass within the switch then. `torch.compile` traces all of it; what was compiled before is compiled again.

    Linear layers are routed for plain tensors in float32, bfloat16 and float16 on a CPU (with the compiled extension)
    and on CUDA's GPUs; another dtype there raises, as does a CPU without the extension. Subclasses of Tensor (DTensor),
    other devices, TorchScript and `torch.func` transforms stay with PyTorch, and so do products that are written
    ``x @ w`` and other layers (convolutions, `torch.nn.Bilinear`).

    It costs speed: decoding without splits of the keys, linear layers without BLAS.

    Returns:
        A handle, which is a context manager. Several may be on at a time.

    He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.
    """
    return BatchInvariantSwitch()


class BatchInvariantSwitch:
    """What :func:`batch_invariant` returns; it is on as soon as it is made."""

    def __init__(self) -> None:
        with _lock:
            if not _switches:
                _linear.put()
            _switches.append(self)
            invariance.on = True

    def undo(self) -> None:
        """Turns this switch off. What was before is back where no other one is on. Once is enough."""
        with _lock:
            if self not in _switches:
                return
            _switches.remove(self)
            invariance.on = bool(_switches)
            if not _switches:
                _linear.restore()

    def __enter__(self) -> BatchInvariantSwitch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def routed(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """The batch-invariant linear layer while a switch is on: a module that imports it then keeps it for longer."""
    if has_torch_function((input, weight, bias)):
        return handle_torch_function(routed, (input, weight, bias), input, weight, bias)
    return chosen()(input, weight, bias)


_linear = Replacement(TORCHS, routed)
