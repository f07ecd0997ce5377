"""`make TARGET STACK=2.11`, `STACK=newest` and `make cuda-build`, but for what takes minutes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import cuda_build
import fresh
import pytest
import stack

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        ".gitignore": "/build/\n/.venv*/\n__pycache__/\n*.so\n",
        "constraints.txt": "# versions\ntorch==2.13.0\nnumpy==2.4.6\npytest==9.2.0\n",
        "constraints-2.11.txt": "# older\ntorch==2.11.0\nnumpy==2.3.5\n",
        "constraints-newest.txt": "# any\ntorch\nnumpy\n",
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
    versions = {"constraints.txt", "constraints-2.11.txt", "constraints-newest.txt"}
    listed = {".gitignore", *versions, "package/code.py", "package/build/kept.py"}
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
    assert done.stderr == "error: STACK must be one of 2.11, newest; got '1.0'\n"


def test_the_newest_stack_has_no_versions_of_its_own(tree: Path) -> None:
    copy = stack.update(tree, "newest")
    assert stack.pins((copy / "constraints.txt").read_text()) == {"pytest": "9.2.0"}
    assert "torch" not in (copy / "constraints.txt").read_text()
    assert stack.changed_versions(tree, "newest") == "the newest torch, the newest numpy"
    ours = (ROOT / "constraints-newest.txt").read_text()
    assert not stack.pins(ours)
    assert set(stack.without_version(ours)) == {"torch", "triton", "numpy", "transformers", "tokenizers"}


def test_the_index_is_asked_again_what_is_newest(tree: Path) -> None:
    for name, asked_again in (("newest", True), ("2.11", False)):
        stamp = stack.update(tree, name) / stack.INSTALLED
        stamp.parent.mkdir()
        stamp.touch()
        stack.update(tree, name)
        assert stamp.exists(), "within the hour"
        os.utime(stamp, (0, time.time() - 2 * stack.FRESH))
        stack.update(tree, name)
        assert stamp.exists() is not asked_again


def test_make_gives_pip_the_versions_of_the_stack_alone(tree: Path) -> None:
    """Whatever this machine constrains pip to; and an environment of the newest has the newest Python."""
    for name in ("Makefile", "tests/support/stack.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "bootstrap.py").write_text(
        "import json, os, pathlib, sys\n"
        "def missing(): return None\n"
        "if __name__ == '__main__':\n"
        "    pathlib.Path('.venv').mkdir()\n"
        "    pathlib.Path('seen').write_text(json.dumps([os.environ['PIP_CONSTRAINT'], *sys.version_info[:2]]))\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTHON", "STACK"))}
    for name, given in (("newest", []), ("2.11", [f"PYTHON={sys.executable}"])):
        command = ["make", ".venv/.demo-packages", f"STACK={name}", *given]
        done = subprocess.run(command, cwd=tree, env=env | {"PIP_CONSTRAINT": "/mine"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        copy = tree / "build" / f"stack-{name}"
        constraint, *version = json.loads((copy / "seen").read_text())
        assert Path(constraint) == copy / "constraints.txt"
        assert version >= list(sys.version_info[:2]) if name == "newest" else version == list(sys.version_info[:2])


def wheel(folder: Path, version: str) -> None:
    name = f"foundry_probe-{version}"
    about = f"Metadata-Version: 2.1\nName: foundry-probe\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.dist-info/METADATA", about)
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")


def test_the_newest_is_installed_where_this_machine_holds_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two versions, with an older one installed and a file that constrains pip to it. A version of constraints.txt
    stays what it is."""
    monkeypatch.syspath_prepend(str(ROOT))
    import bootstrap

    for version in ("1.0", "2.0"):
        wheel(tmp_path, version)
    (tmp_path / "cap.txt").write_text("foundry-probe<2\n")
    (tmp_path / "pip.conf").write_text(f"[global]\nconstraint = {tmp_path / 'cap.txt'}\n")
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "PIP_CONSTRAINT": str(tmp_path / "constraints.txt"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    assert bootstrap.make_environment(tmp_path / "venv") is None
    for pinned, installed in (("foundry-probe==1.0\n", "1.0"), ("# any\n", "2.0"), ("foundry-probe==1.0\n", "1.0")):
        (tmp_path / "constraints.txt").write_text(pinned)
        assert bootstrap.install(tmp_path / "venv", ["foundry-probe"]) is None
        found = [p.name for p in (tmp_path / "venv").rglob("foundry_probe-*.dist-info")]
        assert found == [f"foundry_probe-{installed}.dist-info"]


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
    done = fresh.python("-c", code, cwd=ROOT)
    assert done.returncode == 1
    assert re.search(r"needs setuptools 77 or newer, not 65\.5\.0: pip install 'setuptools>=77'", done.stderr)
