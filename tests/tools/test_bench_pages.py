"""Results of the benchmarks: what is kept of a run, two trees side by side, the stored results and their pages."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch

import foundry_kernels as fk
from benchmarks import compare, isa, report, suite, tables
from benchmarks import kept as kept_format

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (report.RESULTS / "README.md").read_text(encoding="utf-8")
KEPT = report.all_kept()
over_results = pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, as tests here set Triton to be interpreted."""
    return fresh.python("-m", *arguments, env=environment(), cwd=ROOT)


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST")}


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_kept_and_becomes_a_page(tmp_path: Path) -> None:
    source, target = tmp_path / "run.json", tmp_path / "kept.json"
    chosen = "flash_attention and forward and float32 and H8 and Hk2 and T512 and causal or rms_norm-overhead"
    if torch.cuda.is_available():
        chosen = "rms_norm-forward-bfloat16-1x4096-decode-warm or rms_norm-overhead"
    files = [f"benchmarks/test_{name}.py" for name in ("ops", "overhead")]
    options = (
        "--benchmark-only",
        "-v",
        "-k",
        f"({chosen}) and not (add or stubbed or varlen or compile)",
        f"--benchmark-json={source}",
    )
    done = command("pytest", *files, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " us, " in done.stdout  # progress: the figures, row by row
    assert re.search(r"rows in \d+ comparisons, about \d\.\d min for all; budget 5 min", done.stdout)
    assert "verdict: " in done.stdout
    run = json.loads(source.read_text())
    native = next(b for b in run["benchmarks"] if b["extra_info"]["row"] in ("native", "triton"))
    info = native["extra_info"]
    assert native["stats"]["median"] * 1e6 == pytest.approx(info["median_us"], abs=0.1)  # the same rounds
    assert "eager" in info["speedup_over"]
    if not torch.cuda.is_available():
        assert any(row["row"] == "Liger" and "GPU" in row["why_not"] for row in run["absent"])
    report.keep(source, target)
    kept = kept_format.read(target)
    page = report.page(target).read_text()
    assert kept["commit"].keys() == {"id", "dirty"}
    assert f"of commit {kept['commit']['id'][:10]}" in page.replace("\n", " ")
    assert f"| `{info['op']}` | forward | {info['dtype']} |" in page
    assert "## Host time a call" in page
    for content, message in (("{", "cannot be read as results"), ("{}", "it is no result of")):
        source.write_text(content)
        with pytest.raises(SystemExit, match=f"run.json.*{message}"):
            report.keep(source, target)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="--isa is the CPU's")
