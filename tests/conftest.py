"""Settings that come before any import: without a GPU, Triton's kernels run in its interpreter."""

import gc
import os
import sys

import torch

os.environ["FOUNDRY_KERNELS_TUNING"] = "off"  # a measured launch of this machine's user is no part of what is tested
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
else:  # deterministic cuBLAS, which the NaN-poisoning mode asks for
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds", type=float, help="let tests/proof/test_fuzz.py try random cases for so long (make fuzz)"
    )
    parser.addoption("--sixth", type=int, choices=range(6), help="of the slow tests this sixth (tests/support/slow.py)")
    parser.addoption(
        "--held-to", metavar="ISA", help="for tests/support/forced_isa.py, which sets the environment (make test-isa)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (name := config.getoption("--held-to")) is None:
        return
    from benchmarks import isa

    try:
        obeyed = isa.force(name).obeyed
    except ValueError as error:
        raise pytest.UsageError(f"--held-to {name}: {error}") from None
    if not obeyed:  # torch was imported before its switches were set
        raise pytest.UsageError(
            f"--held-to {name}: torch uses another instruction set; run tests/support/forced_isa.py {name}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The millions of objects that modules and tests are live until the end: the garbage collector need not look at
    them, neither while they are made nor each time that it runs."""
    import interpreter

    interpreter.hasten()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import slow

    held = config.getoption("--held-to")
    slow.mark(items, every_case=held is not None)  # other sets are tried on no other occasion
    left_out = []
    if (sixth := config.getoption("--sixth")) is not None:
        left_out = [item for item in items if slow.is_slow(item) and slow.sixth_of(item.nodeid) != sixth]
    if held is not None:
        left_out += [item for item in items if slow.instruction_set_of(item) in _others_than(held)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


def _others_than(held: str) -> set[str]:
    """The instruction sets, by name, in which no kernel of ours runs on a processor that has this one as its best."""
    from foundry_kernels.core import extension

    return {*extension.build_info()["usable_instruction_sets"]} - {held}


_counted: list[int] = []


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Says how many tests there are, which takes the workers seconds to find out."""
    if not _counted:
        _counted.append(len(ids))
        processes = node.config.getoption("tx")
        node.config.get_terminal_writer().line(f"\n{len(ids)} tests in {len(processes)} processes")


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float | None:
    return request.config.getoption("--fuzz-seconds")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh tensors hold NaN, so that an element which a kernel does not write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(100_000).isnan().all(), "the poison is not working"
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def guarded_memory() -> Iterator[None]:
    """Tensors end at a page that faults, so that the checker of CUDA kernels sees accesses behind them."""
    from cuda_on_cpu.build import LIBRARY, load_operators

    load_operators()
    getattr(torch.ops, LIBRARY).guard(True)
    yield
    getattr(torch.ops, LIBRARY).guard(False)


@pytest.fixture
def threads() -> Iterator[None]:
    """The test may set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def instruction_set() -> Iterator[Callable[[str], None]]:
    """Sets the instruction set of the CPU kernels for the test."""
    from foundry_kernels.core import extension

    chosen = extension.build_info()["instruction_set"]
    yield extension._C.force_instruction_set
    extension._C.force_instruction_set(chosen)


@pytest.fixture
def bfloat16_choice() -> Iterator[Callable[[bool, bool, bool], None]]:
    """Sets whether products of bfloat16 on the CPU are by instructions: attention's tiles, pairs, oneDNN's products."""
    from foundry_kernels.core import extension

    chosen = extension._C.bfloat16_choice()
    yield extension._C.choose_bfloat16
    extension._C.choose_bfloat16(*chosen)


@pytest.fixture(autouse=True)
def _active_row(request: pytest.FixtureRequest) -> Iterator[None]:
    """A row of the parity table may need something in place while it is tested."""
    if "row" not in request.fixturenames:
        yield
        return
    with request.getfixturevalue("row").active():
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """One test's recompilations do not count against another's. To forget nothing takes long, for so many tests."""
    yield
    compiler: Any = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is not None and (compiler.FRAME_COUNTER or compiler.input_codes.seen):
        torch.compiler.reset()
