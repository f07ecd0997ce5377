"""Score functions as programs: tracing, the encoding, evaluation and derivatives."""

from __future__ import annotations

import math
import pickle

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention.score_program import Program, derive, evaluate, trace

CPU = torch.device("cpu")
TABLE = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])


def at(fn, score: float, b: int, h: int, q: int, k: int) -> list[float]:
    """The result of the traced function at one place, its derivative by the score and by each load."""
    program, tensors = trace(fn, torch.float32, CPU)
    assert Program.decode(program.encode()) == program
    assert pickle.loads(pickle.dumps(program)) == program
    places = [torch.tensor(i) for i in (b, h, q, k)]
    found = evaluate(derive(program), torch.tensor(score, dtype=torch.float64), places, tensors)
    assert evaluate(program, torch.tensor(score, dtype=torch.float64), places, tensors) == found[:1]
    return [float(x) for x in found]


def test_by_hand():
    assert at(lambda s, b, h, q, k: s - 0.5 * (q - k).abs(), 3.0, 0, 0, 2, 6) == [1.0, 1.0]
    assert at(lambda s, b, h, q, k: s * s + b + 10 * h, 3.0, 1, 2, 0, 0) == [30.0, 6.0]
    assert at(lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf), 3.0, 0, 0, 1, 2) == [-math.inf, 0.0]
    assert at(lambda s, b, h, q, k: s + TABLE[h, (q - k) % 3], 3.0, 0, 1, 0, 2) == [19.0, 1.0, 1.0]
    assert at(lambda s, b, h, q, k: s * TABLE[h][k // 2] ** 2, 3.0, 0, 0, 0, 5) == [48.0, 16.0, 24.0]
    assert at(lambda s, b, h, q, k: s + TABLE[h, q - k], 3.0, 0, 0, 0, 1) == [7.0, 1.0, 1.0]  # the last of the row
    assert at(lambda s, b, h, q, k: s + TABLE[h, q], 3.0, 0, 0, 7, 0) == [7.0, 1.0, 1.0]  # likewise: nearest inside
    assert at(lambda s, b, h, q, k: torch.where(q > k, torch.sqrt(s), 1.0), -3.0, 0, 0, 0, 1) == [1.0, 0.0]


def test_what_a_value_depends_on():
    def fn(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + TABLE[h, k] * torch.exp2(-(q - k).float())

    program, tensors = trace(fn, torch.float32, CPU)
    depends = {x.op: x.depends for x in program.instructions}
    assert (depends["load"], depends["exp2"], depends["add"]) == (0b10100, 0b11000, 0b11101)
    assert [x is TABLE for x in tensors] == [True]
