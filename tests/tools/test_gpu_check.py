"""`make gpu-check` and `make gpu-cache`, as far as there need be no GPU."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import gpu_check
import pytest
import torch

from foundry_kernels import _triton

ROOT = Path(__file__).parents[2]
GPU = "NVIDIA Made-Up 1"


@pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))
def test_kernels_compiled_here_are_found_by_a_launch_elsewhere(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")}
    command = ["tests/tools/kernel_cache.py", str(tmp_path)]
    done = fresh.python(*command, env=env | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found 2 kernels" in done.stdout


@pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))
@pytest.mark.parametrize("damage", ["truncated", "text", "another archive"])
def test_a_damaged_cache_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    import gpu_cache

    made, archive = tmp_path / "made", tmp_path / "cache.tar.xz"
    (made / "KEY").mkdir(parents=True)
    (made / "KEY" / "kernel.json").write_text("{}")
    (made / "KEY" / "kernel.cubin").write_bytes(os.urandom(5000))
    gpu_cache.pack(made, archive, {"kernels": 1})
    assert gpu_cache.unpack(archive, tmp_path / "whole") == {"kernels": 1}
    paths = json.loads((tmp_path / "whole" / "KEY" / "__grp__kernel.json").read_text())["child_paths"]
    assert paths == {name: str(tmp_path / "whole" / "KEY" / name) for name in ("kernel.json", "kernel.cubin")}
    if damage == "truncated":
        archive.write_bytes(archive.read_bytes()[:3000])
    elif damage == "text":
        archive.write_text("no archive")
    else:
        subprocess.run(["tar", "-cJf", archive, "-C", made, "KEY"], check=True)
    with pytest.raises(ValueError, match=r"cache.tar.xz is not a cache that `make gpu-cache` made, or is damaged"):
        gpu_cache.unpack(archive, tmp_path / "other")


@pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_launcher_modules_name_the_driver_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own build of a module, by a compiler whose linker leaves out the libraries in which it finds nothing."""
    import gpu_cache
    from triton.runtime import build

    (tmp_path / "thrifty").write_text('#!/bin/sh\nexec gcc -Wl,--as-needed "$@"\n')
    (tmp_path / "thrifty").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "thrifty"))
    (tmp_path / "main.c").write_text("int cuInit(unsigned); int begin(void) { return cuInit(0); }")

    def needed(name: str) -> list[str]:
        if hasattr(build, "_find_compiler"):  # Triton 3.9 remembers the first compiler
            monkeypatch.setattr(build, "_find_compiler", inspect.unwrap(build._find_compiler))
        given = ([str(tmp_path)], [], ["libcuda.so.1"], [])
        return needed_libraries(Path(build._build(name, str(tmp_path / "main.c"), str(tmp_path), *given)))

    with gpu_cache.linked_against_empty_libcuda(tmp_path):
        assert os.environ["CC"] == str(tmp_path / "cc")
        assert needed_libraries(tmp_path / "libcuda.so.1").count("libcuda.so.1") == 0
        assert "libcuda.so.1" in needed("kept")
    assert os.environ["CC"] == str(tmp_path / "thrifty")
    assert "libcuda.so.1" not in needed("dropped"), "such a compiler leaves it out by itself"


def needed_libraries(path: Path) -> list[str]:
    """The names of the libraries that a 64-bit ELF file says it needs (DT_NEEDED)."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", "64 bits, little-endian"
    at, size, count = struct.unpack_from("<Q", data, 0x28)[0], *struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, at + size * i) for i in range(count)]
    dynamic = next(s for s in sections if s[1] == 6)
    names = sections[dynamic[6]][4]
    entries = [struct.unpack_from("<qQ", data, dynamic[4] + 16 * i) for i in range(dynamic[5] // 16)]
    return [data[names + n : data.index(b"\0", names + n)].decode() for tag, n in entries if tag == 1]


TESTS = """
import os, pathlib, pytest, signal
@pytest.mark.parametrize("n", range(4))
def test_quick(n): pass
def test_skipped(): pytest.skip("no")
def test_wrong(): assert False
def test_where_it_is_stopped():
    if not pathlib.Path(__file__).with_name("second").exists():
        os.killpg(0, signal.SIGKILL)
