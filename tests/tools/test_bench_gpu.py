"""What a comparison of the benchmarks does on a GPU: where it computes what is expected, how much memory that takes,
and how long by arithmetic. Nothing is computed: the tensors are on the meta device, where mixing in one of the CPU is
an error."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from slow import rest_slow
from torch import Tensor

import foundry_kernels as fk
from benchmarks import calls, checks, liger, models, suite, test_model
from foundry_kernels.testing import Case, call, make_cotangents, run
from tests.support.metered import Meter

ROOT = Path(__file__).parents[2]
#: An H100: bytes a second of a copy and operations a second of a product in bfloat16, less than measured; in float64,
#: without tensor cores, as its maker says; and what the host takes for an operator.
COPIED, BFLOAT16, FLOAT64, HOST = 2.9e12, 700e12, 34e12, 10e-6
#: Seconds of the checks of a comparison; and bytes that are free on one.
MOST, FREE = 3.0, 84e9
#: Operations whose reference reads indices on the host, which the meta device has not.
READ_ON_THE_HOST = ("flash_attention_varlen",)
#: Their reference takes one token after another, and on the meta device, which a meter needs, none.
RECURRENT = ("gated_delta_rule", "gated_linear_attention", "ssd")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[suite.Group]]:
    """The quick set of an H100, with the caches of one; to the checks the meta device is the GPU."""
    for module in (suite, calls):
        monkeypatch.setattr(module, "cache_bytes", lambda device: 50 * 2**20)
    monkeypatch.setattr(suite, "DEVICE", "cuda")
    monkeypatch.setattr(liger, "why_not", lambda device: None)
    monkeypatch.setattr(suite, "free_bytes", lambda device: FREE)
    monkeypatch.setattr(suite, "_USED", suite._USED | {"meta": 0.9})
    monkeypatch.setattr(suite, "DTYPES", (torch.bfloat16,))
    found = list(suite.groups(False, "cuda"))
    for module in (suite, checks, calls):
        monkeypatch.setattr(module, "DEVICE", "meta")
    for g in found:  # what is made once in a process
        assert g.op.cases.CASES
        g.bench.sample(g.case)
    checks._latest.clear()
    yield found
    checks._latest.clear()


def names_of(group: suite.Group) -> tuple[str, ...]:
    """The rows on a GPU: the meta device has no kernels of ours."""
    return ("triton", "native", *(n for n in group.chosen(False) if n not in suite.OURS))


def checked(group: suite.Group) -> tuple[Meter, Meter, Meter]:
    """Computes what is expected of a group's arguments; the check of one row, the reference's own result; and that
    result alone."""
    args = group.case.make(group.dtype, "meta", drawn_on="meta")
    with Meter() as once:
        check = checks.Check(group, args)
    for result in (check.expected.reference, check.expected.oracle):
        assert {x.device.type for x in result.items().values()} == {"meta"}
    assert {c.device.type for c in check.expected.cotangents} == {"meta"}
    assert {x.dtype for x in check.expected.oracle.items().values()} == {torch.float64}
    with Meter() as each:
        check.expected.hold(check._result("reference"))
    cotangents = (
        None
        if group.direction == "forward"
        else tuple(
            check._into_whole(c, o.detach()) for c, o in zip(check.expected.cotangents, whole(group, args), strict=True)
        )
    )
    with Meter() as alone:
        run(group.op, check.args, group.case.options, cotangents, backend="reference")
    return once, each, alone


def whole(group: suite.Group, args: dict[str, Tensor | None]) -> tuple[Tensor, ...]:
    return call(group.op, args, group.case.options, backend="reference")


def seconds(meter: Meter) -> float:
    products = sum(n / (FLOAT64 if dtype == torch.float64 else BFLOAT16) for dtype, n in meter.operations.items())
    return meter.launches * HOST + meter.moved / COPIED + products


@pytest.mark.parametrize("which", rest_slow(["the largest", "all"]))
def test_an_oracle_is_computed_where_the_tensors_are_within_memory_and_three_seconds(
    which: str, gpu: list[suite.Group]
) -> None:
    """No more than a sample's row numbers, and what these rows see of a mask, are made on the CPU. The time is an
    estimate: no GPU measured it."""
    names = {(g.op.name, g.case.id) for g in gpu}
    assert ("flash_attention", "B=4 H=32 Hk=8 T=4096 D=128-causal") in names
    total = 0.0
    if which == "the largest":  # of each operation, with gradients if it has any
        gpu = [*{g.op.name: g for g in sorted(gpu, key=lambda g: (g.direction != "forward", g.size))}.values()]
    for g in gpu:
        took = 0.0
        if g.op.name not in (*READ_ON_THE_HOST, *RECURRENT):
            once, each, alone = checked(g)
            bound = suite.CHECKS * suite.checked_bytes(g) + 3 * suite.case_bytes(g.case, g.dtype)
            assert once.peak <= bound + g.bench.workspace_bytes(g.case) + 2**20, g.id
            assert once.on_cpu <= 3_000_000, g.id
            assert each.on_cpu <= 100, g.id
            if g.flops and g.bench.sample(g.case) is None:  # grouped_mm's own loop has no groups without values
                took += (g.flops + replace(g, direction="backward").flops) / FLOAT64
            rows = [n for n in names_of(g) if n not in suite.LIMITS]
            took += seconds(once) + len(rows) * max(seconds(each) - seconds(alone), 0.0)
        assert took <= MOST, f"{g.id}: {took:.1f} s"
        assert suite.too_large(g) is None, g.id
        total += took
    print(f"{len(gpu)} comparisons: {total:.0f} s of checks by this estimate")


def test_a_form_that_does_not_fit_is_left_out_alone(monkeypatch: pytest.MonkeyPatch, gpu: list[suite.Group]) -> None:
    """Eager attention materializes all scores; the rest of the comparison needs none of that."""
    group = next(g for g in gpu if g.case.id == "B=4 H=32 Hk=8 T=4096 D=128-causal")
    assert suite.too_large(group) is None
    for name in ("eager", "torch.compile", "SDPA math"):
        reason = suite.too_large(group, name)
        assert reason is not None
        assert "GB, and 84.0 are free, of which half is left to others" in reason
    assert suite.too_large(group, "SDPA cuDNN") is None
    monkeypatch.setattr(suite, "free_bytes", lambda device: 140e9)
    assert suite.too_large(group, "eager") is None, "an H200 has room for it"
    monkeypatch.setattr(suite, "free_bytes", lambda device: 10e9)
    assert "of which 90% are used" in str(suite.too_large(group))


def test_the_reason_is_in_the_row_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    group = next(g for g in suite.groups(False, "cpu") if g.case.id.endswith("Hk=2 T=512 D=64-causal"))
    monkeypatch.setattr(suite, "free_bytes", lambda device: 2 * suite.group_bytes(group) + 2)
    found = calls.Contenders(group, ("native", "eager"))
    assert set(found.prepare) == {"native"}
    assert "half is left to others" in found.why_not["eager"]


def test_a_gpu_has_the_rows_of_training_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "DEVICE", "cuda")
    step, lora = (g for g in models.model_groups(False) if g.family in ("training", "lora"))
    assert (step.tokens, step.config.vocab_size, step.dtype) == (8192, 128256, torch.bfloat16)
    assert step.names[:3] == ("Hugging Face", "patched by ours", "patched by Liger")
    assert {n for n in step.names if "compiled" in n} == {"Hugging Face, compiled", "patched by ours, compiled"}
    assert lora.names == ("PEFT", "patched by ours", "patched by Liger", "patched by ours, frozen")
    assert models.other_loss(step, 1.0, 1.01) is None
    assert "that of the first" in str(models.other_loss(step, 1.0, 2.0))
    assert test_model.unit({"group": step}).kind == "compiled model"


def h100() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / "h100-81e711d.json").read_text())["rows"]
    return rows


def test_the_page_has_the_tables_of_what_an_h100_measured() -> None:
    page = (ROOT / "docs" / "dev" / "performance.md").read_text().partition("## On a GPU")[2]
    cells = [cell for line in page.splitlines() if line.startswith("|") for cell in line.strip("| ").split(" | ")[1:]]
    shown = {number for cell in cells if re.fullmatch(r"[\d., ]+", cell) for number in cell.split(", ")}
    units = {"ms": (1, 1e3), "us": (1,), "TFLOP/s": (1,), "TB/s": (1,), "peakMB": (1, 1e-3)}
    known = {
        f"{row[unit] * factor:.{digits}f}"
        for row in h100() for unit, factors in units.items() if unit in row for factor in factors for digits in range(3)
    }  # fmt: skip
    assert shown - known == set()
    assert len(shown) > 120


def test_values_are_drawn_where_it_is_asked_for() -> None:
    """For a GPU on it: through the CPU they take seconds. By default they are the CPU's, whatever the device."""
    case: Case = next(iter(suite.groups(False, "cpu"))).case
    with Meter() as there:
        made = case.make(torch.bfloat16, "meta", drawn_on="meta")
        make_cotangents(tuple(t for t in made.values() if t is not None), "contiguous", drawn_on="meta")
    assert there.on_cpu == 0
    with Meter() as here:
        case.make(torch.bfloat16, "meta")
    assert here.on_cpu > 0


def test_auto_takes_first_what_an_h100_ran_faster() -> None:
    """On a GPU "auto" is native first where that takes at most 3 % longer than Triton, as its calls cost the host less.
    Decoding counts for attention, whose kernels on a GPU without those for Hopper these are."""
    milliseconds: dict[tuple[str, str], float] = defaultdict(float)
    for row in h100():
        name = {"attention": "flash_attention", "decode": "flash_attention"}.get(row["op"], row["op"])
        if row["form"] in ("triton", "native") and name in fk.OPS:
            milliseconds[name, row["form"]] += row.get("ms", row.get("us", 0.0) / 1e3)
    both = {name for name, form in milliseconds if form == "native" and (name, "triton") in milliseconds}
    assert len(both) >= 8
    for name in both:
        native_first = milliseconds[name, "native"] <= 1.03 * milliseconds[name, "triton"]
        assert (fk.OPS[name].cuda_order[0] == "native") == native_first, name