def test_a_forced_run_and_one_without_time(tmp_path: Path) -> None:
    if "avx2" not in fk.core.extension.build_info().get("usable_instruction_sets", []):
        pytest.skip("our kernels have no AVX2 here")
    choice = "rms_norm and overhead and not add and not stubbed and not compile"
    # Switches count when torch is imported, so this is an interpreter of its own.
    options = ("--benchmark-only", "--isa=avx2", "-k", choice, f"--benchmark-json={tmp_path / 'run'}")
    run_it = [sys.executable, "-m", "pytest", "benchmarks", *options]
    done = subprocess.run(run_it, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run").read_text())
    assert run["isa"] == isa.Isa("avx2", "AVX2", "avx2").kept()
    report.keep(tmp_path / "run", tmp_path / "kept.json")
    assert "**Held to avx2**" in report.page(tmp_path / "kept.json").read_text()
    nothing = command("pytest", "benchmarks", "--benchmark-only", "--budget=0.01", "-k", choice, "-rs")
    assert "budget: no time for it within 0.01 min" in nothing.stdout
    assert " passed" not in nothing.stdout


@pytest.mark.slow
def test_the_quick_set_functions() -> None:
    """Each operation x kernel x direction x peer once, and the models; not the large shapes, which are only larger."""
    chosen = "(cached and warm) or S512 or (T512 and D64) or overhead or scaling or model or 1x4096-decode"
    done = command("pytest", "benchmarks", "--benchmark-disable", "-k", f"({chosen}) and not compile")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_two_trees_take_turns(capfd: pytest.CaptureFixture) -> None:
    sides = [compare.Side("this tree", ROOT), compare.Side("itself", ROOT)]
    try:
        names = sides[0].ask(list=True, full=False)
        chosen = next(n for n in names if n.startswith("rms_norm-forward") and n.endswith("warm"))
        worst = compare.run(sides, chosen, turns=2, seconds=0.01)
        with pytest.raises(SystemExit, match="no row's name contains 'rms and more'"):
            compare.run(sides, "rms and more", turns=2, seconds=0.01)
    finally:
        for side in sides:
            side.close()
    printed = capfd.readouterr().out
    assert sum(line.startswith(chosen) for line in printed.splitlines()) >= 1
    assert worst > 0


# --- stored results ---------------------------------------------------------------------------------------------------


@over_results
def test_pages_are_what_is_made_of_the_stored_results(path: Path, tmp_path: Path) -> None:
    """And results come back from their format as they were, a row a line."""
    text, found = path.read_text(encoding="utf-8"), KEPT[path]
    assert kept_format.dumps(found) == text
    assert len(text.splitlines()) > len(found["rows"]) + len(found["absent"])
    for file in path.parent.glob(f"{path.stem}*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    again = report.page(tmp_path / path.name, draw=False)
    assert again.read_text() == path.with_suffix(".md").read_text(), "run `python -m benchmarks report`"
    assert f"({path.stem}.md#slower-than-a-peer)" in INDEX


def test_the_headline_and_its_chart_are_of_the_newest_results() -> None:
    part = README.partition("**On a CPU**")[2].partition("\n\nMeasure your own")[0]
    (name,) = re.findall(r"!\[[^]]*\]\(benchmarks/results/(\S+)-speedups\.svg\)", part)
    unforced = {path.stem: kept for path, kept in KEPT.items() if kept["full"] and not kept["isa"]["forced"]}
    assert unforced[name]["date"] == max(kept["date"] for kept in unforced.values())
    assert f"({unforced[name]['device']}, {unforced[name]['date']})" in part
    steps = [row for row in tables.of_kind(unforced[name], "model") if row["direction"] == "step"]
    speeds = {f"{ratio:.2f}x" for row in steps for ratio in row.get("speedup_over", {}).values()}
    memory = {f"{one['peak_bytes'] / other['peak_bytes']:.2f}x" for one in steps for other in steps}
    figures = re.findall(r"\*\*([\d.]+x)\*\*", part)
    assert len(figures) == 4
    assert set(figures[::2]) <= speeds
    assert set(figures[1::2]) <= memory


def test_what_is_called_measured_has_rows() -> None:
    """Looked up in the files themselves, and each operation that is exported has a row in the table."""
    rows = [r for kept in KEPT.values() for r in kept["rows"] if r.get("kind", "op") == "op" and r["row"] == "native"]
    table = INDEX.split("## What is measured")[1].split("##")[0]
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert {name for c in cells for name in re.findall(r"`(\w+)`", c[0])} >= fk.OPS.keys() & set(fk.__all__)
    for first, _, cell, *_ in cells:
        for name in (n for n in re.findall(r"`(\w+)`", first) if n in fk.OPS):
            impl, bench = fk.OPS[name].impl("native"), fk.OPS[name].bench
            if impl is None or "cpu" not in impl.sources:
                assert "measured" not in cell
                continue
            assert bench is not None
            found = {r["direction"] for r in rows if r["op"] == name}
            dropped = any("dropout" in r["case"] for r in rows if r["op"] == name)
            assert cell == ("measured" if found else "not measured")
            if found:
                trains = any(suite.takes_gradient(case, full=False) for case in bench.bench_cases(name, "cpu"))
                assert found >= set(bench.DIRECTIONS[: 1 + trains])
                assert dropped >= ("dropout_p" in inspect.signature(fk.OPS[name].public).parameters)


def h100() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / "h100-81e711d.json").read_text())["rows"]
    return rows


def test_the_page_has_the_tables_of_what_an_h100_measured() -> None:
    page = (ROOT / "docs" / "dev" / "performance.md").read_text().partition("## On a GPU")[2]
    cells = [cell for line in page.splitlines() if line.startswith("|") for cell in line.strip("| ").split(" | ")[1:]]
    shown = {number for cell in cells if re.fullmatch(r"[\d., ]+", cell) for number in cell.split(", ")}
    units = {"ms": (1, 1e3), "us": (1,), "TFLOP/s": (1,), "TB/s": (1,), "peakMB": (1, 1e-3)}
    known = {
        f"{row[unit] * factor:.{digits}f}"
        for row in h100() for unit, factors in units.items() if unit in row for factor in factors for digits in range(3)
    }  # fmt: skip
    assert shown - known == set()
    assert len(shown) > 120


def test_auto_takes_first_what_an_h100_ran_faster() -> None:
    """On a GPU "auto" is native first where that takes at most 3 % longer than Triton, as its calls cost the host less.
    Decoding counts for attention, whose kernels on a GPU without those for Hopper these are."""
    milliseconds: dict[tuple[str, str], float] = defaultdict(float)
    for row in h100():
        name = {"attention": "flash_attention", "decode": "flash_attention"}.get(row["op"], row["op"])
        if row["form"] in ("triton", "native") and name in fk.OPS:
            milliseconds[name, row["form"]] += row.get("ms", row.get("us", 0.0) / 1e3)
    both = {name for name, form in milliseconds if form == "native" and (name, "triton") in milliseconds}
    assert len(both) >= 8
    for name in both:
        native_first = milliseconds[name, "native"] <= 1.03 * milliseconds[name, "triton"]
        assert (fk.OPS[name].cuda_order[0] == "native") == native_first, name


def test_a_picture(tmp_path: Path) -> None:
    """It is the same file of the same results, and there is none of no results."""
    plots = pytest.importorskip("benchmarks.plots", reason="the picture needs matplotlib")
    of, target = next(iter(KEPT.values())), tmp_path / "a-speedups.svg"
    assert plots.draw(of, target) == target
    first = target.read_text()
    assert of["date"] in first
    plots.draw(of, target)
    assert target.read_text() == first
    assert plots.draw({**of, "rows": []}, target) is None
