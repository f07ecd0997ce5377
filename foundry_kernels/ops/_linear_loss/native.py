"""Losses whose row kernels are the extension's, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops._linear_loss.operators import make_backend
from foundry_kernels.ops._linear_loss.problem import Loss, RowKernel

_LIBRARY = torch.library.Library("foundry_kernels", "FRAGMENT")


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"foundry_kernels::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.foundry_kernels, name).default


def native_backend(loss: Loss, rows: type[RowKernel]) -> Callable[..., dict[str, Tensor]]:
    return make_backend(loss, rows, "", _define)
