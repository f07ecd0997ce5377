"""`make gpu-check`: everything that needs a GPU, with the current Python and without a network.

The parts, in order, which together take ten minutes at most; a failing one does not stop the rest.
GPU_CHECK=units,bench runs those parts; GPU_CHECK=rest those that have not passed yet, and of their
tests those that have not.
    build     the extension, by nvcc
    units     samples of Hopper's instructions, where there is an nvcc
    parity    attention's cases with CUDA tensors: native, and Triton's masks, biases and dropout in float32 and float16
    sanitize  compute-sanitizer (memcheck, racecheck) on a few cases of every kernel, where it is installed
    bench     operations beside their peers, attention 128 wide first; host time
    model     a training step of a Llama of 1 B: unpatched, patched, by Liger; compiled
    tune      `python -m foundry_kernels tune --seconds 120`
Only where they are named, as they take longer:
    all       all of the parity suite's cases with CUDA tensors
    suite     all other tests, with CUDA tensors; CUDA graphs; more than 2^31 elements
The result goes to benchmarks/results/<gpu>.json (or to the folder in OUT, where that is set, beside the logs), after
each part, so that a run that is stopped leaves what it had; rows of the benchmarks lie beside it as they are measured.
GPU_CHECK=rest continues from there (or from the folder in FROM) if the sources are the same. Kernels come from
build/gpu-cache.tar.xz, if it was brought along: `make gpu-cache` fills it on a machine without a GPU. Else they are
compiled as they are met.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT), str(HERE)]
OUT = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
FROM = Path(os.environ.get("FROM") or OUT)
#: Seconds that each part may take; together they stay within ten minutes.
LIMITS = {"build": 100, "units": 20, "parity": 75, "sanitize": 35, "bench": 110, "model": 120, "tune": 140}
PARTS = tuple(LIMITS)
#: Those of parts that only run where they are named.
MORE = {"all": 580, "suite": 580}
SANITIZERS = ("memcheck", "racecheck")
#: Of attention in Triton what no GPU has run: its masks, biases, tiles and dropout in bfloat16 have.
NEW = "triton-cuda and (bool or bias or mask or dropout or tiles or blocks or documents) and not bfloat16"
CACHE = ROOT / "build" / "gpu-cache"


def run(name: str, command: list[str], limit: float) -> dict[str, Any]:
    """Runs a command, its output shown as it comes and kept in a log."""
    print(f"--- {name}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    env.pop("TRITON_INTERPRET", None)
    log = OUT / f"{name}.log"
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))  # its own processes too
    timer.start()
    with log.open("w") as file:
        for line in process.stdout:
            file.write(line)
            print(line, end="", flush=True)
    process.wait()
    timed_out = time.monotonic() - start >= limit
    timer.cancel()
    summary = next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "")
    if timed_out:
        summary = f"stopped after {limit:.0f} s; last line: {summary}"
    return {
        "ok": process.returncode == 0 and not timed_out,
        "seconds": round(time.monotonic() - start, 1),
        "summary": summary,
        "log": log.name,
    }


def tests(name: str, arguments: list[str]) -> dict[str, Any]:
    """pytest, with a process for each core: most of the time goes into compiling and into oracles on the CPU."""
    command = [sys.executable, "-m", "pytest", *arguments, "-q", "--no-header", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"]
    passed, already = OUT / f"{name}-passed.txt", OUT / f"{name}-already.txt"
    already.write_text(passed.read_text() if passed.exists() else "")
    command += ["-p", "gpu_resume", f"--passed-file={passed}", f"--already-passed={already}"]
    command.append(f"--failed-file={OUT / f'{name}-failed.txt'}")
    before = compiled_kernels()
    result = run(name, command, (LIMITS | MORE)[name])
    names = set(passed.read_text().splitlines()) if passed.exists() else set()
    result |= {"passed": len(names), "kernels compiled": compiled_kernels() - before}
    result["summary"] += f" ({len(names)} passed in all, {result['kernels compiled']} kernels compiled)"
    already.unlink()
    return result


def compiled_kernels() -> int:
    """Kernels in the folder from which the tests take them, and in which they leave what they compile."""
    return sum(1 for _ in CACHE.glob("*/*.cubin"))


def use_cache(arch: int) -> str:
    """Have the tests use the kernels that were brought along, if there are any; what became of that, in a sentence."""
    CACHE.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(CACHE)
    archive = CACHE.with_name(CACHE.name + ".tar.xz")
    if not archive.exists():
        return f"kernels are compiled here: no {archive.relative_to(ROOT)} was brought along (`make gpu-cache`)"
    import gpu_cache

    try:
        about = gpu_cache.unpack(archive, CACHE)
    except ValueError as error:
        return f"kernels are compiled here: {error}"
    reason = gpu_cache.why_it_would_miss(about, arch)
    return f"{about['kernels']} kernels were brought along" + (f", which will not be found: {reason}" if reason else "")


def sanitize() -> dict[str, Any]:
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"ok": True, "summary": "skipped: compute-sanitizer is not installed"}
    result: dict[str, Any] = {"ok": True, "seconds": 0.0}
    for tool in SANITIZERS:
        command = [program, "--tool", tool, "--error-exitcode", "1", sys.executable, str(HERE / "gpu_sanitize.py")]
        part = run(f"sanitize-{tool}", command, LIMITS["sanitize"] / len(SANITIZERS))
        result[tool] = part
        result["ok"] &= part["ok"]
        result["seconds"] += part["seconds"]
    result["summary"] = ", ".join(f"{t}: {result[t]['summary']}" for t in SANITIZERS)
    return result


def rows_of(name: str, arguments: list[str]) -> dict[str, Any]:
    """Runs benchmarks; each row is in a file as soon as it is measured."""
    target = OUT / f"{name}-rows.jsonl"
    target.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *arguments, "--benchmark-only", "-v", "-p", "no:cacheprovider"]
    result = run(name, [*command, f"--rows={target}"], LIMITS[name])
    result["rows"] = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []
    return result


def tune() -> dict[str, Any]:
    target = OUT / "tuning.json"
    command = [sys.executable, "-m", "foundry_kernels", "tune", "--seconds", str(LIMITS["tune"] - 20)]
    result = run("tune", [*command, "--file", str(target)], LIMITS["tune"])
    if target.exists():
        result["tuned"] = target.name
    return result


#: The tests of a part. The CPU's kernels, the ahead-of-time compilations and the checker of CUDA kernels are proved
#: without a GPU, on every commit.
_PARITY = "tests/proof/test_parity.py"
_PROOFS = ("tools/test_aot.py", *(f"proof/test_{name}.py" for name in ("parity", "checker", "fuzz", "sanitize")))
_TESTS = {
    "units": ["tests/proof/cuda/test_hopper_units.py"],
    "parity": [_PARITY, "-k", f"flash_attention and (native-cuda or ({NEW}))"],
    "all": [_PARITY, "-k", "not cuda_on_cpu and not native-cpu"],
    "suite": ["tests", *(f"--ignore=tests/{name}" for name in _PROOFS), "-k", "not cuda_on_cpu"],
}
_SUITES = [f"benchmarks/test_{name}.py" for name in ("ops", "overhead")]  # growth takes minutes more
STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "build": lambda: run("build", [sys.executable, "setup.py", "build_ext", "--inplace"], LIMITS["build"]),
    **{name: partial(tests, name, arguments) for name, arguments in _TESTS.items()},
    "sanitize": sanitize,
    "bench": lambda: rows_of("bench", [*_SUITES, f"--budget={(LIMITS['bench'] - 20) / 60:.2f}"]),
    "model": lambda: rows_of("model", ["benchmarks/test_model.py", "-k", "training", "--budget=0"]),
    "tune": tune,
}


def environment() -> dict[str, str]:
    from foundry_kernels.tools.environment import versions

    return dict(line.strip().split(None, 1) for line in versions())


def sources() -> str:
    """Returns a digest of what the parts test: results are continued only where it is the same."""
    digest = hashlib.sha256()
    for folder in ("foundry_kernels", "csrc", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".cu", ".h", ".cuh"):
                digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def begin(gpu: str, chosen: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the report, with what an earlier run of the same sources left in it, and the parts to be run."""
    name = file_name(gpu)
    report: dict[str, Any] = {"gpu": gpu, "sources": sources()}
    try:
        earlier = json.loads((FROM / name).read_text())
    except (OSError, ValueError):
        earlier = {}
    same = isinstance(earlier, dict) and earlier.get("sources") == report["sources"]
    if same:
        report |= earlier
    elif chosen == "rest":
        print(f"nothing to continue: {FROM / name} is not there, or is of other sources; all parts are run", flush=True)
    for part in (*PARTS, *MORE):
        passed = OUT / f"{part}-passed.txt"
        if not (same and chosen == "rest"):
            passed.unlink(missing_ok=True)
        elif FROM != OUT and (FROM / passed.name).exists():
            shutil.copyfile(FROM / passed.name, passed)
    if chosen in ("", "rest"):
        return report, tuple(p for p in PARTS if chosen == "" or not report.get(p, {}).get("ok"))
    return report, tuple(p for p in (*PARTS, *MORE) if p in chosen.split(","))


