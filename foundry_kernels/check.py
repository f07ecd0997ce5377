"""`python -m foundry_kernels check`: whether every operation is right on the device at hand, in about a minute.

Needs no checkout: the cases and the tolerance policy are those of the test suite, and are installed with the package.
Each kernel is held against the reference, forward and backward, for as many of its cases and dtypes as the time allows,
in an order that is random but always the same. On a GPU it is also launched on a side stream, captured in a CUDA graph
and, where there is a second GPU, called with tensors on the one that is not current.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foundry_kernels import OPS, _triton
from foundry_kernels.registry import FLOATS, OpSpec, short_dtype
from foundry_kernels.testing import Case, assert_parity, call, make_cotangents

COMMAND = "python -m foundry_kernels check"


def small_cases(cases: Iterable[Case]) -> tuple[Case, ...]:
    """A few small cases, each with options or layouts that the others do not have."""
    kinds: dict[object, Case] = {}
    for case in cases:
        if 16 <= numel(case) <= 6000:
            layouts = tuple(None if a is None else (a.layout, a.dtype, a.grad) for a in case.args.values())
            kinds.setdefault((tuple(sorted(map(str, case.options.items()))), layouts), case)
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
    """A call on a stream that is busy waits for it, and its results are those of the default stream."""
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
    """Forward and backward, captured once and replayed on other values, give what a call on these gives."""
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
    """With tensors on cuda:1 results are the same, bit for bit, whichever device is the current one."""
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


@dataclass
class Row:
    """One backend of one operation on one device, and what came of it."""

    op: OpSpec
    backend: str
    device: str
    checked: dict[str, int] = field(default_factory=dict)  # cases by dtype
    total: int = 0
    failures: list[str] = field(default_factory=list)

    def calls(self, dtypes: tuple[torch.dtype, ...], case_id: str | None) -> list[tuple[Case, torch.dtype]]:
        interpreted = self.backend == "triton" and self.device == "cpu"
        impl = self.op.impl(self.backend)
        assert impl is not None
        cases = [c for c in self.op.cases.CASES[self.op.name] if c.interpreted or not interpreted]
        if case_id is not None:
            cases = [c for c in cases if c.id == case_id]
        found = [(c, d) for d in dtypes if d in impl.dtypes for c in cases]
        random.Random(0).shuffle(found)
        first = {dtype: (case, dtype) for case, dtype in reversed(found)}  # of each dtype, however short the time is
        return [*first.values(), *(each for each in found if each != first[each[1]])]

    def run(self, calls: list[tuple[Case, torch.dtype]], seconds: float) -> None:
        """All calls, or those that are begun within `seconds` and at least one of each dtype."""
        self.total = len(calls)
        end = time.monotonic() + seconds
        for case, dtype in calls:
            name = short_dtype(dtype)
            if time.monotonic() > end and name in self.checked:
                continue
            self.checked[name] = self.checked.get(name, 0) + 1
            options = f"--backend {self.backend} --device {self.device} --dtype {name} --case {case.id}"
            with self.caught(f"{name} {case.id}", f"{COMMAND} {self.op.name} {options}"):
                assert_parity(self.op, case, backend=self.backend, dtype=dtype, device=self.device)

    def run_on_gpu(self) -> list[str]:
        """The checks that only a GPU can make; their names."""
        case = small_cases(self.op.cases.CASES[self.op.name])[0]
        checks: list[tuple[str, Callable[[OpSpec, str, Case], None]]] = [("stream", side_stream), ("graph", cuda_graph)]
        if torch.cuda.device_count() > 1:
            checks.append(("second GPU", second_device))
        for name, check in checks:
            with self.caught(f"{name} {case.id}", f"{COMMAND} {self.op.name} --backend {self.backend}"):
                check(self.op, self.backend, case)
        return [name for name, _ in checks]

    @contextmanager
    def caught(self, what: str, again: str) -> Iterator[None]:
        """Note an error as a failure. The block ends when the GPU has finished, so that an error is noted where it was
        caused."""
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
        of = f"{sum(self.checked.values())} of {self.total} cases ({counts})"
        return f"{verdict:<5} {self.op.name:<22} {self.backend:<8} {of}"


def rows(ops: Iterable[str], backends: Iterable[str], device: str) -> Iterator[Row]:
    """The kernels that can run on the device."""
    for name in ops:
        for backend in backends:
            if OPS[name].why_not(backend, device) is None:
                yield Row(OPS[name], backend, device)


def device_is_lost(device: str) -> bool:
    """Whether an error (an illegal access) has made the GPU useless to this process."""
    if device != "cuda":
        return False
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


def main(argv: list[str], environment: list[str]) -> int:
    """Hold every kernel that can run here against the reference; 1 if one is wrong, 2 if there is nothing to check."""
    dtypes = {short_dtype(d): d for d in FLOATS}
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("op", nargs="*", help=f"operations (default: all of {', '.join(OPS)})")
    parser.add_argument("--backend", choices=("triton", "native"), help="only this one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=dtypes, help="only this one")
    parser.add_argument("--case", help="only the case of this id")
    parser.add_argument("--seconds", type=float, default=60.0, help="the time for all cases together (default: 60)")
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
        print("Triton's kernels are interpreted on the CPU: their arithmetic is checked, not what a GPU makes of it.\n")
    chosen = (dtypes[options.dtype],) if options.dtype else tuple(dtypes.values())
    calls = {id(row): row.calls(chosen, options.case) for row in found}
    if not any(calls.values()):
        parser.error(f"no case {options.case!r} for {', '.join(sorted({row.op.name for row in found}))}")
    end = time.monotonic() + options.seconds
    for i, row in enumerate(found):
        row.run(calls[id(row)], (end - time.monotonic()) / (len(found) - i))
        more = row.run_on_gpu() if options.device == "cuda" and options.case is None else []
        print(f"{row}{''.join(', ' + name for name in more)}", flush=True)
        for failure in row.failures:
            print(f"    {failure}", flush=True)
        if row.failures and device_is_lost(options.device):
            rest = " ".join(dict.fromkeys(r.op.name for r in found[i + 1 :]))
            print(f"the GPU cannot be used any more by this process; check the rest by: {COMMAND} {rest}")
            break
    failures = sum(len(row.failures) for row in found)
    if failures:
        print(f"\n{failures} failures. Please report all that is printed above: it names the versions and the device.")
        return 1
    print(f"\nall right: {len(found)} kernels agree with the reference on {options.device}")
    return 0
