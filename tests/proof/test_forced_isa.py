"""`make test-isa`: which instruction sets tests are held to, and with what environment. The run itself is a command."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forced_isa
import pytest
from forced_isa import CHOICE, FILES, ROOT, run, to_run

from benchmarks import isa

ALL = ["avx2", "avx512", "avx512_bf16", "amx_bf16"]


@pytest.mark.parametrize(
    ("usable", "chosen", "lacking"),
    [
        (["baseline", *ALL], ALL[:3], []),
        (["baseline", *ALL[:2]], ["avx2"], ALL[2:]),
        (["baseline", "avx2"], [], ALL[1:]),
        (["neon", "neon_bf16"], [], ALL),
        ([], [], ALL),
    ],
)
def test_all_sets_below_the_best_are_run(usable: list[str], chosen: list[str], lacking: list[str]) -> None:
    """And each of the others is a line that says why not."""
    found, skipped = to_run(ALL, usable)
    assert found == chosen
    assert len(skipped) == len(ALL) - len(chosen)
    assert [line.partition(":")[0] for line in skipped if "lacks it" in line] == lacking


@pytest.mark.parametrize(("best", "runs"), [("avx512", False), ("avx512_bf16", True), ("neon_bf16", True)])
def test_bfloat16_is_widened_where_it_would_not_be(best: str, runs: bool) -> None:
    chosen, skipped = to_run(["widened"], ["baseline", best])
    assert (chosen, len(skipped)) == (["widened"] * runs, not runs)


def test_all_four_are_held_and_no_gpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def record(command: list[str], **options: Any) -> SimpleNamespace:
        calls.append((command, options["env"]))
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(subprocess, "run", record)
    assert run("avx512", ["-x"]) == 3
    command, environment = calls[0]
    assert "--held-to=avx512" in command
    assert command[-1] == "-x"
    assert isa.SWITCHES["avx512"].items() <= environment.items()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    run("widened", [])
    command, environment = calls[1]
    assert not any(each.startswith("--held-to") for each in command)
    assert environment["FOUNDRY_KERNELS_BFLOAT16"] == "widened"


def test_a_failure_and_what_was_skipped_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forced_isa.extension, "build_info", lambda: {"usable_instruction_sets": ["baseline", *ALL[:3]]})
    monkeypatch.setattr(forced_isa, "run", lambda name, arguments: int(name == "avx512"))
    assert forced_isa.main(["avx2"]) == 0
    assert forced_isa.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" in ")[0] for line in lines if line.startswith("restricted to")] == [
        "restricted to avx2: passed", "restricted to avx2: passed", "restricted to avx512: failed",
        "restricted to widened: passed",
    ]  # fmt: skip
    assert any(line.startswith("amx_bf16: skipped") for line in lines)


def test_what_is_run_exists() -> None:
    assert all((ROOT / file.partition("::")[0]).exists() for file in FILES)
    assert compile(CHOICE, "-k", "eval")
    assert Path(forced_isa.__file__).parent == ROOT / "tests" / "support"
