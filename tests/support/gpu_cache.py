"""`make gpu-cache`: compiles the Triton kernels of parity cases and benchmarks for a GPU in another machine.

    make gpu-cache STACK=2.11 PYTHON=python3.12 VENV=.venv-3.12    # for Triton 3.6 in Python 3.12; needs no GPU
    make gpu-check                                  # there; it uses build/gpu-cache.tar.xz

Triton's own launch, on a stub of the GPU (stub_gpu.py), computes each kernel's key: a hash of Triton's files, the
kernel's source, signature and options, and the architecture, but no path. Triton's index of its cache has absolute
paths, so `unpack` writes the index. The archive has code and metadata, but no intermediate results.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from stub_gpu import StubDriver, stub_gpu, uncompiled, why_not  # noqa: E402

import foundry_kernels as fk  # noqa: E402
from foundry_kernels.core.registry import OpSpec  # noqa: E402
from foundry_kernels.testing import Case, call, make_cotangents  # noqa: E402
from foundry_kernels.tools.inspect import aot  # noqa: E402

ARCHIVE = ROOT / "build" / "gpu-cache.tar.xz"
MANIFEST, INDEX = "manifest.json", "__grp__"
#: Triton's source object and the launch options.
Kernel = tuple[Any, dict[str, Any]]


def made_with() -> dict[str, str]:
    """Returns the properties that must be equal on both machines so that kernels are found."""
    import triton
    from triton.runtime.cache import triton_key

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"triton": triton.__version__, "python": python, "key": triton_key()}


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


def why_not_writable(folder: Path) -> str | None:
    """Returns the reason why the folder (which is created if needed) is not writable, or None."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"{folder} cannot be written to ({error})"
    return None


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
        for case in op.bench.bench_cases(op.name, "cuda") if op.bench is not None else ():
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


def pack(folder: Path, archive: Path, about: dict[str, Any]) -> None:
    """Packs the files of Triton's cache in `folder` that launches need, and `about`."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    about_file = folder / MANIFEST
    about_file.write_text(json.dumps(about))
    partial = archive.with_name(archive.name + ".partial")
    with tarfile.open(partial, "w:xz", preset=6) as tar:
        # Sorted by name, because variants of a kernel compress well next to each other.
        for path in [about_file, *sorted(folder.glob("*/*"), key=lambda path: (path.suffix, path.name, path))]:
            if path.suffix in (".json", ".cubin", ".so") and not path.name.startswith(INDEX):
                tar.add(path, str(path.relative_to(folder)))
    partial.replace(archive)


def unpack(archive: Path, folder: Path) -> dict[str, Any]:
    """Unpacks the archive into `folder`, for TRITON_CACHE_DIR. Returns its `about`.

    Raises:
        ValueError: it is damaged, or not such an archive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        about = json.loads((folder / MANIFEST).read_text())
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        raise ValueError(f"{archive} is not a cache that `make gpu-cache` made, or is damaged: {error}") from None
    for described in folder.glob("*/*.json"):
        if not described.name.startswith(INDEX):
            code = described.with_suffix(".cubin")
            paths = {path.name: str(path.resolve()) for path in (described, code) if path.exists()}
            (described.parent / f"{INDEX}{described.name}").write_text(json.dumps({"child_paths": paths}))
    return dict(about)


def why_it_would_miss(about: dict[str, Any], arch: int) -> str | None:
    """Returns the reason why this Triton would not find an archive's kernels on a GPU of capability `arch`, or None."""
    here = made_with() | {"arch": arch}
    for name in ("arch", "triton", "python"):
        if about.get(name) != here[name]:
            return f"it was made for {name} {about.get(name)}, and here is {here[name]}"
    return None if about.get("key") == here["key"] else "it was made with another build of the same release of Triton"


def main(argv: list[str]) -> int:
    """Compile the kernels for a GPU in another machine, and pack them."""
    parser = argparse.ArgumentParser(prog="tests/support/gpu_cache.py", description=main.__doc__)
    parser.add_argument("--arch", type=int, default=90, help="compute capability, 90 for 9.0 (default)")
    parser.add_argument("--multiprocessors", type=int, default=132, help="of that GPU (default: 132, as H100 and H200)")
    parser.add_argument("-k", metavar="TEXT", default="", help="only operations whose name contains this text")
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
    pack(folder, options.archive, about)
    size = options.archive.stat().st_size / 2**20
    made_for = f"compute capability {options.arch / 10}, Triton {about['triton']} in Python {about['python']}"
    print(f"{options.archive}: {about['kernels']} kernels for {made_for}; {size:.1f} MB")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