def file_name(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(
        prog="tests/support/gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    chosen = os.environ.get("GPU_CHECK", "")
    if chosen and not set(chosen.split(",")) <= {*PARTS, *MORE} and chosen != "rest":
        print(f"GPU_CHECK must be rest or any of {', '.join((*PARTS, *MORE))}; got {chosen!r}", file=sys.stderr)
        return 2
    try:
        import torch
    except ImportError:
        print("gpu-check needs a Python with torch: make gpu-check PYTHON=...", file=sys.stderr)
        return 2
    from gpu_cache import why_not_writable

    if (reason := why_not_writable(OUT) or why_not_writable(CACHE)) is not None:
        where = f"Results go to the folder in OUT, kernels to {CACHE}"
        print(f"gpu-check stops here: {reason}. {where}.", file=sys.stderr)
        return 2
    print("\n".join(f"{k:<11} {v}" for k, v in environment().items()))
    from foundry_kernels._triton import devices

    if (reason := devices.why_no_gpu()) is not None:
        print(f"gpu-check stops here: {reason}. Nothing was measured and no result was written.", file=sys.stderr)
        return 3
    gpu = torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    print(use_cache(10 * major + minor), flush=True)
    return check(gpu, chosen)


def check(gpu: str, chosen: str) -> int:
    report, wanted = begin(gpu, chosen)
    target = OUT / file_name(gpu)
    for name in wanted:
        try:
            report[name] = STEPS[name]()
        except Exception as error:
            report[name] = {"ok": False, "summary": f"{type(error).__name__}: {error}"}
        report["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        target.write_text(json.dumps(report, indent=1) + "\n")
    # The table of backends as a fresh process sees it, now that the extension is built.
    show = subprocess.run([sys.executable, "-m", "foundry_kernels"], cwd=ROOT, capture_output=True, text=True)
    report["environment"] = show.stdout.splitlines()
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{show.stdout}\n{gpu}: {target}")
    for name in (*PARTS, *MORE):
        if name in report:
            part = report[name]
            state = "ok  " if part["ok"] else "FAIL"
            print(f"{name:<9} {state} {part.get('seconds', 0):>6} s  {part['summary'][:150]}")
    print_rows([row for name in ("bench", "model") for row in report.get(name, {}).get("rows", [])])
    left = [name for name in PARTS if not report.get(name, {}).get("ok")]
    if left:
        print(f"not passed: {', '.join(left)}; GPU_CHECK=rest goes on from here")
    return 1 if left else 0


def print_rows(rows: list[dict[str, Any]]) -> None:
    from benchmarks.conftest import in_a_line

    for row in rows:
        if row.get("kind") == "model" or (row["row"] in ("triton", "native") and "speedup_over" in row):
            print(f"{row['op']:<13} {row['direction']:<8} {row['case']:<24} {row['row']:<7} {in_a_line(row)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
