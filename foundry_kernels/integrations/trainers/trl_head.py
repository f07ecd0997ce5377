"""TRL's fused head on `linear_log_probs`, for the time of training.

TRL's trainers give each model a forward that hands hidden states and the head's weight to one autograd function
(`trl.trainer.utils.add_fused_lm_head`, from 1.16 on). It is looked up in that module at each call, so a function in its
place serves every wrapped copy of the forward (of PEFT, accelerate, FSDP), and reference models too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.registry import FLOATS, OPS, is_dtensor
from foundry_kernels.ops.linear_log_probs import linear_log_probs
from foundry_kernels.ops.log_probs.options import STATS

#: TRL's function, and that by which its forward asks whether to leave out ignored tokens before the head.
FUNCTION, LEAVES_OUT = "_ChunkedLogProbFunction", "_use_triton"
#: Devices on which ours was measured to be faster (docs/trainers.md).
FASTER_ON = ("cpu",)
#: TRL's results of each token besides the log-probabilities, in its order.
RESULTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Head(NamedTuple):
    """What takes the place of TRL's function, `theirs`."""

    theirs: Any
    backend: str

    def serves(self, hidden: Tensor, weight: Tensor) -> bool:
        """Whether a call is ours. ZeRO-3's weight is only there while TRL's function runs."""
        device, within = hidden.device.type, autocast_dtype(hidden) or hidden.dtype
        if device not in FASTER_ON or within not in FLOATS or hasattr(weight, "ds_id") or is_dtensor(weight):
            return False
        if autocast_dtype(hidden) is None and weight.dtype != hidden.dtype:  # which would be copied as a whole
            return False
        native = OPS["linear_log_probs"].why_not("native", device, within) is None
        return self.backend == "native" or (self.backend == "auto" and native)

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = RESULTS,
    ) -> tuple[Tensor | None, ...]:
        """Returns what TRL's function does: (log_probs, *RESULTS) of tokens ``[N]``, with None for those that are not
        among `outputs`. The temperature divides logits after their soft cap."""
        if not self.serves(hidden, weight):
            given = (hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs)
            found: tuple[Tensor | None, ...] = self.theirs.apply(*given)
            return found
        entropy, stats = "entropy" in outputs, not set(RESULTS[1:]).isdisjoint(outputs)
        each = linear_log_probs(
            hidden,
            weight,
            targets,
            bias=bias,
            logit_scale=logit_scale / temperature,
            softcap=None if softcap is None else softcap / temperature,
            return_entropy=entropy,
            return_stats=stats,
            backend=self.backend,
        )
        picked, *others = each if isinstance(each, tuple) else (each,)
        made: dict[str, Tensor] = dict(zip(("entropy",) * entropy + STATS * stats, others, strict=True))
        made |= {"is_top1": made["token_accuracy"].bool()} if stats else {}
        return picked, *(made[name] if name in outputs else None for name in RESULTS)


@contextmanager
def head_in_trl(backend: str) -> Iterator[None]:
    """Puts `Head` into TRL, if it is imported and has such a head. backend: of `linear_log_probs`."""
    utils: Any = sys.modules.get("trl.trainer.utils")
    before = {name: getattr(utils, name, None) for name in (FUNCTION, LEAVES_OUT)}
    theirs, leaves_out = before.values()
    if theirs is None or leaves_out is None:
        yield
        return
    ours = {
        FUNCTION: Head(theirs, backend),
        LEAVES_OUT: lambda device: leaves_out(device) or device.type in FASTER_ON,
    }
    vars(utils).update(ours)
    try:
        yield
    finally:
        for name, value in ours.items():
            if getattr(utils, name) is value:  # else somebody has replaced it since
                setattr(utils, name, before[name])
