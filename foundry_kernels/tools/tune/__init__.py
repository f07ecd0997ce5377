"""`python -m foundry_kernels tune`: finds the fastest launch configs and backends on the current GPU.

It calls the operations on their benchmark shapes. Every launcher then passes its candidate configs to `tuning.choose`.
The results of each candidate are compared with the reference by the policy of `testing`, and its launches are timed in
turns with those of the built-in config. The winners are written to a file, which every process on this machine reads
(see `tuning`).
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from foundry_kernels import OPS, _triton, tuning
from foundry_kernels._triton import devices, rows, tuning_file
from foundry_kernels._triton.tuning import Choice
from foundry_kernels._triton.tuning_file import Entry, LaunchConfig, TuningFileError, describe
from foundry_kernels.core.registry import AUTO_ORDER, OpSpec, short_dtype
from foundry_kernels.testing import Case, Expected, call, make_cotangents
from foundry_kernels.tools.check import device_is_lost, numel
from foundry_kernels.tools.tune.measuring import GpuTimer, Timer, WallTimer, ratio

COMMAND = "python -m foundry_kernels tune"
#: A launch config or backend must be faster by this fraction, and by more than the built-in one's own noise.
WON_BY = 0.03
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@dataclass
class Job:
    """One choice among launch configs, with the first case in which a launcher requested it."""

    op: OpSpec
    case: Case
    dtype: torch.dtype
    backward: bool
    choice: Choice
    dropped: dict[str, str] = field(default_factory=dict)  # excluded configs, and why
    speedups: dict[str, float] = field(default_factory=dict)
    winner: LaunchConfig | None = None

    @property
    def what(self) -> str:
        return f"{self.case.id} {short_dtype(self.dtype)}"


Calls = tuple[Callable[[], object], Callable[[], object] | None]


def calls(op: OpSpec, case: Case, dtype: torch.dtype, device: str, backend: str = "triton") -> Calls:
    """A forward and a backward pass of a case; the latter is None if no argument has a gradient."""
    args = case.make(dtype, device)
    outputs = call(op, args, case.options, backend=backend)
    wanted = [t for t in args.values() if t is not None and t.requires_grad]
    paired = [(o, d) for o, d in zip(outputs, make_cotangents(outputs, "contiguous"), strict=True) if o.requires_grad]

    def backward() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            [o for o, _ in paired], wanted, [d for _, d in paired], retain_graph=True, allow_unused=True
        )

    return lambda: call(op, args, case.options, backend=backend), backward if paired else None


def cases_of(op: OpSpec, device: str) -> tuple[Case, ...]:
    """The benchmark shapes, the fastest to measure first; in the interpreter, a few small cases."""
    if device == "cpu":
        return tuple(sorted((c for c in op.cases.CASES[op.name] if c.interpreted and _is_plain(c)), key=numel)[:3])
    if op.bench is None:
        return ()
    quick = op.bench.BENCH_QUICK
    return tuple(sorted(op.bench.bench_cases(op.name, "cuda"), key=lambda case: not case.id.endswith(quick)))


def _is_plain(case: Case) -> bool:
    """Whether the case is small and, like benchmarks, contiguous with aligned rows."""
    return 16 <= numel(case) <= 20_000 and all(
        a is None or (a.layout == "contiguous" and (a.dtype is not None or a.shape[-1] % 16 == 0))
        for a in case.args.values()
    )


def find_jobs(ops: Iterable[OpSpec], dtypes: Iterable[torch.dtype], device: str) -> Iterator[Job]:
    """Yields every choice with several launch configs that the cases request, once."""
    known: set[tuple[str, str]] = set()
    for dtype in dtypes:
        for op in ops:
            for case in cases_of(op, device):
                for job in _asked(op, case, dtype, device):
                    key = job.choice.kernel, job.choice.key
                    if key not in known and len(job.choice.configs) > 1:
                        known.add(key)
                        yield job


def _asked(op: OpSpec, case: Case, dtype: torch.dtype, device: str) -> list[Job]:
    """The choices that launchers request in a forward and a backward pass."""
    with tuning.watched() as seen:
        _, backward = calls(op, case, dtype, device)
        forward = len(seen)
        if backward is not None:
            backward()
    return [Job(op, case, dtype, i >= forward, choice) for i, choice in enumerate(seen.values())]


class Tuner:
    """Checks and times jobs, one after the other."""

    def __init__(self, device: str, timer: Timer) -> None:
        self.device, self.timer = device, timer
        self.kept: tuple[tuple[str, str, torch.dtype], Expected] | None = None

    def expected(self, job: Job) -> Expected:
        """The reference's results, for a smaller case if it has the same choice, otherwise for the case itself."""
        made = job.op.name, job.case.id, job.dtype
        if self.kept is None or self.kept[0] != made:
            bench, case = job.op.bench, job.case
            smaller = bench.parity_case(case) if bench is not None and self.device == "cuda" else case
            if smaller is not case:
                asked = {(j.choice.kernel, j.choice.key) for j in _asked(job.op, smaller, job.dtype, self.device)}
                case = smaller if (job.choice.kernel, job.choice.key) in asked else case
            self.kept = None  # frees memory before the next one is computed
            self.kept = made, Expected.of(job.op, case, job.dtype, self.device)
        return self.kept[1]

    def run(self, job: Job) -> None:
        """Finds the job's winner, if there is one."""
        kernel, key = job.choice.kernel, job.choice.key
        own = describe(job.choice.configs[0])
        forward, backward = calls(job.op, job.case, job.dtype, self.device)
        step = backward if job.backward else forward
        assert step is not None
        expected = self.expected(job)
        repeats: dict[str, Callable[[], object]] = {}
        for row in job.choice.configs:
            name = describe(row)
            with tuning.forced(kernel, key, row):
                try:
                    expected.check("triton")
                    repeats[name] = self.timer.prepare(step, kernel)
                except AssertionError as error:
                    job.dropped[name] = f"WRONG: {error}"
                except Exception as error:  # it does not fit, or does not compile
                    job.dropped[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if own not in repeats:
            return
        times = self.timer.times({**repeats, "again": repeats[own]})
        threshold = 1 + max(WON_BY, 2 * abs(ratio(times[own], times["again"]) - 1))
        job.speedups = {name: ratio(times[own], times[name]) for name in repeats}
        best = max(job.speedups, key=lambda name: job.speedups[name])
        if job.speedups[best] > threshold:  # the best of several is partly luck, so it must win once more, alone
            times = self.timer.times({own: repeats[own], best: repeats[best]})
            job.speedups[best] = ratio(times[own], times[best])
            if job.speedups[best] > threshold:
                job.winner = next(row for row in job.choice.configs if describe(row) == best)


def order_of_backends(op: OpSpec, dtype: torch.dtype, device: str, timer: Timer) -> tuple[list[str], dict[str, float]]:
    """The backends, the fastest first, and their speedups over the default backend: the geometric mean over the shapes
    and both directions. The default order stays unless one is better by more than `WON_BY`."""
    default = [b for b in AUTO_ORDER["cuda"] if op.why_not(b, device, dtype) is None]
    ratios: dict[str, list[float]] = {backend: [] for backend in default}
    bench = op.bench
    quick = bench.BENCH_QUICK if bench is not None else ()
    for case in cases_of(op, device):
        if device == "cuda" and not case.id.endswith(quick):
            continue
        steps: dict[str, Calls] = {}
        for backend in default:
            try:
                steps[backend] = calls(op, case, dtype, device, backend)
            except torch.OutOfMemoryError:  # the reference, on long sequences
                torch.cuda.empty_cache()
        for direction in (0, 1):
            repeats = {b: step for b, both in steps.items() if (step := both[direction]) is not None}
            if default[0] not in repeats:
                continue
            times = timer.times(repeats)
            for backend in default:
                found = ratio(times[default[0]], times[backend]) if backend in times else 1e-3
                ratios[backend].append(found)
    means = {b: statistics.geometric_mean(found) for b, found in ratios.items() if found}
    ranked = sorted(means, key=lambda b: -means[b])
    if not ranked or means[ranked[0]] <= 1 + WON_BY:
        return default, means
    return ranked, means


def why_not(device: str) -> str | None:
    """The reason why nothing can be measured, or None."""
    if _triton.MISSING is not None:
        return _triton.MISSING
    if device == "cpu":
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, a driver too old for torch, or a build without CUDA
        return f"torch finds no usable GPU: {error}"
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    if major < 8:
        return f"{name} has compute capability {major}.{minor}; the Triton kernels need 8.0"
    try:
        part = torch.ones(2, 8, device=device)
        rows.sum_partials(part, torch.empty(8, device=device))
        torch.cuda.synchronize()
    except Exception as error:
        return (
            f"Triton {tuning.triton_version()} cannot launch a kernel on {name}: {' '.join(str(error).split())}. "
            "This also happens if the driver is older than this Triton's CUDA: update it, or install an older Triton"
        )
    return None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    made.add_argument("op", nargs="*", help=f"operations (default: all of {', '.join(OPS)})")
    made.add_argument("--dtype", choices=[short_dtype(d) for d in DTYPES], help="only this one (default: all)")
    made.add_argument("--seconds", type=float, default=300.0, help="the time for everything together (default: 300)")
    made.add_argument(
        "--file", type=Path, help=f"the output file (default: {tuning_file.default_path()}, or ${tuning.VARIABLE})"
    )
    made.add_argument("--no-auto", action="store_true", help="do not compare the backends")
    made.add_argument(
        "--write-table", action="store_true", help="also write the package's table, for all GPUs of this name"
    )
    made.add_argument(
        "--arch",
        type=int,
        metavar="CC",
        help="measure nothing: compile all configs for a GPU that is not present (90 for 9.0)",
    )
    return made


def main(argv: list[str], environment: list[str]) -> int:
    """Measure which launch configs of the Triton kernels, and which backends, are the fastest on this GPU, and keep the
    winners for later processes. The exit status is 2 if nothing can be measured."""
    options_of = parser()
    options = options_of.parse_args(argv)
    unknown = [name for name in options.op if name not in OPS]
    if unknown:
        options_of.error(f"op must be one of {', '.join(OPS)}; got {unknown[0]}")
    ops = [OPS[name] for name in dict.fromkeys(options.op or OPS) if OPS[name].impl("triton") is not None]
    if options.arch is not None:
        from foundry_kernels.tools.tune.ahead import print_configs

        return print_configs(ops, options.arch, options_of.error)
    device = "cpu" if _triton.INTERPRET else "cuda"
    reason = why_not(device)
    if reason is not None:
        print(f"nothing to measure: {reason}")
        print(f"`{COMMAND} --arch 90` shows which configs fit such a GPU, without one.")
        return 2
    path = options.file or tuning.path_in_use() or tuning_file.default_path()
    paths = [path, tuning.PACKAGED] if options.write_table and device == "cuda" else [path]
    try:
        for each in paths:
            tuning_file.check_writable(each)
    except TuningFileError as error:
        print(f"nothing was measured: {error}")
        return 2
    print("\n".join([*environment, ""]))
    if device == "cpu":
        print("Triton's kernels are interpreted: these times do not apply to any GPU, only to the interpreter.\n")
    print(f"measuring for at most {options.seconds:.0f} s; winners go to {path}\n", flush=True)
    dtypes = [d for d in DTYPES if options.dtype in (None, short_dtype(d))]
    timer = GpuTimer() if device == "cuda" else WallTimer()
    found = Measured.on(torch.device(device))
    try:
        measure(found, ops, dtypes, device, timer, options.seconds, auto=not options.no_auto)
    except KeyboardInterrupt:
        print("\ninterrupted; the results so far are kept")
    for each in paths:
        try:
            tuning_file.write(each, found.entry, found.asked)
        except TuningFileError as error:
            print(f"{error}. The results are:\n{vars(found.entry)}")
            return 2
    tuning.forget()
    won = sum(map(len, found.entry.rows.values()))
    print(f"\n{len(found.asked)} launches measured, {won} of them faster with another config.")
    print(f"Written to {' and '.join(map(str, paths))}")
    if found.left:
        print(f"The time was up before {found.left} were measured. Name operations, or give more --seconds.")
    return 0


@dataclass
class Measured:
    """The measurements, the measured choices, and the number of choices not reached in time."""

    entry: Entry
    asked: set[tuple[str, str]] = field(default_factory=set)
    left: int = 0

    @classmethod
    def on(cls, device: torch.device) -> Measured:
        gpu = tuning.gpu_name(device)
        assert gpu is not None
        day = datetime.date.today().isoformat()
        return cls(Entry(gpu, tuning.triton_version(), devices.capability(device), torch.__version__, day))


def measure(
    found: Measured,
    ops: list[OpSpec],
    dtypes: list[torch.dtype],
    device: str,
    timer: Timer,
    seconds: float,
    *,
    auto: bool,
) -> None:
    """Adds measurements to `found` until the time is up. A fifth of the time is for the backends."""
    end = time.monotonic() + seconds
    end_of_launches = end - 0.2 * seconds if auto else end
    tuner, entry = Tuner(device, timer), found.entry
    for job in find_jobs(ops, dtypes, device):
        if found.asked and time.monotonic() > end_of_launches:
            found.left += 1
            continue
        try:
            tuner.run(job)
        except Exception as error:  # the reference needs too much memory
            print(f"{job.choice.kernel}  {job.what}: not measured ({type(error).__name__}: {error})")
        if device_is_lost(device):
            print(f"this process can no longer use the GPU; run {COMMAND} for the other operations")
            return
        if not job.speedups:
            show(job)
            continue
        found.asked.add((job.choice.kernel, job.choice.key))
        show(job)
        if job.winner is not None:
            won = {"row": job.winner, "speedup": round(job.speedups[describe(job.winner)], 3), "case": job.what}
            entry.rows.setdefault(job.choice.kernel, {})[job.choice.key] = won
    for op, dtype in [(op, dtype) for op in ops for dtype in dtypes] if auto else ():
        if time.monotonic() > end:
            found.left += 1
            continue
        order, means = order_of_backends(op, dtype, device, timer)
        entry.auto.setdefault(op.name, {})[short_dtype(dtype)] = order
        shown = ", ".join(f"{b} x{means[b]:.2f}" for b in order if b in means)
        print(f'{op.name} {short_dtype(dtype)}: "auto" takes {order[0]} ({shown})', flush=True)


def show(job: Job) -> None:
    own = describe(job.choice.configs[0])
    print(f"{job.choice.kernel}  {job.what}\n    built in: {own}")
    for name, speedup in sorted(job.speedups.items(), key=lambda item: -item[1]):
        mark = "  wins" if job.winner is not None and name == describe(job.winner) else ""
        if name != own:
            print(f"    x{speedup:.2f}     {name}{mark}")
    for name, reason in job.dropped.items():
        print(f"    dropped  {name}: {reason}")
    print(end="", flush=True)
