"""Chunks through the extension's cross-entropy, on the CPU; or in the backward pass blocks of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.cross_entropy.native import cross_entropy_bwd_classes_
from foundry_kernels.ops.cross_entropy.options import LossOptions
from foundry_kernels.ops.linear_cross_entropy import sizes
from foundry_kernels.ops.linear_cross_entropy.calls import Kernels
from foundry_kernels.ops.linear_cross_entropy.operators import Strategy, make_backend

_LIBRARY = torch.library.Library("foundry_kernels", "FRAGMENT")
_OPS = torch.ops.foundry_kernels


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"foundry_kernels::{name}", fake, lib=_LIBRARY)
    return getattr(_OPS, name).default


def _forward(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, options: LossOptions, save_lse: bool,
    save_z_loss: bool, save_stats: bool, dloss: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    loss, lse, low, z, _ = _OPS.cross_entropy_fwd.default(
        logits, target, class_weight, *options.operator_args(), save_lse, save_z_loss, save_stats
    )
    if dloss is not None:
        _gradients_(logits, dloss, target, class_weight, lse, low, 0, logits.shape[1], options)
    return loss, lse, low, z


def _gradients_(
    logits: Tensor, dloss: Tensor, target: Tensor, class_weight: Tensor | None, lse: Tensor, lse_low: Tensor,
    first: int, n_classes: int, options: LossOptions,
) -> None:  # fmt: skip
    """In place: a second block of a chunk's size would take longer to be handed out by the system than to be
    written."""
    cross_entropy_bwd_classes_(
        logits, dloss, target, class_weight, lse, lse_low, first, n_classes, options.ignore_index,
        options.label_smoothing, options.z_loss, options.softcap,
    )  # fmt: skip


KERNELS = Kernels(_forward, _gradients_, cpu=True, classes=sizes.classes_on_cpu)

linear_cross_entropy = make_backend("", define, Strategy(KERNELS, sizes.on_cpu))
