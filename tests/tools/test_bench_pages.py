"""The benchmarks' command: that they run, kept results and their pages, two commits side by side, the steps of the GPU
check. No time decides a test."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fresh
import gpu_check
import pytest
import torch

from benchmarks import compare, report, sources, tables
from benchmarks import kept as kept_format

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, as tests here set Triton to be interpreted."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST")}
    return fresh.python("-m", *arguments, env=env, cwd=ROOT)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a short run of rms_norm."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    chosen = "rms_norm-forward-float32-512x2048-cached-warm or rms_norm-overhead"
    if torch.cuda.is_available():
        chosen = "rms_norm-forward-bfloat16-1x4096-decode-warm or rms_norm-overhead"
    files = [f"benchmarks/test_{name}.py" for name in ("ops", "overhead")]
    done = command(
        "pytest", *files, "--benchmark-only", "-v", "-k", f"({chosen}) and not add", f"--benchmark-json={path}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " us, " in done.stdout  # progress: the figures, row by row
    return path


def test_runs_of_the_same_kernels_are_kept_together(run_file: Path, tmp_path: Path) -> None:
    """Rows of the second take the places of those that it has anew, also of those that had no figures; others stay."""
    first = json.loads(run_file.read_text())
    first["budget"] = {"minutes": 5.0, "spent": 4.2, "comparisons": 9, "cut": {"a": [1, 2]}, "fewer_rounds": 0}
    ours = next(b for b in first["benchmarks"] if b["extra_info"]["row"] in ("native", "triton"))
    again = copy.deepcopy(ours)
    again["extra_info"]["median_us"] = 7.0
    found = copy.deepcopy(ours)
    missing = {key: ours["extra_info"][key] for key in ("kind", "op", "direction", "dtype", "case", "memory")}
    first["absent"].append(missing | {"row": "a peer", "why_not": "was not installed"})
    found["extra_info"]["row"] = "a peer"
    second = first | {"benchmarks": [again, found], "full": True}
    second["budget"] = first["budget"] | {"cut": {"b": [3, 3]}, "spent": 1.1}
    paths = [tmp_path / name for name in ("first.json", "second.json")]
    for path, run in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(run))
    report.keep(paths[0], tmp_path / "kept.json", paths[1])
    kept = report.load(tmp_path / "kept.json")
    assert len(kept["rows"]) == len(first["benchmarks"]) + 1
    assert len(kept["absent"]) == len(first["absent"]) - 1
    key = report._key(ours["extra_info"])
    assert [row["median_us"] for row in kept["rows"] if report._key(row) == key] == [7.0]
    assert kept["full"]
    assert kept["budget"] == {
        "minutes": 10.0,
        "spent": 5.3,
        "comparisons": 18,
        "fewer_rounds": 0,
        "cut": {"a": [1, 2], "b": [3, 3]},
    }
    second["commit_info"] = first["commit_info"] | {"id": "0" * 40}
    paths[1].write_text(json.dumps(second))
    report.keep(paths[0], tmp_path / "kept.json", paths[1])
    commits = f"of commits {first['commit_info']['id'][:10]} and 0000000000"
    assert tables.of_commit(report.load(tmp_path / "kept.json")).startswith(commits)
    for key, message in (("sources", "which kernels"), ("environment", "are of different environments")):
        paths[1].write_text(json.dumps(second | {key: {"torch": "1"} if key == "environment" else None}))
        with pytest.raises(SystemExit, match=message):
            report.keep(paths[0], tmp_path / "kept.json", paths[1])


def test_kept_results_take_a_later_run(run_file: Path, tmp_path: Path) -> None:
    """As the run that they were made of would; and what a budget cut is left out no longer where it is there now."""
    run = json.loads(run_file.read_text())
    cut = {"rms_norm 512x2048": [1, 2], "growth of rope over T": [1, 1]}
    run["budget"] = {"minutes": 5.0, "spent": 4.2, "comparisons": 9, "cut": cut, "fewer_rounds": 0}
    paths = [tmp_path / name for name in ("run.json", "kept.json", "both.json")]
    paths[0].write_text(json.dumps(run))
    report.keep(paths[0], paths[1])
    report.keep(paths[1], paths[2], paths[0])
    kept, both = (report.load(path) for path in paths[1:])
    assert kept["budget"]["cut"] == cut
    assert list(both["budget"]["cut"]) == ["growth of rope over T"]
    assert both["budget"]["minutes"] == 10.0
    run["budget"] |= {"minutes": 0.0, "cut": {}}
    paths[0].write_text(json.dumps(run))
    report.keep(paths[1], paths[2], paths[0])
    assert report.load(paths[2])["budget"]["minutes"] == 9.2, "one without a budget had the minutes that it took"
    for key in ("rows", "absent", "device", "commit", "environment", "sources"):
        assert both[key] == kept[key], key


def test_no_row_of_kernels_that_have_changed_is_kept(run_file: Path, tmp_path: Path) -> None:
    """Nor of a model, which any kernel may be in; but those of other operations."""
    later = json.loads(run_file.read_text())
    ours = next(b for b in later["benchmarks"] if b["extra_info"]["row"] in ("native", "triton"))
    first = copy.deepcopy(later)
    for op, kind in (("swiglu", "op"), ("layer_norm", "op"), ("transformer", "model")):
        row = copy.deepcopy(ours)
        row["extra_info"] |= {"op": op, "kind": kind, "tokens/s": 1.0, "peak_bytes": 1}
        first["benchmarks"].append(row)
        first["absent"].append({**row["extra_info"], "row": "a peer", "why_not": "was not installed"})
    paths = [tmp_path / "first.json", tmp_path / "later.json"]

    def kept_with(changed: tuple[str, ...]) -> set[str]:
        sources = {op: "another" if op in changed else digest for op, digest in later["sources"].items()}
        for path, run in zip(paths, (first | {"sources": sources}, later), strict=True):
            path.write_text(json.dumps(run))
        report.keep(paths[0], tmp_path / "kept.json", paths[1])
        found = report.load(tmp_path / "kept.json")
        assert found["sources"] == later["sources"]
        ops = {row["op"] for row in found["rows"]}
        assert ops - {"rms_norm"} == {row["op"] for row in found["absent"] if row["row"] == "a peer"}
        return ops

    assert kept_with(()) == {"rms_norm", "swiglu", "layer_norm", "transformer"}
    assert kept_with(("swiglu",)) == {"rms_norm", "layer_norm"}
    assert kept_with(("rms_norm",)) == {"rms_norm", "swiglu", "layer_norm"}  # measured anew


def test_a_run_is_kept_and_becomes_pages(run_file: Path, tmp_path: Path) -> None:
    run = json.loads(run_file.read_text())
    native = next(b for b in run["benchmarks"] if b["extra_info"]["row"] in ("native", "triton"))
    info = native["extra_info"]
    assert native["stats"]["median"] * 1e6 == pytest.approx(info["median_us"], abs=0.1)  # the same rounds
    assert info["speedup_over"].keys() >= {"eager", "F.rms_norm"}
    assert info["quick"]
    if not torch.cuda.is_available():
        assert any(row["row"] == "Liger" and "GPU" in row["why_not"] for row in run["absent"])
    target = tmp_path / "kept.json"
    report.keep(run_file, target)
    kept = report.load(target)
    assert kept["commit"].keys() == {"id", "dirty"}
    assert kept["sources"] == sources.digests("cuda" if torch.cuda.is_available() else "cpu")
    page = report.page(target).read_text()
    assert f"of commit {kept['commit']['id'][:10]}" in page.replace("\n", " ")
    assert f"| `rms_norm` | forward | {info['dtype']} |" in page
    assert "## Host time a call" in page


ROW = {
    "op": "rms_norm",
    "row": "native",
    "direction": "forward",
    "dtype": "float32",
    "case": "2x4-cached",
    "memory": "warm",
    "median_us": 3.0,
    "limit": "memcpy",
    "of_limit": 0.5,
    "speedup_over": {"eager": 4.0},
    "GB/s": 7.0,
    "peak_bytes": 2_000_000,
    "quick": True,
}
KEPT = {"date": "2026-01-02", "device": "A processor, 2 cores", "environment": {"torch": "2.13.0"}, "rows": [ROW]}


def test_tables() -> None:
    low = ROW | {"dtype": "bfloat16", "median_us": 2.0, "speedup_over": {"eager": 5.0}, "of_limit": 0.25}
    product = ROW | {"op": "flash_attention", "TFLOP/s": 0.25, "speedup_over": {"SDPA flash": 2.0}, "memory": "cold"}
    product |= {"case": "B=1 H=8 Hk=2 T=8 D=64-causal", "limit": "GEMM"}
    wrong = {k: v for k, v in product.items() if k not in ("speedup_over", "of_limit")} | {
        "wrong": "max error 1",
        "direction": "backward",
        "limit": "memcpy",
        "time_over_memcpy": 6.0,
    }
    line = {"median_us": [1.0, 2.0], "time_exponent": 1.0, "memory_exponent": 2.0, "last_memory_exponent": 2.0}
    growth = {**ROW, "kind": "scaling", "axis": "N", "sizes": [1, 2], "lines": {"native": line}}
    growth["theory"] = {"time": 1.0, "memory": 1.0}
    model = {**ROW, "kind": "model", "op": "transformer", "row": "ours", "base": "reference", "tokens/s": 1234.5}
    model["speedup_over"] = {"reference": 1.5}
    absent = [ROW | {"row": "Liger", "why_not": "not here"}] * 2
    kept = {**KEPT, "rows": [ROW, low, product, wrong, growth, model], "absent": absent}
    report.check(kept, Path("kept.json"))
    text = tables.operations(kept)
    assert "| × eager | % of memcpy | rate |" in text
    assert "| `rms_norm` | forward | float32 | 2x4 | warm | native | 3.0 | 4.00 | 50% | 7.0 GB/s | 2.0 | – |" in text
    assert "| × SDPA flash | % of memcpy | % of GEMM | rate |" in text
    shape = "B=1 H=8 Hk=2 T=8 D=64, causal"
    assert f"| `flash_attention` | forward | float32 | {shape} | cold | native | 3.0 | 2.00 | – | 50% | 0.25" in text
    assert f"| `flash_attention` | backward | float32 | {shape} | cold | native | 3.0 | wrong | 17% | – |" in text
    assert "| **2.00** | **2.00** |" in tables.scaling(kept)
    assert "| ours | 1,234 | 1.50 |" in tables.models(kept)
    reasons = tables.absent(kept)
    assert "- `rms_norm`, Liger (2x4): not here" in reasons
    assert "max error 1" in reasons


def test_the_table_of_the_readme_has_a_row_an_operation_and_a_number_a_cell() -> None:
    def row(case: str, dtype: str, us: float, **changes: Any) -> dict[str, Any]:
        return ROW | {"case": case, "dtype": dtype, "median_us": us, "memory": "cold"} | changes

    compiled = {"speedup_over": {"eager": 3.0, "torch.compile": 1.25, "F.rms_norm": 9.0}}
    product = {"op": "flash_attention", "TFLOP/s": 0.25, "limit": "GEMM", "speedup_over": {"SDPA flash": 2.0}}
    kept = [
        row("B=1 H=8 Hk=2 T=8 D=64-causal", "float32", 8.0, **product),
        row("2x4-cached", "float32", 2.0),
        row("2x4-cached", "float32", 99.0, memory="warm"),
        row("4x8-large", "float32", 5.0, **compiled),
        {k: v for k, v in row("4x8-large", "bfloat16", 4.0, wrong="max error 1").items() if k != "of_limit"},
        row("4x8-large", "float32", 50.0, direction="backward"),
        row("4x8-large", "float32", 60.0, row="eager"),
    ]
    caption, _, table = tables.summary({**KEPT, "rows": kept}).partition("\n\n")
    assert (
        "A processor, 2 cores (torch 2.13.0, 2026-01-02), native kernels of a commit that was not recorded, inputs not"
        in caption.replace("\n", " ")
    )
    assert table.splitlines() == [
        "| operation | shape | × eager, fp32 | × eager, bf16 | × compiled, fp32 | × compiled, bf16 | "
        "% of memcpy, fp32 | % of memcpy, bf16 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `rms_norm` | 4x8 | 3.00 | wrong | 1.25 | wrong | 50% | – |",
        "| `flash_attention` | B=1 H=8 Hk=2 T=8 D=64, causal | – | – | 2.00 | – | 50% | – |",
    ]
    assert tables.summary({**KEPT, "rows": []}) == ""


def test_pictures(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", reason="the pictures need matplotlib")
    line = {"median_us": [1.0, None, 4.0], "GB/s": [3.0, None, 4.0], "peak_bytes": [10, None, 80]}
    product = {n: {**line, "TFLOP/s": [0.1, None, 0.3]} for n in ("native", "SDPA flash", "GEMM")}
    width = {**ROW, "kind": "scaling", "axis": "N", "sizes": [1, 2, 4], "lines": {"native": line, "memcpy": line}}
    tokens = {**width, "op": "flash_attention", "axis": "T", "lines": product}
    point = ROW | {"TFLOP/s": 0.2, "memory": "cold"}
    roofs = [point | {"row": "GEMM"}, point | {"row": "memcpy", "GB/s": 40.0}]
    kept = {**KEPT, "rows": [width, tokens, point, *roofs]}
    drawn = plots.draw(kept, tmp_path / "kept.json")
    assert [path.name for _, path in drawn] == [
        f"kept-{n}.svg" for n in ("speedups", "tflops", "bandwidth", "memory", "roofline")
    ]
    assert drawn == plots.names(kept, tmp_path / "kept.json")
    for _, path in drawn:
        assert "A processor, 2 cores, torch 2.13.0, 2026-01-02" in path.read_text()
    first = drawn[0][1].read_bytes()
    plots.draw(kept, tmp_path / "kept.json")
    assert drawn[0][1].read_bytes() == first  # the same results are the same file
    assert plots.draw({**KEPT, "rows": []}, tmp_path / "none.json") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as results"),
        ("[]", "it holds list, not an object"),
        ("{}", "no 'date'"),
        (json.dumps({**KEPT, "rows": {}}), "'rows' is dict"),
        (json.dumps({**KEPT, "environment": {}}), "no version of torch"),
        (json.dumps({**KEPT, "rows": [ROW, 3]}), r"rows\[1\] is int"),
        (json.dumps({**KEPT, "rows": [{"kind": "odd"}]}), r"rows\[0\] is of the unknown kind 'odd'"),
        (json.dumps({**KEPT, "rows": [{k: v for k, v in ROW.items() if k != "median_us"}]}), "no 'median_us'"),
        (json.dumps({**KEPT, "absent": [ROW]}), r"absent\[0\] has no 'why_not'"),
    ],
)
def test_malformed_results_are_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    source = tmp_path / "broken.json"
    source.write_text(content)
    with pytest.raises(SystemExit, match=f"broken.json.*{message}"):
        report.page(source)
    assert not source.with_suffix(".md").exists()


@pytest.mark.parametrize(("content", "message"), [("{", "cannot be read as results"), ("{}", "it is not a result of")])
def test_a_malformed_run_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    source = tmp_path / "broken.json"
    source.write_text(content)
    with pytest.raises(SystemExit, match=f"broken.json.*{message}"):
        report.keep(source, tmp_path / "kept.json")
    assert not (tmp_path / "kept.json").exists()


@pytest.mark.parametrize("path", report.all_kept(), ids=lambda path: path.stem)
def test_kept_results_are_a_row_a_line_with_what_pages_read(path: Path) -> None:
    """And come back from their format as they were: what is kept again is the same file."""
    text = path.read_text(encoding="utf-8")
    found = report.load(path)
    assert kept_format.dumps(found) == text
    assert len(text.splitlines()) > len(found["rows"]) + len(found["absent"])
    assert tables.operations(found)


def test_kept_results_are_small() -> None:
    assert sum(path.stat().st_size for path in report.RESULTS.glob("*.json")) <= 1_000_000


def test_what_is_kept_of_rows_comes_back() -> None:
    line = {"median_us": [1.0, None], "GB/s": [3.0, None], "time_exponent": 1.0, "last_memory_exponent": 2.0}
    noise = {"low": 3.5, "high": 4.5, "itself": 0.01}
    rows = [
        ROW | {"kind": "op", "noise": {"eager": noise}, "quick": True, "time_over_memcpy": 2.0},
        ROW | {"kind": "op", "noise": {"eager": {"low": 3.5, "high": 4.5}}, "device_us": 2.5},
        ROW | {"kind": "op", "row": "eager", "noise": {}, "speedup_over": {"native": 0.25}},
        ROW | {"kind": "scaling", "axis": "N", "sizes": [1, 2], "lines": {"native": line | {"of_limit": [0.5, None]}}},
    ]
    absent = [{**ROW, "row": "Liger", "kind": "op", "why_not": "not here: ≥ 1"}]
    before = {**KEPT, "rows": rows, "absent": absent, "full": True}
    after = kept_format.loads(kept_format.dumps(before))
    assert after == kept_format.slim(before)
    assert after["rows"][0]["noise"] == {"eager": noise}
    assert after["rows"][1]["device_us"] == 2.5
    assert not {"quick", "time_over_memcpy"} & after["rows"][0].keys()
    assert not {"speedup_over", "limit", "peak_bytes", "GB/s"} & after["rows"][2].keys()
    assert after["rows"][3]["lines"] == {"native": line}
    assert after["absent"][0]["why_not"] == "not here: ≥ 1"


@pytest.mark.slow
def test_the_quick_set_functions() -> None:
    """Each operation x kernel x direction x peer once, and the models; not the large shapes, which are only larger."""
    chosen = "(cached and warm) or S512 or (T512 and D64) or overhead or scaling or model or 1x4096-decode"
    done = command("pytest", "benchmarks", "--benchmark-disable", "-k", f"({chosen}) and not compile")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_a_ratio_and_what_it_says() -> None:
    slower = compare.Ratio([2.2, 2.0, 1.8], [1.0, 1.0, 1.0])
    assert (slower.middle, slower.low, slower.high, slower.verdict) == (2.0, 1.8, 2.2, "slower")
    assert compare.Ratio([1.0, 1.0], [2.0, 2.2]).verdict == "faster"
    assert compare.Ratio([1.2, 0.9], [1.0, 1.0]).verdict == ""  # the turns do not agree


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


def test_compare_refuses_what_is_no_commit() -> None:
    with pytest.raises(SystemExit, match="'no-such-commit' is no commit"):
        compare.prepare("no-such-commit")
    with pytest.raises(SystemExit):
        compare.main(["HEAD", "--turns", "1"])


def test_a_step_shows_logs_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    good = gpu_check.run("good", [sys.executable, "-c", "print('one'); print('two')"], 3600)
    assert good["ok"]
    assert good["summary"] == "two"
    assert (tmp_path / "good.log").read_text() == "one\ntwo\n"
    assert "one\ntwo" in capfd.readouterr().out
    assert not gpu_check.run("bad", [sys.executable, "-c", "raise SystemExit(4)"], 3600)["ok"]
    # A shell begins at once, on a busy machine too.
    slow = gpu_check.run("slow", ["sh", "-c", "echo began; exec sleep 3600"], 2)
    assert not slow["ok"]
    assert slow["summary"] == "stopped after 2 s; last line: began"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_without_a_gpu_says_so_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    done = fresh.python("tests/support/gpu_check.py", cwd=ROOT)
    assert done.returncode == 3
    assert "gpu-check stops here" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_gpu_check_refuses_an_unknown_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_CHECK", "everything")
    done = fresh.python("tests/support/gpu_check.py", cwd=ROOT)
    assert done.returncode == 2
    parts = "build, units, parity, sanitize, bench, model, tune, all, suite"
    assert f"GPU_CHECK must be rest or any of {parts}; got 'everything'" in done.stderr
