"""Every command says what it takes, and refuses what it does not know."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import runpy
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slow import rest_slow

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.core import extension
from foundry_kernels.tools import environment

ROOT = Path(__file__).parents[2]
COMMANDS = ("check", "hub-layout", "inspect", "patch-report", "size", "tune")

#: Modules that are run, with the command that comes before --help, and a word that only their help has.
HELP = [
    ("foundry_kernels", "", "{check,hub-layout,inspect,patch-report,size,tune}"),
    ("foundry_kernels", "check", "--all"),
    ("foundry_kernels", "hub-layout", "--backend"),
    ("foundry_kernels", "inspect", "--sass"),
    ("foundry_kernels", "patch-report", "family"),
    ("foundry_kernels", "size", "llama-2-7b"),
    ("foundry_kernels", "tune", "--write-table"),
    ("foundry_kernels.diagnostics", "", "--map-tokens"),
    ("foundry_kernels.diagnostics", "attention", "--compare"),
    ("foundry_kernels.diagnostics", "positions", "sinusoidal"),
    ("foundry_kernels.diagnostics", "positions rope", "--scaling"),
    ("foundry_kernels.diagnostics", "initialization", "--schemes"),
    ("examples.grpo", "", "--steps"),
    ("examples.hybrid", "", "--steps"),
    ("examples.lora", "", "--bits"),
    ("benchmarks", "", "compare"),
    ("benchmarks", "report", "RUN.json"),
    ("benchmarks", "compare", "--fail-above"),
    ("gpu_cache", "", "--multiprocessors"),
    ("gpu_check", "", "ARGS=rest"),
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
    assert run(module, [*command.split(), "--help"], monkeypatch) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage:")
    assert word in shown.out
    assert not shown.err


@pytest.mark.parametrize(
    ("module", "arguments", "named"),
    [
        ("foundry_kernels", ["no-such-command"], COMMANDS),
        ("foundry_kernels", ["--no-such-option"], ("--no-such-option",)),
        ("benchmarks", ["no-such-command"], ("report", "compare")),
        ("benchmarks", ["report", "a.json", "b", "c"], ("unrecognized arguments: c",)),
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


@pytest.mark.parametrize("buffered", rest_slow([False, True]), ids=["at once", "at the end"])
@pytest.mark.parametrize("arguments", rest_slow([["size", "llama-2-7b"], ["--report"], ["--help"]]), ids=" ".join)
def test_a_reader_that_has_gone_is_no_error(arguments: list[str], buffered: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    environ = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    command = [sys.executable, "-m", "foundry_kernels", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, text=True, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert done.stderr == ""
    ignored = arguments == ["--help"] and not buffered  # by argparse
    assert done.returncode == (0 if ignored else 128 + signal.SIGPIPE)


def test_the_console_script_is_the_same_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == {"foundry-kernels"}
    program = importlib.metadata.EntryPoint("foundry-kernels", scripts["foundry-kernels"], "console_scripts").load()
    monkeypatch.setattr(sys, "argv", ["foundry-kernels", "--version"])
    with pytest.raises(SystemExit) as stopped:
        program()
    assert stopped.value.code == 0
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"foundry_kernels {version}\n"
    monkeypatch.setattr(sys, "argv", ["foundry-kernels"])
    assert program() == 0
    assert "flash_attention" in capsys.readouterr().out


@pytest.mark.slow
def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """Kernels run, and what has to be kept says how. Not even root can write below a file."""
    home = tmp_path / "home"
    home.touch()
    left_out = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET")
    env = {key: value for key, value in os.environ.items() if key not in left_out} | {"HOME": str(home)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "foundry_kernels", *arguments]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)

    done = run("check", "rms_norm", "--backend", "native", "--seconds", "0.1")
    assert "Traceback" not in done.stderr
    if extension.MISSING is None:
        assert done.returncode == 0, done.stderr
    if not _triton.MISSING:
        done = run("inspect", "rms_norm", "--arch", "90")
        assert done.returncode == 2
        last = done.stderr.splitlines()[-1]
        assert re.search(r"error: Triton cannot keep what it compiles \(.*\): set TRITON_CACHE_DIR to a folder", last)


def overview(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert importlib.import_module("foundry_kernels.__main__").main(list(arguments)) == 0
    lines = capsys.readouterr().out.splitlines()
    return {words[0]: words[1] for line in lines if len(words := line.strip().split(None, 1)) == 2}


def test_the_overview_names_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    shown = overview(capsys=capsys)
    assert shown.keys() >= {*fk.OPS, "python", "torch"}
    assert shown["python"].startswith(platform.python_version())
    assert shown["torch"] == torch.__version__
    assert shown["transformers"] == environment.installed("transformers")
    assert re.search(r"\w.*, \d+ threads?$", shown["processor"])
    assert (shown["driver"] == "none found") or re.match(r"(amdgpu )?\d+\.\d+", shown["driver"])


def test_the_report_says_what_is_set_and_no_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith(environment.VARIABLES)]:
        monkeypatch.delenv(name)
    assert overview("--report", capsys=capsys)["variables"] == "none of FOUNDRY_*, TRITON_*"
    values = {
        "TRITON_CACHE_DIR": "/home/someone/cache/triton",
        "TRITON_ALWAYS_COMPILE": "1",
        "FOUNDRY_KERNELS_TUNING": "/scratch/someone/one.json:/home/someone/two.json",
        "FOUNDRY_TOKEN": "someone",
        "ANOTHER": "someone",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    shown = overview("--report", capsys=capsys)
    assert {name: shown.get(name) for name in values} == {
        "TRITON_CACHE_DIR": "[...]/triton",
        "TRITON_ALWAYS_COMPILE": "1",
        "FOUNDRY_KERNELS_TUNING": "[...]/one.json:[...]/two.json",
        "FOUNDRY_TOKEN": "(set)",
        "ANOTHER": None,
    }
    assert not any("someone" in text for text in shown.values())
    assert Path(shown["package"]).expanduser() == Path(environment.__file__).parents[1]
    assert platform.release() in shown["system"]
    assert platform.node() not in shown["system"]
    assert f"torch uses {torch.backends.cpu.get_cpu_capability()}" in shown["instructions"]


def test_a_gpu_is_named_with_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"is_available": True, "current_device": 1, "get_device_capability": (9, 0), "get_device_name": "H100"}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=85e9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment.devices, "why_no_gpu", lambda: None)
    assert environment.gpu() == "H100, compute capability 9.0, 79 GiB, CUDA 13.0"
    monkeypatch.setattr(environment.devices, "why_no_gpu", lambda: "it is too old")
    assert environment.gpu(0).endswith("CUDA 13.0; it is too old")
    monkeypatch.setattr(environment, "_cpuinfo", lambda _: None)
    monkeypatch.setattr(environment, "_output", lambda *_: "580.65")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13020, raising=False)
    assert environment.driver() == "580.65, for CUDA up to 13.2"
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    for text, version in ((closed, "535.183.01"), (opened, "580.65.06")):
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text, **__: text)
        assert environment.driver().partition(",")[0] == version


CPUINFO = {
    "x86": (
        "processor : 0\nmodel name\t: AMD EPYC 9654\nflags\t\t: fpu avx2 sse avx512f\n",
        "AMD EPYC 9654",
        "avx2 avx512f",
    ),
    "board": ("processor : 0\nFeatures : fp asimd i8mm\nModel : Raspberry Pi 5\n", "Raspberry Pi 5", "asimd i8mm"),
    "unnamed": ("processor : 0\nFeatures : fp asimd sve\nCPU part : 0xd40\n", "Neoverse-V1", "asimd sve"),
    "nothing": ("", "told by lscpu", "not known"),
}


@pytest.mark.parametrize("kind", CPUINFO)
def test_processors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, name, features = CPUINFO[kind]
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    told = {"unnamed": "Vendor ID: ARM\nModel name:   Neoverse-V1\nModel: 1", "nothing": "Model name: told by lscpu"}
    monkeypatch.setattr(environment, "_output", lambda *_: told.get(kind, ""))
    assert environment.processor() == name
    assert environment.processor_features().partition(";")[0] == features
