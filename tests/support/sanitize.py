"""`make sanitize`: the native CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

`setup.py build_ext --sanitize` builds the extension a second time, in build/sanitized; a process that has the
sanitizers loaded before anything else then runs parts of the suite on it: parity over all cases under every instruction
set, and random cases. torch itself is not instrumented, but its memory comes from the sanitizer's allocator, which sees
every access of a kernel beyond a tensor.
"""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SUITE = [
    "tests/proof/test_parity.py::test_parity",
    "tests/proof/test_fuzz.py::test_random_cases",
    "tests/ops/test_accumulate_product.py",  # of which the cases of parity are too small
    "tests/ops/test_matmul.py",
    "-k",
    "native-cpu or accumulate_product or matmul",
]
LOG = ROOT / "build" / "sanitized" / "log.txt"
#: No leaks, which Python and torch have at exit; no complaints about what is not ours.
OPTIONS = "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:quarantine_size_mb=64:malloc_context_size=8"


def build_script() -> ModuleType:
    """build_extension.py as a module: its compiler and flags."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # for bootstrap.py
    spec = importlib.util.spec_from_file_location("build_script", ROOT / "build_extension.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runtime() -> Path | None:
    """The sanitizers' library of the build's compiler, or None where it has none."""
    compiler = build_script().COMPILER.split()
    for name in ("libclang_rt.asan.so", f"libclang_rt.asan-{platform.machine()}.so", "libasan.so"):
        try:
            found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        except OSError:
            return None
        path = Path(found.stdout.strip())
        if path.is_absolute() and path.exists():
            return path.resolve()
    return None


def build(*instruction_sets: str) -> Path:
    """The extension with sanitizers and the kernels of these instruction sets (default: all that the compiler has)."""
    command = [sys.executable, "setup.py", "build_ext", "--sanitize"]
    if instruction_sets:
        command.append(f"--instruction-sets={','.join(instruction_sets)}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [library] = (ROOT / "build" / "sanitized" / "foundry_kernels").glob("_C*.so")
    return library


def sanitized(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with the sanitizers loaded. Their reports go to stderr."""
    library = runtime()
    assert library is not None
    # Loaded before torch brings it: the sanitizer looks for __cxa_throw when it starts.
    cxx = ctypes.util.find_library("stdc++")
    env = os.environ | {
        "LD_PRELOAD": " ".join([str(library), *([cxx] if cxx else [])]),
        "ASAN_OPTIONS": OPTIONS,
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, text=True, **kwargs)


def run_suite(extension: Path, *arguments: str) -> tuple[int, str]:
    """pytest over SUITE on the sanitized `extension`: its exit code and the end of what it wrote to LOG. That is
    uncaptured, so that the last line before a report is the test or the random case that it is about."""
    command = [
        "tests/support/sanitize.py",
        "--inside",
        str(extension),
        "-sv",
        "-p",
        "no:cacheprovider",
        *SUITE,
        *arguments,
    ]
    with LOG.open("w") as log:
        code = sanitized(command, stdout=log, stderr=subprocess.STDOUT).returncode
    return code, LOG.read_text(errors="replace")[-10_000:]


def parameters(item: pytest.Item) -> dict[str, Any]:
    """What a test was parametrized with, nothing where it was not."""
    call = getattr(item, "callspec", None)
    return {} if call is None else call.params


class Plugin:
    """Makes pytest run the parity suite once for each instruction set that was built and that this machine has, without
    its larger cases where `--most-elements` is given; random cases are printed."""

    def __init__(self) -> None:
        self.tried: set[str] = set()

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--most-elements", type=int, help="leave out cases of more elements of their arguments")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        from foundry_kernels.tools.check import numel

        if (most := config.getoption("--most-elements")) is not None:
            cases = [(item, parameters(item).get("case")) for item in items]
            items[:] = [item for item, case in cases if case is None or numel(case) <= most]

    def pytest_configure(self) -> None:
        from hypothesis import Verbosity, settings

        settings.register_profile("sanitized", verbosity=Verbosity.verbose)
        settings.load_profile("sanitized")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if metafunc.function.__name__ == "test_parity":
            from foundry_kernels.core import extension

            metafunc.fixturenames.append("instruction_set")  # or it would be refused as one that the test does not take
            metafunc.parametrize("instruction_set", extension.build_info()["usable_instruction_sets"])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """pytest forgets a fixture that the test itself does not take: the set is chosen here."""
        from table import cpu_setting

        from foundry_kernels.core import extension

        name = parameters(item).get("instruction_set")
        with nullcontext() if name is None else cpu_setting(name, 2):
            if name is not None:
                assert extension.build_info()["instruction_set"] == name
                self.tried.add(name)
            yield

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"instruction sets: {', '.join(sorted(self.tried))}")


def inside(extension: str, arguments: list[str]) -> int:
    """Runs in the process that has the sanitizers: puts `extension` in the place of the package's own, then run
    pytest."""
    spec = importlib.util.spec_from_file_location("foundry_kernels._C", extension)
    assert spec is not None
    assert spec.loader is not None
    import torch  # noqa: F401  # whose libraries the extension needs

    sys.modules["foundry_kernels._C"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return pytest.main(arguments, plugins=[Plugin()])


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        return inside(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to try random cases (default: 120)")
    seconds = parser.parse_args().seconds
    if runtime() is None:
        print(f"sanitize stops here: {build_script().COMPILER} has no AddressSanitizer library", file=sys.stderr)
        return 3
    code, end = run_suite(build(), f"--fuzz-seconds={seconds}")
    print(end if code else end.splitlines()[-1], f"(all of it: {LOG.relative_to(ROOT)})", sep="\n")
    return abs(code)


if __name__ == "__main__":
    sys.exit(main())
