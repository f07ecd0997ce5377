"""`make gpu-cache`: compiles the Triton kernels of parity cases and benchmarks for a GPU in another machine, and where
nvcc is and torch is a CUDA build, the extension for that GPU alone.

    make gpu-cache STACK=2.11 PYTHON=python3.12 VENV=.venv-3.12    # for Triton 3.6 in Python 3.12; needs no GPU
    make gpu-check                                  # there; it uses build/gpu-cache.tar.xz

Triton's own launch, on a stub of the GPU (stub_gpu.py), computes each kernel's key: a hash of Triton's files, the
kernel's source, signature and options, and the architecture, but no path. Triton's index of its cache has absolute
paths, so `gpu_archive.unpack` writes the index. The archive has code and metadata, but no intermediate results.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import cuda_build  # noqa: E402
import gpu_archive  # noqa: E402
import gpu_shapes  # noqa: E402
import hopper_units  # noqa: E402
import sanitize  # noqa: E402
from gpu_archive import ARCHIVE, made_with, why_not_writable  # noqa: E402
from stub_gpu import StubDriver, stub_gpu, uncompiled, why_not  # noqa: E402

import foundry_kernels as fk  # noqa: E402
from foundry_kernels.core.registry import OpSpec  # noqa: E402
from foundry_kernels.testing import Case, call, make_cotangents  # noqa: E402
from foundry_kernels.tools.inspect import aot  # noqa: E402

#: Triton's source object and the launch options.
Kernel = tuple[Any, dict[str, Any]]


def recorded(driver: StubDriver, run: Callable[[], None]) -> list[Kernel]:
    """Returns the distinct kernels that `run` launches. This process can no longer launch them."""
    import triton.compiler

    found: list[Kernel] = []

    def compile_later(src: Any, target: Any, options: dict[str, Any]) -> Any:
        found.append((src, options))
        return uncompiled(driver, src)

    own, triton.compiler.compile = triton.compiler.compile, compile_later
    try:
        with stub_gpu(driver):
            run()
    finally:
        triton.compiler.compile = own
    return found


def launch_all(text: str) -> None:
    """Makes all launches of the operations whose names contain `text`: the parity cases in each dtype, forward with and
    without gradients, and backward; and the benchmarks."""
    for op in fk.OPS.values():
        impl = op.impl("triton")
        if impl is None or text not in op.name:
            continue
        for case in op.cases.CASES[op.name]:
            for dtype in impl.dtypes:
                launch_case(op, case, case.make(dtype))
        if op.name == "linear_cross_entropy":  # its matmuls would run; the cases already have its kernels
            continue
        timed = op.bench.bench_cases(op.name, "cuda") if op.bench is not None else ()
        for case in (*timed, *(gpu_shapes.TIMED if op is gpu_shapes.OP else ())):
            for dtype in aot.DTYPES:
                aot._call(op, case, aot._unfilled(case, dtype))


def launch_case(op: OpSpec, case: Case, args: dict[str, torch.Tensor | None]) -> None:
    with torch.no_grad():
        call(op, args, case.options, backend="triton")
    outputs = tuple(o for o in call(op, args, case.options, backend="triton") if o.requires_grad)
    given = [t for t in args.values() if t is not None and t.requires_grad]
    if given and outputs:
        torch.autograd.grad(outputs, given, make_cotangents(outputs, case.cotangent), allow_unused=True)


def fill(folder: Path, kernels: list[Kernel], target: Any, jobs: int) -> int:
    """Compiles the kernels, and with Triton 3.6 also their launchers, to Triton's cache in `folder`, `jobs` at a time.
    Returns the number of failures."""
    global _WORK
    _WORK = kernels, target, folder
    began, failed = time.monotonic(), 0
    context = multiprocessing.get_context("fork")  # kernels cannot be pickled; forked children already have them
    with context.Pool(jobs) as pool:
        for done, error in enumerate(pool.imap_unordered(_compile, range(len(kernels)), chunksize=4), 1):
            if error:
                failed += 1
                print(f"not compiled: {error}", file=sys.stderr, flush=True)
            if done % 100 == 0 or done == len(kernels):
                print(f"{done} of {len(kernels)} kernels, {time.monotonic() - began:.0f} s", flush=True)
    return failed


_WORK: tuple[list[Kernel], Any, Path]


def _compile(index: int) -> str:
    from triton import knobs
    from triton.compiler.compiler import compile

    kernels, target, folder = _WORK
    src, options = kernels[index]
    knobs.cache.dir = str(folder)
    try:
        compiled = compile(src, target=target, options=options)
        _compile_launcher(src, compiled.metadata)
    except Exception as error:
        return f"{src.fn.__name__}: {type(error).__name__}: {error}"
    return ""


def _compile_launcher(src: Any, metadata: Any) -> None:
    """Triton 3.6 compiles a C function for each signature with gcc and the driver's library. Since this machine may
    have no driver, the function is linked against an empty library with this name, and not loaded."""
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.runtime import build

    if not hasattr(driver, "make_launcher"):
        return
    with tempfile.TemporaryDirectory() as folder, linked_against_empty_libcuda(Path(folder)):
        driver.libcuda_dirs.cache_clear()
        driver.library_dirs.cache_clear()
        with knobs.nvidia.scope():
            knobs.nvidia.libcuda_path = folder
            own, build._load_module_from_path = build._load_module_from_path, _not_loaded
            try:
                driver.CudaLauncher(src, metadata)
            finally:
                build._load_module_from_path = own


@contextmanager
def linked_against_empty_libcuda(folder: Path) -> Iterator[None]:
    """Puts an empty libcuda.so.1 into the folder. In this block, the C compiler marks all given libraries as needed.
    Many linkers would omit the empty one, and on the GPU the module would then load without the driver's functions."""
    before = os.environ.get("CC")
    compiler = before or shutil.which("gcc") or "cc"
    library = [*shlex.split(compiler), "-shared", "-o", f"{folder}/libcuda.so.1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*library, "-x", "c", os.devnull], check=True)
    wrapper = folder / "cc"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} -Wl,--no-as-needed "$@"\n')
    wrapper.chmod(0o755)
    os.environ["CC"] = str(wrapper)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CC"]
        else:
            os.environ["CC"] = before


