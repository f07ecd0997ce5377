"""The Python in README.md and docs/ runs as it stands, its commands choose something, links lead somewhere, and the
table of families is what is printed."""

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

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """The code blocks of a language, and the line that each begins on."""
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: m.start(2)].count("\n"), m[2]) for m in found if m[1] == language]


PYTHON = [name for name, text in TEXTS.items() if blocks(text, "python")]


@pytest.fixture
def one_of_two_processes() -> Iterator[None]:
    """A process group of two whose other process is not there: collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def names(folder: Path) -> dict[str, Any]:
    """What the pages take for granted: the names that their code uses and does not define."""
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
        "model": AutoModelForCausalLM.from_pretrained(folder),
        "tokens": torch.randint(3, 128, (2, 12), generator=generator),
        "targets": torch.randint(3, 128, (2, 12), generator=generator),
        "logits": normal(2, 12, 128),
        "hidden": normal(2, 12, 64),
        "head_weight": normal(128, 64),
        "sorted_x": normal(18, 32),
        "experts": normal(3, 32, 16),
        "offs": torch.tensor([4, 4, 18], dtype=torch.int32),
        "probs": torch.rand(9, 2, generator=generator),
        "slots": torch.randperm(18, generator=generator).view(9, 2),
        "prompt_a": [5, 6, 7],
        "prompt_b": [8, 9],
        **{name: normal(2, 9, 32) for name in ("x", "branch", "residual")},
        "weight": normal(32),
        "bias": torch.linspace(-1.0, 1.0, 32),
        "q": normal(1, 4, 9, 128),
        "k": normal(1, 2, 9, 128),
        "v": normal(1, 2, 9, 128),
        "q_weight": normal(128),
        "k_weight": normal(128),
        "cos": normal(16, 64),
        "sin": normal(16, 64),
        "sinks": normal(4),
        "gate_up": normal(2, 9, 48),
        "packed_q": normal(9, 4, 64),
        "packed_k": normal(9, 2, 64),
        "packed_v": normal(9, 2, 64),
        "cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32),
        "max_seqlen": 5,
        "queries": normal(2, 1, 4, 128),
        "keys": normal(2, 1, 2, 128),
        "values": normal(2, 1, 2, 128),
        "k_cache": torch.zeros(2, 16, 2, 128),
        "v_cache": torch.zeros(2, 16, 2, 128),
        "lengths": torch.tensor([3, 15]),
        "device": "cpu",
        "devices": 2,
    }


def run(page: str, code: str, line: int, defined: dict[str, Any]) -> None:
    # Without the code generation of torch.compile, which takes a minute.
    code = code.replace("torch.compile(model, fullgraph=True)", 'torch.compile(model, fullgraph=True, backend="eager")')
    exec(compile("\n" * line + code, page, "exec"), defined)


@pytest.mark.usefixtures("one_of_two_processes")
@pytest.mark.parametrize("page", PYTHON)
def test_every_python_block_runs(page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, each with what those before it on the page have defined."""
    pytest.importorskip("transformers")
    found = blocks(TEXTS[page], "python")
    defined = names(tmp_path)
    for line, code in found:
        run(page, code, line, {} if page == "README.md" else defined)  # whose blocks are programs to be pasted
    if "report()" in TEXTS[page]:
        assert "10 of 10 modules replaced" in capsys.readouterr().out
    if "lse = " in TEXTS[page]:
        assert defined["lse"].shape == (1, 4, 9)
    if "loss" in defined:
        # What the other process would have sent is whatever was in memory.
        assert defined["loss"].shape == ()
        assert page == "docs/distributed.md" or torch.isfinite(defined["loss"])
    if "flash_attn_with_kvcache(" in TEXTS[page]:
        for cache in (defined["k_cache"], defined["v_cache"]):
            assert cache.count_nonzero() == 2 * 2 * 128
        assert torch.equal(defined["v_cache"][1, 15], defined["values"][1, 0])


def test_every_block_is_found() -> None:
    """What used to be on one page is still run, wherever it went."""
    assert {"README.md", "docs/drop_in.md", "docs/usage.md", "docs/distributed.md"} <= set(PYTHON)
    assert sum(len(blocks(TEXTS[page], "python")) for page in PYTHON) >= 11
    code = "".join(code for page in PYTHON for _, code in blocks(TEXTS[page], "python"))
    for used in (
        *("rms_norm", "add_rms_norm", "rope_table", "rope", "qk_norm_rope", "swiglu"),
        *("flash_attention", "flash_attention_varlen", "nn.RMSNorm", "nn.SwiGLU", "models.Transformer", "patch"),
    ):
        assert f"fk.{used}(" in code, f"no page shows fk.{used}"
    for used in ("scaled_dot_product_attention", "flash_attn_func", "flash_attn_with_kvcache", "parallelize_module"):
        assert f" = {used}(" in code, f"no page shows {used}"


def test_the_table_of_families_is_what_patch_report_prints(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    from foundry_kernels.__main__ import main

    shown = TEXTS["docs/drop_in.md"].partition("<!-- patch-report -->")[2].partition("<!-- end of patch-report -->")[0]
    lines = [line for line in shown.splitlines() if line]
    if not lines[0].startswith(f"transformers {transformers.__version__}:"):
        pytest.skip(f"the table is of {lines[0].partition(':')[0]}, this is {transformers.__version__}")
    assert main(["patch-report"]) == 0
    assert lines == capsys.readouterr().out.splitlines()


def test_the_benchmark_commands_choose_benchmarks() -> None:
    lines = [line for text in TEXTS.values() for _, block in blocks(text, "") for line in block.splitlines()]
    commands = [line.partition("#") for line in lines if "benchmarks" in line]
    choices = set(re.findall(r'-k ("[^"]*"|[\w-]+)', " ".join(comment for _, _, comment in commands)))
    assert any("pytest benchmarks --benchmark-only" in command for command, _, _ in commands)
    assert len(choices) >= 3
    # In one process, which imports torch once: pytest's exit code for each choice, 0 where it chose something.
    one = "int(pytest.main(['benchmarks', '--collect-only', '-k', choice]))"
    code = f"import pytest, sys; print(*({one} for choice in sys.argv[1:]))"
    call = [sys.executable, "-c", code, *(shlex.split(choice)[0] for choice in choices)]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT)
    found = dict(zip(choices, done.stdout.splitlines()[-1].split(), strict=True))
    assert set(found.values()) == {"0"}, f"{found}: {done.stdout[-500:]}"


@pytest.mark.parametrize("page", TEXTS)
def test_every_make_target_is_there(page: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join([*re.findall(r"`([^`\n]+)`", TEXTS[page]), *(block for _, block in blocks(TEXTS[page], ""))])
    for target in re.findall(r"\bmake ([a-z][\w-]*)", code):
        assert target in targets, f"make {target}"


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page: str) -> None:
    """Links lead to a file, and to a heading where one is named."""
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target
