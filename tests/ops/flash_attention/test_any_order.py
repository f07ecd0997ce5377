"""Results do not depend on the order in which programs run; nor, but for Hopper's kernels, on `deterministic`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product

import pytest
import torch

import foundry_kernels as fk
from foundry_kernels import _triton


@contextmanager
def programs_shuffled(seed: int) -> Iterator[None]:
    """Runs the interpreter's programs, which come one after another, in another order."""
    from triton.runtime.interpreter import interpreter_builder as builder

    own = builder.set_grid_idx

    @cache
    def order(programs: int) -> list[int]:
        return torch.randperm(programs, generator=torch.Generator().manual_seed(seed)).tolist()

    def set_grid_idx(x: int, y: int, z: int) -> None:
        own(order(builder.grid_dim[0])[x], y, z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", set_grid_idx)
        yield


def step(backend: str, deterministic: bool) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 100, 16, generator=g).requires_grad_() for h in (4, 2, 2))
    out = fk.flash_attention(q, k, v, causal=True, deterministic=deterministic, backend=backend)
    return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))


@pytest.mark.skipif(not _triton.INTERPRET, reason="the order of programs is chosen in the interpreter alone")
def test_programs_in_any_order() -> None:
    runs = []
    for deterministic, seed in product((True, False), range(2)):
        with programs_shuffled(seed):
            runs.append(step("triton", deterministic))
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))
