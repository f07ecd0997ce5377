"""Direct calls of steps of decoding (csrc/direct_steps.cpp): the results, states and errors of the general path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.core.registry import OpSpec, no_direct_call
from foundry_kernels.ops.gated_delta_rule import GATED_DELTA_RULE_STEP
from foundry_kernels.ops.short_conv1d import SHORT_CONV1D_STEP

pytestmark = pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))

Made = dict[str, Any]


@contextmanager
def replaced(spec: OpSpec, call: Callable[..., Any]) -> Iterator[None]:
    before, spec.direct = spec.direct, call
    try:
        yield
    finally:
        spec.direct = before


def is_direct(spec: OpSpec, made: Made) -> bool:
    """Whether a call takes the direct path; that it then does what the general path does."""
    taken: list[bool] = []
    own = spec.direct

    def call(*args: Any) -> Any:
        out = own(*args)
        taken.append(out is not None)
        return out

    again = {name: x.clone() if name == "state" else x for name, x in made.items()}
    with replaced(spec, call):
        out = spec.public(**made)
    with replaced(spec, no_direct_call):
        expected = spec.public(**again)
    assert torch.equal(out, expected)
    assert out.stride() == expected.stride()
    assert out.requires_grad == expected.requires_grad
    assert torch.equal(made["state"], again["state"])
    assert len(taken) == 1
    return taken[0]


def rule(dtype: torch.dtype = torch.float32, **changes: Any) -> Made:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=g).to(kind)

    made = {"q": draw(2, 2, 16), "k": draw(2, 2, 16), "v": draw(2, 4, 100)}
    made |= {"g": -draw(2, 4, kind=torch.float32).abs(), "beta": draw(2, 4)}
    return made | {"state": draw(2, 4, 16, 100, kind=torch.float32), "qk_l2norm": True} | changes


def conv(dtype: torch.dtype = torch.float32, size: int = 4, **changes: Any) -> Made:
    g = torch.Generator().manual_seed(0)
    x, state, weight, bias = (torch.randn(s, generator=g) for s in ((3, 300), (3, 300, size), (300, 4), (300,)))
    made: Made = {"x": x.to(dtype), "state": state.to(dtype), "weight": weight.to(dtype), "bias": bias}
    return made | {"activation": "silu"} | changes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_usual_steps_of_the_rule(dtype: torch.dtype) -> None:
    made = rule(dtype)
    cache = torch.randn(3, 2, 6, 16, 100)
    heads = made["q"].repeat_interleave(3, 1)[:, ::3]  # strided
    for changes in (
        {},
        {"g": None, "beta": None, "qk_l2norm": False},
        {"scale": 0.5, "backend": "native"},
        {"q": heads},
        {"state": cache[1, :, 1:5]},
        {"beta": made["beta"].float(), "v": made["v"].transpose(0, 1).contiguous().transpose(0, 1)},
    ):
        assert is_direct(GATED_DELTA_RULE_STEP, rule(dtype, **changes)), changes


def test_other_steps_of_the_rule() -> None:
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in rule().items()}
    assert not is_direct(GATED_DELTA_RULE_STEP, wide)
    assert not is_direct(GATED_DELTA_RULE_STEP, rule(backend="reference"))
    assert not is_direct(GATED_DELTA_RULE_STEP, rule(scale=2))
    assert not is_direct(GATED_DELTA_RULE_STEP, rule(v=rule()["v"].requires_grad_()))
    with torch.no_grad():
        assert is_direct(GATED_DELTA_RULE_STEP, rule(v=rule()["v"].requires_grad_()))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_direct(GATED_DELTA_RULE_STEP, rule())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [3, 4, 7, 12])
def test_usual_steps_of_the_convolution(dtype: torch.dtype, size: int) -> None:
    strided = torch.randn(300, 2, 3).to(dtype)[:, 1].T
    for changes in (
        {},
        {"bias": None, "activation": None},
        {"activation": "swish", "backend": "native"},
        {"x": strided},
    ):
        made = conv(dtype, size, **changes)
        assert is_direct(SHORT_CONV1D_STEP, made), changes
        by_reference = conv(dtype, size, **{**changes, "backend": "reference"})
        assert not is_direct(SHORT_CONV1D_STEP, by_reference)
        assert torch.equal(made["state"], by_reference["state"])
    assert not is_direct(SHORT_CONV1D_STEP, conv(dtype, size, weight=conv()["weight"].requires_grad_()))


WRONG: list[tuple[OpSpec, Made, str]] = [
    (GATED_DELTA_RULE_STEP, rule(k=torch.zeros(2, 2, 15)), "k must have shape"),
    (GATED_DELTA_RULE_STEP, rule(k=torch.zeros(2, 2, 16).half()), "k must have q's dtype"),
    (GATED_DELTA_RULE_STEP, rule(q=torch.zeros(2, 3, 16), k=torch.zeros(2, 3, 16)), "multiple of q's 3 heads"),
    (GATED_DELTA_RULE_STEP, rule(v=torch.zeros(2, 4, 257), state=torch.zeros(2, 4, 16, 257)), "head dimension of 1"),
    (GATED_DELTA_RULE_STEP, rule(g=torch.zeros(2, 3)), "g must have shape"),
    (GATED_DELTA_RULE_STEP, rule(beta=torch.zeros(2, 4).half()), "beta must be float32"),
    (GATED_DELTA_RULE_STEP, rule(state=torch.zeros(2, 4, 16, 99)), "state must have shape"),
    (GATED_DELTA_RULE_STEP, rule(state=torch.zeros(2, 4, 16, 100).bfloat16()), "state must be torch.float32"),
    (GATED_DELTA_RULE_STEP, rule(state=torch.zeros(2, 4, 100, 16).mT), "state must be contiguous"),
    (GATED_DELTA_RULE_STEP, rule(state=torch.zeros(2, 1, 16, 100).expand(2, 4, 16, 100)), "state must be contiguous"),
    (GATED_DELTA_RULE_STEP, rule(scale=-1.0), "scale must be"),
    (GATED_DELTA_RULE_STEP, rule(qk_l2norm=1), "qk_l2norm must be a bool"),
    (SHORT_CONV1D_STEP, conv(x=torch.zeros(3, 1, 300)), "x must be"),
    (SHORT_CONV1D_STEP, conv(weight=torch.zeros(300, 9)), "weight must be"),
    (SHORT_CONV1D_STEP, conv(weight=torch.zeros(299, 4)), "weight must be"),
    (SHORT_CONV1D_STEP, conv(bias=torch.zeros(299)), "bias must have shape"),
    (SHORT_CONV1D_STEP, conv(state=torch.zeros(3, 300, 2)), "S at least 3"),
    (SHORT_CONV1D_STEP, conv(state=torch.zeros(3, 300, 4).half()), "state must have x's dtype"),
    (SHORT_CONV1D_STEP, conv(activation="relu"), "activation must be"),
]


@pytest.mark.parametrize(("spec", "made", "message"), WRONG, ids=[f"{s.name}: {m}" for s, _, m in WRONG])
def test_wrong_arguments(spec: OpSpec, made: Made, message: str) -> None:
    before = made["state"].clone()
    with pytest.raises((TypeError, ValueError), match=message):
        spec.public(**made)
    assert torch.equal(made["state"], before)


def test_a_step_is_seen_by_the_profiler_and_by_autograd() -> None:
    made = rule()
    version = made["state"]._version
    with torch.profiler.profile() as profile:
        fk.gated_delta_rule_step(**made)
    assert "foundry_kernels::gated_delta_rule_step" in {event.name for event in profile.events()}
    assert made["state"]._version > version
