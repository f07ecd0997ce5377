"""Programs printed for Triton compute what PyTorch's evaluation does, in a tile of either orientation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foundry_kernels import _triton
from foundry_kernels.ops.flash_attention.score_program.derive import derive
from foundry_kernels.ops.flash_attention.score_program.evaluate import evaluate
from foundry_kernels.ops.flash_attention.score_program.program import Program
from foundry_kernels.ops.flash_attention.score_program.trace import trace

if _triton.MISSING is not None or not _triton.INTERPRET:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

import triton
import triton.language as tl
from score_random import FUNCTIONS, RandomFunction

from foundry_kernels.ops.flash_attention.triton.bundles import Modifier
from foundry_kernels.ops.flash_attention.triton.score_print import Request, functions

M, N = 8, 16


@triton.jit
def tile_kernel(
    score_ptr, value_ptr, slope_ptr, b, h, pointers, layout,
    PREPARE: tl.constexpr, MODIFY: tl.constexpr, BY_KEYS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    if BY_KEYS:
        rows, columns = tl.arange(0, M)[None, :], tl.arange(0, N)[:, None]
    at, moving = rows, columns
    if BY_KEYS:
        at, moving = columns, rows
    b_s = tl.load(score_ptr + rows * N + columns)
    ready = PREPARE(Modifier(b, h, at, pointers, layout, b), b_s.dtype)
    b_value, b_slope = MODIFY(b_s, moving, Modifier(b, h, at, pointers, layout, ready))
    tl.store(value_ptr + rows * N + columns, b_value)
    tl.store(slope_ptr + rows * N + columns, tl.broadcast_to(b_slope, b_s.shape))


def check(fn: Callable[..., Any], what: object) -> None:
    torch.manual_seed(0)
    score, b, h = torch.randn(M, N, dtype=torch.float64), 1, 2
    program, tensors = trace(fn, torch.float64, torch.device("cpu"))
    places = [torch.tensor(b), torch.tensor(h), torch.arange(M)[:, None], torch.arange(N)]
    expected = [x.expand(M, N) for x in evaluate(derive(program), score, places, tensors)[:2]]
    for by_keys in (False, True):
        found = [torch.full((M, N), torch.nan, dtype=torch.float64) for _ in range(2)]
        made = functions(Request(tuple(program.encode()), by_keys, 0, tuple([x.numel() == 0 for x in tensors])))
        layout = tuple([n for x in tensors for pair in zip(x.shape, x.stride(), strict=True) for n in pair]) or (0,)
        tile_kernel[(1,)](score, *found, b, h, tensors or (score,), layout, made.prepare, made.modify, by_keys, M, N)
        for name, x, y in zip(("value", "slope"), found, expected, strict=True):
            torch.testing.assert_close(x, y, equal_nan=True, msg=lambda text: f"{what}, {name}: {text}\n{program}")  # noqa: B023


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, 40, 10)], ids=lambda r: f"from {r.start}")
def test_random_programs(seeds: range) -> None:
    for seed in seeds:
        check(RandomFunction(seed), seed)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    check(lambda score, b, h, q_idx, kv_idx: FUNCTIONS[name](score, q_idx, kv_idx), name)


def test_tensors_of_any_kind() -> None:
    """Strides, dtypes, negative indices, none and no elements."""
    table = torch.randn(9, 8).t()[::2].expand(4, 9)
    tensors: dict[str, Tensor] = {
        "bool": torch.arange(7) % 2 == 0,
        "uint8": torch.arange(7, dtype=torch.uint8),
        "int16": -torch.arange(7, dtype=torch.int16),
        "half": torch.randn(7).half(),
        "bfloat16": torch.randn(7).bfloat16(),
        "float64": torch.randn(7, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(0.25),
    }
    check(lambda s, b, h, q, k: s + table[q - 5, k] + table[q - k, h] * tensors["number"], "strides")
    for name, x in tensors.items():
        if x.dim() == 1:
            check(lambda s, b, h, q, k: torch.where(s > 0, s, 1.0) * x[k - 3] + x[h], name)  # noqa: B023
    check(lambda s, b, h, q, k: s + 1, "nothing")


def test_the_text_is_the_same_for_the_same_program() -> None:
    """So that Triton's cache on disk finds what another process compiled."""
    made = [trace(lambda s, b, h, q, k: s * (q - k), torch.float32, torch.device("cpu"))[0] for _ in range(2)]
    found = [functions.__wrapped__(Request(tuple(p.encode()), False, 0, ())) for p in made]
    assert found[0].modify.__name__ == found[1].modify.__name__
    assert isinstance(made[0], Program)
