"""`make gpu-check` and `make gpu-cache`, as far as there need be no GPU."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fresh
import gpu_archive
import gpu_check
import gpu_shapes
import pytest
import torch
from built import needs_native
from isolated import Pool
from slow import ahead_of_time

from foundry_kernels import _triton
from foundry_kernels.tools import check

ROOT = Path(__file__).parents[2]
GPU = "NVIDIA Made-Up 1"


@pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))
@ahead_of_time
def test_kernels_compiled_here_are_found_by_a_launch_elsewhere(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")}
    command = ["tests/tools/kernel_cache.py", str(tmp_path)]
    done = fresh.python(*command, env=env | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found 2 kernels" in done.stdout


@pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))
def test_a_damaged_cache_is_refused_by_name(tmp_path: Path) -> None:
    made, archive = tmp_path / "made", tmp_path / "cache.tar.xz"
    (made / "KEY").mkdir(parents=True)
    (made / "KEY" / "kernel.json").write_text("{}")
    (made / "KEY" / "kernel.cubin").write_bytes(os.urandom(5000))
    gpu_archive.pack(made, archive, {"kernels": 1})
    assert gpu_archive.unpack(archive, tmp_path / "whole") == {"kernels": 1}
    paths = json.loads((tmp_path / "whole" / "KEY" / "__grp__kernel.json").read_text())["child_paths"]
    assert paths == {name: str(tmp_path / "whole" / "KEY" / name) for name in ("kernel.json", "kernel.cubin")}
    whole = archive.read_bytes()
    subprocess.run(["tar", "-cJf", archive, "-C", made, "KEY"], check=True)
    damaged = {"truncated": whole[:3000], "text": b"no archive", "another": archive.read_bytes()}
    for damage, content in damaged.items():
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=r"cache.tar.xz is not a cache that `make gpu-cache` made, or is damaged"):
            gpu_archive.unpack(archive, tmp_path / damage)


@pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))
@pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("readelf") is None, reason="needs gcc and readelf")
def test_launcher_modules_name_the_driver_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own build of a module, by a compiler whose linker leaves out the libraries in which it finds nothing."""
    import gpu_cache
    from triton.runtime import build

    (tmp_path / "thrifty").write_text('#!/bin/sh\nexec gcc -Wl,--as-needed "$@"\n')
    (tmp_path / "thrifty").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "thrifty"))
    (tmp_path / "main.c").write_text("int cuInit(unsigned); int begin(void) { return cuInit(0); }")

    def needed(name: str) -> str:
        if hasattr(build, "_find_compiler"):  # Triton 3.9 remembers the first compiler
            monkeypatch.setattr(build, "_find_compiler", inspect.unwrap(build._find_compiler))
        given = ([str(tmp_path)], [], ["libcuda.so.1"], [])
        return libraries_of(build._build(name, str(tmp_path / "main.c"), str(tmp_path), *given))

    def libraries_of(module: str | Path) -> str:
        return subprocess.run(["readelf", "-dW", module], capture_output=True, text=True, check=True).stdout

    with gpu_cache.linked_against_empty_libcuda(tmp_path):
        assert os.environ["CC"] == str(tmp_path / "cc")
        assert "[libcuda.so.1]" in needed("kept")
    assert os.environ["CC"] == str(tmp_path / "thrifty")
    assert "[libcuda.so.1]" not in needed("dropped"), "such a compiler leaves it out by itself"


# --- the checks -------------------------------------------------------------------------------------------------------

WORKER = """
import os, time
from isolated import serve
seen = []
def check(name):
    seen.append(name)
    if name == "hangs": time.sleep(600)
    if name == "dies": os._exit(3)
    if name in ("is wrong", "breaks"): raise ValueError(name)
    return os.getpid()
serve({"names": 6}, check, lambda: seen[-1] == "breaks")
"""


