"""`make test-releases`: tests patched models with the oldest supported and with the newest transformers.

Each release has an environment in build/transformers-RELEASE with transformers and its requirements. Everything else,
including torch, comes from the environment that runs this script.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from foundry_kernels.integrations.release import OLDEST

ROOT = Path(__file__).resolve().parents[2]
#: The tests: packed documents in every family, and results, gradients and generation for the table's families.
NAMES = ("test_packing", "test_packing_arguments", "test_continuous_batching", "test_releases")
TESTS = tuple(f"tests/integrations/{name}.py" for name in NAMES)
RELEASES = {"oldest": f"transformers=={'.'.join(map(str, OLDEST))}.*", "newest": "transformers"}


def main(arguments: list[str]) -> int:
    failed = 0
    for name, requirement in RELEASES.items():
        python = environment(f"transformers-{name}", requirement)
        print(f"{name}: {version(python)}", flush=True)
        if version(python) == version(Path(sys.executable)):
            print("make test is on the same")
            continue
        failed |= run_tests(python, *TESTS, *arguments)
    return failed


def run_tests(python: Path, *arguments: str) -> int:
    """Runs tests with the Python of such an environment; returns the exit status."""
    command = [python, "-m", "pytest", *arguments, "-m", "not slow", "--numprocesses", "auto", "--maxprocesses", "4"]
    command += ["-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_WAIT_POLICY": "passive"}).returncode


def environment(name: str, *requirements: str) -> Path:
    """The Python of an environment in build/ with these requirements, which is created or updated."""
    folder = ROOT / "build" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    inner = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    # Its own packages come first; this line adds those of the surrounding environment after them.
    Path(inner.stdout.strip(), "around.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-compile", "--no-warn-conflicts"]
    subprocess.run([python, "-m", "pip", "install", *quiet, "--upgrade", *requirements], check=True)
    return python


def version(python: Path) -> str:
    script = "import transformers, torch; print(f'transformers {transformers.__version__}, torch {torch.__version__}')"
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
