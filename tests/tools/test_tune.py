"""`python -m foundry_kernels tune`, with the interpreter for a GPU: its launches are real, its times are made up."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels._triton import tuning, tuning_file
from foundry_kernels._triton.tuning_file import describe
from foundry_kernels.core import registry
from foundry_kernels.testing import Expected
from foundry_kernels.tools import tune
from foundry_kernels.tools.tune.measuring import Repeat, recorded

pytestmark = pytest.mark.skipif(not _triton.INTERPRET, reason="Triton's interpreter stands in for a GPU")
Captured = pytest.CaptureFixture[str]
#: One operation of each folder, which share their kernels.
OPS = {op.package: op for op in reversed(fk.OPS.values()) if op.impl("triton") and "linear" not in op.name}


class MadeUp:
    """Launches, and gives times by what was launched."""

    def __init__(self, seconds: Callable[[str], float]) -> None:
        self.seconds, self.turns = seconds, 0

    def prepare(self, step: Repeat, kernel: str) -> Repeat:
        return recorded(step, kernel)

    def times(self, repeats: Mapping[str, Repeat]) -> dict[str, list[float]]:
        self.turns += 1
        return {name: [self.seconds(name)] * 3 for name in repeats}


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    yield
    tuning.use(None)
    registry.prefer("cuda", {})


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], float]], MadeUp]:
    def use(seconds: Callable[[str], float]) -> MadeUp:
        timer = MadeUp(seconds)
        monkeypatch.setattr(tune, "WallTimer", lambda: timer)
        return timer

    return use


def by_warps(name: str) -> float:
    """8 warps are twice as fast as 4; a backend's name has none."""
    return {"num_warps=4": 2.0, "num_warps=8": 1.0}.get(name.split()[-1], 3.0)


def swiglu(path: Path, *more: str) -> int:
    return tune.main(["swiglu", "--dtype", "float32", "--no-auto", "--file", str(path), *more], ["the versions"])


def measured(path: Path) -> tuning_file.Entry:
    (entry,) = tuning_file.read(path).values()
    return entry


def test_winners_are_kept_and_taken(tmp_path: Path, capsys: Captured, timed: Any) -> None:
    timed(by_warps)
    path = tmp_path / "a.json"
    assert swiglu(path) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("the versions\n\nTriton's kernels are interpreted")
    assert f"measuring for at most 300 s; winners go to {path}" in shown
    assert re.search(r"^    x2\.00     BLOCK_COLS=\d+ BLOCK_ROWS=\d+ num_warps=8  wins$", shown, re.M)
    entry = measured(path)
    assert (entry.gpu, entry.triton) == (tuning.INTERPRETER, tuning.triton_version())
    assert set(entry.rows) == {"glu_fwd_kernel", "glu_bwd_kernel"}
    for rows in entry.rows.values():
        assert {found["row"]["num_warps"] for found in rows.values()} == {8}
        assert all(found["speedup"] == 2.0 for found in rows.values())
    tuning.use(path)
    op = fk.OPS["swiglu"]
    with tuning.watched() as seen:
        _, backward = tune.calls(op, tune.cases_of(op, "cpu")[0], torch.float32, "cpu")
        assert backward is not None
        backward()
    assert {choice.kernel for choice in seen.values()} == {"glu_fwd_kernel", "glu_bwd_kernel"}
    assert all(str(path) in choice.origin for choice in seen.values())


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, id=name, marks=() if name.endswith(("swiglu", "rms_norm", "log_probs")) else pytest.mark.slow)
        for name, op in OPS.items()
    ],
)
def test_every_operation_is_measured(op: registry.OpSpec, timed: Any) -> None:
    """An operation is measured by being registered: its launchers say what is tried, and all of it is right."""
    tuner, kinds = tune.Tuner("cpu", MadeUp(lambda name: 1.0)), set()
    for job in tune.find_jobs([op], [torch.float32], "cpu"):
        if (kind := (job.choice.kernel, job.backward)) in kinds:
            continue
        kinds.add(kind)
        job.choice = dataclasses.replace(job.choice, configs=job.choice.configs[:2])
        tuner.run(job)
        assert not job.dropped
        assert len(job.speedups) == len(job.choice.configs) >= 2
        assert job.winner is None
    assert kinds


def one_job() -> tune.Job:
    return next(tune.find_jobs([fk.OPS["swiglu"]], [torch.float32], "cpu"))