def _not_loaded(name: str, path: str) -> Any:
    return type("module", (), {"launch": None})


def compile_extension(arch: int, jobs: int, folder: Path) -> str:
    """Compiles by nvcc what the archive has of it, for this GPU alone; returns a sentence about it.

    For the lowest instruction set: the CPU's kernels are not what is checked there.

    Raises:
        SystemExit: nvcc fails.
    """
    if (reason := cuda_build.why_not()) is not None:
        return f"without the extension: {reason}"
    capability, began = f"{arch // 10}.{arch % 10}", time.monotonic()
    lowest = sanitize.build_script().LOWEST
    library = cuda_build.compile_into(
        ROOT / "build" / f"cuda-{arch}", {"TORCH_CUDA_ARCH_LIST": capability, "MAX_JOBS": str(jobs)}, lowest
    )
    if library is None:
        raise SystemExit("error: the extension does not compile; see above")
    compiled = folder / gpu_archive.COMPILED
    shutil.rmtree(compiled, ignore_errors=True)
    compiled.mkdir(parents=True)
    shutil.copyfile(library, compiled / library.name)
    if arch == 90:
        hopper_units.compile_for_gpu(compiled / gpu_archive.samples().name)
    size = library.stat().st_size / 2**20
    return f"with {library.name} for {capability}, {size:.0f} MB, compiled in {time.monotonic() - began:.0f} s"


def main(argv: list[str]) -> int:
    """Compile the kernels for a GPU in another machine, and pack them."""
    parser = argparse.ArgumentParser(prog="tests/support/gpu_cache.py", description=main.__doc__)
    parser.add_argument("--arch", type=int, default=90, help="compute capability, 90 for 9.0 (default)")
    parser.add_argument("--multiprocessors", type=int, default=132, help="of that GPU (default: 132, as H100 and H200)")
    parser.add_argument(
        "-k", metavar="TEXT", default="", help="only operations with this text in their name, no extension"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    parser.add_argument("--archive", type=Path, default=ARCHIVE, help=f"default: {ARCHIVE}")
    options = parser.parse_args(argv)
    folder = options.archive.with_suffix("").with_suffix("")  # kept, so that its kernels are not compiled again
    if folder == options.archive:
        parser.error(f"--archive must end in .tar.xz; got {options.archive}")
    if (reason := why_not() or why_not_writable(options.archive.parent) or why_not_writable(folder)) is not None:
        parser.error(reason)
    driver = StubDriver(options.arch, options.multiprocessors)
    kernels = recorded(driver, lambda: launch_all(options.k))
    if not kernels:
        parser.error(f"no operation with Triton kernels has {options.k!r} in its name")
    failed = fill(folder, kernels, driver.target, options.jobs)
    about = made_with() | {"arch": options.arch, "kernels": len(kernels) - failed}
    about |= {"torch": torch.__version__, "sources": gpu_archive.compiled_sources()}
    extension = "" if options.k else f"; {compile_extension(options.arch, options.jobs, folder)}"
    gpu_archive.pack(folder, options.archive, about)
    size = options.archive.stat().st_size / 2**20
    made_for = f"compute capability {options.arch / 10}, Triton {about['triton']} in Python {about['python']}"
    print(f"{options.archive}: {about['kernels']} kernels for {made_for}; {size:.1f} MB{extension}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
