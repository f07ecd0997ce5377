"""A callback of Lightning's `Trainer`::

from foundry_kernels.integrations.lightning import PatchCallback
lightning.Trainer(callbacks=[PatchCallback()]).fit(module, data)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from foundry_kernels.integrations.trainers.callbacks import PatchInTraining


class PatchCallback(PatchInTraining, Callback):
    """Patches the models in a LightningModule when `fit` begins, hands the report to `log`, and undoes the patch at the
    end, also after an error.

    Args:
        backend, ops, dense_masks, return_logits: as for :func:`foundry_kernels.patch`.
        log: what the report is given to, on the first process only; None for nothing.

    Raises:
        As :func:`foundry_kernels.patch`, when `fit` begins.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(pl_module, trainer.is_global_zero)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()