"""


def test_tests_that_passed_are_kept_when_the_rest_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run, with several processes, has what is left."""
    (tmp_path / "test_them.py").write_text(TESTS)
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    monkeypatch.setattr(gpu_check, "CACHE", tmp_path / "cache")
    with monkeypatch.context() as alone:
        alone.setattr(importlib.util, "find_spec", lambda name: None)
        first = gpu_check.tests("parity", [str(tmp_path / "test_them.py")])
    assert not first["ok"]
    assert first["passed"] == 5
    (tmp_path / "second").touch()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    second = gpu_check.tests("parity", [str(tmp_path / "test_them.py")])
    assert not second["ok"]
    assert "1 failed, 1 passed" in second["summary"]
    assert second["passed"] == 6
    assert sorted(p.name for p in tmp_path.glob("parity-*")) == ["parity-failed.txt", "parity-passed.txt"]
    [failed] = (tmp_path / "parity-failed.txt").read_text().splitlines()
    assert "test_them.py::" in failed
    assert "assert" in failed.partition("\t")[2]


class Steps:
    """Parts that are recorded instead of run. One fails where it is asked to, one stops everything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.ran: list[str] = []
        self.failing: dict[str, BaseException | bool] = {}
        monkeypatch.setattr(gpu_check, "OUT", folder)
        monkeypatch.setattr(gpu_check, "FROM", folder)
        for part in (*gpu_check.PARTS, *gpu_check.MORE):
            monkeypatch.setitem(gpu_check.STEPS, part, self.step(part))

    def step(self, part: str) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            self.ran.append(part)
            failing = self.failing.get(part)
            if isinstance(failing, BaseException):
                raise failing
            return {"ok": not failing, "summary": "", "seconds": 1}

        return run

    def take(self) -> list[str]:
        ran, self.ran = self.ran, []
        return ran


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Steps:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, "table", ""))
    return Steps(monkeypatch, tmp_path)


def test_what_is_left_is_run_by_itself(steps: Steps, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    steps.failing = {"parity": True, "sanitize": RuntimeError("no such tool")}
    assert gpu_check.check(GPU, "") == 1
    assert steps.take() == list(gpu_check.PARTS)
    assert "not passed: parity, sanitize; GPU_CHECK=rest goes on from here" in capsys.readouterr().out
    report = json.loads((tmp_path / "nvidia-made-up-1.json").read_text())
    assert report["sanitize"]["summary"] == "RuntimeError: no such tool"
    steps.failing = {}
    assert gpu_check.check(GPU, "rest") == 0
    assert steps.take() == ["parity", "sanitize"]
    assert gpu_check.check(GPU, "rest") == 0
    assert steps.take() == []
    assert gpu_check.check(GPU, "bench,build") == 0
    assert steps.take() == ["build", "bench"]
    assert gpu_check.check(GPU, "suite,parity,all") == 0
    assert steps.take() == ["parity", "all", "suite"]
    assert gpu_check.check(GPU, "") == 0
    assert steps.take() == list(gpu_check.PARTS)


def test_a_run_that_is_ended_leaves_the_parts_that_it_finished(steps: Steps) -> None:
    steps.failing = {"parity": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        gpu_check.check(GPU, "")
    assert steps.take() == ["build", "units", "parity"]
    steps.failing = {}
    assert gpu_check.check(GPU, "rest") == 0
    assert steps.take() == ["parity", "sanitize", "bench", "model", "tune"]


@pytest.mark.parametrize("earlier", ["other sources", "truncated", "absent", "a list"])
def test_results_of_something_else_are_not_continued(
    earlier: str, steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    target, passed = tmp_path / "nvidia-made-up-1.json", tmp_path / "parity-passed.txt"
    gpu_check.check(GPU, "")
    steps.take()
    passed.write_text("tests/proof/test_parity.py::test_parity\n")
    if earlier == "other sources":
        monkeypatch.setattr(gpu_check, "sources", lambda: "others")
    elif earlier == "truncated":
        target.write_text(target.read_text()[:50])
    elif earlier == "absent":
        target.unlink()
    else:
        target.write_text("[]")
    gpu_check.check(GPU, "rest")
    assert steps.take() == list(gpu_check.PARTS)
    assert not passed.exists()
    assert f"nothing to continue: {target}" in capsys.readouterr().out


def test_the_parts_fit_into_ten_minutes() -> None:
    assert sum(gpu_check.LIMITS.values()) <= 600
    order = list(gpu_check.LIMITS)
    assert max(map(order.index, ("units", "parity", "sanitize"))) < min(map(order.index, ("bench", "model", "tune")))


BENCH = """
import pathlib, pytest, time
from benchmarks.measure import replay
@pytest.mark.benchmark(timer=replay)
def test_row(benchmark, record):
    record(benchmark, {"row": "first"}, "group", [1.0, 2.0])
def test_absent(benchmark, record):
    record.absent({"row": "second", "why_not": "too large"})
