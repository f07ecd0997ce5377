"""The order in which a GPU begins attention's programs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from attention_inputs import plain_options
from slow import rest_slow

from foundry_kernels import _triton
from foundry_kernels._triton.plans import forget_plans
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.triton import problem as problems
from foundry_kernels.ops.flash_attention.triton.kernel_options import tensor_options
from foundry_kernels.ops.flash_attention.triton.order import program_order
from foundry_kernels.ops.flash_attention.triton.problem import _Problem

DEVICE = "cpu" if _triton.INTERPRET else "cuda"
pytestmark = pytest.mark.skipif(
    FLASH_ATTENTION.why_not("triton", DEVICE) is not None, reason=str(FLASH_ATTENTION.why_not("triton", DEVICE))
)


@triton.jit
def _note(seen_ptr, n_batch, n_heads, section):
    n, head, tile, tiles = program_order(n_batch, n_heads, section)
    p_seen = seen_ptr + tl.program_id(0) * 3
    tl.store(p_seen, n)
    tl.store(p_seen + 1, head)
    tl.store(p_seen + 2, tiles * 100 + tile)


def order(n_batch: int, n_heads: int, tiles: int, section: int) -> list[tuple[int, int, int]]:
    seen = torch.full((n_batch * n_heads * tiles, 3), -1, dtype=torch.int64, device=DEVICE)
    _note[(len(seen),)](seen, n_batch, n_heads, section)
    assert (seen[:, 2] // 100 == tiles).all()
    return [(n, head, tile % 100) for n, head, tile in seen.tolist()]


@pytest.mark.parametrize("section", [1, 2, 4, 5, 8, 100])
def test_a_section_after_the_other(section: int) -> None:
    """Everything once; no section begins before the last has; in it, tile by tile, all of its heads."""
    found = order(2, 4, 3, section)
    assert sorted(found) == [(n, head, tile) for n in range(2) for head in range(4) for tile in range(3)]
    places = [((n * 4 + head) // section, tile, n * 4 + head) for n, head, tile in found]
    assert all(before < after for before, after in pairwise(places))


@pytest.mark.parametrize("section_bytes", rest_slow([1, 64 * 32 * 8 * 3]))
@pytest.mark.parametrize("packed", rest_slow([True, False]), ids=["packed", "dense"])
@pytest.mark.usefixtures("poisoned")
def test_no_order_changes_a_bit(section_bytes: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections of one key-value head, of three, and of all."""
    heads = (4, 2, 2)
    g = torch.Generator().manual_seed(0)
    if packed:
        tensors = [torch.randn(134, h, 32, generator=g).to(DEVICE).requires_grad_() for h in heads]
        cu_seqlens = torch.tensor([0, 3, 70, 70, 134], dtype=torch.int32, device=DEVICE)
        lengths = (cu_seqlens, cu_seqlens, 70, 70)
    else:
        tensors = [torch.randn(2, h, 64, 32, generator=g).to(DEVICE).requires_grad_() for h in heads]
        lengths = ()

    def run() -> tuple[torch.Tensor, ...]:
        forget_plans()
        attend = flash_attention_varlen if packed else flash_attention
        out = attend(*tensors, *lengths, causal=True, backend="triton")
        return (out, *torch.autograd.grad(out, tensors, torch.ones_like(out)))

    expected = run()
    monkeypatch.setattr(problems, "_SECTION_BYTES", section_bytes)
    found = run()
    monkeypatch.undo()
    forget_plans()
    assert all(map(torch.equal, found, expected))


def test_what_shares_a_cache() -> None:
    """4096 keys 128 wide in 16 bits are 2 MB: 8 heads of one sequence or of several; however long, one at least."""

    def problem(b: int, heads: tuple[int, int], t: int) -> _Problem:
        q, k = (torch.empty(b, h, t, 128, dtype=torch.bfloat16, device="meta") for h in heads)
        layouts = ((x.shape, x.stride()) for x in (q, k, k))
        device = torch.device("cpu")
        options = plain_options(t, t, 1.0, window_right=0)
        return _Problem(*layouts, q.dtype, device, None, tensor_options(options), options)

    assert problem(4, (32, 32), 4096).section(4096) == 8
    assert problem(1, (32, 8), 4096).section(4096) == 8
    assert problem(1, (8, 2), 4096).section(4096) == 2
    assert problem(1, (8, 2), 1 << 20).section(1 << 20) == 1
