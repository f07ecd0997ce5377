"""How products of bfloat16 are made on which processor: the table, by name; what is measured, kept and forced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest

from foundry_kernels.core import bfloat16, extension
from foundry_kernels.core.bfloat16 import AMD, INTEL, VARIABLE, Choice, Processor, choose
from foundry_kernels.tools.environment import versions

ROOT = Path(__file__).parents[2]
SETS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16")
UNKNOWN = Processor(INTEL, 6, 0xD0, 3, "avx512_bf16")

needs_extension = pytest.mark.skipif(extension.BFLOAT16 is None, reason=str(extension.MISSING))


def never() -> dict[str, float]:
    raise AssertionError("measured, though it is known")


def chosen(processor: Processor, **environment: str) -> Choice:
    usable = (*SETS[: SETS.index(processor.instruction_set) + 1],) if processor.vendor else (processor.instruction_set,)
    return choose(processor, usable, environment, never)


#: By instructions: attention's tiles, its pairs, and oneDNN's products.
KNOWN = {
    "Zen 2": (AMD, 0x17, 0x31, 0, "avx2", (False, False, False)),
    "Zen 3": (AMD, 0x19, 0x01, 1, "avx2", (False, False, False)),
    "Zen 4": (AMD, 0x19, 0x11, 1, "avx512_bf16", (False, True, True)),
    "Zen 4c": (AMD, 0x19, 0xA0, 2, "avx512_bf16", (False, True, True)),
    "Zen 5": (AMD, 0x1A, 0x02, 1, "avx512_bf16", (False, True, True)),
    "Zen 5c": (AMD, 0x1A, 0x11, 0, "avx512_bf16", (False, True, True)),
    "Skylake": (INTEL, 6, 0x55, 4, "avx512", (False, False, False)),
    "Cascade Lake": (INTEL, 6, 0x55, 7, "avx512", (False, False, False)),
    "Cooper Lake": (INTEL, 6, 0x55, 11, "avx512_bf16", (False, True, True)),
    "Ice Lake": (INTEL, 6, 0x6A, 6, "avx512", (False, False, False)),
    "Sapphire Rapids": (INTEL, 6, 0x8F, 8, "amx_bf16", (True, False, True)),
    "Emerald Rapids": (INTEL, 6, 0xCF, 2, "amx_bf16", (True, False, True)),
    "Granite Rapids": (INTEL, 6, 0xAD, 1, "amx_bf16", (True, False, True)),
    "Granite Rapids D": (INTEL, 6, 0xAE, 1, "amx_bf16", (True, False, True)),
    "Sapphire Rapids, AMX masked": (INTEL, 6, 0x8F, 8, "avx512_bf16", (False, False, False)),
    "Emerald Rapids, AMX masked": (INTEL, 6, 0xCF, 2, "avx512_bf16", (False, False, False)),
    "Granite Rapids, AMX masked": (INTEL, 6, 0xAD, 1, "avx512_bf16", (False, False, False)),
    "Granite Rapids D, AMX masked": (INTEL, 6, 0xAE, 1, "avx512_bf16", (False, False, False)),
    "a later one with AMX": (INTEL, 19, 0x01, 0, "amx_bf16", (True, True, True)),
    "Graviton 2": ("", 0, 0, 0, "neon", (False, False, False)),
    "Graviton 3": ("", 0, 0, 0, "neon_bf16", (False, True, True)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_processors_by_name(name: str) -> None:
    *facts, wanted = KNOWN[name]
    choice = chosen(Processor(*facts))  # type: ignore[arg-type]
    assert (choice.tiles, choice.pairs, choice.products) == wanted
    assert choice.why


@pytest.mark.parametrize(
    ("processor", "pairs", "products", "wanted"),
    [
        (UNKNOWN, 0.5, 0.6, (True, True)),
        (Processor(AMD, 0x1B, 0, 0, "avx512_bf16"), 2.0, 1.9, (False, False)),
        (Processor("HygonGenuine", 0x18, 4, 1, "avx512_bf16"), 1.1, 1.9, (True, False)),  # within the margin they stay
        (UNKNOWN, 1.2, -1.0, (False, True)),  # oneDNN has none, which is asked elsewhere
    ],
    ids=str,
)
def test_others_are_measured_once(
    processor: Processor, pairs: float, products: float, wanted: tuple[bool, bool], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seconds = {"float32": 1.0, "pairs": pairs, "products": products}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not yet there"))
    first = choose(processor, SETS[:4], {}, lambda: seconds)
    assert (first.tiles, first.pairs, first.products) == (False, *wanted)
    assert choose(processor, SETS[:4], {}, never) == first
    (kept,) = (tmp_path / "not yet there" / "foundry_kernels").iterdir()  # and nothing beside it
    assert str(kept) in first.why
    assert json.loads(kept.read_text())["seconds"] == seconds


def _no_folder(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"  # in which no folder can be made, by root neither


def _damaged(tmp_path: Path) -> Path:
    path = tmp_path / "foundry_kernels"
    path.mkdir()
    (path / f"bfloat16-{UNKNOWN.vendor}-{bfloat16._key(UNKNOWN)}.json").write_text('{"format": "another"}')
    return tmp_path


@pytest.mark.parametrize("make", [_no_folder, _damaged])
def test_what_cannot_be_kept_is_not_measured(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(make(tmp_path)))
    choice = choose(UNKNOWN, SETS[:4], {}, never)
    assert (choice.tiles, choice.pairs, choice.products) == (False, True, True)
    assert str(tmp_path) in choice.why


def test_a_user_without_a_home_has_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    choice = choose(UNKNOWN, SETS[:4], {}, never)
    assert (choice.pairs, choice.products) == (True, True)
    assert "home" in choice.why


#: A process in which measurements are noise about the margin, without torch, which it does not need.
PROCESS = """
import random, sys, types
package = types.ModuleType("foundry_kernels")
package.__path__ = [sys.argv[1]]
sys.modules["foundry_kernels"] = package
from foundry_kernels.core.bfloat16 import MARGIN, Processor, choose
noise = lambda: {"float32": 1.0, **{name: random.choice([0.9, 1.1]) * MARGIN for name in ("pairs", "products")}}
sys.stdin.read(1)
print(choose(Processor("GenuineIntel", 6, 0xD0, 3, "avx512_bf16"), (), {}, noise))
"""


def test_a_choice_is_the_same_in_20_processes(tmp_path: Path) -> None:
    """That begin at the same time, on a processor that none of them knows."""
    command = [sys.executable, "-c", PROCESS, str(ROOT / "foundry_kernels")]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(20)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    said = {process.stdout.read() for process in processes if process.stdout is not None}
    assert [process.wait() for process in processes] == [0] * 20
    assert len(said) == 1
    assert "measured" in said.pop()
    assert len(list((tmp_path / "foundry_kernels").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "asked", "wanted"),
    [
        ("Zen 5", "widened", (False, False, False)),
        ("Sapphire Rapids", "widened", (False, False, False)),
        ("Sapphire Rapids", "avx512_bf16", (False, True, True)),
        ("Sapphire Rapids, AMX masked", "avx512_bf16", (False, True, True)),
        ("Sapphire Rapids", "amx_bf16", (True, True, True)),
        ("Zen 2", "widened", (False, False, False)),
        ("Graviton 3", "neon_bf16", (False, True, True)),
    ],
)
def test_a_choice_can_be_forced(name: str, asked: str, wanted: tuple[bool, bool, bool]) -> None:
    choice = chosen(Processor(*KNOWN[name][:-1]), **{VARIABLE: asked})  # type: ignore[arg-type]
    assert (choice.tiles, choice.pairs, choice.products) == wanted
    assert choice.why == f"{VARIABLE}={asked}"


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("Zen 5", "amx_bf16", "amx_bf16 names instructions that are not available: this processor .* has avx512_bf16"),
        ("Ice Lake", "avx512_bf16", "avx512_bf16 names instructions .*GenuineIntel family 6 model 106 .* has avx512"),
        ("Zen 4", "neon_bf16", "neon_bf16 names instructions"),
        ("Zen 4", "fast", "must be widened or one of neon_bf16, avx512_bf16, amx_bf16; got 'fast'"),
        ("Zen 4", "avx2", "must be widened or one of"),
    ],
)
def test_what_the_processor_lacks_is_refused_by_name(name: str, asked: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"{VARIABLE}.*{message}"):
        chosen(Processor(*KNOWN[name][:-1]), **{VARIABLE: asked})  # type: ignore[arg-type]


def test_a_build_that_lacks_it_refuses_it_too() -> None:
    with pytest.raises(ValueError, match="usable are avx2"):
        choose(Processor(AMD, 0x1A, 2, 1, "avx512_bf16"), ("avx2",), {VARIABLE: "avx512_bf16"}, never)


@needs_extension
def test_the_overview_says_what_was_chosen_and_why() -> None:
    (line,) = (line for line in versions() if line.split()[0] == "bfloat16")
    assert str(extension.BFLOAT16) in line
    assert "attention" in line
    assert "matmuls" in line


@needs_extension
def test_this_processor_is_what_linux_says() -> None:
    found = extension._C.processor()
    about = Path("/proc/cpuinfo")
    if not found["vendor"] or not about.exists():
        pytest.skip("no such file, or no CPUID")
    said = dict(line.split(":", 1) for line in about.read_text().split("\n\n")[0].splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, value in said.items()}
    names = {"vendor": "vendor_id", "family": "cpu family", "model": "model", "stepping": "stepping"}
    assert {name: str(found[name]) for name in names} == {name: facts[of] for name, of in names.items()}


def imported(asked: str) -> Any:
    code = """
import foundry_kernels
from foundry_kernels.core import extension
from foundry_kernels.nn._linear_layers import OWN_PRODUCTS
print(extension._C.bfloat16_choice(), *extension.build_info()["fast_products"], *OWN_PRODUCTS)
"""
    environment = os.environ | {VARIABLE: asked}
    return fresh.python("-c", code, env=environment, cwd=ROOT)


@needs_extension
def test_the_variable_is_obeyed_when_the_package_is_imported() -> None:
    found = imported("widened")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("(False, False, False)")
    fast, own = found.stdout.split(")", 1)[1].split(), "torch.bfloat16" in found.stdout
    assert "bfloat16" not in fast
    assert own == any("avx512" in name for name in extension.build_info()["usable_instruction_sets"])
    usable = extension.build_info()["usable_instruction_sets"]
    lacks = next(name for name in bfloat16.INSTRUCTIONS if name not in usable)
    refused = imported(lacks)
    assert refused.returncode != 0
    assert f"ValueError: {VARIABLE}={lacks} names instructions that are not available" in refused.stderr
