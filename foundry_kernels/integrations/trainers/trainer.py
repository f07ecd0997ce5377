"""A callback of transformers' `Trainer`, and of trainers that derive from it, TRL's among them::

from foundry_kernels.integrations.trainer import PatchCallback
Trainer(model, arguments, train_dataset=data, callbacks=[PatchCallback]).train()
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from foundry_kernels.integrations.trainers.callbacks import PatchInTraining


class PatchCallback(PatchInTraining, TrainerCallback):
    """Patches the trainer's model, hands the report to `log`, and undoes the patch at the end of `train`.

    The model is patched when the trainer is made, before it is wrapped (in autocast, DDP, FSDP or DeepSpeed), or where
    `train` begins if it is not patched then. A model that was patched before, by the same arguments, stays patched at
    the end.

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

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