def test_a_check_that_hangs_or_dies_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support")}
    pool = Pool([sys.executable, str(tmp_path / "worker.py")], tmp_path / "log.txt", env)
    first = pool.worker()
    assert first.about == {"names": 6}
    pool.give_back(first)
    names = ["good", "hangs", "is wrong", "again", "dies", "breaks", "last"]
    found = dict(pool.run(names, 2, time.monotonic() + 600, 1))
    assert list(found) == names
    assert found["hangs"]["error"] == "stopped after 2 s"
    assert found["dies"]["error"] == "its process ended with 3"
    assert found["is wrong"]["error"] == "worker.py:9: ValueError: is wrong"
    assert found["breaks"]["error"] == "worker.py:9: ValueError: breaks"
    processes = {name: answer["found"] for name, answer in found.items() if "found" in answer}
    assert list(processes) == ["good", "again", "last"]
    assert len(set(processes.values())) == 3, "a new process after one that hung, and after one that broke"
    assert list(pool.run(names, 5, time.monotonic() - 1, 2)) == [], "no time is left"
    assert pool.close() == 0
    assert "--- dies" in (tmp_path / "log.txt").read_text()
    (tmp_path / "worker.py").write_text("raise SystemExit(4)")
    failed = dict(Pool([sys.executable, str(tmp_path / "worker.py")], tmp_path / "log.txt").run(names, 5, time.monotonic() + 600, 1))  # fmt: skip # noqa: E501
    assert [*failed] == ["good"], "nothing else is tried"
    assert failed["good"]["error"] == "its process ended with 4"


@needs_native
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("other kernel", "passes before"),
        ("other bits", "call 2: other bits"),
        ("together", "two streams: other bits"),
        ("inexact", "dq: error"),
        ("", ""),
    ],
)
def test_large_attention_is_held_to_its_kernel_its_bits_and_sdpa(
    mistake: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, own, calls = gpu_shapes.Stub(), check.forward_and_backward, [0]

    def planted(*args: Any) -> tuple[torch.Tensor, ...]:
        calls[0] += 1
        out, *grads = own(*args)
        if mistake == "inexact" or (mistake == "other bits" and calls[0] == 3):
            grads[0] = grads[0] * 1.01
        return out, *grads

    monkeypatch.setattr(check, "forward_and_backward", planted)
    if mistake == "other kernel":
        monkeypatch.setattr(card, "passes", lambda: (1, 1))
    if mistake == "together":
        monkeypatch.setattr(card, "at_once", lambda *runs: [tuple(x + 1 for x in run()) for run in runs])
    case = next(iter(gpu_shapes.shapes(card).values()))
    with pytest.raises(AssertionError, match=message) if mistake else contextlib.nullcontext():
        assert gpu_shapes.hold(case, card).keys() == {"out", "dq", "dk", "dv"}


def test_the_parts_fit_into_ten_minutes() -> None:
    assert sum(gpu_check.LIMITS.values()) <= 600
    order = [part for part in gpu_check.LIMITS if part not in gpu_check.TIMED]
    assert (*order, *gpu_check.TIMED) == gpu_check.PARTS, "what is right is known before how fast it is"
    assert order[:4] == ["build", "units", "hopper", "shapes"]
    names = gpu_shapes.shapes(gpu_shapes.Card())
    for each in ("T=4096", "T=16384", "D=64", "D=128", "D=192/128", "D=256", "Hk=1", "Hk=2", "Hk=8", "any order"):
        assert any(each in name for name in names), each


SANITIZER = """#!/bin/sh
log=$6
shift 6
echo "========= COMPUTE-SANITIZER"
"$@"
code=$?
echo "========= ERROR SUMMARY: 0 errors" > $log
exit $code
"""


@needs_native
@pytest.mark.slow
def test_a_dry_run_has_all_parts(tmp_path: Path) -> None:
    """With the CPU in the GPU's place."""
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(SANITIZER)
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"OUT": str(tmp_path / "out"), "PATH": path, "TRITON_INTERPRET": "1"}
    done = fresh.python("tests/support/gpu_check.py", "--stub", env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "stub.json").read_text())
    assert tuple(report["parts"]) == gpu_check.PARTS
    for name, part in report["parts"].items():
        assert part["ok"], name
        assert name == "build" or part["passed"], name
        assert f"{name:<9} ok " in done.stdout
    assert "2 of 2 passed, 0 failed, 0 errors" in report["parts"]["sanitize"]["summary"]
    assert any((r["op"], r["row"]) == ("flash_attention", "native") for r in report["rows"])
    eager, ours = (
        next(r for r in report["rows"] if (r["op"], r["row"]) == ("training", name))
        for name in ("Hugging Face", "patched by ours")
    )
    assert abs(eager["loss"] - ours["loss"]) <= 1e-4 * eager["loss"]
    assert ours["speedup_over"].keys() == {"Hugging Face"}
    assert ours["tokens/s"] == pytest.approx(2 * 96 / (ours["median_us"] / 1e6), rel=1e-3)
    assert ours["peak_bytes"] > 0
    assert "for a GPU" in next(r for r in report["absent"] if r["row"] == "patched by Liger")["why_not"]


