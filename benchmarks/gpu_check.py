"""`make gpu-check`: everything that needs a GPU, with the current Python and without a network.

The parts, in order; a failing one does not stop the rest. GPU_CHECK=build|parity|sanitize|bench runs a single one.
    build     the extension, by nvcc
    parity    the whole test suite, with CUDA tensors; CUDA graphs; more than 2^31 elements
    sanitize  compute-sanitizer (memcheck, racecheck, initcheck) on a few cases, where it is installed
    bench     the benchmarks
The result goes to benchmarks/results/<gpu>.json (or to the folder in OUT, where that is set, beside the logs).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
PARTS = ("build", "parity", "sanitize", "bench")
#: Seconds that each part may take; together they stay within ten minutes.
LIMITS = {"build": 130, "parity": 210, "sanitize": 60, "bench": 180}


def run(name: str, command: list[str], limit: float) -> dict[str, Any]:
    """Run a command, its output shown as it comes and kept in a log."""
    print(f"--- {name}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    env = os.environ | {"PYTHONUNBUFFERED": "1", "CI": "true"}  # under CI a failed build is an error
    env.pop("TRITON_INTERPRET", None)
    log = OUT / f"{name}.log"
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    timer = threading.Timer(limit, process.kill)
    timer.start()
    with log.open("w") as file:
        for line in process.stdout:
            file.write(line)
            print(line, end="", flush=True)
    process.wait()
    timed_out = time.monotonic() - start >= limit
    timer.cancel()
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    summary = lines[-1] if lines else ""
    ok = process.returncode == 0 and not timed_out
    if timed_out:
        summary = f"stopped after {limit:.0f} s; last line: {summary}"
    return {"ok": ok, "seconds": round(time.monotonic() - start, 1), "summary": summary, "log": log.name}


def build() -> dict[str, Any]:
    return run("build", [sys.executable, "setup.py", "build_ext", "--inplace"], LIMITS["build"])


def parity() -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "tests", "-q", "--no-header", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "4"]
    # The ahead-of-time compilations, the CPU checker and the CPU kernels are proved without a GPU, on every commit.
    left_out = ("test_aot.py", "cuda_on_cpu", "test_fuzz.py", "test_sanitize.py")
    command += [*(f"--ignore=tests/{name}" for name in left_out), "-k", "not cuda_on_cpu"]
    return run("parity", command, LIMITS["parity"])


def sanitize() -> dict[str, Any]:
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"ok": True, "summary": "skipped: compute-sanitizer is not installed"}
    result: dict[str, Any] = {"ok": True, "seconds": 0.0}
    for tool in ("memcheck", "racecheck", "initcheck"):
        command = [program, "--tool", tool, "--error-exitcode", "1", sys.executable, "-m", "benchmarks.gpu_sanitize"]
        part = run(f"sanitize-{tool}", command, LIMITS["sanitize"] / 3)
        result[tool] = part
        result["ok"] &= part["ok"]
        result["seconds"] += part["seconds"]
    result["summary"] = ", ".join(f"{t}: {result[t]['summary']}" for t in ("memcheck", "racecheck", "initcheck"))
    return result


def bench() -> dict[str, Any]:
    target = OUT / "benchmarks.json"
    # Operations and host time; models and growth take minutes more: pytest benchmarks --benchmark-only.
    files = ["benchmarks/test_ops.py", "benchmarks/test_overhead.py"]
    command = [sys.executable, "-m", "pytest", *files, "--benchmark-only", "-p", "no:cacheprovider"]
    command.append(f"--budget={(LIMITS['bench'] - 20) / 60:.2f}")
    result = run("bench", [*command, f"--benchmark-json={target}"], LIMITS["bench"])
    if target.exists() and target.stat().st_size:
        rows = json.loads(target.read_text())["benchmarks"]
        result["rows"] = [row["extra_info"] for row in rows]
        target.unlink()
    return result


def environment() -> dict[str, str]:
    from foundry_kernels.__main__ import versions

    return dict(line.strip().split(None, 1) for line in versions())


def main() -> int:
    chosen = os.environ.get("GPU_CHECK", "")
    if chosen and chosen not in PARTS:
        print(f"GPU_CHECK must be one of {', '.join(PARTS)}; got {chosen!r}", file=sys.stderr)
        return 2
    try:
        import torch
    except ImportError:
        print("gpu-check needs a Python with torch: make gpu-check PYTHON=...", file=sys.stderr)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    print("\n".join(f"{k:<11} {v}" for k, v in environment().items()))
    if not torch.cuda.is_available():
        reason = "torch is a CPU build" if torch.version.cuda is None else "no CUDA device is present"
        print(f"gpu-check stops here: {reason}. Nothing was measured and no result was written.", file=sys.stderr)
        return 3
    steps: tuple[Callable[[], dict[str, Any]], ...] = (build, parity, sanitize, bench)
    gpu = torch.cuda.get_device_name()
    report: dict[str, Any] = {"gpu": gpu, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    for name, step in zip(PARTS, steps, strict=True):
        if chosen not in ("", name):
            continue
        try:
            report[name] = step()
        except Exception as error:
            report[name] = {"ok": False, "summary": f"{type(error).__name__}: {error}"}
    # The table of backends as a fresh process sees it, now that the extension is built.
    show = subprocess.run([sys.executable, "-m", "foundry_kernels"], cwd=ROOT, capture_output=True, text=True)
    report["environment"] = show.stdout.splitlines()
    target = OUT / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{show.stdout}\n{gpu}: {target}")
    for name in PARTS:
        if name in report:
            part = report[name]
            print(
                f"{name:<9} {'ok  ' if part['ok'] else 'FAIL'} {part.get('seconds', 0):>6} s  {part['summary'][:150]}"
            )
    print_rows(report.get("bench", {}).get("rows", []))
    return 0 if all(report[n]["ok"] for n in PARTS if n in report) else 1


def print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["row"] in ("triton", "native") and "speedup_over" in row:
            over = ", ".join(f"{n} {r:.2f}x" for n, r in row["speedup_over"].items())
            name = f"{row['op']:<13} {row['direction']:<8} {row['case']:<24} {row['row']:<7}"
            print(f"{name} {row['GB/s']:>8.0f} GB/s  {over}")


if __name__ == "__main__":
    sys.exit(main())
