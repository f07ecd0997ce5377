"""`make TARGET STACK=2.11` and `make cuda-build`, but for what takes minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cuda_build
import pytest
import stack

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        ".gitignore": "/build/\n/.venv*/\n__pycache__/\n*.so\n",
        "constraints.txt": "# versions\ntorch==2.13.0\nnumpy==2.4.6\npytest==9.2.0\n",
        "constraints-2.11.txt": "# older\ntorch==2.11.0\nnumpy==2.3.5\n",
        "package/code.py": "x = 1\n",
        "package/_C.so": "for torch 2.13",
        "package/build/kept.py": "only the root's is ignored\n",
        "package/__pycache__/code.pyc": "",
        ".venv-3.12/bin/python": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_copy_follows_the_tree_and_keeps_what_was_built(tree: Path) -> None:
    copy = stack.update(tree, "2.11")
    assert copy == tree / "build" / "stack-2.11"
    names = {str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()}
    listed = {".gitignore", "constraints.txt", "constraints-2.11.txt", "package/code.py", "package/build/kept.py"}
    assert names == listed
    pins = stack.pins((copy / "constraints.txt").read_text())
    assert pins == {"torch": "2.11.0", "numpy": "2.3.5", "pytest": "9.2.0"}
    (copy / "package" / "_C.so").write_text("for torch 2.11")
    (copy / ".venv").mkdir()
    (copy / ".venv" / ".built").touch()
    before = {name: (copy / name).stat().st_mtime_ns for name in listed}
    (tree / "package" / "code.py").write_text("x = 2\n")
    (tree / "package" / "build" / "kept.py").unlink()
    (tree / "package" / "new.py").write_text("")
    stack.update(tree, "2.11")
    assert (copy / "package" / "code.py").read_text() == "x = 2\n"
    assert (copy / "package" / "new.py").exists()
    assert not (copy / "package" / "build" / "kept.py").exists()
    assert (copy / "package" / "_C.so").read_text() == "for torch 2.11"
    assert (tree / "package" / "_C.so").read_text() == "for torch 2.13"
    assert (copy / ".venv" / ".built").exists()
    unchanged = {name for name, time in before.items() if (copy / name).exists()} - {"package/code.py"}
    assert all((copy / name).stat().st_mtime_ns == before[name] for name in unchanged), "make would build again"


def test_an_unknown_stack_is_refused() -> None:
    done = subprocess.run([sys.executable, "tests/support/stack.py", "1.0"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: STACK must be one of 2.11; got '1.0'\n"


def test_the_older_stack_is_what_the_package_says_that_it_needs_at_least() -> None:
    pins = stack.pins((ROOT / "constraints-2.11.txt").read_text())
    needed = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={pins["torch"].removesuffix(".0")}"' in needed
    assert f'"triton>={pins["triton"].removesuffix(".0")},' in needed
    assert set(pins) <= set(stack.pins((ROOT / "constraints.txt").read_text()))


def test_the_toolkit_is_found_behind_a_script() -> None:
    said = "#$ _HERE_=/opt/cuda-13.0/bin\n#$ TOP=/opt/cuda-13.0/bin/..\n#$ PATH=/bin\n"
    assert cuda_build.toolkit(said) == Path("/opt/cuda-13.0")


def test_headers_of_the_toolkit_come_before_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPATH", "/mine")
    monkeypatch.delenv("LIBRARY_PATH", raising=False)
    wheels = tmp_path / "nvidia" / "cu13"
    wheels.mkdir(parents=True)
    found = cuda_build.environment(Path("/toolkit"), tmp_path)
    assert found == {
        "CUDA_HOME": "/toolkit",
        "CPATH": f"/toolkit/include:{wheels}/include:/mine",
        "LIBRARY_PATH": f"{wheels}/lib",
    }


def test_every_cuda_source_registers_operators_that_are_looked_for() -> None:
    names = cuda_build.operators()
    assert len(names) == len(set(names)) >= 2 * len(list((ROOT / "csrc" / "torch").glob("*_cuda.cpp")))
    assert {"rms_norm_fwd", "rms_norm_bwd"} <= set(names)


def test_an_old_setuptools_is_told_apart() -> None:
    """setup.py stops before setuptools reads pyproject.toml, of which it would say something that helps nobody."""
    code = (
        "import setuptools, sys; setuptools.__version__ = '65.5.0'; sys.argv = ['setup.py', '--version'];"
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__name__': '__main__', '__file__': 'setup.py'})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"needs setuptools 77 or newer, not 65\.5\.0: pip install 'setuptools>=77'", done.stderr)
