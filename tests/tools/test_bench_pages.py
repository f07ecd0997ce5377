"""Results of the benchmarks: what is kept of a run, two trees side by side, the stored results and their pages."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
from pathlib import Path

import fresh
import pytest
import torch
from bench_rows import kept, row

import foundry_kernels as fk
from benchmarks import compare, isa, report, tables, verdict
from benchmarks import kept as kept_format

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (report.RESULTS / "README.md").read_text(encoding="utf-8")
KEPT = report.all_kept()
over_results = pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, as tests here set Triton to be interpreted."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST")}
    return fresh.python("-m", *arguments, env=env, cwd=ROOT)


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
    done = command("pytest", "benchmarks", "--benchmark-only", "--isa=avx2", "-k", choice, f"--benchmark-json={tmp_path / 'run'}")  # fmt: skip # noqa: E501
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


def test_a_ratio_of_two_trees() -> None:
    slower = compare.Ratio([2.2, 2.0, 1.8], [1.0, 1.0, 1.0])
    assert (slower.middle, slower.low, slower.high, slower.verdict) == (2.0, 1.8, 2.2, "slower")
    assert compare.Ratio([1.0, 1.0], [2.0, 2.2]).verdict == "faster"
    assert compare.Ratio([1.2, 0.9], [1.0, 1.0]).verdict == ""  # the turns do not agree
    with pytest.raises(SystemExit, match="'no-such-commit' is no commit"):
        compare.prepare("no-such-commit")
    with pytest.raises(SystemExit):
        compare.main(["HEAD", "--turns", "1"])


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


def test_results_take_at_most_a_megabyte() -> None:
    assert sum(path.stat().st_size for path in report.RESULTS.iterdir()) <= 1_000_000


def test_the_headline_and_its_chart_are_of_the_newest_results() -> None:
    part = README.partition("**On a CPU**")[2].partition("\n\nMeasure your own")[0]
    (name,) = re.findall(r"!\[[^]]*\]\(benchmarks/results/(\S+)-speedups\.svg\)", part)
    unforced = {path.stem: kept for path, kept in KEPT.items() if not kept["isa"]["forced"]}
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
                assert found >= set(bench.DIRECTIONS[:2])
                assert dropped >= ("dropout_p" in inspect.signature(fk.OPS[name].public).parameters)
                for kept in KEPT.values():
                    assert any(r["op"] == name and r["direction"] == "forward" for r in kept["rows"])


@over_results
def test_every_row_that_is_slower_than_a_peer_is_listed(path: Path) -> None:
    """Looked up in the file itself."""
    page = path.with_suffix(".md").read_text()
    listed = page.split(f"## {verdict.TITLE}\n")[1].split("\n## ")[0]
    slower, _, noisy = listed.partition("Too noisy to call, as the peer differs")
    tables_of = [[line for line in part.splitlines() if re.match(r"\| \d", line)] for part in (slower, noisy)]
    ours, expected = (*tables.OURS, *tables.OUR_MODELS), 0
    for made in KEPT[path]["rows"]:
        if made["row"] not in ("native", "triton", *tables.OUR_MODELS):
            continue
        for peer, ratio in made.get("speedup_over", {}).items():
            of_a_peer = peer not in ours or (made["kind"] == "model" and peer == "reference")
            if ratio >= 1 or not of_a_peer or peer == tables.WITHOUT:
                continue
            shown = f"| {ratio:.2f} | {peer} | "
            among = [[line for line in of if line.startswith(shown) and made["op"] in line] for of in tables_of]
            there = [any(made["direction"] in line and made["dtype"] in line for line in same) for same in among]
            known = made["noise"][peer]
            if known["high"] >= 1 or 1 / ratio <= 1 + known["itself"]:
                far = max(known["high"], 1 / known["low"], 1 + known["itself"])
                assert there[1] or far <= 1.05, made
                continue
            expected += 1
            assert there[0], made
    assert sum("host time" not in line for line in tables_of[0]) == expected
    count = verdict.counted(*verdict.slower(KEPT[path]), verdict.too_noisy(KEPT[path]))
    assert count in listed
    assert count[:-1] in INDEX.replace("\n  ", " ")


# --- made-up rows -----------------------------------------------------------------------------------------------------


def test_tables() -> None:
    plain = row(over={"eager": 4.0}, memory="warm")
    low = plain | {"dtype": "bfloat16", "median_us": 2.0, "speedup_over": {"eager": 5.0}, "of_limit": 0.25}
    product = plain | {"op": "flash_attention", "TFLOP/s": 0.25, "speedup_over": {"SDPA flash": 2.0}, "memory": "cold"}
    product |= {"case": "B=1 H=8 Hk=2 T=8 D=64-causal", "limit": "GEMM"}
    wrong = {k: v for k, v in product.items() if k not in ("speedup_over", "of_limit")} | {
        "wrong": "max error 1",
        "direction": "backward",
        "limit": "memcpy",
        "time_over_memcpy": 6.0,
    }
    line = {"time_exponent": 1.0, "last_time_exponent": 1.2, "memory_exponent": 2.0, "last_memory_exponent": 1.3}
    growth = {**plain, "kind": "scaling", "axis": "N", "sizes": [1, 2], "lines": {"native": line}}
    growth["theory"] = {"time": 1.0, "memory": 1.0}
    model = {**plain, "kind": "model", "op": "transformer", "row": "ours", "base": "reference", "tokens/s": 1234.5}
    model["speedup_over"] = {"reference": 1.5}
    absent = [plain | {"row": "Liger", "why_not": "not here"}] * 2
    of = kept(plain, low, product, wrong, growth, model, absent=absent)
    text = tables.operations(of)
    assert "| × eager | % of memcpy | rate |" in text
    assert "| `rms_norm` | forward | float32 | 2x4 | warm | native | 3.0 | 4.00 | 50% | 7.0 GB/s | 2.0 | – |" in text
    assert "| × SDPA flash | % of memcpy | % of GEMM | rate |" in text
    shape = "B=1 H=8 Hk=2 T=8 D=64, causal"
    assert f"| `flash_attention` | forward | float32 | {shape} | cold | native | 3.0 | 2.00 | – | 50% | 0.25" in text
    assert f"| `flash_attention` | backward | float32 | {shape} | cold | native | 3.0 | wrong | 17% | – |" in text
    assert "| native | 1.00 | 1.20 | 1.00 | **2.00** | **1.30** | 1.00 |" in tables.scaling(of)
    assert "| ours | 1,234 | 1.50 |" in tables.models(of)
    reasons = tables.absent(of)
    assert "- `rms_norm`, Liger (2x4): not here" in reasons
    assert "max error 1" in reasons
    assert "a commit that was not recorded" in tables.header(of, "a.json").replace("\n", " ")
    assert report.commit({"commit_info": {"id": "unversioned", "dirty": False}}) is None


def test_the_table_in_short_has_a_row_an_operation_and_a_number_a_cell() -> None:
    compiled = {"eager": 3.0, "torch.compile": 1.25, "F.rms_norm": 9.0}
    product = {"op": "flash_attention", "TFLOP/s": 0.25, "limit": "GEMM", "median_us": 8.0}
    rows = [
        row(over={"SDPA flash": 2.0}, case="B=1 H=8 Hk=2 T=8 D=64-causal", **product),
        row(over={"eager": 4.0}, median_us=2.0),
        row(over={"eager": 4.0}, median_us=99.0, memory="warm"),
        row(over=compiled, case="4x8-large", median_us=5.0),
        row(case="4x8-large", dtype="bfloat16", wrong="max error 1", of_limit=None),
        row(over={"eager": 4.0}, case="4x8-large", median_us=50.0, direction="backward"),
        row(case="4x8-large", median_us=60.0, row="eager"),
    ]
    rows[4].pop("of_limit")
    caption, _, table = tables.summary(kept(*rows)).partition("\n\n")
    assert caption.startswith("Forward passes on A (torch 2.13.0, 2026-01-02), native kernels of a commit that was")
    assert table.splitlines() == [
        "| operation | shape | × eager, fp32 | × eager, bf16 | × compiled, fp32 | × compiled, bf16 | "
        "% of memcpy, fp32 | % of memcpy, bf16 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `rms_norm` | 4x8 | 3.00 | wrong | 1.25 | wrong | 50% | – |",
        "| `flash_attention` | B=1 H=8 Hk=2 T=8 D=64, causal | – | – | 2.00 | – | 50% | – |",
    ]
    assert tables.summary(kept()) == ""


def test_a_picture(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", reason="the picture needs matplotlib")
    of, target = kept(row(over={"eager": 4.0, "torch.compile": 2.0})), tmp_path / "a-speedups.svg"
    assert plots.draw(of, target) == target
    first = target.read_text()
    assert "A, torch 2.13.0, 2026-01-02" in first
    plots.draw(of, target)
    assert target.read_text() == first  # the same results are the same file
    assert plots.draw(kept(), target) is None


def test_what_is_kept_of_rows_comes_back() -> None:
    line = {"median_us": [1.0, None], "time_exponent": 1.0, "last_memory_exponent": 2.0}
    known = {"low": 3.5, "high": 4.5, "itself": 0.01}
    rows = [
        row(over={"eager": 4.0, "reference": 9.0}, noise={"eager": known}, quick=True, time_over_memcpy=2.0),
        row(over={"eager": 4.0}, noise={"eager": {"low": 3.5, "high": 4.5}}, device_us=2.5),
        row(over={"native": 0.25}, row="eager", noise={}),
        row(row="F.rms_norm", wrong="max error 1"),
        row(kind="scaling", axis="N", sizes=[1, 2], lines={"native": line | {"of_limit": [0.5, None]}}),
    ]
    before = kept(*rows, absent=[row(row="Liger", why_not="not here: ≥ 1")], full=True)
    after = kept_format.loads(kept_format.dumps(before))
    assert after == kept_format.slim(before)
    first, second, wrong, growth = after["rows"]  # of peers only what is wrong
    assert (first["speedup_over"], first["noise"]) == ({"eager": 4.0}, {"eager": known})
    assert second["device_us"] == 2.5
    assert not {"quick", "time_over_memcpy"} & first.keys()
    assert wrong["wrong"] == "max error 1"
    assert growth["lines"] == {"native": {"time_exponent": 1.0, "last_memory_exponent": 2.0}}
    assert after["absent"][0]["why_not"] == "not here: ≥ 1"


def test_a_page_says_once_what_was_held() -> None:
    of = isa.Isa("avx2", "AVX2", "avx2", products16=False).kept()
    text = tables.held({"isa": of}).replace("\n", " ")
    assert text.startswith("**Held to avx2** (`--isa avx2`)")
    assert "`ONEDNN_MAX_CPU_ISA=AVX2`" in text
    assert "torch (it reports AVX2)" in text
    lied = isa.Isa("avx2", "AVX512", "avx2", obeyed=False).kept()
    assert "**it did not obey and reports AVX512**" in tables.held({"isa": lied}).replace("\n", " ")
    assert tables.held({"isa": isa.Isa("avx2", "AVX2").kept()}) == tables.held({}) == ""
    run = {"machine_info": {"cpu": {"brand_raw": "A processor", "count": 2}}, "device": "cpu"}
    assert report.device(run) == "A processor, 2 cores"
    assert report.device({**run, "isa": of}) == "A processor, 2 cores, restricted to avx2"
