"""The first step of `make`: creates a virtual environment with some packages, or prints what this machine lacks.

    python3 bootstrap.py .venv torch numpy ...

Older Pythons must be able to parse this file, so that it can tell them that they are too old.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

OLDEST = (3, 11)
#: What to do on a machine where the C++ extension cannot be built.
WITHOUT = "FOUNDRY_KERNELS_SKIP_EXTENSION=1 installs without it, with the reference and Triton"
#: Seconds between two lines of progress.
EVERY = 5.0
#: Lines of pip's output that show its progress.
STAGE = re.compile(r"\s*(Collecting|Downloading|Installing collected packages|Building|Using cached)\b.*")
#: pip's messages without a network, or without access to the package index.
OFFLINE = re.compile(
    r"NewConnectionError|ConnectTimeout|Temporary failure in name resolution|Connection (refused|broken)|Read timed out"
    r"|Network is unreachable|Could not fetch URL|ProxyError|No matching distribution"
)


def wants_extension() -> bool:
    """Whether the C++ extension is to be built."""
    return os.environ.get("FOUNDRY_KERNELS_SKIP_EXTENSION", "") in ("", "0")


def missing() -> str | None:
    """What this machine lacks, and how to install it on Debian and Ubuntu."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        return (
            f"foundry_kernels needs Python {wanted} or newer; {sys.executable} is {version}: make PYTHON=python{wanted}"
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        return f"{sys.executable} cannot make virtual environments: apt-get install python3-venv"
    problem = missing_for_extension() if wants_extension() else None
    return None if problem is None else f"{problem}; {WITHOUT}"


def missing_for_extension() -> str | None:
    """What the extension needs besides the packages; setup.py asks too."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler, {compiler}: apt-get install g++, or set CXX"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return f"{sys.executable} has no headers (Python.h), which an extension needs: apt-get install python3-dev"
    return None


def make_environment(folder: Path) -> str | None:
    if (folder / "bin" / "python").exists():
        return None
    done = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return f"cannot make a virtual environment in {folder}: {last_line(done.stderr or done.stdout)}"


def install(folder: Path, packages: list[str]) -> str | None:
    """Installs packages in the versions of constraints.txt, and prints pip's progress every few seconds."""
    # Without --no-compile pip compiles every module of torch to bytecode; most of them are never imported here.
    options = [
        "--disable-pip-version-check",
        "--no-compile",
        "--progress-bar",
        "off",
        "--constraint",
        "constraints.txt",
    ]
    if not set(packages) <= pinned(Path("constraints.txt").read_text()):
        options.append("--upgrade")  # unpinned packages should be the newest, even if an older one is installed
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", *options, *packages]
    began = shown = time.monotonic()
    print(f"installing {', '.join(packages)}", flush=True)
    log = folder / "pip.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.2)
            if time.monotonic() - shown >= EVERY:
                shown = time.monotonic()
                stages = [line.strip() for line in log.read_text().splitlines() if STAGE.match(line)]
                print(f"  {shown - began:.0f} s: {stages[-1][:100] if stages else 'starting'}", flush=True)
    said, code = log.read_text(), process.returncode
    if code == 0:
        return None
    if OFFLINE.search(said):
        return f"cannot download packages; is there a network? pip: {last_line(said)}"
    print(said[-3000:], file=sys.stderr)
    return f"pip failed ({code}): {last_line(said)}"


def pinned(constraints: str) -> set[str]:
    return {line.partition("==")[0] for line in constraints.splitlines() if "==" in line}


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1][:300]


def main(argv: list[str]) -> int:
    folder, packages = Path(argv[0]), argv[1:]
    problem = missing() or make_environment(folder) or install(folder, packages)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
