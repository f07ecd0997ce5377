"""What the callbacks of trainers share: a patch for the time of training."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from foundry_kernels.integrations.patching.patch import patch
from foundry_kernels.nn._backend import Backend


class PatchInTraining:
    """Patches a model where training begins and leaves it at the end as it was found there.

    Args:
        backend, ops, dense_masks, return_logits: as for :func:`foundry_kernels.patch`.
        log: what the report is given to, on the first process only; None for nothing.
    """

    def __init__(
        self,
        *,
        backend: Backend = "auto",
        ops: Iterable[str] | None = None,
        dense_masks: str = "kernels",
        return_logits: bool = False,
        log: Callable[[str], Any] | None = print,
    ) -> None:
        super().__init__()
        ops = ops if ops is None or isinstance(ops, str) else tuple(ops)  # which is read at each start
        self._arguments: dict[str, Any] = {
            "backend": backend, "ops": ops, "dense_masks": dense_masks, "return_logits": return_logits
        }  # fmt: skip
        self._log = log
        self._patched = contextlib.ExitStack()
        self._model: nn.Module | None = None

    def _begin(self, model: nn.Module, first_process: bool) -> None:
        if model is self._model:
            return
        self._end()
        handle = self._patched.enter_context(patch(model, **self._arguments))
        if first_process and self._log is not None:
            self._log(str(handle.report()))
        self._model = model

    def _end(self) -> None:
        """Undoes the patch. Where that is impossible the model stays patched: what a trainer does at the end of a long
        run must not fail for it."""
        self._model = None
        try:
            self._patched.close()
        except RuntimeError as error:
            warnings.warn(f"the model stays patched: {error}", stacklevel=2)
