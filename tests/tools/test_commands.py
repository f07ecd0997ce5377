"""Every command says what it takes, and refuses what it does not know."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ("check", "inspect", "patch-report", "size", "tune")

#: Modules that are run, with the command that comes before --help, and a word that only their help has.
HELP = [
    ("foundry_kernels", "", "{check,inspect,patch-report,size,tune}"),
    ("foundry_kernels", "check", "--all"),
    ("foundry_kernels", "inspect", "--sass"),
    ("foundry_kernels", "patch-report", "family"),
    ("foundry_kernels", "size", "llama-2-7b"),
    ("foundry_kernels", "tune", "--write-table"),
    ("foundry_kernels.diagnostics", "", "--map-tokens"),
    ("foundry_kernels.diagnostics", "attention", "--compare"),
    ("foundry_kernels.diagnostics", "positions", "sinusoidal"),
    ("foundry_kernels.diagnostics", "positions rope", "--scaling"),
    ("foundry_kernels.diagnostics", "initialization", "--schemes"),
    ("benchmarks", "", "compare"),
    ("benchmarks", "report", "RUN.json"),
    ("benchmarks", "readme", "NAME"),
    ("benchmarks", "compare", "--fail-above"),
    ("benchmarks.measured", "", "On a GPU"),
    ("benchmarks.gpu_cache", "", "--multiprocessors"),
    ("benchmarks.gpu_check", "", "GPU_CHECK=rest"),
    ("benchmarks.gpu_sanitize", "", "compute-sanitizer"),
    ("examples.studies.ablation", "", "--variants"),
    ("examples.studies.claims", "", "--scale"),
    ("examples.studies.extrapolation", "", "--factors"),
    *(
        (f"examples.{name}", "", "--steps")
        for name in ("train", "nanogpt_style", "patch_hugging_face", "plain_loop", "reverse")
    ),
    ("examples.prepare_tokens", "", "--vocab"),
]


def run(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Runs what `python -m module` does, in this process, which has imported torch already; the exit status."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    return stopped.value.code


def test_no_command_is_forgotten() -> None:
    """Every file outside of the tests that is run as a program, and every command of the package."""
    listed = {module for module, _, _ in HELP}
    for folder in ("foundry_kernels", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if '__name__ == "__main__"' in path.read_text():
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
                assert module in listed, module
    assert {command for module, command, _ in HELP if module == "foundry_kernels"} == {"", *COMMANDS}


@pytest.mark.parametrize(("module", "command", "word"), HELP, ids=lambda value: str(value).replace("foundry_", ""))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # runpy's, of a module that another test has imported
def test_help(
    module: str, command: str, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for needed in {"examples.train": ("tqdm",), "examples.patch_hugging_face": ("transformers",)}.get(module, ()):
        pytest.importorskip(needed)
    for asked in ("--help", "-h"):
        assert run(module, [*command.split(), asked], monkeypatch) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith("usage:")
        assert word in shown.out
        assert not shown.err


@pytest.mark.parametrize(
    ("module", "arguments", "named"),
    [
        ("foundry_kernels", ["no-such-command"], COMMANDS),
        ("foundry_kernels", ["--no-such-option"], ("--no-such-option",)),
        ("foundry_kernels", ["check", "--no-such-option"], ("--no-such-option",)),
        ("benchmarks", ["no-such-command"], ("report", "readme", "compare")),
        ("benchmarks", [], ("COMMAND",)),
        ("benchmarks", ["report", "a.json", "b", "c"], ("got b",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_not_known(
    module: str,
    arguments: list[str],
    named: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(module, arguments, monkeypatch) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(name in shown.err for name in named), shown.err


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module("foundry_kernels.__main__").main
    with pytest.raises(SystemExit):
        main(["--help"])
    described = capsys.readouterr().out
    for command in COMMANDS:
        assert f"python -m foundry_kernels {command}" in described
