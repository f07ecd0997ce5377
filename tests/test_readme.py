"""The README's Python runs as it stands, its commands choose something, its table of families is what is printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def one_of_two_processes() -> Iterator[None]:
    """A process group of two whose other process is not there: collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def names(folder: Path) -> dict[str, Any]:
    """What the README's snippets take for granted: the names that they use and do not define."""
    from transformers import AutoModelForCausalLM

    from foundry_kernels.integrations.tiny import tiny_model

    tiny_model("llama").save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "torch": torch,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "name": str(folder),  # of a checkpoint
        "tokens": torch.randint(3, 128, (2, 12), generator=generator),
        "targets": torch.randint(3, 128, (2, 12), generator=generator),
        "prompt_a": [5, 6, 7],
        "prompt_b": [8, 9],
        **{name: normal(2, 9, 32) for name in ("x", "branch", "residual")},
        "weight": normal(32),
        "q": normal(1, 4, 9, 128),
        "k": normal(1, 2, 9, 128),
        "v": normal(1, 2, 9, 128),
        "q_weight": normal(128),
        "k_weight": normal(128),
        "sinks": normal(4),
        "gate_up": normal(2, 9, 48),
        "packed_q": normal(9, 4, 64),
        "packed_k": normal(9, 2, 64),
        "packed_v": normal(9, 2, 64),
        "cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32),
        "longest": 5,
        "queries": normal(2, 1, 4, 128),
        "keys": normal(2, 1, 2, 128),
        "values": normal(2, 1, 2, 128),
        "k_cache": torch.zeros(2, 16, 2, 128),
        "v_cache": torch.zeros(2, 16, 2, 128),
        "lengths": torch.tensor([3, 15]),
        "device": "cpu",
        "devices": 2,
    }


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for of, text in found if of == language]


@pytest.mark.usefixtures("one_of_two_processes")
def test_every_python_block_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, each with what those before it have defined."""
    pytest.importorskip("transformers")
    found = blocks("python")
    assert len(found) >= 5
    defined = names(tmp_path)
    for code in found:  # without the code generation of torch.compile, which takes a minute
        code = code.replace(
            "torch.compile(model, fullgraph=True)", 'torch.compile(model, fullgraph=True, backend="eager")'
        )
        line = README[: README.index(code[:40])].count("\n")
        exec(compile("\n" * line + code, "README.md", "exec"), defined)
    assert "9 of 9 modules replaced" in capsys.readouterr().out
    assert torch.isfinite(defined["loss"])
    assert defined["lse"].shape == (1, 4, 9)
    for cache in (defined["k_cache"], defined["v_cache"]):
        assert cache.count_nonzero() == 2 * 2 * 128
    assert torch.equal(defined["v_cache"][1, 15], defined["values"][1, 0])


def test_the_table_of_families_is_what_patch_report_prints(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    from foundry_kernels.__main__ import main

    shown = README.partition("<!-- patch-report -->")[2].partition("<!-- end of patch-report -->")[0]
    lines = [line for line in shown.splitlines() if line]
    if not lines[0].startswith(f"transformers {transformers.__version__}:"):
        pytest.skip(f"the README's table is of {lines[0].partition(':')[0]}, this is {transformers.__version__}")
    assert main(["patch-report"]) == 0
    assert lines == capsys.readouterr().out.splitlines()


def test_the_benchmark_commands_choose_benchmarks() -> None:
    commands = [line.partition("#") for block in blocks("") for line in block.splitlines() if "benchmarks" in line]
    choices = re.findall(r'-k ("[^"]*"|[\w-]+)', " ".join(comment for _, _, comment in commands))
    assert any("pytest benchmarks --benchmark-only" in command for command, _, _ in commands)
    assert len(choices) >= 2
    for choice in choices:
        arguments = ["benchmarks", "--collect-only", "-k", shlex.split(choice)[0]]
        done = subprocess.run([sys.executable, "-m", "pytest", *arguments], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, f"{choice}: {done.stdout[-500:]}"


def test_every_linked_file_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
