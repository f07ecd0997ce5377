"""The forms of linear_cross_entropy with the kernels of log_probs between PyTorch's matmuls: all rows at once, blocks
of classes, or chunks of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels._triton.operators import define
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.cross_entropy.options import LossOptions
from foundry_kernels.ops.linear_cross_entropy import sizes
from foundry_kernels.ops.linear_cross_entropy.calls import Kernels
from foundry_kernels.ops.linear_log_probs.operators import Strategy, make_backend
from foundry_kernels.ops.log_probs.options import LogProbsOptions
from foundry_kernels.ops.log_probs.triton import Rows, gradients


def _options(options: LossOptions, return_entropy: bool = False) -> LogProbsOptions:
    return LogProbsOptions(options.ignore_index, 1.0, options.softcap, return_entropy)


class _Results(Rows):
    def __init__(
        self, target: Tensor, n_classes: int, _: None, options: LossOptions, dtype: torch.dtype, save_lse: bool,
        save_entropy: bool, save_low: bool,
    ) -> None:  # fmt: skip
        super().__init__(target, n_classes, _options(options, save_entropy), dtype, save_lse, save_low)
        picked, entropy, lse, low = self.outputs
        self.results = picked, lse, low, entropy


def _forward(
    logits: Tensor, target: Tensor, _: None, options: LossOptions, save_lse: bool, save_entropy: bool, save_low: bool,
    __: None,
) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = wide_dtype(logits.dtype)
    rows = _Results(target, logits.shape[1], None, options, dtype, save_lse, save_entropy, save_low)
    rows.add(logits, 0)
    return rows.results


def _gradients_(
    logits: Tensor, drows: Tensor, target: Tensor, _: None, lse: Tensor, lse_low: Tensor, first: int, n_classes: int,
    options: LossOptions,
) -> None:  # fmt: skip
    g, *rest = drows.unbind(-1)
    c, b = (*rest, None, None)[:2]
    gradients(g, c, b, logits, target, lse, lse_low, _options(options), logits, first, n_classes)


KERNELS = Kernels(_forward, _gradients_, cpu=False, classes=sizes.classes_on_gpu, losses=_Results)

linear_log_probs: Any = make_backend("triton_", define, Strategy(KERNELS, sizes.on_gpu))
