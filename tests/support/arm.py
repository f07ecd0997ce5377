"""`make test-arm`: the package built as a wheel for 64-bit ARM, and tested under user-mode emulation.

Python, PyTorch and the tests are ARM's own and run in qemu-aarch64. The compiler that this Python starts is the
machine's, at full speed, and makes code for ARM: setup.py sees an ARM machine and needs to know nothing of all this.
Everything lies in build/arm but for two of Debian's packages, which root installs where they are missing.

What is shown is that results are right. How fast they come on a processor is not: emulation says nothing of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = ROOT / "build" / "arm"
SYSTEM, PACKAGES, SOURCE, SITE = (HERE / name for name in ("system", "packages", "source", "site"))
PYTHON, LOG = HERE / "python", HERE / "log.txt"
#: By the program that is needed: Debian's package that has it.
TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
#: The last PyTorch whose wheel for ARM, on PyPI, needs no CUDA libraries (gigabytes of them).
TORCH = "torch==2.10.0"
REQUIREMENTS = ("numpy", "setuptools", "wheel", "build", "pip", "pytest", "expecttest", "hypothesis")
#: What torch needs besides: pip would ask for it by the machine it runs on.
OF_TORCH = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")
#: Emulated processors and the instruction sets that the extension must find there. PyTorch's own wheel does not start
#: on one older than the Neoverse N1 (which is Graviton 2).
CPUS = {"max,sve=off,pauth-impdef=on": ["neon", "neon_bf16"], "neoverse-n1": ["neon"]}
BF16 = next(iter(CPUS))

RANDOM = "tests/proof/test_fuzz.py::test_random_cases"
SUITE = [
    "tests/proof/test_parity.py::test_parity",
    "tests/ops/test_norms.py::test_every_half_precision_number_survives",
    "tests/ops/test_swiglu.py::test_the_exponential_keeps_its_relative_error",
    "tests/ops/flash_attention/test_native.py::test_error_of_the_exponential",
    "tests/ops/flash_attention/test_native.py::test_errors_are_those_of_the_reference",
    "tests/ops/flash_attention/test_native.py::test_soft_cap_is_tanh",
    *("-k", "not cuda_on_cpu", "-p", "no:cacheprovider", "-o", "pythonpath=tests"),
]


def run(*command: str | Path, cwd: Path = ROOT, **kwargs: object) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, text=True, capture_output=True, **kwargs)  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def unavailable(install: bool) -> str | None:
    """Why this cannot be done here, or None. What is missing of Debian's is installed if asked for and root."""
    if platform.system() != "Linux":
        return f"user-mode emulation is of Linux; this is {platform.system()}"
    if platform.machine() == "aarch64":
        return "this is an ARM machine: `make test` tests it as it is"
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "Python for ARM comes from Debian's packages: apt-get and dpkg-deb are needed"
    wanted = [package for program, package in TOOLS.items() if shutil.which(program) is None]
    if not wanted:
        return None
    if not install or os.geteuid() != 0:
        return f"not installed: {', '.join(wanted)} (`make test-arm` does it for root)"
    try:
        run("apt-get", "update")
        run("apt-get", "install", "-y", "--no-install-recommends", *wanted)
    except RuntimeError as error:
        return str(error)
    return None


def set_up() -> None:
    """Python for ARM from Debian's packages, PyTorch and the tests' packages for it from PyPI."""
    constraints = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith(("torch==", "triton=="))
    ]
    wanted = "\n".join([TORCH, *REQUIREMENTS, *OF_TORCH, *constraints])
    done = HERE / "set_up"
    if done.exists() and done.read_text() == wanted:
        return
    shutil.rmtree(HERE, ignore_errors=True)
    unpack_system()
    version = next((SYSTEM / "usr" / "lib").glob("python3.*")).name.removeprefix("python")
    limits = HERE / "constraints.txt"
    limits.write_text("\n".join(constraints))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-compile"]
    target = ["--target", PACKAGES, "--python-version", version, "--implementation", "cp", "--only-binary=:all:"]
    for glibc in ("2_28", "2_27", "2_17"):
        target += ["--platform", f"manylinux_{glibc}_aarch64"]
    run(*pip, *target, "--no-deps", TORCH)
    run(*pip, *target, "--constraint", limits, *REQUIREMENTS, *OF_TORCH)
    # Without G_SLICE a process that qemu forks may wait for ever for a lock of the memory that it got from GLib.
    PYTHON.write_text(
        "#!/bin/sh\n"
        f"export PYTHONHOME={SYSTEM}/usr PYTHONPATH={SITE}:{PACKAGES} G_SLICE=always-malloc\n"
        f'export QEMU_CPU="${{QEMU_CPU:-{BF16}}}"\n'
        f'exec qemu-aarch64 -L {SYSTEM} -0 "$0" {SYSTEM}/usr/bin/python3 "$@"\n'
    )
    PYTHON.chmod(0o755)
    done.write_text(wanted)


