"""Chunks through the extension's cross-entropy, on the CPU; or in the backward pass blocks of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.ops._products import fast_products
from foundry_kernels.ops.cross_entropy.native import cross_entropy_bwd_classes_
from foundry_kernels.ops.cross_entropy.options import LossOptions
from foundry_kernels.ops.linear_cross_entropy.calls import Kernels, Needs
from foundry_kernels.ops.linear_cross_entropy.operators import Strategy, make_backend
from foundry_kernels.ops.linear_cross_entropy.options import ALL, TILES, LinearLossOptions

_LIBRARY = torch.library.Library("foundry_kernels", "FRAGMENT")
_OPS = torch.ops.foundry_kernels


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"foundry_kernels::{name}", fake, lib=_LIBRARY)
    return getattr(_OPS, name).default


# Looked up here, where no compiler traces it.
_FAST_PRODUCTS = fast_products(torch.bfloat16)
#: Whether a fourth matmul takes less time than the sum of the weight's gradient. With matrix instructions it was faster
#: than a float32 sum; the sum in 24 bits was not measured there.
_TILES_ARE_FASTER = _FAST_PRODUCTS and extension.build_info().get("instruction_set") == "amx_bf16"


#: Bytes of logits that a single chunk may have: as many as a chunk of float32 has by default over 32768 classes.
_ONE_CHUNK = 1 << 25


#: The number of logits that tiles hold at a time, and the least number of classes: enough for fast matmuls.
_LOGITS, _LEAST = 1 << 21, 256


def chunk_size(hidden: Tensor, weight: Tensor, options: LinearLossOptions, needs: Needs) -> int | None:
    """Returns a single chunk for few tokens; for many tokens chunks with three matmuls, or tiles with four
    (docs/dev/performance.md). None of these needs a float32 sum of a bfloat16 weight's gradient."""
    if options.chunk_size is not None or options.batch_invariant:
        return options.chunk_size
    if not needs.weight or hidden.dtype != torch.bfloat16 or not _FAST_PRODUCTS:
        return None
    if options.reduction == "none":
        return TILES
    n_tokens = hidden.numel() // hidden.shape[-1]
    if 2 * n_tokens * weight.shape[0] <= _ONE_CHUNK:
        return ALL
    return TILES if _TILES_ARE_FASTER else None


def classes(n_tokens: int, n_classes: int, itemsize: int) -> int:
    return max(_LEAST, _LOGITS // n_tokens)


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


KERNELS = Kernels(_forward, _gradients_, cpu=True, classes=classes)

linear_cross_entropy = make_backend("", define, Strategy(KERNELS, chunk_size))
