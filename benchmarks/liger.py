"""Liger-Kernel as a peer, if it is installed (`pip install 'foundry-kernels[bench]' liger-kernel`) and can run.

Its kernels overwrite inputs and incoming gradients, so `suite.py` gives it separate arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.testing import Case

NAME = "Liger"
_FUNCTIONAL = "liger_kernel.transformers.functional"


def why_not(device: str) -> str | None:
    """Returns the reason why Liger-Kernel cannot be measured on `device`, or None."""
    if device != "cuda":
        return "Liger-Kernel's kernels are Triton's, for a GPU"
    try:
        importlib.import_module(_FUNCTIONAL)
    except ImportError as error:
        return f"Liger-Kernel does not import ({error}); pip install liger-kernel"
    return None


def peers(op: str, device: str, case: Case | None = None) -> dict[str, Callable[..., Any] | str]:
    """Its form of the operation, or of a case with options, or the reason why it cannot run; empty if it has none."""
    form = _FORMS.get(op)
    if op == "linear_kl_div" and case is not None and "teacher_hidden" in case.args:
        beta = {"forward": 0.0, "reverse": 1.0}.get(case.options["direction"], case.options.get("beta", 0.5))
        form = _calls("liger_fused_linear_jsd", None, beta)
    if form is None:
        return {}
    reason = why_not(device)
    return {NAME: form if reason is None else reason}


def _calls(name: str, *more: float | None) -> Callable[..., Any]:
    """Returns a function that calls `name` with the operation's arguments in order, and `more`."""
    return lambda **args: getattr(importlib.import_module(_FUNCTIONAL), name)(*args.values(), *more)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates by tables [1 or B, T, D] in q's dtype, as from transformers."""
    wide = [torch.cat([table, table], -1).to(q.dtype) for table in (cos, sin)]
    cos, sin = (table if table.dim() == 3 else table[None] for table in wide)
    rotate = importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb
    return rotate(q, k, cos, sin)[:2]


def _swiglu(gate: Tensor, up: Tensor | None) -> Tensor:
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return _calls("liger_swiglu")(gate=gate, up=up)


_FORMS: dict[str, Callable[..., Any]] = {
    "rms_norm": _calls("liger_rms_norm", 1e-6),
    "add_rms_norm": _calls("liger_fused_add_rms_norm", 1e-6),
    "layer_norm": _calls("liger_layer_norm", 1e-5),
    "rope": _rope,
    "swiglu": _swiglu,
    "geglu": _calls("liger_geglu"),
    "cross_entropy": _calls("liger_cross_entropy"),
}
