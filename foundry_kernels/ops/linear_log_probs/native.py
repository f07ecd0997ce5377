"""Chunks through the extension's log-probabilities, on the CPU; or in the backward pass blocks of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.cross_entropy.options import LossOptions
from foundry_kernels.ops.linear_cross_entropy import sizes
from foundry_kernels.ops.linear_cross_entropy.calls import Kernels
from foundry_kernels.ops.linear_cross_entropy.native import define
from foundry_kernels.ops.linear_log_probs.operators import Strategy, make_backend
from foundry_kernels.ops.log_probs.native import log_probs_bwd_classes_

_FORWARD = torch.ops.foundry_kernels.log_probs_fwd.default


def _forward(
    logits: Tensor, target: Tensor, _: None, options: LossOptions, save_lse: bool, save_entropy: bool, save_low: bool,
    __: None,
) -> tuple[Tensor, ...]:  # fmt: skip
    picked, entropy, lse, low = _FORWARD(
        logits, target, options.ignore_index, 1.0, options.softcap, save_entropy, save_lse, save_low
    )
    return picked, lse, low, entropy


def _gradients_(
    logits: Tensor, drows: Tensor, target: Tensor, _: None, lse: Tensor, lse_low: Tensor, first: int, n_classes: int,
    options: LossOptions,
) -> None:  # fmt: skip
    g, *rest = drows.unbind(-1)
    c, b = (*rest, None, None)[:2]
    log_probs_bwd_classes_(
        logits, g, c, b, target, lse, lse_low, first, n_classes, options.ignore_index, 1.0, options.softcap
    )


KERNELS = Kernels(_forward, _gradients_, cpu=True, classes=sizes.classes_on_cpu)

linear_log_probs: Any = make_backend("", define, Strategy(KERNELS, sizes.on_cpu))
