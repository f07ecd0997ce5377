"""README.md and the pages of results are what is made from the committed results; what is slower than a peer is listed
whole; results know which kernels they are of. No time decides a test."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import foundry_kernels as fk
from benchmarks import __main__ as command
from benchmarks import readme, report, sources, tables, verdict

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / readme.INDEX).read_text(encoding="utf-8")
KEPT = report.all_kept()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with README.md and the pages, made again."""
    root = tmp_path_factory.mktemp("repository")
    folder = root / "benchmarks" / "results"
    shutil.copytree(report.RESULTS, folder)
    (root / "README.md").write_text(README, encoding="utf-8")
    readme.write(root=root)
    return root


def test_the_readme_and_the_pages_are_what_is_made_of_the_kept_results(made: Path) -> None:
    pytest.importorskip("matplotlib")
    for page, text in (("README.md", README), (readme.INDEX, INDEX)):
        assert (made / page).read_text(encoding="utf-8") == text, "run `python -m benchmarks readme`"
    for path in KEPT:
        page = path.with_suffix(".md")
        again = made / "benchmarks" / "results" / page.name
        assert again.read_text() == page.read_text(), f"run `python -m benchmarks report`: {page.name}"


def test_all_results_have_a_forward_row_of_every_operation() -> None:
    """Except of those that the page calls not measured."""
    lines = [line for line in INDEX.splitlines() if line.startswith("| `") and "| not measured |" in line]
    waiting = {name for line in lines for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    for path, kept in report.all_kept().items():
        found = {row["op"] for row in tables.of_kind(kept, "op") if row["direction"] == "forward"}
        assert found >= fk.OPS.keys() - waiting, path.name


def test_the_chart_is_of_the_newest_results() -> None:
    of = re.search(r"!\[[^]]*\]\(benchmarks/results/(\S+)-speedups\.svg\)", README)
    assert of is not None
    kept = {path.stem: kept for path, kept in KEPT.items() if not kept.get("isa", {}).get("forced")}
    dates = {name: of_it["date"] for name, of_it in kept.items() if not readme.on_gpu(of_it)}
    assert dates[of[1]] == max(dates.values())
    assert all(f"{name}.md" in INDEX for name in kept)


def test_what_is_called_measured_has_rows() -> None:
    """Looked up in the files themselves, and each operation that is exported has a row in the table."""
    rows = [r for kept in KEPT.values() for r in kept["rows"] if r.get("kind", "op") == "op" and r["row"] == "native"]
    table = INDEX.split("## What is measured")[1].split("##")[0]
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert {name for c in cells for name in re.findall(r"`(\w+)`", c[0])} >= fk.OPS.keys() & set(fk.__all__)
    for first, _, cell, *_ in cells:
        for name in (n for n in re.findall(r"`(\w+)`", first) if n in fk.OPS):
            impl, bench = fk.OPS[name].impl("native"), fk.OPS[name].bench
            state = re.search(rf"`{name}` ([^;]+)", cell)
            text = state[1] if state else cell
            if impl is None or "cpu" not in impl.sources:
                assert "measured" not in text
                continue
            assert bench is not None
            found = {r["direction"] for r in rows if r["op"] == name}
            dropped = any("dropout" in r["case"] for r in rows if r["op"] == name)
            dropout = "dropout_p" in inspect.signature(fk.OPS[name].public).parameters
            assert text.startswith("measured" if found else "not measured")
            if text in ("measured", "measured †"):
                assert found >= set(bench.DIRECTIONS[:2])
                assert dropped >= dropout


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_every_row_that_is_slower_than_a_peer_is_listed(path: Path) -> None:
    """Looked up in the file itself."""
    page = path.with_suffix(".md").read_text()
    listed = page.split(f"## {verdict.TITLE}\n")[1].split("\n## ")[0]
    slower, _, noisy = listed.partition("Too noisy to call, as the peer differs")
    tables_of = [[line for line in part.splitlines() if re.match(r"\| \d", line)] for part in (slower, noisy)]
    expected = 0
    for row in KEPT[path]["rows"]:
        if row["row"] in ("native", "triton", *tables.OUR_MODELS):
            ours = (*tables.OURS, *tables.OUR_MODELS)
            for peer, ratio in row.get("speedup_over", {}).items():
                if peer == tables.WITHOUT:  # the same call of ours: no peer, but its ratio is told
                    named = [line for line in page.splitlines() if f"`{row['op']}` | {row['direction']}" in line]
                    assert any(f" {ratio:.2f} " in line and tables.shape_of(row) in line for line in named), row
                elif ratio < 1 and (peer not in ours or (row["kind"] == "model" and peer == "reference")):
                    shown = f"| {ratio:.2f} | {peer} | "
                    among = [[line for line in of if line.startswith(shown) and row["op"] in line] for of in tables_of]
                    there = [any(row["direction"] in line and row["dtype"] in line for line in same) for same in among]
                    known = row.get("noise", {}).get(peer)  # runs that were kept earlier have none
                    if known is not None and (known["high"] >= 1 or 1 / ratio <= 1 + known["itself"]):
                        far = max(known["high"], 1 / known["low"], 1 + known["itself"])
                        assert there[1] or far <= 1.05, row
                        continue
                    expected += 1
                    assert there[0], row
    assert sum("host time" not in line for line in tables_of[0]) == expected
    found, held = verdict.slower(KEPT[path])
    count = verdict.counted(found, held, verdict.too_noisy(KEPT[path]))
    assert count in listed
    assert count[:-1] in INDEX.replace("\n  ", " ")
    alike = {p: kept for p, kept in KEPT.items() if readme.on_gpu(kept) == readme.on_gpu(KEPT[path])}
    newest = next(p for p, kept in alike.items() if not kept.get("isa", {}).get("forced"))
    for what in {s.what for s in found} if path == newest else ():  # of each the worst
        assert f"{what} {min(s.ratio for s in found if s.what == what):.2f}x" in INDEX.replace("\n  ", " ")


# --- made-up results --------------------------------------------------------------------------------------------------


def row(op: str = "rms_norm", direction: str = "forward", case: str = "2x4-cached", **changes: Any) -> dict[str, Any]:
    made_up = {"kind": "op", "op": op, "row": "native", "direction": direction, "dtype": "float32", "case": case}
    return made_up | {"memory": "warm", "median_us": 3.0, "speedup_over": {"eager": 2.0}, "peak_bytes": 1} | changes


def kept(*rows: dict[str, Any], date: str = "2026-01-02", **changes: Any) -> dict[str, Any]:
    return {"date": date, "device": "A", "environment": {"torch": "2"}, "rows": list(rows), **changes}


BOTH = (row(), row(direction="backward"))


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("<!-- end of slower --> <!-- slower -->")
    with pytest.raises(SystemExit, match=r"page.md has no <!-- slower --> followed by <!-- end of slower -->"):
        readme.insert(tmp_path / "page.md", "slower", "")


def test_what_is_slower_than_a_peer() -> None:
    rows = [
        row(speedup_over={"eager": 0.999, "torch.compile": 0.5, "reference": 0.1}),
        row("rope", speedup_over={"eager": 1.0}),
        row("swiglu", speedup_over={"reference": 0.5}),  # against no peer
        row("transformer", kind="model", row="ours", speedup_over={"reference": 0.9, "ours, compiled": 0.8}),
        row("geglu", kind="overhead", host_us=4.0),
        row("geglu", kind="overhead", host_us=3.0, row="eager"),
        row("geglu", kind="overhead", host_us=9.0, row="reference"),
        row("rope", kind="overhead", host_us=4.0, row="triton, both, launch stubbed"),
        row("rope", kind="overhead", host_us=1.0, row="Liger, both, launch stubbed"),
    ]
    found, held = verdict.slower(kept(*rows))
    assert [(s.ratio, s.peer, s.what) for s in found] == [
        (0.25, "Liger", "host time of `rope`"),
        (0.5, "torch.compile", "`rms_norm`"),
        (0.75, "eager", "host time of `geglu`"),
        (0.9, "reference", "transformer, ours"),
        (0.999, "eager", "`rms_norm`"),
    ]
    assert verdict.counted(found, held) == "4 of 5 benchmarks are slower than a peer."
    assert verdict.worst(found).count("`rms_norm`") == 1
    assert verdict.counted([], 3) == "None of 3 benchmarks is slower than a peer."


# --- of which kernels -------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("csrc", "foundry_kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_digests_are_of_the_code_that_makes_an_operation(tree: Path) -> None:
    def edited(path: str, text: str) -> set[str]:
        """The operations whose digest changes where `text` is added."""
        file = tree / path
        code = file.read_text()
        file.write_text(code + text)
        after = sources.digests("cpu", tree)
        file.write_text(code)
        return {op for op in before if before[op] != after[op]}

    GATED = {"swiglu", "geglu", "glu", "reglu"}
    before = sources.digests("cpu", tree)
    assert before == sources.digests("cpu")
    assert edited("csrc/cpu/swiglu.cpp", "int more;") == GATED
    assert edited("csrc/cpu/swiglu.cpp", "\n// more\n\n/* and\nmore */\n") == set()
    assert edited("foundry_kernels/ops/swiglu/__init__.py", "\n# more\n") == set()
    assert edited("foundry_kernels/ops/swiglu/__init__.py", "\nmore = 1\n") == GATED
    for path in (
        "ops/swiglu/bench.py",
        "ops/swiglu/triton/kernels.py",
        "ops/rope/triton/__init__.py",
        "nn/__init__.py",
    ):
        assert edited(f"foundry_kernels/{path}", "\nmore = 1\n") == set()
    assert edited("csrc/torch/swiglu_cuda.cpp", "int more;") == set()
    linear = {"linear_cross_entropy", "linear_kl_div", "linear_log_probs"}
    assert edited("csrc/torch/accumulate_product_cpu.cpp", "int more;") == linear
    assert edited("foundry_kernels/ops/_linear_loss/chunks.py", "\nmore = 1\n") == linear
    assert edited("csrc/cpu/cross_entropy.cpp", "int more;") == {
        "cross_entropy",
        "kl_div",
        "log_probs",
        *linear,
    }
    kernels = {op.name for op in fk.OPS.values() if (impl := op.impl("native")) and "cpu" in impl.sources}
    assert edited("csrc/cpu/vec.h", "int more;") == kernels  # by what is included
    assert edited("csrc/cpu/matmul.cpp", "int more;") == {"grouped_mm", *linear}
    assert edited("foundry_kernels/ops/_products.py", "\nmore = 1\n") == linear
    assert edited("csrc/cpu/decode_linear.cpp", "int more;") == {"decode_linear", "grouped_mm", *linear}
    assert "csrc/cuda/swiglu.cu" in {p.relative_to(ROOT).as_posix() for p in sources.files(fk.OPS["swiglu"], "cuda")}
    of_attention = [
        {p.relative_to(ROOT).as_posix() for p in sources.files(fk.OPS["flash_attention"], d)} for d in ("cuda", "cpu")
    ]
    hopper = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc" / "cuda" / "hopper").iterdir()}
    assert hopper <= of_attention[0]
    assert not hopper & of_attention[1]


def test_the_command_names_the_operations_that_have_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = sources.digests("cpu")
    of = kept(
        *BOTH, row("rope"), row("geglu"), sources=now | {"rope": "another"}, commit={"id": "a" * 40, "dirty": True}
    )
    (tmp_path / "a.json").write_text(json.dumps(of))
    assert command.main(["changed", str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a.json, of commit aaaaaaaaaa with changes: 1 operations have changed since, or are not known",
        "  rope",
    ]
    assert sources.changed(kept(*BOTH), now) == ["rms_norm"]  # it is not known


@pytest.mark.parametrize("info", [{}, {"commit_info": {"id": "unversioned", "dirty": False}}])
def test_outside_of_a_checkout_results_have_no_commit(info: dict[str, Any]) -> None:
    assert report.commit(info) is None
    assert tables.of_commit({}) == "of a commit that was not recorded"
