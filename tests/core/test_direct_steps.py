"""Direct calls of steps of decoding (csrc/direct_steps.cpp): the results, states and errors of the general path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from built import needs_native
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core.registry import OpSpec, no_direct_call
from foundry_kernels.ops.gated_delta_rule import GATED_DELTA_RULE_STEP
from foundry_kernels.ops.short_conv1d import SHORT_CONV1D_STEP

pytestmark = needs_native

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
        {"g": -torch.rand(2, 4, 16)},
        {"v": torch.randn(2, 4, 512).to(dtype), "state": torch.randn(2, 4, 16, 512)},
        {"A_log": torch.randn(4), "dt_bias": torch.randn(4).to(dtype), "beta_limit": 2.0},
        {"g": torch.randn(2, 4, 16).to(dtype), "A_log": torch.randn(4), "dt_bias": torch.randn(4, 16)},
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
        {"residual": strided},
    ):
        made = conv(dtype, size, **changes)
        assert is_direct(SHORT_CONV1D_STEP, made), changes
        by_reference = conv(dtype, size, **{**changes, "backend": "reference"})
        assert not is_direct(SHORT_CONV1D_STEP, by_reference)
        assert torch.equal(made["state"], by_reference["state"])
    for name, shape in (("weight", (300, 4)), ("residual", (3, 300))):
        assert not is_direct(
            SHORT_CONV1D_STEP, conv(dtype, size, **{name: torch.ones(shape, dtype=dtype).requires_grad_()})
        )


def test_a_step_is_seen_by_the_profiler_and_by_autograd() -> None:
    made = rule()
    version = made["state"]._version
    with torch.profiler.profile() as profile:
        fk.gated_delta_rule_step(**made)
    assert "foundry_kernels::gated_delta_rule_step" in {event.name for event in profile.events()}
    assert made["state"]._version > version
