"""Score functions as programs: tracing, the encoding, evaluation and derivatives."""

from __future__ import annotations

import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from score_functions import EXAMPLES, Sizes, whole
from score_random import FUNCTIONS, INTEGERS, TABLE, RandomFunction
from torch import Tensor

from foundry_kernels.ops.flash_attention.score_program.arguments import check_indices
from foundry_kernels.ops.flash_attention.score_program.derive import derive
from foundry_kernels.ops.flash_attention.score_program.evaluate import evaluate
from foundry_kernels.ops.flash_attention.score_program.program import Program
from foundry_kernels.ops.flash_attention.score_program.trace import trace

CPU = torch.device("cpu")
SIZES = Sizes()


def places_of(sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(sizes)]


def at(fn: Any, score: float, b: int, h: int, q: int, k: int) -> list[float]:
    """The result of the traced function at one place, its derivative by the score and by each load."""
    program, tensors = trace(fn, torch.float32, CPU)
    places = [torch.tensor(i) for i in (b, h, q, k)]
    found = evaluate(derive(program), torch.tensor(score, dtype=torch.float64), places, tensors)
    assert evaluate(program, torch.tensor(score, dtype=torch.float64), places, tensors) == found[:1]
    return [float(x) for x in found]


def test_by_hand() -> None:
    assert at(lambda s, b, h, q, k: s - 0.5 * (q - k).abs(), 3.0, 0, 0, 2, 6) == [1.0, 1.0]
    assert at(lambda s, b, h, q, k: s * s + b + 10 * h, 3.0, 1, 2, 0, 0) == [30.0, 6.0]
    assert at(lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf), 3.0, 0, 0, 1, 2) == [-math.inf, 0.0]
    assert at(lambda s, b, h, q, k: s + TABLE[h, (q - k) % 3], 3.0, 0, 1, 0, 2) == [19.0, 1.0, 1.0]
    assert at(lambda s, b, h, q, k: s * TABLE[h][k // 2] ** 2, 3.0, 0, 0, 0, 5) == [48.0, 16.0, 24.0]
    assert at(lambda s, b, h, q, k: s + TABLE[h, q - k], 3.0, 0, 0, 0, 1) == [7.0, 1.0, 1.0]  # the last of the row
    assert at(lambda s, b, h, q, k: s + TABLE[h, q], 3.0, 0, 0, 7, 0) == [7.0, 1.0, 1.0]  # likewise: nearest inside
    assert at(lambda s, b, h, q, k: torch.where(q > k, torch.sqrt(s), 1.0), -3.0, 0, 0, 0, 1) == [1.0, 0.0]
    assert at(lambda s, b, h, q, k: s + q // k + q % k, 3.0, 0, 0, 7, 0) == [3.0, 1.0]  # by 0 both are 0
    assert at(lambda s, b, h, q, k: (s * math.nan).long() + (s / 0).int(), 3.0, 0, 0, 0, 0) == [2.0**30, 0.0]


def test_what_a_value_depends_on() -> None:
    program, tensors = trace(lambda s, b, h, q, k: s + TABLE[h, k] * torch.exp2(-(q - k).float()), torch.float32, CPU)
    depends = {x.op: x.depends for x in program.instructions}
    assert (depends["load"], depends["exp2"], depends["add"]) == (0b10100, 0b11000, 0b11101)
    assert [x is TABLE for x in tensors] == [True]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    """The value is that of the function on whole tensors, each derivative what autograd gives for it in float64."""
    example = EXAMPLES[name]
    fn = example.score_mod(example.captured(SIZES, torch.float64))
    program, tensors = trace(fn, torch.float64, CPU)
    assert Program.decode(program.encode()) == program
    assert pickle.loads(pickle.dumps(program)) == program
    score = torch.randn(SIZES, dtype=torch.float64, requires_grad=True)
    places, loads = places_of(SIZES), program.loads()
    with torch.no_grad():
        value, *slopes = (x.expand(SIZES) for x in evaluate(derive(program), score, places, tensors))
    torch.testing.assert_close(value, whole(fn, score, sizes=SIZES))
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    result = evaluate(program, score, places, leaves)[0].expand(SIZES)
    hidden, weights = result == -math.inf, torch.randn(SIZES, dtype=torch.float64)
    floating = [x for x in leaves if x.requires_grad]
    wanted = torch.autograd.grad((result.masked_fill(hidden, 0.0) * weights).sum(), [score, *floating])
    by_score, *by_loads = ((weights * x).masked_fill(hidden, 0.0) for x in slopes)
    torch.testing.assert_close(by_score, wanted[0])
    for slot, gradient in zip((i for i, x in enumerate(leaves) if x.requires_grad), wanted[1:], strict=True):
        own = [x for x, at in zip(by_loads, loads, strict=True) if program.instructions[at].slot == slot]
        torch.testing.assert_close(torch.stack(own).sum(), gradient.sum())


# --- random programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(i, i + 15) for i in range(0, 60, 15)], ids=lambda r: f"from {r.start}")
def test_random_programs(seeds: range) -> None:
    """The value and the derivative by the score are those of PyTorch on whole tensors."""
    for seed in seeds:
        torch.manual_seed(seed)
        score = torch.randn(2, 3, 6, 5, dtype=torch.float64, requires_grad=True)
        fn, places = RandomFunction(seed), places_of(score.shape)
        program, tensors = trace(fn, torch.float64, CPU)
        value, by_score, *_ = evaluate(derive(program), score.detach(), places, tensors)
        wanted = fn(score, *places).expand(score.shape)
        torch.testing.assert_close(value.expand(score.shape), wanted, msg=lambda text: f"seed {seed}: {text}")  # noqa: B023
        slope = torch.autograd.grad(wanted.sum(), score)[0]
        torch.testing.assert_close(by_score.expand(score.shape), slope, msg=lambda text: f"seed {seed}: {text}")  # noqa: B023


# --- what functions of torch become -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    fn = FUNCTIONS[name]
    program, tensors = trace(lambda s, b, h, q, k: fn(s, q, k), torch.float64, CPU)
    score = torch.randn(1, 1, 6, 5, dtype=torch.float64)
    for i in range(6):
        for j in range(5):
            places = [torch.tensor(0), torch.tensor(0), torch.tensor(i), torch.tensor(j)]
            (found,) = evaluate(program, score[0, 0, i, j], places, tensors)
            wanted = fn(score[0, 0, i, j], *places[2:])
            torch.testing.assert_close(found.reshape(()), wanted.double(), equal_nan=True)


class Learned(torch.nn.Module):
    """A score function with parameters, of which one is a table of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.gate = torch.nn.Embedding(8, 4), torch.nn.Parameter(torch.ones(4))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, far: int = 7) -> Tensor:
        def away() -> Tensor:
            return torch.clamp(abs(q_idx - kv_idx), max=far)

        return score * self.gate[h] + self.bias(away())[h]


def test_callables() -> None:
    """Modules, methods and partial functions; what they read are the module's own parameters."""
    module = Learned()
    for fn in (module, module.forward, partial(module, far=3), lambda *args: module(*args)):
        program, tensors = trace(fn, torch.float32, CPU)
        assert [x is y for x, y in zip(tensors, (module.gate, module.bias.weight), strict=True)] == [True, True]
        far = 3.0 if isinstance(fn, partial) else 7.0
        assert any(x.value == far for x in program.instructions)


# --- bad input --------------------------------------------------------------------------------------------------------

OTHER = torch.zeros(3, device="meta")
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no function": (3, TypeError, "score_mod must be a function of"),
    "control flow": (lambda s, b, h, q, k: s if s > 0 else -s, TypeError, "control flow .* in .*: .*if s > 0"),
    "builtin": (lambda s, b, h, q, k: max(s, 0), TypeError, "control flow .*max"),
    "value": (lambda s, b, h, q, k: s * math.exp(q), TypeError, "only known in the kernel .*math.exp"),
    "item": (lambda s, b, h, q, k: s.item(), TypeError, "uses item, which is not among the operations .*s.item"),
    "operation": (lambda s, b, h, q, k: torch.erf(s), TypeError, "uses erf, which is not among .*torch.erf"),
    "in place": (lambda s, b, h, q, k: s.mul_(2), TypeError, r"changes a value in place \(mul_\)"),
    "arguments": (lambda s, b, h, q, k: torch.div(s, 2, rounding_mode="up"), TypeError, "uses div with rounding_mode"),
    "wrong arguments": (lambda s, b, h, q, k: s.exp(2), TypeError, "uses exp with arguments .*s.exp"),
    "whole tensor": (
        lambda s, b, h, q, k: s + TABLE,
        TypeError,
        r"single numbers; a tensor of shape \(2, 3\) was used",
    ),
    "row": (lambda s, b, h, q, k: s + TABLE[h], TypeError, r"single numbers; a tensor of shape \(3,\) was used"),
    "returned row": (lambda s, b, h, q, k: TABLE[h], TypeError, r"a tensor of shape \(3,\) was returned"),
    "returned tensor": (lambda s, b, h, q, k: TABLE, TypeError, r"a tensor of shape \(2, 3\) was returned"),
    "returned pair": (lambda s, b, h, q, k: (s, s), TypeError, "must return one number; it returned tuple"),
    "returned nothing": (lambda s, b, h, q, k: None, TypeError, "must return one number; it returned NoneType"),
    "returned bool": (lambda s, b, h, q, k: q >= k, TypeError, "must return a score; it returned a bool"),
    "float index": (lambda s, b, h, q, k: TABLE[h, s], TypeError, "indexes a tensor by a float"),
    "indices": (lambda s, b, h, q, k: TABLE[h, q, k], TypeError, r"has 3 indices for a tensor of shape \(2, 3\)"),
    "slice": (lambda s, b, h, q, k: TABLE[:, q], TypeError, "by a slice before an index"),
    "none": (lambda s, b, h, q, k: TABLE[None, q, k], TypeError, "indexes a tensor by None"),
    "constant index": (lambda s, b, h, q, k: TABLE[2, k], ValueError, "index 2 is out of range for dimension 0"),
    "device": (lambda s, b, h, q, k: s + OTHER[q], ValueError, "tensor on meta; its tensors must be on q's device cpu"),
    "complex": (
        lambda s, b, h, q, k: s + torch.zeros(3, dtype=torch.complex64)[q],
        TypeError,
        "a tensor of torch.comp",
    ),
    "large integer": (lambda s, b, h, q, k: s + q * 2**40, TypeError, "integers have 32 bits"),
    "text": (lambda s, b, h, q, k: s + "1", TypeError, "uses str as a number"),
    "not a score": (lambda s, b, h, q, k: s & 1, TypeError, "uses and with a float, where a bool or an integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    fn, error, text = REFUSED[name]
    with pytest.raises(error, match=f"(?s)score_mod.*{text}|{text}") as raised:
        trace(fn, torch.float32, CPU)
    if callable(fn) and "returned" not in name:
        assert Path(__file__).name in str(raised.value), "the message has the line of the source"


OUT_OF_RANGE = {
    "h": lambda s, b, h, q, k: s + TABLE[h, 0],
    "q": lambda s, b, h, q, k: s + TABLE[0, q],
    "distance": lambda s, b, h, q, k: s + TABLE[0, q - k],
    "away": lambda s, b, h, q, k: s + TABLE[0, abs(q - k) // 2],
}
NOT_KNOWN = {
    "chosen": lambda s, b, h, q, k: s + TABLE[0, torch.where(q < 3, q, 0)],
    "together": lambda s, b, h, q, k: s + TABLE[0, q - q // 2 * 2],
    "in range": lambda s, b, h, q, k: s + TABLE[b, torch.clamp(q - k, -3, 2)],
    "remainder": lambda s, b, h, q, k: s + TABLE[h % 2, (q * 5 - k) % 3],
    "table": lambda s, b, h, q, k: s + TABLE[0, INTEGERS[h, 0]],
}


@pytest.mark.parametrize("name", [*OUT_OF_RANGE, *NOT_KNOWN])
def test_ranges_of_indices(name: str) -> None:
    fn = (OUT_OF_RANGE | NOT_KNOWN)[name]
    program, tensors = trace(fn, torch.float32, CPU)
    if name in NOT_KNOWN:
        check_indices(program, tuple(x.shape for x in tensors), (2, 4, 8, 8))
        return
    with pytest.raises(
        ValueError, match=r"score_mod: an index of .* is out of range for dimension [01] of a tensor of"
    ):
        check_indices(program, tuple(x.shape for x in tensors), (2, 4, 8, 8))
