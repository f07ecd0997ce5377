"""What the benchmarks measure with: clocks that take turns, peak memory, kept results, the steps of the GPU check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, measure, report

ROOT = Path(__file__).parents[1]


def test_contenders_take_turns() -> None:
    order: list[str] = []
    times = measure.interleaved({n: (lambda n=n: lambda: order.append(n)) for n in "ab"}, seconds=60, rounds=7)
    assert [len(t) for t in times.values()] == [7, 7]
    assert "".join(order) == "aabb" + "aabb" * 7  # warm-up, then in each round an untimed run and a timed one of each


def test_ratio_is_of_rounds_not_of_medians() -> None:
    assert measure.median_ratio([2.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0


def test_peak_memory_counts_what_is_held_at_once() -> None:
    x = torch.randn(1 << 18)  # 1 MB

    def two_after_each_other() -> object:
        x.clone()
        return x.clone()

    def two_at_once() -> object:
        return x.clone(), x.clone()

    assert measure.peak_bytes(lambda: two_after_each_other, "cpu") == 1 << 20
    assert measure.peak_bytes(lambda: two_at_once, "cpu") == 2 << 20


def test_saved_memory_counts_storages_once() -> None:
    x = torch.randn(1 << 18, requires_grad=True)  # 1 MB
    assert measure.saved_bytes(lambda: x.sin().cos()) == 2 << 20
    assert measure.saved_bytes(lambda: x * x.detach()) == 1 << 20
    assert measure.saved_bytes(lambda: x + 1) == 0


def test_results_are_kept_and_become_a_table(tmp_path: Path) -> None:
    row = {
        "op": "rms_norm",
        "row": "native",
        "direction": "forward",
        "dtype": "float32",
        "case": "2x4-cached",
        "memory": "fresh",
        "median_us": 3.0,
        "time_over_copy": 1.5,
        "speedup_over": {"eager": 4.0},
        "GB/s": 7.0,
        "peak_bytes": 2_000_000,
    }
    low = row | {"dtype": "bfloat16", "median_us": 2.0, "speedup_over": {"eager": 5.0}, "time_over_copy": 2.5}
    run = {
        "benchmarks": [{"extra_info": r, "stats": {"data": [0.0]}} for r in (row, low)],
        "machine_info": {"cpu": {"brand_raw": "A processor", "count": 2}},
        "datetime": "2026-01-02T03:04:05",
        "environment": {"torch": "2.13.0"},
        "device": "cpu",
    }
    source, target = tmp_path / "run.json", tmp_path / "kept.json"
    source.write_text(json.dumps(run))
    report.keep(source, target)
    kept = json.loads(target.read_text())
    assert kept["device"] == "A processor, 2 cores"
    results = ROOT / "benchmarks" / "results" / "kept.json"
    text = report.table(kept, results)
    assert "| `rms_norm` | forward | float32 | 2x4-cached | native | 3 | 4.00 | 1.50 | 7.0 | 2.0 | – |" in text
    text = report.summary(kept, results)
    assert "Each cell: float32 / bfloat16." in text
    assert "| `rms_norm` | forward | 2x4-cached | native | 3 / 2 | 4.00 / 5.00 | 1.50 / 2.50 |" in text


@pytest.mark.parametrize(("content", "message"), [("{", "cannot be read as results"), ("{}", "it is not a result of")])
def test_a_malformed_result_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    source = tmp_path / "broken.json"
    source.write_text(content)
    with pytest.raises(SystemExit, match=f"broken.json.*{message}"):
        report.keep(source, tmp_path / "kept.json")
    assert not (tmp_path / "kept.json").exists()


def test_a_step_shows_logs_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    good = gpu_check.run("good", [sys.executable, "-c", "print('one'); print('two')"], 60)
    assert good["ok"]
    assert good["summary"] == "two"
    assert (tmp_path / "good.log").read_text() == "one\ntwo\n"
    assert "one\ntwo" in capfd.readouterr().out
    assert not gpu_check.run("bad", [sys.executable, "-c", "raise SystemExit(4)"], 60)["ok"]
    slow = gpu_check.run("slow", [sys.executable, "-c", "print('began'); import time; time.sleep(60)"], 2)
    assert not slow["ok"]
    assert slow["summary"] == "stopped after 2 s; last line: began"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_without_a_gpu_says_so_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert "gpu-check stops here" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_gpu_check_refuses_an_unknown_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_CHECK", "everything")
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "GPU_CHECK must be one of build, parity, sanitize, bench; got 'everything'" in done.stderr
