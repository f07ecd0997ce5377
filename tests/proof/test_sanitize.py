"""The CPU kernels under the sanitizers of tests/support/sanitize.py, and proof that those see what they are for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import sanitize

from foundry_kernels.core import extension

if extension.MISSING is not None:
    pytest.skip(str(extension.MISSING), allow_module_level=True)
if sanitize.runtime() is None:
    pytest.skip("the C++ compiler has no AddressSanitizer library", allow_module_level=True)

HEAP, PAST, BEFORE = (
    "AddressSanitizer: heap-buffer-overflow",
    r"bytes (after|to the right of) 38-byte",
    r"bytes (before|to the left of) 38-byte",
)
#: The report on each kernel of faulty.cpp, called with 19 elements of bfloat16 that torch has allocated.
REPORTED = {
    "right": r"^$",
    "read_past": rf"{HEAP}(?s:.*)READ of size (?s:.*){PAST}",
    "write_past": rf"{HEAP}(?s:.*)WRITE of size (?s:.*){PAST}",
    "one_past": rf"{HEAP}(?s:.*)READ of size 2(?s:.*){PAST}",
    "one_before": rf"{HEAP}(?s:.*)READ of size 2(?s:.*){BEFORE}",
    "past_a_buffer": r"index 8 out of bounds for type 'float \[8\]'|stack-buffer-overflow",
    "misaligned": r"load of misaligned address",
    "overflow": r"signed integer overflow: (1073741824 \* 19|19 \* 1073741824)",
}

#: A few tests of each of the suite's files, without parameters too.
QUICK = "native-cpu and swiglu and float32 or accumulate_product and refuses"

#: Every kernel in a process of its own, for a report ends it.
DRIVER = """
import ctypes, os, sys, torch
library = ctypes.CDLL(sys.argv[1])
library.run.restype = ctypes.c_float
for name in sys.argv[2:]:
    print("---", name, file=sys.stderr, flush=True)
    child = os.fork()
    if child == 0:
        x = torch.ones(19, dtype=torch.bfloat16)
        found = library.run(name.encode(), ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(19))
        os._exit(0 if found == 19.0 or name != "right" else 7)
    print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr, flush=True)
"""


def instruction_sets() -> list[str]:
    """The first and the last that this machine has, for a build that is quick enough; `make sanitize` does all."""
    usable = extension.build_info()["usable_instruction_sets"]
    return list(dict.fromkeys((usable[0], usable[-1])))


@pytest.mark.slow
@pytest.mark.parametrize("name", instruction_sets())
def test_faulty_kernels_are_reported(name: str, tmp_path: Path) -> None:
    build = sanitize.build_script()
    library, source = tmp_path / "faulty.so", Path(sanitize.__file__).with_name("faulty.cpp")
    flags = [*build.FLAGS, *build.SANITIZE, f"-DFK_ISA={name}", *build.ISA_FLAGS[name]]
    command = [*build.COMPILER.split(), "-std=c++17", "-fPIC", "-shared", *flags, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    done = sanitize.sanitized(["-c", DRIVER, str(library), *REPORTED], capture_output=True)
    assert done.returncode == 0, done.stderr
    reports = re.findall(r"--- (\w+)\n(.*?)exit (-?\d+)\n", done.stderr, re.DOTALL)
    assert [kernel for kernel, *_ in reports] == list(REPORTED), done.stderr
    for kernel, report, code in reports:
        assert re.search(REPORTED[kernel], report), f"{kernel}: {report}"
        assert (code == "0") == (kernel == "right"), f"{kernel} ended with {code}"


@pytest.mark.slow
def test_each_instruction_set_is_tried() -> None:
    """On the extension as it is, for the sake of time: that the kernels are those of the set is asserted there."""
    command = [sys.executable, sanitize.__file__, "--inside", extension._C.__file__, "-q", "-p", "no:cacheprovider"]
    command += [*sanitize.SUITE, "-k", QUICK, "--most-elements=100"]
    done = subprocess.run(command, cwd=sanitize.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    usable = extension.build_info()["usable_instruction_sets"]
    assert f"instruction sets: {', '.join(sorted(usable))}\n" in done.stdout


@pytest.mark.slow
def test_the_kernels_are_clean() -> None:
    """The parity suite's cases but for the largest, under two instruction sets, and the random cases."""
    code, end = sanitize.run_suite(sanitize.build(*instruction_sets()), "--most-elements=20000")
    assert code == 0, end
    assert re.search(r"\d{3} passed", end), end
    assert f"instruction sets: {', '.join(sorted(instruction_sets()))}\n" in end