def unpack_system() -> None:
    """Unpacks what apt-get would install on an ARM machine with nothing on it. Not root's work."""
    apt = HERE / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
    }
    get = ["apt-get", *(f"-o{name}={value}" for name, value in settings.items())]
    archives = apt / "cache" / "archives"
    run(*get, "update")
    needed = ("python3", "libstdc++6", "libgomp1")
    run(*get, "install", "--yes", "--download-only", "--no-install-recommends", *needed)
    [python] = archives.glob("python3.*-minimal_*.deb")
    run(*get, "download", f"lib{python.name.partition('-')[0]}-dev", cwd=archives)  # its headers, and not those of libc
    for archive in sorted(archives.glob("*.deb")):
        run("dpkg-deb", "-x", archive, SYSTEM)
    if not (SYSTEM / "lib").exists():  # a link of the package base-files
        (SYSTEM / "lib").symlink_to("usr/lib")
    shutil.rmtree(apt)


def environment(cpu: str = BF16) -> dict[str, str]:
    """Keeps those of this machine's settings that concern no Python."""
    kept = ("PATH", "HOME", "TMPDIR", "MAX_JOBS")
    here = {k: v for k, v in os.environ.items() if k in kept or k.startswith("CCACHE_")}
    include = SYSTEM / "usr" / "include"
    python = next(include.glob("python3.*"))
    compiler = f"aarch64-linux-gnu-g++ -isystem {include} -isystem {python}"
    return here | {"QEMU_CPU": cpu, "CXX": compiler, "CC": "aarch64-linux-gnu-gcc"}


def build_wheel() -> Path:
    """`python -m build --wheel` by the emulated Python, of a copy of the source, and installed for it."""
    SOURCE.mkdir(exist_ok=True)
    for name in ("foundry_kernels", "csrc"):
        shutil.rmtree(SOURCE / name, ignore_errors=True)
        shutil.copytree(ROOT / name, SOURCE / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in (
        "setup.py",
        "bootstrap.py",
        "build_extension.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
    ):
        shutil.copy2(ROOT / name, SOURCE / name)
    for folder in [*SOURCE.glob("build/lib*"), *SOURCE.glob("build/bdist*"), HERE / "dist", SITE]:
        shutil.rmtree(folder, ignore_errors=True)
    options = ["--wheel", "--no-isolation", "--skip-dependency-check", "--outdir", HERE / "dist"]
    run(PYTHON, "-P", "-m", "build", *options, ".", cwd=SOURCE, env=environment())
    [wheel] = (HERE / "dist").iterdir()
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-index", "--no-deps", "--no-compile"]
    run(PYTHON, *pip, "--target", SITE, wheel, env=environment())
    return wheel


def instruction_sets(cpu: str) -> list[str]:
    """Those that the installed extension finds usable on an emulated processor."""
    code = "from foundry_kernels.core import extension; print(*extension.build_info()['usable_instruction_sets'])"
    return run(PYTHON, "-P", "-c", code, cwd=HERE, env=environment(cpu)).split()


def run_suite(cpu: str, *arguments: str) -> tuple[int, str]:
    """pytest over SUITE, parity under each instruction set of the emulated processor: its exit code and the end of what
    it wrote to LOG."""
    command = [PYTHON, "-P", "tests/support/arm.py", "--inside", *SUITE, *arguments]
    with LOG.open("w") as log:
        done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment(cpu), stdout=log, stderr=log)
    return done.returncode, LOG.read_text(errors="replace")[-10_000:]


def inside(arguments: Sequence[str]) -> int:
    """Runs in the emulated Python."""
    sys.path.append(str(ROOT / "tests" / "support"))
    import pytest
    from sanitize import Plugin

    import foundry_kernels

    assert Path(foundry_kernels.__file__).is_relative_to(SITE)
    return pytest.main(list(arguments), plugins=[Plugin()])


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        return inside(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", action="store_true", help="make the wheel and stop")
    parser.add_argument("--fuzz", action="store_true", help="random cases too, which take longer than all others")
    parser.add_argument("--most-elements", type=int, default=3000, help="leave out larger cases (default: 3000)")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    given = parser.parse_args()
    if (reason := unavailable(install=True)) is not None:
        print(f"test-arm stops here: {reason}", file=sys.stderr)
        return 3
    began = time.monotonic()

    def say(what: object) -> None:
        print(f"[{time.monotonic() - began:.0f} s] {what}", flush=True)

    say("Python and PyTorch for ARM")
    set_up()
    say("the wheel")
    say(build_wheel().relative_to(ROOT))
    if given.wheel:
        return 0
    for cpu, expected in CPUS.items():
        found = instruction_sets(cpu)
        say(f"{cpu}: {', '.join(found)}")
        if found != expected:
            print(f"expected {', '.join(expected)}", file=sys.stderr)
            return 1
    arguments = [f"--most-elements={given.most_elements}", *([RANDOM] if given.fuzz else []), *given.arguments]
    code, end = run_suite(BF16, *arguments)
    say(f"{end if code else end.splitlines()[-1]} (all of it: {LOG.relative_to(ROOT)})")
    return abs(code)


if __name__ == "__main__":
    sys.exit(main())
