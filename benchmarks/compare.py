"""Compares this tree with another commit: the quick set of both, alternating in one session, with the spread of ratios.

Each side is a process that imports the package of its own tree and waits while the other measures. The benchmarks are
those of this tree, so that both are measured alike; a row that only one side has is named at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.isa import SWITCHES, force

ROOT = Path(__file__).parents[1]
TREES = ROOT / "build" / "compare"
#: Beyond this, and with the whole spread on one side of it, a row is called slower or faster.
MARGIN = 1.05

#: What a side runs: the package from its own tree first, then the benchmarks from this one.
_START = """
import sys
tree, root = sys.argv[1:3]
sys.path.insert(0, tree)
import foundry_kernels
assert foundry_kernels.__file__.startswith(tree), foundry_kernels.__file__
sys.path[0] = root
from benchmarks.compare import serve
serve(*sys.argv[3:])
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("commit", help="the commit, tag or branch to compare this tree with")
    parser.add_argument("-k", metavar="TEXT", default="", help="only rows whose name contains this text")
    parser.add_argument("--turns", type=int, default=5, help="turns of each side (default: 5)")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn (default: 0.3)")
    parser.add_argument("--full", action="store_true", help="all shapes, not the quick set")
    parser.add_argument(
        "--fail-above", type=float, metavar="RATIO", help="exit with 1 if the whole spread of a row is above RATIO"
    )
    parser.add_argument("--isa", choices=tuple(SWITCHES), help="hold both sides to this instruction set of the CPU")
    options = parser.parse_args(argv)
    if options.turns < 2:
        parser.error(f"--turns must be at least 2, for there to be a spread; got {options.turns}")
    other = prepare(options.commit)
    sides = [Side("this tree", ROOT, options.isa), Side(options.commit, other, options.isa)]
    try:
        worst = run(sides, options.k, options.turns, options.seconds, options.full)
    finally:
        for side in sides:
            side.close()
    print(f"\nThe other tree is kept for the next run; to remove it: git worktree remove --force {other}")
    return int(options.fail_above is not None and worst > options.fail_above)


def prepare(commit: str) -> Path:
    """Returns a worktree of the commit, with its extension built, or this tree's where the sources are the same.

    Raises:
        SystemExit: there is no such commit, or it does not build.
    """
    found = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}", check=False)
    if found.returncode:
        raise SystemExit(f"error: {commit!r} is no commit of {ROOT}")
    sha = found.stdout.strip()
    tree = TREES / sha[:12]
    if not (tree / "foundry_kernels").is_dir():
        _git("worktree", "prune")
        _git("worktree", "add", "--detach", str(tree), sha)
    if any((tree / "foundry_kernels").glob("_C*.so")):
        return tree
    compiled = list((ROOT / "foundry_kernels").glob("_C*.so"))
    same = _git("diff", "--quiet", sha, "--", "csrc", "setup.py", "build_extension.py", check=False).returncode == 0
    if compiled and same:
        for path in compiled:
            shutil.copy2(path, tree / "foundry_kernels")
    elif (tree / "setup.py").exists():
        print(f"building the extension of {commit}", flush=True)
        build = [sys.executable, "setup.py", "build_ext", "--inplace"]
        if subprocess.run(build, cwd=tree, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"error: the extension of {commit} does not build; see above, in {tree}")
    return tree


def _git(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"error: git {' '.join(arguments)}: {done.stderr.strip()}")
    return done


