"""Benchmarks that are held to an instruction set, and the options of the command. No time decides a test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
import torch

import foundry_kernels as fk
from benchmarks import calls, isa, models, report, suite, tables
from foundry_kernels.core import extension
from foundry_kernels.testing import Arg, Case

ROOT = Path(__file__).parents[2]


def test_every_instruction_set_of_ours_holds_torch_too() -> None:
    assert set(extension.build_info().get("instruction_sets", [])) <= set(isa.SWITCHES)
    environment: dict[str, str] = {"ATEN_CPU_CAPABILITY": "avx512", "HOME": "/"}
    isa.switch("avx2", environment)
    assert environment == {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
        "HOME": "/",
    }
    with pytest.raises(ValueError, match=r"no instruction set 'avx1024'; there are baseline, avx2"):
        isa.switch("avx1024", environment)


def test_an_instruction_set_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "switch", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(extension, "MISSING", None)
    monkeypatch.setattr(extension, "build_info", lambda: {"usable_instruction_sets": ["baseline", "avx2"]})
    with pytest.raises(ValueError, match="our kernels have no 'avx512' here; they have baseline, avx2"):
        isa.force("avx512")
    monkeypatch.setattr(extension, "MISSING", "the C++ extension is not built")
    with pytest.raises(ValueError, match="cannot be restricted to 'avx2': the C\\+\\+ extension is not built"):
        isa.force("avx2")


HELD = isa.Isa("avx2", "AVX2", "avx2", obeyed=True, products16=False)


def test_a_run_says_what_it_was_held_to() -> None:
    kept = {"ours": "avx2", "torch": "AVX2", "forced": "avx2", "obeyed": True, "switches": isa.SWITCHES["avx2"]}
    assert HELD.kept() == kept
    assert isa.Isa("avx512", "AVX512").kept() == {"ours": "avx512", "torch": "AVX512", "forced": None}


def test_the_page_says_once_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    text = tables.held({"isa": HELD.kept()}).replace("\n", " ")
    assert text.startswith("**Held to avx2** (`--isa avx2`)")
    assert "`ONEDNN_MAX_CPU_ISA=AVX2`" in text
    assert "torch (it reports AVX2)" in text
    lied = isa.Isa("avx2", "AVX512", "avx2", obeyed=False)
    assert "**it did not obey and reports AVX512**" in tables.held({"isa": lied.kept()}).replace("\n", " ")
    assert tables.held({"isa": isa.Isa("avx2", "AVX2").kept()}) == tables.held({}) == ""
    run = {"machine_info": {"cpu": {"brand_raw": "A processor", "count": 2}}, "device": "cpu"}
    assert report.device(run) == "A processor, 2 cores"
    assert report.device({**run, "isa": HELD.kept()}) == "A processor, 2 cores, restricted to avx2"


def test_torch_is_no_peer_where_its_products_fall_back_to_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HELD.lacks_products(2, True)
    assert not HELD.lacks_products(4, True)
    assert not HELD.lacks_products(2, False)
    assert not isa.Isa("avx2", "AVX2").lacks_products(2, True)  # not forced: the machine is what it is
    case = Case("T=8", {n: Arg((1, 2, 8, 16)) for n in "qkv"}, {"causal": True})
    g = suite.Group(fk.OPS["flash_attention"], case, torch.bfloat16, "forward", "warm")
    monkeypatch.setattr(isa, "current", HELD)
    seconds = iter([9.0, 1.0, 2.0, 1.0])  # in bfloat16 and in float32, of eager and then of SDPA
    monkeypatch.setattr(calls, "_seconds", lambda prepare: next(seconds))
    found = calls.Contenders(g, (*g.ours, "eager", "SDPA flash", "memcpy"))
    assert "oneDNN is restricted to avx2: more than 2.5 times as slow as in float32" in found.why_not.pop("eager")
    assert found.why_not == {}
    assert set(found.prepare) == {*g.ours, "SDPA flash", "memcpy"}


def test_models_in_16_bits_are_not_measured_on_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "current", HELD)
    if suite.DEVICE != "cpu":
        pytest.skip("on a GPU the CPU's instruction set matters to no model")
    m = models.ModelGroup("transformer", "small", "forward", torch.bfloat16)
    found = models.ModelContenders(m, ("reference", "ours"))
    assert all("plain loops" in reason for reason in found.why_not.values())
    assert found.prepare == {}


# --- the command ------------------------------------------------------------------------------------------------------


COMMAND = ("-m", "pytest", "benchmarks", "--benchmark-only")


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST")}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """With an interpreter of its own, in which torch has not yet read what restricts it."""
    call = [sys.executable, *COMMAND, *arguments]
    return subprocess.run(call, cwd=ROOT, env=environment(), capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget=-1",), "argument --budget: invalid minutes value: '-1'"),
        (("--budget=nan",), "argument --budget: invalid minutes value: 'nan'"),
        (("--isa=avx1024",), "argument --isa: invalid choice: 'avx1024'"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    done = fresh.python(*COMMAND, *arguments, env=environment(), cwd=ROOT)
    assert done.returncode == 4
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="--isa is the CPU's")
def test_a_forced_run_and_one_without_time(tmp_path: Path) -> None:
    """It announces a plan, ends with its verdict, and says what it was held to; in no time, all is left out."""
    usable = extension.build_info().get("usable_instruction_sets", [])
    if "avx2" not in usable:
        pytest.skip("our kernels have no AVX2 here")
    run_file = tmp_path / "run.json"
    choice = "rms_norm and overhead and not add and not stubbed and not compile"
    done = command("--isa=avx2", "-k", choice, f"--benchmark-json={run_file}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"rows in \d comparisons, about \d\.\d min; budget 5 min", done.stdout)
    assert "verdict: " in done.stdout
    assert "Name (time in" not in done.stdout  # with -v
    run = json.loads(run_file.read_text())
    assert run["isa"]["forced"] == run["isa"]["ours"] == "avx2"
    assert run["isa"]["obeyed"]
    assert run["isa"]["torch"] == "AVX2"
    assert run["budget"]["cut"] == {}
    kept = tmp_path / "kept.json"
    report.keep(run_file, kept)
    assert "**Held to avx2**" in report.page(kept).read_text()

    nothing = command("--budget=0.01", "-k", choice, "-rs")
    assert "budget: no time for it within 0.01 min" in nothing.stdout
    assert " passed" not in nothing.stdout
