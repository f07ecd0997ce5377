"""The source distribution and the wheels that are made of it, each installed into an environment that holds the
dependencies of this package and nothing of its source, without network and compiler; the pinned versions of tools."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import sanitize
import wheels
from built import needs_native
from wheels import empty_environment, install, run

import foundry_kernels

ROOT = Path(__file__).parents[2]
BUILDING = ("build", "setuptools", "wheel")
MISSING = [name for name in BUILDING if not list(importlib.metadata.distributions(name=name))]
needs_build = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def build(what: list[str], folder: Path) -> list[Path]:
    run(sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", folder, ROOT, cwd=folder)
    return sorted(folder.iterdir())


@pytest.mark.slow
@needs_build
def test_source_distribution_without_a_compiler(tmp_path: Path) -> None:
    """It holds all that the extension is compiled from; where that cannot be, it is installed without if asked to."""
    made = tmp_path / "made"
    made.mkdir()
    [archive] = build(["--sdist"], made)
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    tracked = [str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.*") if p.is_file()]
    wanted = [*tracked, "setup.py", "constraints.txt", "LICENSE", "README.md", "foundry_kernels/py.typed"]
    assert set(wanted) <= held
    python = empty_environment(tmp_path / "environment")
    asked = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
    with pytest.raises(
        AssertionError, match=r"error: the C\+\+ extension of foundry_kernels cannot be built: there is no"
    ):
        install(archive, python, **asked)
    said = install(archive, python, FOUNDRY_KERNELS_SKIP_EXTENSION="1", **asked)
    assert "-py3-none-any.whl" in said


@pytest.mark.slow
@needs_build
@needs_native
def test_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made from the source distribution as `make wheel` makes one for CPUs, with a label, it needs no compiler. It
    holds the kernels for all instruction sets, and the libraries and symbols that it needs are torch's or old."""
    made = tmp_path / "made"
    made.mkdir()
    (name, variables), *_ = wheels.variants().items()
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    wheel, archive = sorted(build([], made), key=lambda path: path.suffix != ".whl")
    assert archive.name.endswith(".tar.gz")
    wheel = wheels.label(wheel, name, "torch")
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
        [library] = [held.extract(name, tmp_path) for name in names if ".so" in name]
    assert re.fullmatch(r".*/foundry_kernels/_C\.[^/]*so", library)
    assert not [name for name in names if not re.match(r"foundry_kernels(/|-.*\.dist-info/)", name)]
    assert not newer_symbols(Path(library))
    of_others = [
        each for each in needed(library) if not re.match(r"lib(c|m|stdc\+\+|gcc_s|pthread|dl)\.so|ld-linux", each)
    ]
    assert of_others
    assert not [each for each in of_others if not any(fnmatch(each, pattern) for pattern in wheels.OF_TORCH)]
    said = wheels.attempt(wheel, tmp_path / "environment", "reference", "auto", "native")
    assert f"compiled for {', '.join(sanitize.build_script().ISA_FLAGS)}; uses" in said
    assert re.search("^all right: ", said, re.MULTILINE)


@pytest.mark.slow
def test_the_wheel_without_the_extension(tmp_path: Path) -> None:
    """It says what it lacks, once, and trains; nothing of it is compiled."""
    source = wheels.copy_source(tmp_path / "source")
    left, kept = (source / "build" / name / "foundry_kernels" / "left_over.py" for name in ("lib", "libraries"))
    for path in (left, kept):  # the first by an earlier build, and packed by setuptools; the other is no build's
        path.parent.mkdir(parents=True)
        path.write_text("")
    wheel = wheels.build(tmp_path / "made", source, FOUNDRY_KERNELS_SKIP_EXTENSION="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as held:
        assert not any(name.endswith("left_over.py") for name in held.namelist())
    assert kept.exists()
    said = wheels.attempt(wheel, tmp_path / "environment", "reference", "auto")
    assert said.count("rms_norm runs on the reference, plain PyTorch, on this CPU: the C++ extension is not built") == 1
    assert re.search(r"modules replaced .*: reference \(no extension: the C\+\+ extension is not built; ", said)
    assert re.search(r"native: the C\+\+ extension is not built", said)


@pytest.mark.slow
def test_a_label_says_what_torch_the_wheel_is_for(tmp_path: Path) -> None:
    made = wheels.build(tmp_path / "made", wheels.copy_source(tmp_path / "source"), FOUNDRY_KERNELS_SKIP_EXTENSION="1")
    labelled = wheels.label(made, "torch2.13.cpu", "torch==2.13.*")
    version = foundry_kernels.__version__
    assert labelled.name == f"foundry_kernels-{version}+torch2.13.cpu-py3-none-any.whl"
    assert [path.name for path in labelled.parent.glob("*.whl")] == [labelled.name]
    folder = tmp_path / "environment"
    install(labelled, python := empty_environment(folder))
    code = "import importlib.metadata as m; d = m.distribution('foundry-kernels'); print(d.version, *d.requires)"
    said = run(python, "-c", code, cwd=folder).split()
    assert said[0] == f"{version}+torch2.13.cpu"
    assert [text for text in said if text.startswith("torch")] == ["torch==2.13.*"]


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("readelf") is None, reason="needs Linux and readelf")
def test_a_wheel_is_linked_with_old_symbols(tmp_path: Path) -> None:
    """Those that the headers here ask for newer versions of; without csrc/wheels the same program needs newer ones."""
    script = sanitize.build_script()
    source = tmp_path / "all.cpp"
    source.write_text("""
    #include <cmath>
    #include <condition_variable>
    #include <memory>
    #include <mutex>
    double all(double x, std::shared_ptr<double> y, std::condition_variable& c, std::unique_lock<std::mutex>& lock) {
      std::shared_ptr<double> z = y;
      c.wait(lock);
      return std::exp(x) + std::log(x) + std::pow(x, *z);
    }
    """)
    flags = [*script.COMPILER.split(), "-std=c++17", "-fPIC", "-shared", *script.FLAGS, "-fvisibility=default"]
    wrap = [*script.sources("wheels"), *(f"-Wl,--wrap={name}" for name in script.OLD_SYMBOLS)]
    found = {}
    for name, more in {"new": [], "old": wrap}.items():
        library = tmp_path / f"{name}.so"
        subprocess.run([*flags, str(source), *more, "-o", str(library)], cwd=ROOT, check=True)
        found[name] = newer_symbols(library)
    assert found["old"] == set()
    if tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 32):
        assert {("GLIBC", 2, 29), ("GLIBC", 2, 32)} <= found["new"]


def newer_symbols(library: Path) -> set[tuple[str | int, ...]]:
    """The versions of glibc and libstdc++ that it needs and manylinux_2_28 lacks."""
    said = subprocess.run(["readelf", "-VW", str(library)], capture_output=True, text=True, check=True).stdout
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24)}
    needed = {(name, *map(int, version.split("."))) for name, version in re.findall(r"\b(GLIBC(?:XX)?)_([\d.]+)", said)}
    return {each for each in needed if each[1:] > newest[each[0]]}


def needed(library: str) -> list[str]:
    said = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\) .*\[(.+)\]", said)


def test_tools_have_one_version() -> None:
    """Those of .pre-commit-config.yaml are those that `make lint` runs."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    hooks = dict(re.findall(r"repo: \S+/(\S+)\n\s+rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert hooks == {"ruff-pre-commit": pinned["ruff"], "mirrors-clang-format": pinned["clang-format"]}
    assert f"clang-format=={pinned['clang-format']}" in (ROOT / "pyproject.toml").read_text()
