"""Chunks through the compiled extension's cross-entropy, on the CPU; or in the backward pass some classes at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foundry_kernels.ops.linear_cross_entropy import chunks, classes

_LIBRARY = torch.library.Library("foundry_kernels", "FRAGMENT")
_OPS = torch.ops.foundry_kernels


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"foundry_kernels::{name}", fake, lib=_LIBRARY)
    return getattr(_OPS, name).default


linear_cross_entropy = chunks.make(
    "",
    _define,
    _OPS.cross_entropy_fwd.default,
    _OPS.cross_entropy_bwd.default,
    cpu=True,
    tiles=(None, classes.backward),
)
