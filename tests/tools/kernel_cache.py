"""What tests/tools/test_gpu_check.py runs in a process of its own, where kernels are not interpreted.

The kernels of one case are compiled as `make gpu-cache` does it, into an archive. Then, where none has been launched,
that case is launched on the stub of a GPU with the unpacked archive as Triton's only cache. The key of each kernel is
computed by Triton's own launch; what it does not find is an error.
"""

from __future__ import annotations

import multiprocessing
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import gpu_archive  # noqa: E402
import gpu_cache  # noqa: E402
from stub_gpu import StubDriver, stub_gpu  # noqa: E402

import foundry_kernels as fk  # noqa: E402

OP = fk.OPS["swiglu"]
CASE = OP.cases.CASES["swiglu"][0]


def launch(dtype: torch.dtype = torch.bfloat16) -> None:
    gpu_cache.launch_case(OP, CASE, CASE.make(dtype))


@contextmanager
def only_from(folder: Path) -> Iterator[None]:
    """While it lasts, Triton's cache is `folder`, and a kernel that is not in it is an error instead of compiled."""
    from triton import knobs
    from triton.compiler import ASTSource

    def refuse(src: Any, *args: Any, **kwargs: Any) -> Any:
        raise LookupError(f"{src.fn.__name__} is not in {folder}")

    own = ASTSource.make_ir
    with knobs.cache.scope():
        knobs.cache.dir, ASTSource.make_ir = str(folder), refuse
        try:
            yield
        finally:
            ASTSource.make_ir = own


def make(folder: Path) -> None:
    driver = StubDriver()
    kernels = gpu_cache.recorded(driver, launch)
    assert len(kernels) >= 2, "forward and backward"
    assert gpu_cache.fill(folder / "made", kernels, driver.target, 1) == 0
    gpu_archive.pack(
        folder / "made", folder / "cache.tar.xz", gpu_archive.made_with() | {"arch": 90, "kernels": len(kernels)}
    )
    shutil.rmtree(folder / "made")  # its paths are in Triton's index


def find(folder: Path) -> None:
    about = gpu_archive.unpack(folder / "cache.tar.xz", folder / "elsewhere")
    assert gpu_archive.why_it_would_miss(about, gpu_archive.made_with() | {"arch": 90}) is None
    assert "made for arch 90, and here is 80" in str(
        gpu_archive.why_it_would_miss(about, gpu_archive.made_with() | {"arch": 80})
    )
    assert "another build" in str(
        gpu_archive.why_it_would_miss(about | {"key": "x"}, gpu_archive.made_with() | {"arch": 90})
    )
    assert "made for triton 3.0" in str(
        gpu_archive.why_it_would_miss(about | {"triton": "3.0"}, gpu_archive.made_with() | {"arch": 90})
    )
    driver = StubDriver()
    launches: list[object] = []
    driver.launch = lambda *args: launches.append(args)  # type: ignore[method-assign]
    with stub_gpu(driver), only_from(folder / "elsewhere"):
        launch()
        assert len(launches) >= 3, "forward twice, and backward"
        assert about["kernels"] == len(list((folder / "elsewhere").glob("*/*.cubin")))
        try:
            launch(torch.float32)
        except LookupError as error:
            print(f"found {about['kernels']} kernels; as it should be: {error}")
        else:
            raise AssertionError("a kernel that was not compiled was found")


if __name__ == "__main__":
    making = multiprocessing.get_context("fork").Process(target=make, args=(Path(sys.argv[1]),))
    making.start()
    making.join()
    assert making.exitcode == 0
    find(Path(sys.argv[1]))