def test_that_takes_too_long(benchmark):
    pathlib.Path(__file__).with_name("begun").touch()
    time.sleep(600)
"""


@pytest.mark.slow
def test_rows_are_kept_of_benchmarks_that_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_rows.py").write_text(BENCH)
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):  # in which pytest-benchmark measures nothing
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    monkeypatch.setattr(gpu_check, "LIMITS", {"bench": 0})

    class WhenBegun(threading.Timer):
        """Its time is up when the last benchmark has begun."""

        def run(self) -> None:
            while not (tmp_path / "begun").exists() and not self.finished.is_set():
                time.sleep(0.05)
            super().run()

    monkeypatch.setattr(threading, "Timer", WhenBegun)
    found = gpu_check.rows_of("bench", [str(tmp_path / "test_rows.py"), "-p", "benchmarks.conftest"])
    assert not found["ok"]
    assert "stopped after 0 s" in found["summary"]
    assert [row["row"] for row in found["rows"]] == ["first", "second"]
    assert found["rows"][1]["why_not"] == "too large"


def test_what_has_not_run_on_a_gpu_is_chosen_by_the_names_of_its_cases() -> None:
    """Of attention in Triton, every case with a mask, a bias or dropout."""
    import foundry_kernels as fk

    words = gpu_check.NEW.partition("(")[2].partition(")")[0].split(" or ")
    for case in fk.OPS["flash_attention"].cases.CASES["flash_attention"]:
        if {"attn_mask", "dropout_p"} & {*case.args, *case.options}:
            assert any(word in case.id for word in words), case.id


def test_kernels_that_were_not_brought_along_are_said_to_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "CACHE", tmp_path / "build" / "gpu-cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert "no build/gpu-cache.tar.xz was brought along" in gpu_check.use_cache(90)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "build" / "gpu-cache")
    (tmp_path / "build" / "gpu-cache.tar.xz").write_text("no archive")
    assert "kernels are compiled here:" in gpu_check.use_cache(90)


def test_results_that_cannot_be_written_are_said_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    monkeypatch.setattr(gpu_check, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(gpu_check, "environment", dict)
    for name in ("OUT", "CACHE"):
        with monkeypatch.context() as unwritable:
            unwritable.setattr(gpu_check, name, tmp_path / "file" / "folder")
            assert gpu_check.main() == 2
        assert f"stops here: {tmp_path / 'file' / 'folder'} cannot be written to (" in capsys.readouterr().err
    monkeypatch.setattr("foundry_kernels._triton.devices.why_no_gpu", lambda: "there is no GPU")
    assert gpu_check.main() == 3
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"], "no probe is left"


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        ("file/cache.tar.xz", "file cannot be written to ("),
        ("taken.tar.xz", "taken cannot be written to ("),
        ("no-suffix", "--archive must end in .tar.xz; got "),
    ],
)
def test_a_cache_that_cannot_be_written_is_said_before_anything_is_compiled(
    archive: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import gpu_cache

    (tmp_path / "file").touch()
    (tmp_path / "taken").touch()  # where the folder beside the archive would be
    monkeypatch.setattr(gpu_cache, "why_not", lambda: None)
    monkeypatch.setattr(gpu_cache, "recorded", None)
    with pytest.raises(SystemExit) as stopped:
        gpu_cache.main(["--archive", str(tmp_path / archive)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_step_shows_logs_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    good = gpu_check.run("good", [sys.executable, "-c", "print('one'); print('two')"], 3600)
    assert good["ok"]
    assert good["summary"] == "two"
    assert (tmp_path / "good.log").read_text() == "one\ntwo\n"
    assert "one\ntwo" in capfd.readouterr().out
    assert not gpu_check.run("bad", [sys.executable, "-c", "raise SystemExit(4)"], 3600)["ok"]
    # A shell begins at once, on a busy machine too.
    slow = gpu_check.run("slow", ["sh", "-c", "echo began; exec sleep 3600"], 2)
    assert not slow["ok"]
    assert slow["summary"] == "stopped after 2 s; last line: began"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_without_a_gpu_says_so_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    done = fresh.python("tests/support/gpu_check.py", cwd=ROOT)
    assert done.returncode == 3
    assert "gpu-check stops here" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_gpu_check_refuses_an_unknown_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_CHECK", "everything")
    done = fresh.python("tests/support/gpu_check.py", cwd=ROOT)
    assert done.returncode == 2
    parts = "build, units, parity, sanitize, bench, model, tune, all, suite"
    assert f"GPU_CHECK must be rest or any of {parts}; got 'everything'" in done.stderr
