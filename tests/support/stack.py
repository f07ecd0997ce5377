"""`make TARGET STACK=2.11` or `STACK=newest`: any target, with other versions of torch and Triton.

The target runs in a copy of this tree, build/stack-2.11, with its own environment, build folder and extension, because
an extension is next to the sources and works with one version of torch. This script creates or updates the copy.
constraints-2.11.txt has the versions that differ from constraints.txt. A name without a version, as in
constraints-newest.txt, means the newest version in the package index.

`stack.py --python STACK` prints the Python for the stack's environment.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The file that marks the packages as installed for `make`.
INSTALLED = Path(".venv", ".demo-packages")
#: Seconds after which the index is asked again for the newest versions.
FRESH = 3600
#: Whether a Python can make an environment and compile for it.
USABLE = "import bootstrap, sys; sys.exit(bootstrap.missing() is not None)"


def main(argv: list[str]) -> int:
    [*flags, stack] = argv
    if flags == ["--python"]:
        print(python(ROOT, stack))
        return 0
    try:
        print(f"{update(ROOT, stack)}: this tree with {changed_versions(ROOT, stack)}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def update(root: Path, stack: str) -> Path:
    """Updates and returns the copy of the tree at `root`, which only differs in the versions.

    Raises:
        ValueError: the stack does not exist.
    """
    versions = constraints(root, stack)
    copy = root / "build" / f"stack-{stack}"
    stamp, newest = copy / INSTALLED, without_version(_file(root, stack).read_text())
    if newest and stamp.exists() and time.time() - stamp.stat().st_mtime > FRESH:
        stamp.unlink()
    wanted = {path.relative_to(root): path.read_bytes() for path in files(root)}
    wanted[Path("constraints.txt")] = versions.encode()
    copy.mkdir(parents=True, exist_ok=True)
    for path in list(files(copy)):
        if path.relative_to(copy) not in wanted:
            path.unlink()
    for name, content in wanted.items():
        target = copy / name
        if not target.exists() or target.read_bytes() != content:  # otherwise keeps its time for make
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            if name != Path("constraints.txt"):
                shutil.copymode(root / name, target)
    return copy


def files(root: Path) -> Iterator[Path]:
    """The files that git would not ignore, also without git."""
    ignored = (root / ".gitignore").read_text().split() if (root / ".gitignore").exists() else []
    patterns = ["/.git", *(line.rstrip("/") for line in ignored)]

    def inside(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            names = (path.name, f"/{path.relative_to(root)}")
            if any(fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns):
                continue
            if path.is_dir():
                yield from inside(path)
            else:
                yield path

    return inside(root)


def constraints(root: Path, stack: str) -> str:
    """constraints.txt with the versions of the stack."""
    text = _file(root, stack).read_text()
    ours = pins(text)
    lines = (root / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in {*ours, *without_version(text)}]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in ours.items())]) + "\n"


def changed_versions(root: Path, stack: str) -> str:
    text = _file(root, stack).read_text()
    named = [f"{name} {version}" for name, version in pins(text).items()]
    return ", ".join([*named, *(f"the newest {name}" for name in without_version(text))])


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE))


def without_version(text: str) -> list[str]:
    return re.findall(r"^([\w-]+)$", text, re.MULTILINE)


def python(root: Path, stack: str) -> str:
    """The Python for the stack's environment: for the newest packages the newest one here, because some packages need
    it; otherwise the one that runs this."""
    if not without_version(_file(root, stack).read_text()):
        return sys.executable
    return next(filter(_usable, newer_pythons()), sys.executable)


def newer_pythons() -> list[str]:
    """Commands, and paths in pyenv, of Pythons, the newest first."""
    kept = Path.home() / ".pyenv" / "versions"
    found = []
    for minor in (14, 13, 12):
        name = f"python3.{minor}"
        found += [name, *map(str, sorted(kept.glob(f"3.{minor}.*/bin/{name}"), reverse=True))]
    return found


def _usable(command: str) -> bool:
    try:
        return subprocess.run([command, "-c", USABLE], cwd=ROOT, capture_output=True).returncode == 0
    except OSError:
        return False


def _file(root: Path, stack: str) -> Path:
    path = root / f"constraints-{stack}.txt"
    if not path.exists():
        known = sorted(p.stem.removeprefix("constraints-") for p in root.glob("constraints-*.txt"))
        raise ValueError(f"STACK must be one of {', '.join(known)}; got {stack!r}")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
