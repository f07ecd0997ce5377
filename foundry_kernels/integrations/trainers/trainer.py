"""A callback of transformers' `Trainer`, and of trainers that derive from it, TRL's among them::

from foundry_kernels.integrations.trainer import PatchCallback
Trainer(model, arguments, train_dataset=data, callbacks=[PatchCallback]).train()
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from foundry_kernels.integrations.trainers.callbacks import PatchInTraining
from foundry_kernels.integrations.trainers.trl_head import head_in_trl
from foundry_kernels.nn._backend import plan

#: The operation of `fk.patch` that is a model's head.
_HEAD = "linear_cross_entropy"


class PatchCallback(PatchInTraining, TrainerCallback):
    """Patches the trainer's model, hands the report to `log`, and undoes the patch at the end of `train`.

    The model is patched when the trainer is made, before it is wrapped (in autocast, DDP, FSDP or DeepSpeed), or where
    `train` begins if it is not patched then. A model that was patched before, by the same arguments, stays patched at
    the end. During `train` the fused head that TRL's trainers add runs on :func:`foundry_kernels.linear_log_probs`
    where that is faster, on the CPU, for all trainers of the process; unless `return_logits` is set or `ops` lacks
    linear_cross_entropy.

    Args:
        backend, ops, dense_masks, return_logits: as for :func:`foundry_kernels.patch`.
        log: what the report is given to, on the first process only; None for nothing.

    Raises:
        As :func:`foundry_kernels.patch`, when the trainer is made or training begins.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin(kwargs["model"], state.is_world_process_zero)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin(kwargs["model"], state.is_world_process_zero)
        ops, backend = self._arguments["ops"], self._arguments["backend"]
        if (ops is None or _HEAD in ops) and not self._arguments["return_logits"]:
            self._patched.enter_context(head_in_trl(plan(backend, [_HEAD])[_HEAD]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