def test_a_row_with_wrong_results_is_dropped(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    job, check = one_job(), Expected.check
    forced: list[dict[str, int]] = []
    wrong = job.choice.configs[1]

    def checks(self: Expected, backend: str) -> Any:
        with tuning.watched() as seen:
            result = check(self, backend)
        row = seen[job.choice.kernel, job.choice.key].config
        forced.append(row)
        assert row != wrong, "output 0 differs"
        return result

    monkeypatch.setattr(Expected, "check", checks)
    tune.Tuner("cpu", MadeUp(lambda name: 0.1 if name == describe(wrong) else 1.0)).run(job)
    assert forced == list(job.choice.configs), "each row is launched for its check"
    assert set(job.dropped) == {describe(wrong)}
    assert job.dropped[describe(wrong)].startswith("WRONG: output 0 differs")
    assert describe(wrong) not in job.speedups
    assert job.winner is None
    tune.show(job)
    assert "dropped" in capsys.readouterr().out


def test_a_row_that_does_not_fit_is_dropped() -> None:
    job = one_job()
    unfit = describe(job.choice.configs[1])

    class Full(MadeUp):
        def prepare(self, step: Repeat, kernel: str) -> Repeat:
            with tuning.watched() as seen:
                repeat = recorded(step, kernel)
            if describe(seen[job.choice.kernel, job.choice.key].config) == unfit:
                raise RuntimeError("out of resource: shared memory")
            return repeat

    tune.Tuner("cpu", Full(lambda name: 1.0)).run(job)
    assert job.dropped == {unfit: "RuntimeError: out of resource: shared memory"}


@pytest.mark.parametrize(
    ("times", "wins"),
    [
        ({"best": [0.9, 0.9]}, True),
        ({"best": [0.98, 0.98]}, False),
        ({"best": [0.9, 0.99]}, False),  # luck: alone against the built-in one it is no better
        ({"best": [0.9, 0.9], "again": [0.94]}, False),  # the built-in one differs from itself by half as much
    ],
    ids=str,
)
def test_noise_does_not_win(times: dict[str, list[float]], wins: bool) -> None:
    job = one_job()
    best = describe(job.choice.configs[-1])

    class Timer(MadeUp):
        def times(self, repeats: Mapping[str, Repeat]) -> dict[str, list[float]]:
            given = {best: times["best"][min(self.turns, 1)], "again": times.get("again", [1.0])[0]}
            self.turns += 1
            return {name: [given.get(name, 1.0)] * 5 for name in repeats}

    tune.Tuner("cpu", Timer(lambda name: 1.0)).run(job)
    assert (job.winner is not None) == wins


def test_backends_are_compared(tmp_path: Path, capsys: Captured, timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick reference goes first; where none is quicker the default order stands."""
    monkeypatch.setattr(tune, "find_jobs", lambda *_: iter(()))
    timed(lambda name: 0.5 if name == "reference" else 1.0)
    path = tmp_path / "a.json"
    assert tune.main(["rms_norm", "--dtype", "float32", "--file", str(path)], []) == 0
    assert measured(path).auto["rms_norm"]["float32"][0] == "reference"
    assert 'rms_norm float32: "auto" takes reference (reference x2.00, ' in capsys.readouterr().out
    timed(lambda name: 1.0)
    assert tune.main(["rms_norm", "--dtype", "float32", "--file", str(path)], []) == 0
    default = [b for b in registry.AUTO_ORDER["cuda"] if fk.OPS["rms_norm"].why_not(b, "cpu") is None]
    assert measured(path).auto["rms_norm"]["float32"] == default


def test_when_the_time_is_up(timed: Any, tmp_path: Path, capsys: Captured) -> None:
    """One choice is measured, the others are counted."""
    timed(by_warps)
    assert swiglu(tmp_path / "a.json", "--seconds", "0") == 0
    shown = capsys.readouterr().out
    assert "1 launches measured" in shown
    assert "The time was up" in shown
    assert sum(map(len, measured(tmp_path / "a.json").rows.values())) == 1


def test_what_was_measured_survives_an_interrupt(timed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(by_warps)
    run, jobs = tune.Tuner.run, []

    def second_stops(self: tune.Tuner, job: tune.Job) -> None:
        if jobs:
            raise KeyboardInterrupt
        jobs.append(job)
        run(self, job)

    monkeypatch.setattr(tune.Tuner, "run", second_stops)
    assert swiglu(tmp_path / "a.json") == 0
    assert sum(map(len, measured(tmp_path / "a.json").rows.values())) == 1


# --- where nothing can be measured ------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_why_and_what_it_can_do(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(_triton, "INTERPRET", False)
    assert tune.main([], []) == 2
    shown = capsys.readouterr().out
    assert "nothing to measure: torch finds no usable GPU: " in shown
    assert "tune --arch 90` shows which configs fit" in shown


def test_a_gpu_that_the_kernels_or_triton_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert tune.why_not("cuda") == "Some GPU has compute capability 7.5; the Triton kernels need 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "ones", refused)
    assert "cannot launch a kernel on Some GPU: Triton Error [CUDA]" in str(tune.why_not("cuda"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_text("{"), "cannot be read as a tuning file"),
        (lambda path: path.mkdir(), "cannot be|can be read"),
    ],
    ids=["damaged", "a folder"],
)
def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    make: Callable[[Path], object], reason: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "measure", None)
    path = tmp_path / "a.json"
    make(path)
    assert swiglu(path) == 2
    shown = capsys.readouterr().out
    assert f"nothing was measured: {path}" in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["no_such_op"], f"op must be one of {', '.join(fk.OPS)}; got no_such_op"),
        (["--arch", "75"], "--arch must be one of 80, 89, 90, 100, 120; got 75"),
        (["--arch", "90"], "interpreted kernels cannot be compiled: unset TRITON_INTERPRET"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_bad_arguments(given: list[str], message: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        tune.main(given, [])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
