"""`python -m foundry_kernels check`: what a user runs to see whether the kernels are right on their device."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from table import Row, over_rows

import foundry_kernels as fk
from foundry_kernels.core.registry import override
from foundry_kernels.testing import Case
from foundry_kernels.tools import check
from foundry_kernels.tools.progress import Progress

Captured = pytest.CaptureFixture[str]


def options(row: Row) -> list[str]:
    return [row.op.name, "--backend", row.backend, "--device", row.device]


@contextmanager
def few_cases(row: Row, cases: list[Case]) -> Iterator[None]:
    """While it lasts, the operation has no other cases."""
    every = row.op.cases.CASES
    before = every[row.op.name]
    every[row.op.name] = tuple(cases)
    try:
        yield
    finally:
        every[row.op.name] = before


@over_rows("triton", "native")
def test_every_kernel_is_checked_in_every_dtype(row: Row, capsys: Captured) -> None:
    assert check.main([*options(row), "--seconds", "0"], ["the versions"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("the versions\n")
    assert re.search(rf"^ok +{row.op.name} +{row.backend} +{len(row.dtypes)} of \d+ cases", shown, re.M), shown
    assert "all right: 1 kernels" in shown
    assert ("interpreted" in shown) == (row.backend == "triton" and row.device == "cpu")


@over_rows("native")
def test_what_is_wrong_is_named_with_a_command_that_shows_it_again(row: Row, capsys: Captured) -> None:
    if row.op.name != "rms_norm":
        pytest.skip("one operation stands for the pattern")
    impl = row.op.impl("native")
    assert impl is not None
    right = impl.fn

    def wrong(x: torch.Tensor, *rest: Any) -> Any:
        if x.dtype == torch.bfloat16 and x.shape[-1] == 17:
            raise RuntimeError("an illegal access")
        out = right(x, *rest)
        return out * 1.001 if x.dtype == torch.float32 and x.shape[-1] == 127 else out

    with override(row.op, "native", fn=wrong):
        assert check.main([*options(row), "--seconds", "60"], []) == 1
        shown = capsys.readouterr().out
        assert "bfloat16 5x17: RuntimeError: an illegal access" in shown
        assert re.search(r"float32 64x127: AssertionError: output 0 .* exceeds", shown)
        assert "2 failures. Please report" in shown
        again = [shlex.split(line.partition("again: ")[2]) for line in shown.splitlines() if "again: " in line]
        assert len(again) == 2
        for command in again:
            assert command[:4] == ["python", "-m", "foundry_kernels", "check"]
            assert check.main(command[4:], []) == 1
            assert "1 of 1 cases" in capsys.readouterr().out
    assert check.main(again[0][4:], []) == 0


def test_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(check, "rows", lambda *_: iter(()))
    assert check.main(["--device", "cpu"], []) == 2
    shown = capsys.readouterr().out
    assert "nothing to check on cpu" in shown
    assert "native: " in shown
    assert "triton: " in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["no_such_op"], f"op must be one of {', '.join(fk.OPS)}; got no_such_op"),
        (["rms_norm", "--device", "cpu", "--case", "no-such-case"], "no case 'no-such-case' for rms_norm"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        pytest.param(
            ["--device", "cuda"],
            "torch finds no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_arguments(given: list[str], message: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        check.main(given, [])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_each_kind_of_case_goes_first() -> None:
    """One of each in some dtype, then these in the others, then the rest by size; every dtype takes its turn."""
    op = fk.OPS["flash_attention"]
    row = check.Row(op, "native", "cpu")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    first, kinds, again, others = row.stages(dtypes, None)
    found = {check.kind_of(case) for case in op.cases.CASES[op.name]}
    assert len(found) > 40
    assert [call.dtype for call in first] == list(dtypes)
    assert len({call.case.id for call in first}) == 1
    assert {check.kind_of(call.case) for call in (*first, *kinds)} == found
    assert len(kinds) == len(found) - 1
    assert {call.dtype for call in kinds[:3]} == set(dtypes)
    assert len(again) == 2 * len(kinds)
    assert sorted(check.numel(call.case) for call in others) == [check.numel(call.case) for call in others]
    every = [(call.case.id, call.dtype) for call in (*first, *kinds, *again, *others)]
    assert len(every) == len(set(every)) == 3 * len(op.cases.CASES[op.name])


def test_all_kernels_are_at_the_same_pace() -> None:
    """Wherever a stage is cut, each has had the same share of its own calls: the time goes by their number and cost."""
    found = [check.Row(fk.OPS[name], "native", "cpu") for name in ("flash_attention", "layer_norm")]
    stages = [row.stages((torch.float32, torch.bfloat16), None) for row in found]
    calls = check.schedule(stages)
    assert len(calls) == sum(len(stage) for of_row in stages for stage in of_row)
    start = 0
    for stage in zip(*stages, strict=True):
        sizes = [len(of_row) for of_row in stage]
        part = calls[start : start + sum(sizes)]
        for cut in range(len(part)):
            shares = [sum(c.row is row for c in part[:cut]) / n for row, n in zip(found, sizes, strict=True)]
            assert abs(shares[0] - shares[1]) <= 1 / min(sizes) + 1e-9, (cut, shares)
        start += sum(sizes)


@over_rows("native")
def test_what_is_left_out_is_counted(row: Row, capsys: Captured) -> None:
    if row.op.name != "layer_norm":
        pytest.skip("one operation stands for the pattern")
    total = len(row.op.cases.CASES["layer_norm"])
    assert check.main([*options(row), "--seconds", "0", "--dtype", "float32"], []) == 0
    shown = capsys.readouterr().out
    assert f"{total - 1} of {total} cases were not reached" in shown
    assert "--all runs all" in shown
    cases = [case for case in row.op.cases.CASES["layer_norm"] if check.numel(case) < 2000]
    with few_cases(row, cases):
        assert check.main([*options(row), "--all", "--dtype", "float32"], []) == 0
    shown = capsys.readouterr().out
    assert f"{len(cases)} of {len(cases)} cases" in shown
    assert "not reached" not in shown


def shown_twice(progress: Progress, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What it waits for between two times; it shows itself twice at once, and then no more."""
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 2

    monkeypatch.setattr(progress._over, "wait", wait)
    progress.at("rms_norm native float32 5x17", 4)
    with progress:
        progress._thread.join(60)
        progress.say("FAIL")
    return waits


def test_progress_is_shown_while_a_call_is_in_flight(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """On a terminal without tqdm as in a file."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", None)  # type: ignore[arg-type]
    assert shown_twice(Progress(9, 25.0), monkeypatch) == [10.0] * 3
    out, err = capsys.readouterr()
    assert out == "FAIL\n"
    assert err == 2 * "0 s: 4 of 9 cases, at rms_norm native float32 5x17\n"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        pytest.param(math.inf, r"44%\|#+.*\| 4 of 9 cases, at rms_norm", id="cases"),
        pytest.param(1e-9, r"100%\|#+\| 0 of 0 s, 4 cases, at rms_norm", id="time"),
    ],
)
def test_progress_on_a_terminal_is_a_bar(
    seconds: float, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert shown_twice(Progress(9, seconds), monkeypatch) == [0.2] * 3
    out, err = capsys.readouterr()
    assert out == "FAIL\n"
    assert re.search(shown, re.sub("[^\x00-\x7f]", "#", err))
    assert "\n" not in err
