"""A callback of transformers' `Trainer`, and of trainers that derive from it, TRL's among them::

    from foundry_kernels.integrations.trainer import PatchCallback
    Trainer(model, arguments, train_dataset=data, callbacks=[PatchCallback]).train()
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from foundry_kernels.integrations.callbacks import PatchInTraining


class PatchCallback(PatchInTraining, TrainerCallback):
    """Patches the trainer's model when `train` begins, hands the report to `log`, and undoes the patch at the end.

    Evaluation within `train` uses the patched model. A model that is patched already, by the same arguments, stays
    patched at the end. The model is patched after it is wrapped (DDP, FSDP, PEFT) and before the first step.

    Args:
        backend, ops, dense_masks, return_logits: as for :func:`foundry_kernels.patch`.
        log: what the report is given to, on the first process only; None for nothing.

    Raises:
        As :func:`foundry_kernels.patch`, when training begins.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin(kwargs["model"], state.is_world_process_zero)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
