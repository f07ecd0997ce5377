"""`python -m foundry_kernels check`: tests in about 30 seconds whether every operation is right on this device.

It needs no checkout: the test suite's cases and tolerance policy are installed with the package. Each kernel is
compared with the reference, forward and backward, on as many of its cases and dtypes as the time allows. One case of
each kind comes first (see `kind_of`), the largest cases come last, and all kernels advance at the same pace (see
`schedule`). On a GPU, each kernel is also launched on a side stream, captured in a CUDA graph and, with a second GPU,
called with tensors on the GPU that is not current.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from foundry_kernels import OPS, _triton
from foundry_kernels.core.registry import FLOATS, OpSpec, short_dtype
from foundry_kernels.testing import Case, assert_parity, call, make_cotangents
from foundry_kernels.tools.progress import Progress

COMMAND = "python -m foundry_kernels check"
#: The limit does not include the imports and the first case of every kernel; with them, a check takes about 30.
SECONDS = 25.0


def kind_of(case: Case) -> object:
    """A key that is equal for cases that differ only in shapes, not in options or layouts."""
    layouts = tuple(None if a is None else (a.layout, a.dtype, a.grad) for a in case.args.values())
    return tuple(sorted(map(str, case.options.items()))), layouts


def small_cases(cases: Iterable[Case]) -> tuple[Case, ...]:
    """A few small cases with different options or layouts."""
    kinds: dict[object, Case] = {}
    for case in cases:
        if 16 <= numel(case) <= 6000:
            kinds.setdefault(kind_of(case), case)
    return tuple(kinds.values())


def numel(case: Case) -> int:
    return sum(torch.Size(a.shape).numel() for a in case.args.values() if a is not None)


def forward_and_backward(
    op: OpSpec, backend: str, args: dict[str, Tensor | None], case: Case, dout: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """The outputs of a call and all its gradients, from `dout` or random ones."""
    outputs = call(op, args, case.options, backend=backend)
    wanted = [t for t in args.values() if t is not None and t.requires_grad]
    dout = make_cotangents(outputs, "contiguous") if dout is None else dout
    paired = [(o, d) for o, d in zip(outputs, dout, strict=True) if o.requires_grad]
    if not paired or not wanted:
        return outputs
    grads = torch.autograd.grad([o for o, _ in paired], wanted, [d for _, d in paired], allow_unused=True)
    return (*outputs, *(g for g in grads if g is not None))


def side_stream(op: OpSpec, backend: str, case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Checks that a call on a busy stream waits for the stream, and that its results are those of the default
    stream."""
    args = case.make(dtype, "cuda")
    expected = call(op, args, case.options, backend=backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        actual = call(op, args, case.options, backend=backend)
        done = stream.record_event()
    assert not done.query(), "the kernel did not wait for the stream that was current"
    stream.synchronize()
    _assert_equal(actual, expected)


def cuda_graph(op: OpSpec, backend: str, case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    """Checks that a captured forward and backward pass, replayed with other values, has the results of a call with
    these."""
    args = case.make(dtype, "cuda")
    dout = make_cotangents(call(op, args, case.options, backend=backend), "contiguous")

    def step() -> tuple[Tensor, ...]:
        return forward_and_backward(op, backend, args, case, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in args.values():
            if t is not None and t.requires_grad:
                t.copy_(torch.randn_like(t))
    graph.replay()
    _assert_equal(captured, step())


def second_device(op: OpSpec, backend: str, case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Checks that results of tensors on cuda:1 have the same bits with either current device."""
    results = []
    for current in (0, 1):
        with torch.cuda.device(current):
            results.append(forward_and_backward(op, backend, case.make(dtype, "cuda:1"), case))
            assert torch.cuda.current_device() == current, "the current device was changed"
        torch.cuda.synchronize(1)
    assert all(t.device == torch.device("cuda:1") for t in results[0]), "a result is not on its inputs' device"
    _assert_equal(*results)


def _assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), f"result {i} differs"


class Call(NamedTuple):
    """One case in one dtype, of one kernel."""

    row: Row
    case: Case
    dtype: torch.dtype


@dataclass
class Row:
    """One backend of one operation on one device, and its results."""

    op: OpSpec
    backend: str
    device: str
    checked: dict[str, int] = field(default_factory=dict)  # cases by dtype
    total: int = 0
    took: float = 0.0  # seconds for the last case; the next one is rarely faster
    on_gpu: list[str] = field(default_factory=list)  # the checks that need a GPU
    failures: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        return sum(self.checked.values())

    def stages(self, dtypes: tuple[torch.dtype, ...], case_id: str | None) -> list[list[Call]]:
        """The calls to check, in order: the first case in every dtype, a case of each other kind in one dtype, the same
        cases in the other dtypes, all other cases. In each stage and kind, the smallest case comes first.
        """
        interpreted = self.backend == "triton" and self.device == "cpu"
        impl = self.op.impl(self.backend)
        assert impl is not None
        cases = [c for c in self.op.cases.CASES[self.op.name] if c.interpreted or not interpreted]
        cases = [c for c in cases if self.op.cases.why_not(c, self.backend, self.device) is None]
        chosen = [c for c in cases if case_id is None or c.id == case_id]
        own = [d for d in dtypes if d in impl.dtypes]
        # A case with almost no elements proves little, so the smallest of at least 16 elements represents its kind.
        chosen.sort(key=lambda case: (numel(case) < 16, numel(case)))
        kinds: dict[object, Case] = {}
        others = sorted((case for case in chosen if kinds.setdefault(kind_of(case), case) is not case), key=numel)
        stages: list[list[Call]] = [[], [], [], [Call(self, case, d) for case in others for d in own]]
        for i, case in enumerate(kinds.values()):
            for j, dtype in enumerate(own):
                stages[0 if i == 0 else 1 if j == i % len(own) else 2].append(Call(self, case, dtype))
        why_not = self.op.cases.why_not
        return [[c for c in s if why_not(c.case, self.backend, self.device, c.dtype) is None] for s in stages]

    def run(self, call: Call) -> None:
        name = short_dtype(call.dtype)
        self.checked[name] = self.checked.get(name, 0) + 1
        options = f"--backend {self.backend} --device {self.device} --dtype {name} --case {call.case.id}"
        start = time.monotonic()
        with self.caught(f"{name} {call.case.id}", f"{COMMAND} {self.op.name} {options}"):
            assert_parity(self.op, call.case, backend=self.backend, dtype=call.dtype, device=self.device)
        self.took = time.monotonic() - start

    def run_on_gpu(self) -> None:
        case = small_cases(self.op.cases.CASES[self.op.name])[0]
        checks: list[tuple[str, Callable[[OpSpec, str, Case], None]]] = [("stream", side_stream), ("graph", cuda_graph)]
        if torch.cuda.device_count() > 1:
            checks.append(("second GPU", second_device))
        for name, check in checks:
            with self.caught(f"{name} {case.id}", f"{COMMAND} {self.op.name} --backend {self.backend}"):
                check(self.op, self.backend, case)
            self.on_gpu.append(name)

    @contextmanager
    def caught(self, what: str, again: str) -> Iterator[None]:
        """Records an error in the block as a failure. The block ends when the GPU has finished, so that its errors are
        recorded here too."""
        try:
            yield
            if self.device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            text = " ".join(str(error).split())
            self.failures.append(f"{what}: {type(error).__name__}: {text[:400]}\n      again: {again}")

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {n}" for name, n in self.checked.items())
        verdict = "FAIL" if self.failures else "ok"
        of = f"{self.done} of {self.total} cases ({counts})"
        return ", ".join([f"{verdict:<5} {self.op.name:<22} {self.backend:<8} {of}", *self.on_gpu])


def rows(ops: Iterable[str], backends: Iterable[str], device: str) -> Iterator[Row]:
    """Yields the kernels that can run on the device."""
    for name in ops:
        for backend in backends:
            if OPS[name].why_not(backend, device) is None:
                yield Row(OPS[name], backend, device)


def schedule(rows: Iterable[list[list[Call]]]) -> list[Call]:
    """The stages of all kernels, one after the other. Within a stage, all kernels have always completed about the same
    fraction of their calls. So kernels with more or slower calls get more of the time."""
    paced = [
        (stage, (i + 1) / len(calls), call)
        for stages in rows
        for stage, calls in enumerate(stages)
        for i, call in enumerate(calls)
    ]
    return [call for _, _, call in sorted(paced, key=lambda each: each[:2])]


def device_is_lost(device: str) -> bool:
    """Whether an error (an illegal access) has made the GPU unusable for this process."""
    if device != "cuda":
        return False
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


def main(argv: list[str], environment: list[str]) -> int:
    """Compares every kernel that can run here with the reference. Returns 1 if one is wrong, and 2 if there is nothing
    to check."""
    dtypes = {short_dtype(d): d for d in FLOATS}
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("op", nargs="*", help=f"operations (default: all of {', '.join(OPS)})")
    parser.add_argument("--backend", choices=("triton", "native"), help="only this one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=dtypes, help="only this one")
    parser.add_argument("--case", help="only the case of this id")
    times = parser.add_mutually_exclusive_group()
    times.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"the time for all cases together (default: {SECONDS:.0f})"
    )
    times.add_argument("--all", action="store_true", help="every case, however long it takes")
    options = parser.parse_args(argv)
    unknown = [name for name in options.op if name not in OPS]
    if unknown:
        parser.error(f"op must be one of {', '.join(OPS)}; got {unknown[0]}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    print("\n".join([*environment, ""]), flush=True)
    backends = (options.backend,) if options.backend else ("triton", "native")
    found = list(rows(options.op or OPS, backends, options.device))
    if not found:
        reasons = {f"{b}: {op.why_not(b, options.device)}" for op in OPS.values() for b in backends if op.impl(b)}
        print(f"nothing to check on {options.device}:", *sorted(reasons), sep="\n  ")
        return 2
    if any(row.backend == "triton" for row in found) and _triton.INTERPRET:
        print("Triton's kernels are interpreted on the CPU: this checks their arithmetic, not their code for a GPU.\n")
    chosen = (dtypes[options.dtype],) if options.dtype else tuple(dtypes.values())
    stages = [row.stages(chosen, options.case) for row in found]
    if not any(map(any, stages)):
        parser.error(f"no case {options.case!r} for {', '.join(sorted({row.op.name for row in found}))}")
    for row, of_row in zip(found, stages, strict=True):
        row.total = sum(map(len, of_row))
    seconds = math.inf if options.all else options.seconds
    return run(found, schedule(stages), seconds, options.device == "cuda" and options.case is None)


def steps(
    found: list[Row], calls: list[Call], seconds: float, gpu_too: bool
) -> Iterator[tuple[Row, str, Callable[[], None]]]:
    """Yields the next steps, each as its row, a text and a function: all calls, or those that should end within
    `seconds` and at least one for each kernel and dtype. `gpu_too`: first the checks that need a GPU."""
    end = time.monotonic() + seconds
    for row in found if gpu_too else ():
        yield row, "launches", row.run_on_gpu
    for each in calls:
        dtype = short_dtype(each.dtype)
        if time.monotonic() + each.row.took <= end or dtype not in each.row.checked:
            yield each.row, f"{dtype} {each.case.id}", partial(each.row.run, each)


def run(found: list[Row], calls: list[Call], seconds: float, gpu_too: bool) -> int:
    """Runs the `steps` and prints their results. Returns the exit status."""
    with Progress(len(calls), seconds) as progress:
        for row, what, step in steps(found, calls, seconds, gpu_too):
            progress.at(f"{row.op.name} {row.backend} {what}", sum(each.done for each in found))
            before = len(row.failures)
            step()
            for failure in row.failures[before:]:
                progress.say(f"FAIL  {row.op.name} {row.backend} {failure}")
            if len(row.failures) > before and device_is_lost(row.device):
                rest = " ".join(dict.fromkeys(each.op.name for each in found if not each.failures))
                progress.say(f"this process can no longer use the GPU; check the others with: {COMMAND} {rest}")
                break
    print(*found, sep="\n")
    if left := len(calls) - sum(row.done for row in found):
        print(f"\n{left} of {len(calls)} cases were not reached (the smallest of each kind come first); --all runs all")
    failures = sum(len(row.failures) for row in found)
    if failures:
        print(f"\n{failures} failures. Please report all output above: it names the versions and the device.")
        return 1
    print(f"\nall right: {len(found)} kernels agree with the reference on {found[0].device}")
    return 0
