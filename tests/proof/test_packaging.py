"""The source distribution and the wheel that `python -m build` makes, each installed into an environment that holds the
dependencies of this package and nothing of its source, without a network; and the pinned versions of the tools."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from foundry_kernels.core import extension

ROOT = Path(__file__).parents[2]
BUILDING = ("build", "setuptools", "wheel")
MISSING = [name for name in BUILDING if not list(importlib.metadata.distributions(name=name))]
needs_build = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

#: One kernel by name and one by choice, against plain PyTorch; where the package was imported from.
USE = """
import sys, torch, foundry_kernels as fk
x, weight = torch.randn(3, 40), torch.randn(40)
expected = torch.nn.functional.rms_norm(x, (40,), weight, 1e-6)
for backend in sys.argv[1:]:
    torch.testing.assert_close(fk.rms_norm(x, weight, backend=backend), expected)
print(fk.__file__)
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What it printed. This project's source is not on its path."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env | variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def empty_environment(folder: Path) -> Path:
    """The Python of a new environment. It finds the packages installed here by a path file, which unlike the ones of
    this environment's own does not lead to an editable install."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    inside = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    here = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    Path(inside, "dependencies.pth").write_text("".join(f"{path}\n" for path in here))
    assert importlib.util.find_spec("foundry_kernels") is not None
    return python


def install(archive: Path, python: Path, **variables: str) -> str:
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "-v"]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    return run(*pip, "install", *options, archive, cwd=python.parent, **variables)


def check(python: Path, *backends: str) -> str:
    """Use it; what `python -m foundry_kernels` prints."""
    folder = python.parents[1]
    assert Path(run(python, "-c", USE, *backends, cwd=folder).splitlines()[-1]).is_relative_to(folder)
    return run(python, "-m", "foundry_kernels", cwd=folder)


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
    assert re.search(r"native: the C\+\+ extension is not built", check(python, "reference", "auto"))


@pytest.mark.slow
@needs_build
@pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))
def test_wheel(tmp_path: Path) -> None:
    """Made from the source distribution, it holds the extension, and needs no compiler."""
    made = tmp_path / "made"
    made.mkdir()
    wheel, archive = sorted(build([], made), key=lambda path: path.suffix != ".whl")
    assert archive.name.endswith(".tar.gz")
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
    assert [name for name in names if re.fullmatch(r"foundry_kernels/_C\..*so", name)]
    assert not [name for name in names if not re.match(r"foundry_kernels(/|-.*\.dist-info/)", name)]
    python = empty_environment(tmp_path / "environment")
    install(wheel, python, CC="no-such-compiler", CXX="no-such-compiler", PATH=str(python.parent))
    here, there = (re.search(r"compiled for .* uses", text) for text in (extension_line(), check(python, "native")))
    assert here is not None
    assert there is not None
    assert here[0] == there[0]


def extension_line() -> str:
    return run(sys.executable, "-m", "foundry_kernels", cwd=ROOT)


def test_tools_have_one_version() -> None:
    """Those of .pre-commit-config.yaml are those that `make lint` runs."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    hooks = dict(re.findall(r"repo: \S+/(\S+)\n\s+rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert hooks == {"ruff-pre-commit": pinned["ruff"], "mirrors-clang-format": pinned["clang-format"]}
    assert f"clang-format=={pinned['clang-format']}" in (ROOT / "pyproject.toml").read_text()


def test_what_make_installs_is_pinned_and_declared() -> None:
    """Every package of the Makefile's two sets has its version in constraints.txt, so that two machines are alike."""
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    sets = re.findall(r"^(?:DEMO|TEST)_PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(sets) == 2
    named = {word for line in sets for word in re.findall(r"[\w-]+", re.sub(r"\$\(if .*,(\w+)\)", r"\1", line))}
    assert {"torch", "triton", "pytest"} <= named
    assert named <= pinned
