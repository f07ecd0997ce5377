"""The Python in README.md and docs/ runs as it stands, its commands choose something, links lead somewhere, the
reference has every public name, and the table of families is what is printed."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """The code blocks of a language, and the line that each begins on."""
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: m.start(2)].count("\n"), m[2]) for m in found if m[1] == language]


PYTHON = [name for name, text in TEXTS.items() if blocks(text, "python")]
#: What a page needs besides transformers: `make test-integrations` has it.
NEEDED = {"docs/trainers.md": ("accelerate", "trl", "peft", "lightning", "torchtitan", "kernels")}


@pytest.fixture
def one_of_two_processes(page: str) -> Iterator[None]:
    """A process group of two whose other process is not there: collectives return at once. Trainers would join it."""
    if page in NEEDED:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_two_processes")
@pytest.mark.parametrize("page", PYTHON)
def test_every_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader who pastes the blocks of a page, one after the other, needs nothing else. Each block of README.md is a
    program of its own."""
    for library in ("transformers", *NEEDED.get(page, ())):
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(ROOT))  # for the scripts in examples/, as from a checkout
    if page in NEEDED:
        monkeypatch.chdir(tmp_path)  # for what trainers write
    defined: dict[str, Any] = {}
    for line, code in blocks(TEXTS[page], "python"):
        if page == "README.md":
            defined = {}
        exec(compile("\n" * line + code, page, "exec"), defined)
    if "fk.patch(model)" in TEXTS[page]:
        assert "10 of 10 modules replaced" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "nn", "losses", "models", "compat", "distributed", "diagnostics"])
def test_every_public_name_is_in_the_reference(name: str) -> None:
    """`make docs` makes it of the docstrings."""
    module = importlib.import_module(f"foundry_kernels.{name}".rstrip("."))
    text = TEXTS[f"docs/api/{name or 'operators'}.md"]
    for each in module.__all__:
        value = getattr(module, each)
        if hasattr(value, "__module__") and hasattr(value, "__name__") and not inspect.ismodule(value):
            assert f"::: {value.__module__}.{value.__name__}\n" in text + "\n", each


def test_every_entry_of_the_reference_exists() -> None:
    """`make docs`, which is no test, reads the sources too: some modules need a library that may not be installed."""
    entries = re.findall(
        r"^::: (\S+)\.(\w+)$", "\n".join(text for page, text in TEXTS.items() if "/api/" in page), re.M
    )
    assert len(entries) > 100
    for module, name in entries:
        home = ROOT / module.replace(".", "/")
        source = (home / "__init__.py" if home.is_dir() else home.with_suffix(".py")).read_text(encoding="utf-8")
        assert re.search(rf"^(def |class |)({name})\b|^from .* import .*\b{name}\b", source, re.M), f"{module}.{name}"


def test_the_pages_are_few_enough_to_be_read() -> None:
    others = [(ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "SECURITY.md")]
    assert sum(len(text.split()) for text in (*TEXTS.values(), *others)) <= 25_000
    assert len(TEXTS["README.md"].splitlines()) <= 100
    assert len(others[0].splitlines()) <= 100


def test_the_table_of_what_runs_on_kernels_is_that_of_the_results() -> None:
    rows = [line for line in TEXTS["docs/hugging-face.md"].splitlines() if line.endswith(" |") and " % |" in line]
    results = (ROOT / "benchmarks" / "results" / "served.md").read_text(encoding="utf-8")
    assert len(rows) == 5
    assert [line for line in results.splitlines() if " % |" in line] == rows


@pytest.mark.slow
def test_the_benchmark_commands_choose_benchmarks() -> None:
    lines = [line for text in TEXTS.values() for _, block in blocks(text, "") for line in block.splitlines()]
    commands = [line.partition("#") for line in lines if "benchmarks" in line]
    choices = set(re.findall(r'-k ("[^"]*"|[\w-]+)', " ".join(comment for _, _, comment in commands)))
    assert any("pytest benchmarks --benchmark-only" in command for command, _, _ in commands)
    assert len(choices) >= 3
    # In one process, which imports torch once: pytest's exit code for each choice, 0 where it chose something.
    one = "int(pytest.main(['benchmarks', '--collect-only', '-k', choice]))"
    code = f"import pytest, sys; print(*({one} for choice in sys.argv[1:]))"
    call = ["-c", code, *(shlex.split(choice)[0] for choice in choices)]
    done = fresh.python(*call, cwd=ROOT)
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


def test_the_notebook_is_the_quickstart() -> None:
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code == [block.rstrip("\n") for _, block in blocks(TEXTS["docs/quickstart.md"], "python")]
    assert not any(cell.get("outputs") for cell in cells)