class Side:
    """A process with the package of `tree`."""

    def __init__(self, name: str, tree: Path, isa: str | None = None) -> None:
        self.name = name
        # An idle side's threads must sleep, not spin.
        env = os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": ""}
        env |= {} if isa is None else SWITCHES[isa]
        env.pop("TRITON_INTERPRET", None)  # interpreted kernels have no speed
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(tree), str(ROOT), *([] if isa is None else [isa])],
            cwd=tree,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        """Returns the answer of the process.

        Raises:
            SystemExit: it ended, or says what is wrong.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"error: the process of {self.name} ended, with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run(sides: Sequence[Side], text: str, turns: int, seconds: float, full: bool = False) -> float:
    """Measures and prints; returns the smallest ratio of the worst row.

    Raises:
        SystemExit: neither side has a row whose name contains `text`, or one ended.
    """
    listed = [side.ask(list=True, full=full) for side in sides]
    if not any(text in name for name in (*listed[0], *listed[1])):
        raise SystemExit(f"error: no row's name contains {text!r} (-k); `--full` has more of them")
    both = [name for name in listed[0] if name in set(listed[1]) and text in name]
    print(f"{'row':<84} {sides[0].name:>10}  {sides[1].name[:12]:>12}  ratio  spread")
    started, worst, apart = time.monotonic(), 0.0, []
    for index, name in enumerate(both, 1):
        times: list[dict[str, list[float]]] = [{}, {}]
        reasons: set[str] = set()
        for turn in range(turns):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):  # neither is always the first
                answer = sides[which].ask(measure=name, full=full, seconds=seconds)
                reasons |= set(answer["why_not"].values())
                for backend, middle in answer["times"].items():
                    times[which].setdefault(backend, []).append(middle)
        for backend in times[0].keys() & times[1].keys():
            found = Ratio(times[0][backend], times[1][backend])
            worst = max(worst, found.low)
            print(f"{name + ' ' + backend:<84} {found.line()}", flush=True)
        apart += [f"{name}: {reason}" for reason in sorted(reasons)]
        if index % 10 == 0:
            print(f"--- {index} of {len(both)}, {time.monotonic() - started:.0f} s", flush=True)
    for side, mine, theirs in ((sides[0], *listed), (sides[1], *reversed(listed))):
        apart += [f"{name}: only {side.name} has it" for name in mine if name not in set(theirs) and text in name]
    print("\n".join(apart))
    return worst


class Ratio:
    """This tree's times over the other's, turn by turn: above 1 this tree is slower."""

    def __init__(self, this: Sequence[float], other: Sequence[float]) -> None:
        ratios = [a / b for a, b in zip(this, other, strict=True)]
        self.this, self.other = statistics.median(this), statistics.median(other)
        self.middle, self.low, self.high = statistics.median(ratios), min(ratios), max(ratios)

    @property
    def verdict(self) -> str:
        if self.low > MARGIN:
            return "slower"
        return "faster" if self.high < 1 / MARGIN else ""

    def line(self) -> str:
        figures = f"{self.this * 1e6:>10,.1f}  {self.other * 1e6:>12,.1f}  {self.middle:>5.2f}"
        return f"{figures}  {self.low:.2f} .. {self.high:.2f}  {self.verdict}".rstrip()


# --- in the process of a side -----------------------------------------------------------------------------------------


def serve(forced: str | None = None) -> None:
    """Answers requests, a line of JSON each; standard output is kept for the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if forced is not None:
        try:
            force(forced)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
    from benchmarks.calls import Contenders
    from benchmarks.measure import interleaved, reused_memory
    from benchmarks.suite import groups

    last: dict[str, Contenders] = {}

    def measure(measure: str, full: bool, seconds: float) -> dict[str, Any]:
        with reused_memory():
            if measure not in last:
                last.clear()
                group = next(g for g in groups(full) if g.id == measure)
                last[measure] = Contenders(group, group.ours)
            ours = last[measure]
            warm_ups = 4 if ours.group.memory == "warm" else 0
            times = interleaved(ours.prepare, seconds, 25, warm_ups) if ours.prepare else {}
        return {"times": {n: statistics.median(t) for n, t in times.items()}, "why_not": ours.why_not}

    for line in sys.stdin:
        request = json.loads(line)
        listed = [g.id for g in groups(request["full"]) if g.ours != ("reference",)] if "list" in request else None
        answers.write(json.dumps(measure(**request) if listed is None else listed) + "\n")
        answers.flush()
