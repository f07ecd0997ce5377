"""Registers grouped matmuls with `torch.utils.flop_counter.FlopCounterMode`, which then counts them like linear
layers."""

from __future__ import annotations

from typing import Any

import torch

from foundry_kernels.core.late import when_imported


def _forward(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * x[0] * weight[-2] * weight[-1]


def _backward(
    dy: Any, x: Any, weight: Any, offs: Any, batch_invariant: bool, need_dx: bool, need_dweight: bool, **__: Any
) -> int:
    return _forward(x, weight) * (need_dx + need_dweight)


def register() -> None:
    """Registers the formula once torch's counter is imported, because importing it imports Triton."""
    when_imported("torch.utils.flop_counter", _register)


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for end, formula in (("fwd", _forward), ("bwd", _backward)):
        for prefix in ("", "triton_", "reference_"):
            operator = getattr(torch.ops.foundry_kernels, f"{prefix}grouped_mm_{end}", None)
            if operator is not None:
                register_flop_formula(operator)(formula)
