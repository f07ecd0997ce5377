"""What setup.py makes, with the extension and without it, and what it says where a machine lacks something."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import wheels
from programs import fake


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that nothing is built here."""
    return wheels.copy_source(tmp_path_factory.mktemp("source") / "tree")


def run_setup(tree: Path, *arguments: str, code: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    run = "import runpy, sys; sys.argv = ['setup.py', *sys.argv[1:]]; runpy.run_path('setup.py', run_name='__main__')"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    command = [sys.executable, "-W", "ignore", "-c", f"{code}\n{run}", *arguments]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)


#: A machine without torch, without Python's headers.
NO_TORCH = "import sys; sys.modules['torch'] = None"
NO_HEADERS = (
    "import sysconfig as s; get = s.get_paths; s.get_paths = lambda *a, **k: get(*a, **k) | {'include': '/none'}"
)
INSTEAD = "FOUNDRY_KERNELS_SKIP_EXTENSION=1 installs without it, with the reference and Triton"


@pytest.mark.parametrize("command", ["build_ext", "bdist_wheel"])
@pytest.mark.parametrize(
    ("code", "variables", "says"),
    [
        (NO_TORCH, {}, "torch cannot be imported by .*: pip install torch, then install with --no-build-isolation"),
        ("", {"CXX": "no-such-c++"}, r"there is no C\+\+ compiler, no-such-c\+\+: apt-get install g\+\+, or set CXX"),
        (NO_HEADERS, {}, r"has no headers \(Python.h\), .*: apt-get install python3-dev"),
    ],
    ids=["torch", "compiler", "headers"],
)
def test_what_is_missing_for_the_extension_fails_the_build_in_one_line(
    tree: Path, command: str, code: str, variables: dict[str, str], says: str
) -> None:
    done = run_setup(tree, command, code=code, **variables)
    assert done.returncode == 1
    pattern = rf"error: the C\+\+ extension of foundry_kernels cannot be built: .*{says}; {INSTEAD}\n"
    assert re.fullmatch(pattern, done.stderr), done.stderr


def test_an_old_pip_is_told_so(tree: Path) -> None:
    """pip before 21.3 makes an editable installation by this command."""
    done = run_setup(tree, "develop", "--no-deps")
    assert done.returncode == 1
    assert done.stderr.endswith("needs pip 21.3 or newer for an editable installation: pip install --upgrade pip\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_what_does_not_compile_fails_the_build(tree: Path, tmp_path: Path) -> None:
    """After the compiler's own messages comes one line; the rest of the machine is as it is."""
    cxx = fake(
        tmp_path,
        "c++",
        f'case "$*" in *csrc/cpu*|*/units/*) echo "no space left" >&2; exit 1;; esac; exec {shutil.which("c++")} "$@"',
    )
    done = run_setup(
        tree, "build_ext", "--inplace", "--instruction-sets=baseline", CXX=str(cxx), MAX_JOBS="1", CUDA_HOME="none"
    )
    assert done.returncode == 1
    assert "no space left" in done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        rf"error: the C\+\+ extension of foundry_kernels was not built: command .* failed .*; {INSTEAD}", last
    )


def test_without_the_extension_the_wheel_is_for_every_platform(tree: Path, tmp_path: Path) -> None:
    """It needs neither torch nor a compiler to be made."""
    asked = {"FOUNDRY_KERNELS_SKIP_EXTENSION": "1", "CXX": "no-such-c++"}
    done = run_setup(tree, "-q", "bdist_wheel", "-d", str(tmp_path), code=NO_TORCH, **asked)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
    assert "foundry_kernels/core/extension.py" in names
    assert not [
        name
        for name in names
        if not re.match(r"foundry_kernels(/.*\.py|/.*\.json|/py\.typed|-.*\.dist-info/.*)$", name)
    ]


def test_the_source_distribution_needs_neither_torch_nor_a_compiler(tree: Path, tmp_path: Path) -> None:
    done = run_setup(tree, "-q", "sdist", "-d", str(tmp_path), code=NO_TORCH, CXX="no-such-c++")
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.iterdir()
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"setup.py", "bootstrap.py", "build_extension.py", "csrc/module.cpp", "csrc/cuda/rms_norm.cu"} <= names


def test_an_old_setuptools_is_told_apart(tree: Path) -> None:
    """setup.py stops before setuptools reads pyproject.toml, of which it would say something that helps nobody."""
    done = run_setup(tree, "--version", code="import setuptools; setuptools.__version__ = '65.5.0'")
    assert done.returncode == 1
    assert re.search(r"needs setuptools 77 or newer, not 65\.5\.0: pip install 'setuptools>=77'", done.stderr)
