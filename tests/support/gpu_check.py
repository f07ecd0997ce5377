"""`make gpu-check`: everything that needs a GPU, with the current Python and without a network, in ten minutes.

    make gpu-check                          # all parts
    make gpu-check ARGS="hopper shapes"     # these parts, in this order of the list:
        build      the extension for this GPU alone, unless one was brought along
        units      samples of Hopper's instructions
        hopper     the parity suite's cases on attention's kernels for compute capability 9.0
        shapes     attention at the sizes of training, on the same kernels
        gluon      attention's forward kernel in Gluon
        streams    every kernel in a CUDA graph and on another stream; more than 2^31 elements
        sanitize   compute-sanitizer (memcheck, racecheck) on a few cases of every kernel, where it is installed
        parity     all other cases of the parity suite, as many as the time allows
        attention  the times of attention, beside SDPA's kernels
        losses     those of the losses
        delta      those of the delta rule
        model      a training step of a Llama of 1 B: transformers, patched, by Liger, compiled
        lora       a training step of its adapters: PEFT, patched, where PEFT is installed
    make gpu-check ARGS=rest                # what has not passed yet; results and sources must be the earlier ones
    make gpu-check ARGS=tune                # `python -m foundry_kernels tune`, only if it is named
    make gpu-check ARGS="--stub"            # a dry run: small sizes on the CPU in place of the GPU

Each check runs in a worker process, within 20 s, or 60 s with times: one that hangs or breaks its process costs no
other. The results go to OUT/<gpu>.json after each part (OUT is build/gpu-check by default; FROM: the folder of earlier
results, if it is another). `python -m benchmarks report OUT/<gpu>.json` merges them into benchmarks/results. Kernels
and the extension come from build/gpu-cache.tar.xz if it was brought along: `make gpu-cache` makes it on a machine
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import gpu_archive  # noqa: E402
from isolated import START, Pool  # noqa: E402

OUT = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check")
FROM = Path(os.environ.get("FROM") or OUT)
#: Seconds that each part may take; together they stay within ten minutes.
LIMITS = {
    "build": 90,
    "units": 15,
    "hopper": 40,
    "shapes": 80,
    "gluon": 15,
    "streams": 20,
    "sanitize": 60,
    "parity": 30,
    "attention": 70,
    "losses": 45,
    "delta": 25,
    "model": 85,
    "lora": 25,
}
PARTS = tuple(LIMITS)
#: Those of parts that only run if they are named.
MORE = {"tune": 140}
#: Parts whose checks are comparisons of times, which nothing else may disturb.
TIMED = ("attention", "losses", "delta", "model", "lora")
#: Seconds of a check, and of a comparison.
CHECK, COMPARISON = 20.0, 60.0
SANITIZERS = ("memcheck", "racecheck")


class Session:
    """The worker processes and the results. `report` is written after each part."""

    def __init__(self, options: Sequence[str]) -> None:
        self.command = [sys.executable, str(HERE / "gpu_worker.py"), *options]
        self.log = OUT / "log.txt"
        self.stub = "--stub" in options
        #: A dry run may be on a busy machine.
        self.patience = 20 if self.stub else 1
        self.report: dict[str, Any] = {}
        self.about: dict[str, Any] = {}
        # cuBLAS is deterministic only with this, which changes its speed.
        self._env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        self._checks = Pool(self.command, self.log, self._env)
        self._timed = self._checks if self.stub else Pool(self.command, self.log)

    def begin(self) -> str | None:
        """Starts a worker; returns the reason why there is none, or None."""
        worker = self._checks.worker()
        self.about = worker.about
        self._checks.give_back(worker)
        reason = self.about.get("no_gpu") or self.about.get("error")
        return None if reason is None else str(reason)

    def close(self) -> None:
        self._checks.close()
        self._timed.close()

    @property
    def target(self) -> Path:
        return OUT / f"{re.sub(r'[^a-z0-9]+', '-', self.about['gpu'].lower()).strip('-')}.json"

    def save(self) -> None:
        self.report["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        self.target.write_text(json.dumps(self.report, indent=1) + "\n")

    # --- parts ---

    def build(self) -> dict[str, Any]:
        """Compiles the extension for this GPU alone, unless the one at hand has code for it and was not built here."""
        found = self.about["extension"]
        architectures = re.split(r"[ ;+]+", str(found.get("cuda_architectures")))
        usable = self.about["capability"] in architectures and found.get("missing") is None
        if self.stub or (usable and not any((ROOT / "build").glob("temp.*"))):
            return {"ok": True, "seconds": 0.0, "summary": f"taken as it is, for {found.get('cuda_architectures')}"}
        os.environ.setdefault(
            "TORCH_CUDA_ARCH_LIST", found["cuda_architectures"] if usable else self.about["capability"]
        )
        self.close()
        result = self.process([sys.executable, "setup.py", "build_ext", "--inplace"], LIMITS["build"])
        if (reason := self.begin()) is not None:
            raise RuntimeError(f"no worker begins after the build: {reason}")
        return result

    def tune(self) -> dict[str, Any]:
        limits = ["--seconds", str(MORE["tune"] - 20), "--file", str(OUT / "tuning.json")]
        return self.process([sys.executable, "-m", "foundry_kernels", "tune", *limits], MORE["tune"])

    def process(self, command: list[str], limit: float) -> dict[str, Any]:
        """Runs a command, its output in the log."""
        began, start = time.monotonic(), self.log.stat().st_size
        with self.log.open("a") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
            try:
                stopped = "" if process.wait(limit) == 0 else "it failed; "
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its own processes too
                stopped = f"stopped after {limit:.0f} s; "
        last = self.log.read_text()[start:].strip().rpartition("\n")[2]
        return {"ok": not stopped, "seconds": round(time.monotonic() - began, 1), "summary": stopped + last}

    def sanitize(self) -> dict[str, Any]:
        program = shutil.which("compute-sanitizer")
        if program is None:
            return {"ok": True, "seconds": 0.0, "summary": "skipped: compute-sanitizer is not installed"}
        began = time.monotonic()
        found: dict[str, Any] = {"ok": True, "passed": [], "failed": {}, "summary": ""}
        for tool in SANITIZERS[: 1 if self.stub else None]:
            log = self.log.with_name(f"{tool}.txt")
            log.unlink(missing_ok=True)
            prefix = [program, "--tool", tool, "--error-exitcode", "1", "--log-file", str(log)]
            pool = Pool([*prefix, *self.command], self.log, self._env, LIMITS["sanitize"] * self.patience / 2)
            names, reason = self.names("sanitize", pool)
            deadline = began + LIMITS["sanitize"] * self.patience * (1 + SANITIZERS.index(tool)) / len(SANITIZERS)
            part = self.checked("sanitize", names, pool, deadline)
            code = pool.close()
            errors = re.findall(r"= (ERROR SUMMARY|RACECHECK SUMMARY): (.+)", log.read_text() if log.exists() else "")
            said = errors[-1][1] if errors else "no summary"
            found["ok"] &= part["ok"] and code == 0 and bool(names)
            found["passed"] += [f"{tool}: {name}" for name in part["passed"]]
            found["failed"] |= {f"{tool}: {name}": error for name, error in part["failed"].items()}
            found["summary"] += f"{tool}: {part['summary']}, {reason or said}; "
        return found | {"seconds": round(time.monotonic() - began, 1)}

    def names(self, part: str, pool: Pool) -> tuple[list[str], str | None]:
        """Returns the names of a part's checks, or none and the reason."""
        ((_, answer),) = pool.run([part], START, time.monotonic() + START, 1)
        return answer.get("found", []), answer.get("error")

    def checked(
        self, part: str, names: Sequence[str], pool: Pool, deadline: float, most: int = 1, each: float = CHECK
    ) -> dict[str, Any]:
        """Runs checks of a part. Those that passed in an earlier run of the same sources are not run again."""
        began = time.monotonic()
        earlier = self.report.get("parts", {}).get(part, {}).get("passed", []) if part != "sanitize" else []
        passed, failed, found = [name for name in names if name in set(earlier)], {}, {}
        left = [f"{part}: {name}" for name in names if name not in set(earlier)]
        for name, answer in pool.run(left, each * self.patience, deadline, most):
            name = name.partition(": ")[2]
            if "error" in answer:
                failed[name] = answer["error"]
                print(f"FAILED {part}: {name}: {answer['error']}", flush=True)
            elif part in TIMED and not self.keep(answer["found"]):
                failed[name] = "wrong"
            else:
                passed.append(name)
                if part == "shapes":  # errors, and SDPA's
                    found[name] = answer["found"]
        summary = f"{len(passed)} of {len(names)} passed, {len(failed)} failed"
        if reached := len(names) - len(passed) - len(failed):
            summary += f", {reached} were not reached"
        seconds = round(time.monotonic() - began, 1)
        if not names:
            summary = "nothing of it on this GPU, or with this extension"
        ok = not failed and (bool(names) or self.about["capability"] != "9.0")
        result = {"ok": ok, "seconds": seconds, "summary": summary, "complete": not reached}
        return result | {"passed": passed, "failed": failed} | ({"found": found} if found else {})

    def keep(self, rows: list[dict[str, Any]]) -> bool:
        """Stores the rows of a comparison and prints those of this package. Returns whether none is wrong."""
        from benchmarks.conftest import in_a_line
        from benchmarks.kept import merge

        merge(self.report, rows)
        self.save()
        for row in rows:
            if row["kind"] == "model" or row["row"] in ("triton", "native") or "why_not" in row:
                what = f"{row['op']:<13} {row['direction']:<8} {row['case']:<24} {row['row']:<7}"
                print(f"{what} {row.get('why_not') or in_a_line(row)}", flush=True)
        return not any("wrong" in row for row in rows)

    def run(self, part: str) -> None:
        print(f"--- {part}", flush=True)
        own = {"build": self.build, "tune": self.tune, "sanitize": self.sanitize}
        try:
            if part in own:
                result = own[part]()
            else:
                pool, each = (self._timed, COMPARISON) if part in TIMED else (self._checks, CHECK)
                if pool is not self._checks:
                    self._checks.close()
                deadline = time.monotonic() + LIMITS[part] * self.patience
                names, reason = self.names(part, pool)
                most = 1 if part in TIMED or self.stub else min(8, (os.cpu_count() or 2) // 2)
                result = self.checked(part, names, pool, deadline, most, each)
                result["summary"] = reason or result["summary"]
        except Exception as error:
            result = {"ok": False, "seconds": 0.0, "summary": f"{type(error).__name__}: {error}"}
        self.report.setdefault("parts", {})[part] = result
        self.save()

    def resume(self, chosen: Sequence[str]) -> tuple[str, ...]:
        """Takes the earlier results of the same sources, and returns the parts to be run."""
        new = {
            "gpu": self.about["gpu"],
            "sources": gpu_archive.digest("foundry_kernels", "csrc", "tests", "benchmarks"),
        }
        try:
            earlier = json.loads((FROM / self.target.name).read_text())
        except (OSError, ValueError):
            earlier = {}
        same = isinstance(earlier, dict) and earlier.get("sources") == new["sources"]
        if "rest" in chosen and not same:
            print(f"nothing to continue: {FROM / self.target.name} is not there, or is of other sources", flush=True)
        self.report = (earlier if same else {}) | new | {"device": self.about["gpu"]}
        self.report |= {key: self.about[key] for key in ("environment", "isa")}
        known = self.report.setdefault("parts", {})
        if "rest" in chosen:
            return tuple(p for p in PARTS if not (known.get(p, {}).get("ok") and known[p].get("complete", True)))
        wanted = tuple(p for p in (*PARTS, *MORE) if p in (chosen or PARTS))
        for part in wanted:
            known.pop(part, None)
        return wanted


def use_archive() -> Mapping[str, Any]:
    """Unpacks what was brought along, and prints what there is; returns the archive's `about`, if there is one."""
    os.environ["TRITON_CACHE_DIR"] = str(gpu_archive.FOLDER)
    archive = gpu_archive.ARCHIVE
    if not archive.exists():
        print(f"kernels are compiled here: no {archive.name} was brought along (`make gpu-cache`)")
        return {}
    try:
        about = gpu_archive.unpack(archive, gpu_archive.FOLDER)
    except ValueError as error:
        print(f"kernels are compiled here: {error}")
        return {}
    print(f"{about['kernels']} kernels were brought along; {gpu_archive.place_extension(gpu_archive.FOLDER, about)}")
    return about


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(
        prog="tests/support/gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join((*PARTS, *MORE))}, or rest")
    parser.add_argument("--stub", action="store_true", help="a dry run without a GPU")
    options = parser.parse_args(argv)
    if unknown := {*options.parts} - {*PARTS, *MORE, "rest"}:
        parser.error(f"a part must be rest or of {', '.join((*PARTS, *MORE))}; got {', '.join(sorted(unknown))}")
    for folder in (OUT, gpu_archive.FOLDER):
        if (reason := gpu_archive.why_not_writable(folder)) is not None:
            print(f"gpu-check stops here: {reason}. Results go to the folder in OUT.", file=sys.stderr)
            return 2
    brought = {} if options.stub else use_archive()
    session = Session(["--stub"] if options.stub else [])
    try:
        return check(session, options.parts, brought)
    finally:
        session.close()


def check(session: Session, chosen: Sequence[str], brought: Mapping[str, Any]) -> int:
    if (reason := session.begin()) is not None:
        print(f"gpu-check stops here: {reason}. Nothing was measured and no result was written.", file=sys.stderr)
        return 3
    about = session.about
    print("\n".join(f"{k:<11} {v}" for k, v in about["environment"].items()), flush=True)
    if brought:
        here = about["made_with"] | {"arch": int(about["capability"].replace(".", ""))}
        if (reason := gpu_archive.why_it_would_miss(brought, here)) is not None:
            print(f"the kernels that were brought along will not be found: {reason}", flush=True)
    for part in session.resume(chosen):
        session.run(part)
    print(f"\n{about['gpu']}: {session.target}")
    left, failed = [], False
    for name in (*PARTS, *MORE):
        part = session.report["parts"].get(name, {})
        if part:
            print(f"{name:<9} {'ok  ' if part['ok'] else 'FAIL'} {part['seconds']:>6} s  {part['summary'][:150]}")
        failed |= name in PARTS and bool(part) and not part["ok"]
        if name in PARTS and not (part.get("ok") and part.get("complete", True)):
            left.append(name)
    if left:
        print(f"not passed, or not whole: {', '.join(left)}; `make gpu-check ARGS=rest` goes on from here")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
