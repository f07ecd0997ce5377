"""Gradients of q and k where they cancel: scores are sharp, or keys alike. In 16 bits a kernel makes them from the
rounded output, which is an exception to the rule of foundry_kernels.testing: see docs/dev/proof.md."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_errors import ALIKE, LEADING, ORDINARY, SHARP, by_backend, ratios
from built import needs_native
from hypothesis import HealthCheck, given, settings
from slow import rest_slow
from table import cpu_setting
from torch import Tensor

from foundry_kernels import _triton
from foundry_kernels.core import extension
from foundry_kernels.core.registry import OpSpec, override
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN
from foundry_kernels.ops.flash_attention.case_makers import ALL_OPTIONS, dense_case, packed_case
from foundry_kernels.ops.flash_attention.fuzz import random_case
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.testing import MAX_FACTOR, RMS_FACTOR, Arg, Case, alike, assert_parity, normal, uniform

LOW = (torch.bfloat16, torch.float16)
ISAS = extension.build_info().get("usable_instruction_sets", [])
needs_triton = pytest.mark.skipif(not _triton.INTERPRET, reason="Triton is not interpreted here")


def _with(case: Case, **args: Arg) -> Case:
    return replace(case, args={**case.args, **args})


#: Keys and values that are alike, with all that else goes into a row: statistics, sinks, a gradient of lse.
_PACKED = packed_case((40, 0, 33), (40, 5, 60), (2, 1), 16, "alike", sinks=normal(), **ALL_OPTIONS)
_DENSE = dense_case(2, (4, 2), (50, 70), 40, "alike-all", alibi_slopes=(4,), sinks=normal(), **ALL_OPTIONS)
_STATS = dense_case(1, (2, 1), (50, 30), 16, "alike-stats", sinks=normal(), causal=True, return_stats=True)
MORE = (
    _with(_DENSE, k=Arg((2, 2, 70, 40), values=alike(2)), v=Arg((2, 2, 70, 40), values=normal(1.0, 4.0))),
    _with(_STATS, k=Arg((1, 1, 30, 16), values=alike(2)), v=Arg((1, 1, 30, 16), values=normal(1.0, 4.0))),
    _with(_PACKED, k=Arg((105, 1, 16), values=alike(0)), v=Arg((105, 1, 16), values=normal(1.0, 4.0))),
)


def _op(case: Case) -> OpSpec:
    return FLASH_ATTENTION_VARLEN if "cu_seqlens_q" in case.args else FLASH_ATTENTION


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(LEADING, "native", id="leading-native", marks=needs_native),
        pytest.param(ALIKE, "native", id="alike-native", marks=needs_native),
        pytest.param(ALIKE, "triton", id="alike-triton", marks=needs_triton),
    ],
)
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="of the rounded output: docs/dev/proof.md")
def test_errors_are_those_of_plain_pytorch(case: Case, backend: str, dtype: torch.dtype) -> None:
    largest, rms = ratios(case, dtype, by_backend(backend), 0).amax(1)
    assert (largest <= MAX_FACTOR) & (rms <= RMS_FACTOR)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("case", [ORDINARY, *SHARP, LEADING, ALIKE], ids=lambda case: case.id)
@needs_native
def test_float32_inputs_hold_the_rule_of_16_bits(case: Case, dtype: torch.dtype) -> None:
    largest, rms = ratios(case, dtype, by_backend("native", torch.float32), 0).amax(1)
    assert (largest <= MAX_FACTOR) & (rms <= RMS_FACTOR)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=str)  # float32 holds the rule itself
@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("case", [*SHARP, LEADING, ALIKE, *MORE], ids=lambda case: case.id)
@pytest.mark.usefixtures("poisoned")
def test_gradients_are_those_of_the_rounded_output(case: Case, name: str, dtype: torch.dtype) -> None:
    with cpu_setting(name, 1):
        assert_parity(_op(case), case, backend="native", dtype=dtype, of_its_output=True)


@needs_triton
@pytest.mark.parametrize("deterministic", rest_slow([True, False]), ids=["", "any-order"])
@pytest.mark.parametrize(
    ("case", "dtype"), [(ALIKE, LOW[0]), (LEADING, LOW[1]), (MORE[-1], LOW[0])], ids=["alike", "leading", "packed"]
)
@pytest.mark.usefixtures("poisoned")
def test_gradients_are_those_of_the_rounded_output_in_triton(
    case: Case, dtype: torch.dtype, deterministic: bool
) -> None:
    case = replace(case, options={**case.options, "deterministic": deterministic})
    assert_parity(_op(case), case, backend="triton", dtype=dtype, of_its_output=True)


@needs_native
def test_a_gradient_that_is_wrong_otherwise_fails() -> None:
    impl = FLASH_ATTENTION.impl("native")
    assert impl is not None

    def wrong(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        more = 0.02 * q.sum(-1, keepdim=True)
        return impl.fn(q, k, v, options) + (more - more.detach())  # the same output

    with override(FLASH_ATTENTION, "native", fn=wrong), pytest.raises(AssertionError, match="gradient of q"):
        assert_parity(FLASH_ATTENTION, ALIKE, backend="native", dtype=torch.bfloat16, of_its_output=True)


@pytest.mark.parametrize("op", [FLASH_ATTENTION, FLASH_ATTENTION_VARLEN], ids=lambda op: op.name)
def test_random_cases_have_gradients_that_cancel(op: OpSpec) -> None:
    tokens = 2 if op is FLASH_ATTENTION else 0
    wanted = {alike(tokens): 0, uniform(9.0): 0}

    @settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(random_case(op.name))
    def draw(case: Case) -> None:
        keys = case.args["k"]
        assert keys is not None
        if keys.values in wanted and keys.shape[tokens] > 1:
            wanted[keys.values] += 1

    draw()
    assert min(wanted.values()) >= 2, wanted
