"""`python -m foundry_kernels check`: what a user runs to see whether the kernels are right on their device."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import torch
from table import Row, over_rows

import foundry_kernels as fk
from foundry_kernels import check
from foundry_kernels.registry import override

Captured = pytest.CaptureFixture[str]


def options(row: Row) -> list[str]:
    return [row.op.name, "--backend", row.backend, "--device", row.device]


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
    ],
)
def test_bad_arguments(given: list[str], message: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        check.main(given, [])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        check.main(["--device", "cuda"], [])
    assert "torch finds no CUDA device" in capsys.readouterr().err


def test_what_the_checks_of_a_gpu_compare() -> None:
    """Outputs, then gradients."""
    op = fk.OPS["rms_norm"]
    case = check.small_cases(op.cases.CASES["rms_norm"])[0]
    args = case.make(torch.float32)
    y, dx, dw = check.forward_and_backward(op, "reference", args, case)
    assert (y.shape, dx.shape) == (args["x"].shape, args["x"].shape)  # type: ignore[union-attr]
    assert dw.shape == args["weight"].shape  # type: ignore[union-attr]