class Stub(gpu_check.Session):
    """Checks that are recorded instead of run."""

    def __init__(self, failing: dict[str, str]) -> None:
        super().__init__([])
        self.failing, self.ran = failing, []
        self.about = {"gpu": GPU, "capability": "9.0", "environment": {}, "isa": {}, "extension": {}}

    def begin(self) -> None:
        return None

    def build(self) -> dict[str, Any]:
        return {"ok": True, "seconds": 0, "summary": ""}

    sanitize = build

    def names(self, part: str, pool: Any) -> tuple[list[str], None]:
        return ["one", "two"], None

    def checked(self, part: str, names: Any, pool: Any, deadline: float, *args: Any) -> dict[str, Any]:
        outer = self

        class Recorded:
            def run(self, names: list[str], *args: Any) -> Iterator[tuple[str, dict[str, Any]]]:
                outer.ran += names
                for name in names:
                    if outer.failing.get(name) == "stop":
                        raise KeyboardInterrupt
                    yield name, {"error": "wrong"} if name in outer.failing else {"found": []}

        return super().checked(part, names, Recorded(), deadline, *args)  # type: ignore[arg-type]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    monkeypatch.setattr(gpu_check, "FROM", tmp_path)
    return tmp_path


def test_what_is_left_is_run_by_itself(out: Path, capsys: pytest.CaptureFixture) -> None:
    first = Stub({"hopper: two": "", "delta: one": "stop"})
    with pytest.raises(KeyboardInterrupt):
        gpu_check.check(first, (), {})
    report = json.loads((out / "nvidia-made-up-1.json").read_text())
    assert report["parts"]["hopper"]["failed"] == {"two": "wrong"}
    assert "delta" not in report["parts"], "the parts before it are kept"
    second = Stub({})
    assert gpu_check.check(second, ("rest",), {}) == 0
    assert second.ran == [
        "hopper: two",
        "delta: one",
        "delta: two",
        "model: one",
        "model: two",
        "lora: one",
        "lora: two",
    ]
    named = Stub({"shapes: two": ""})
    assert gpu_check.check(named, ("parity", "shapes"), {}) == 1
    assert named.ran == ["shapes: one", "shapes: two", "parity: one", "parity: two"]
    assert "not passed, or not whole: shapes; `make gpu-check ARGS=rest`" in capsys.readouterr().out
    for damage in ("[]", "{", json.dumps(report | {"sources": "others"})):
        (out / "nvidia-made-up-1.json").write_text(damage)
        assert gpu_check.check(again := Stub({}), ("rest",), {}) == 0
        assert len(again.ran) == 2 * (len(gpu_check.PARTS) - 2)
        assert "nothing to continue" in capsys.readouterr().out


def test_what_was_brought_along_is_placed_if_it_is_of_these_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu_archive, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_archive, "FOLDER", tmp_path / "gpu-cache")
    monkeypatch.setattr(gpu_archive, "ARCHIVE", tmp_path / "gpu-cache.tar.xz")
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert gpu_check.use_archive() == {}
    assert "no gpu-cache.tar.xz was brought along" in capsys.readouterr().out
    made, placed = tmp_path / "made", tmp_path / "foundry_kernels" / gpu_archive.EXTENSION
    for folder in (made / gpu_archive.COMPILED, placed.parent, tmp_path / "csrc"):
        folder.mkdir(parents=True)
    (tmp_path / "build_extension.py").touch()
    (made / gpu_archive.COMPILED / gpu_archive.EXTENSION).write_text("code")
    gpu_archive.pack(
        made, gpu_archive.ARCHIVE, {"kernels": 7, "torch": "2.11", "sources": gpu_archive.compiled_sources()}
    )
    assert gpu_check.use_archive()["kernels"] == 7
    assert "the extension was brought along, for torch 2.11" in capsys.readouterr().out
    assert placed.read_text() == "code"
    (tmp_path / "csrc" / "new.cu").touch()
    placed.unlink()
    gpu_check.use_archive()
    assert "is of other sources" in capsys.readouterr().out
    assert not placed.exists()
    (tmp_path / "gpu-cache.tar.xz").write_text("no archive")
    assert gpu_check.use_archive() == {}
    assert "kernels are compiled here:" in capsys.readouterr().out
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "gpu-cache")
