"""Compiles sources against the checker; objects are kept by content, so that a rebuild costs what changed."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
CACHE = ROOT / "build" / "cuda_on_cpu"
LIBRARY = "foundry_kernels_cuda_on_cpu"

#: Misaligned vector accesses, shifts and indices of plain arrays that are undefined become traps, which are reported.
CHECKS = ["-fsanitize=alignment,bounds,shift", "-fsanitize-undefined-trap-on-error"]
#: Most kernels run for less time than it takes to optimise them, and of the host's code nothing is slow.
LITTLE, NONE = ["-Og", "-g1"], ["-O0", "-g0"]
#: Fibers jump from stack to stack, which a fortified longjmp takes for a mistake.
FLAGS = ["-fPIC", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas", "-DFK_CUDA_ON_CPU"]
FLAGS.append(f"-I{HERE / 'include'}")


def _compiler() -> list[str]:
    return os.environ.get("CXX", "c++").split()


def compile_object(source: Path, flags: list[str], text: str | None = None) -> Path:
    """The object file of `source`, or of `text` in its place and folder."""
    content = source.read_text() if text is None else text
    headers = "".join(p.read_text() for f in (HERE / "include", ROOT / "csrc") for p in sorted(f.rglob("*.*h")))
    key = hashlib.sha256("\0".join([content, headers, *flags, torch.__version__]).encode()).hexdigest()[:16]
    target = CACHE / f"{source.stem}.{key}.o"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        command = [*_compiler(), *FLAGS, *flags, f"-I{source.parent}", "-x", "c++", "-", "-c", "-o", str(partial)]
        done = subprocess.run(command, input=f'#line 1 "{source.name}"\n{content}', capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        partial.rename(target)
    return target


def link(name: str, objects: list[Path], flags: list[str] = []) -> Path:  # noqa: B006
    key = hashlib.sha256("".join(map(str, objects)).encode()).hexdigest()[:16]
    target = CACHE / f"{name}.{key}.so"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.tmp")  # other processes may be building it too
        command = [*_compiler(), "-shared", *map(str, objects), "-o", str(partial), *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        partial.rename(target)
    return target


@functools.cache
def load_operators() -> ctypes.CDLL:
    """Registers torch.ops.foundry_kernels_cuda_on_cpu.*: the package's operators, with CUDA kernels for CPU tensors."""
    kernels = sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))
    bindings = [p for p in sorted((ROOT / "csrc" / "torch").glob("*.cpp")) if not p.stem.endswith(("_cpu", "_cuda"))]
    torch_flags = [
        "-std=c++20",
        *NONE,
        f"-I{HERE}",
        f"-DFK_LIBRARY={LIBRARY}",
        '-DFK_CUDA_ARCHITECTURES=""',
        "-DFK_HAVE_HOPPER",
        "-DAT_PER_OPERATOR_HEADERS",
        *(f"-isystem{p}" for p in include_paths()),
    ]
    torch_flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    launches = sorted((ROOT / "csrc" / "torch").glob("*_cuda.cpp"))
    launches += [HERE / "device.cpp", HERE / "guarded_memory.cpp"]
    of_torch = [*bindings, *launches]
    jobs: list[tuple[Path, list[str], str | None]] = [(of_torch[0], torch_flags, as_one(of_torch))]
    largest_first = sorted(kernels, key=lambda p: p.stem not in ("rms_norm", "swiglu", "attention_forward"))
    jobs += [(p, ["-std=c++17", *LITTLE, *CHECKS], None) for p in largest_first]
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the test run does not compile the same
        objects = list(pool.map(lambda job: compile_object(*job), jobs))
    libraries = Path(torch.__file__).parent / "lib"
    library = link(LIBRARY, objects, [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"])
    torch.ops.load_library(str(library))
    return ctypes.CDLL(str(library))


def as_one(sources: list[Path]) -> str:
    """Sources as one, as in build_extension.py: most of the time goes into torch's headers."""
    return "\n".join(f'#line 1 "{source.name}"\n{source.read_text()}' for source in sources)


def load_plain(source: Path, text: str) -> ctypes.CDLL:
    """`text` compiled in the place of `source`, without torch and, as little of it runs, without optimisation."""
    return ctypes.CDLL(str(link(source.stem, [compile_object(source, ["-std=c++17", "-O0", "-g1", *CHECKS], text)])))


def shared_memory_traffic(library: ctypes.CDLL) -> dict[tuple[str, int], tuple[int, int]]:
    """By file and line of a kernel's source: its accesses of ldmatrix, cp_async and store_pair, and bank conflicts."""
    library.cuda_on_cpu_traffic.restype = ctypes.c_char_p
    counted: dict[tuple[str, int], tuple[int, int]] = {}
    for entry in library.cuda_on_cpu_traffic().decode().splitlines():
        place, accesses, conflicts = entry.rsplit(" ", 2)
        file, line = place.rsplit(":", 1)
        before = counted.get((file, int(line)), (0, 0))  # of a header in another translation unit
        counted[file, int(line)] = before[0] + int(accesses), before[1] + int(conflicts)
    return counted
