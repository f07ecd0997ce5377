"""`torch.profiler` shows each operation by its operator's name, forward and backward, whatever path called it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.core.registry import OPS

BACKENDS = [
    pytest.param(
        "native", marks=pytest.mark.skipif(OPS["rms_norm"].impl("native").missing is not None, reason="no extension")
    ),
    pytest.param(
        "triton", marks=pytest.mark.skipif(not _triton.INTERPRET, reason="Triton runs in its interpreter on a CPU")
    ),
]


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


TOKENS = torch.zeros(4, dtype=torch.int64)
TABLE = fk.rope_table(16, 4)
#: A call of each operation, and the operators that run it.
CALLS: dict[str, tuple[Callable[[dict[str, Any]], Any], set[str]]] = {
    "rms_norm": (lambda on: fk.rms_norm(x(4, 16), x(16), **on), {"rms_norm_fwd", "rms_norm_bwd"}),
    "layer_norm": (lambda on: fk.layer_norm(x(4, 16), x(16), **on), {"layer_norm_fwd", "layer_norm_bwd"}),
    "swiglu": (lambda on: fk.swiglu(x(4, 16), x(4, 16), **on), {"glu_fwd", "glu_bwd"}),
    "rope": (lambda on: fk.rope(x(1, 2, 4, 16), x(1, 1, 4, 16), *TABLE, **on), {"rope_apply"}),
    "flash_attention": (
        lambda on: fk.flash_attention(x(1, 2, 4, 16), x(1, 2, 4, 16), x(1, 2, 4, 16), **on),
        {"flash_attention_fwd", "flash_attention_bwd"},
    ),
    "cross_entropy": (
        lambda on: fk.cross_entropy(x(4, 16), TOKENS, **on),
        {"cross_entropy_fwd", "cross_entropy_bwd"},
    ),
    "linear_cross_entropy": (
        lambda on: fk.linear_cross_entropy(x(4, 16), x(8, 16), TOKENS, chunk_size=2, **on),
        {"linear_cross_entropy_fwd"},
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_operators_have_readable_names(name: str, backend: str) -> None:
    call, wanted = CALLS[name]
    with profile() as seen:
        out = call({"backend": backend})
        sum(part.sum() for part in (out if isinstance(out, tuple) else (out,))).backward()
    shown = {event.key for event in seen.key_averages()}
    prefix = "foundry_kernels::" + ("triton_" if backend == "triton" else "")
    assert {prefix + operator for operator in wanted} <= shown, sorted(shown)
