"""The claims: that studies compare what they say at equal parameters, that phases leave what the page shows and go on
where they were, that each claim has a measurement and an explanation, and the sums. No time decides a test."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
import torch

pytest.importorskip("tqdm", reason="training needs tqdm")

from examples.studies.ablation import speed, tables, training, variants
from examples.studies.ablation.settings import Settings, UsageError
from examples.studies.claims import __main__ as program
from examples.studies.claims import claims, longest, page, results, studies, sums, timings
from examples.studies.claims import tables as shown
from foundry_kernels.models import Transformer

pytestmark = pytest.mark.slow

WHY = page.explanations(page.WHY.read_text(encoding="utf-8"))
TINY = Settings(
    dim=24, layers=1, heads=12, kv_heads=12, seq_len=16, batch=2, steps=2, dtype="float32", held_out=64
)  # fmt: skip


# --- variants and studies ---------------------------------------------------------------------------------------------

#: What may differ within a study besides the width that makes parameters equal.
DIFFERENT = {
    "heads": {"n_kv_heads"},
    "placement_shallow": {"norm_placement"},
    "placement_deep": {"norm_placement"},
    "placement_xavier": {"norm_placement"},
    "activations": {"activation"},
    "dropout_once": {"embedding_dropout", "residual_dropout", "attention_dropout"},
    "dropout_often": {"embedding_dropout", "residual_dropout", "attention_dropout"},
    "init_shallow": {"init"},
    "init_deep": {"init"},
}


@pytest.mark.parametrize("scale", studies.SCALES)
@pytest.mark.parametrize("key", studies.STUDIES)
def test_a_study_compares_one_thing_at_equal_parameters(key, scale):
    configs = studies.STUDIES[key].configs(scale)
    counts = [config.n_parameters for config in configs.values()]
    assert max(counts) / min(counts) - 1.0 < variants.TOLERANCE
    found = [dataclasses.asdict(config) for config in configs.values()]
    different = {field for field in found[0] if len({str(of[field]) for of in found}) > 1}
    assert different - {"hidden_dim"} == DIFFERENT[key]
    assert ("hidden_dim" in different) == (key == "heads")
    if key == "activations":  # two thirds of 4d, without a rounding that would favour one
        widths = {config.ffn_width * (3 if config.gated else 2) for config in configs.values()}
        assert widths == {8 * configs["GELU"].dim}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama+depth=3", "an option must be one of layers, .* got 'depth'"),
        ("llama+layers=many", "layers must be of type int; got 'many'"),
        ("llama+activation=maxout", "activation must be one of"),
    ],
)
def test_unknown_options_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        variants.config_of(name, variants.Shape())


# --- the phases -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """All studies and measurements so small that they take seconds; the arguments of a run."""
    little = {
        key: dataclasses.replace(TINY, train_bytes=100 if study.settings["small"].train_bytes else 0)
        for key, study in studies.STUDIES.items()
    }
    small = {key: dataclasses.replace(study, settings={"small": little[key]}) for key, study in studies.STUDIES.items()}
    chosen = {key: small[key] for key in ("heads", "placement_deep", "dropout_often")}
    # 24 layers are the shallow model's here; parameters of such narrow ones are further apart.
    monkeypatch.setattr(variants, "TOLERANCE", 0.2)
    for module in (studies, results, timings, shown, page, claims):
        monkeypatch.setattr(module, "STUDIES", small)
    sizes = tables.Sizes(tokens=32, head_dim=8, layers=1, new_tokens=2, rows=8, width=32, seconds=0.01)
    tiny_tables = {
        part: (dataclasses.replace(sizes, heads=of.heads, group=of.group), measured)
        for part, (of, measured) in timings.TABLES.items()
    }
    monkeypatch.setattr(timings, "TABLES", tiny_tables)
    monkeypatch.setattr(timings, "STEPS", {part: (key, {}) for part, (key, _) in timings.STEPS.items()})
    monkeypatch.setattr(timings, "STEP_SECONDS", 0.01)
    monkeypatch.setattr(longest, "peak_bytes", _peak_of)
    text = tmp_path / "play.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 90)
    return ["--text", str(text), "--out", str(tmp_path / "out"), "--page", str(tmp_path / "docs.md"), "--seeds", "0",
            "--studies", *chosen]  # fmt: skip


def _peak_of(prepare, *, whole, device):
    tokens = prepare.sizes.tokens
    assert whole
    assert device == "cpu"
    return 100 * tokens**2 if prepare.name == "explicit matrices" else 8192 * tokens


def _again(*arguments, **options):
    raise AssertionError("done a second time")


@pytest.mark.slow
def test_every_phase_reaches_the_page(tiny, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    assert program.main([*tiny]) == 0
    text = (tmp_path / "docs.md").read_text()
    found = json.loads((tmp_path / "docs" / "results.json").read_text(), parse_constant=pytest.fail)
    run = found["studies"]["placement_deep"]["runs"]["post-norm, no warm-up"]["0"]
    row = next(line for line in text.splitlines() if line.startswith("| post-norm, no warm-up |"))
    assert f"| {run['held_out']:.3f} |" in row
    # In the first table too, and the explanation.
    assert f"{run['held_out']:.3f}" in next(line for line in text.splitlines() if line.startswith("| [Pre-norm"))
    assert found["studies"]["dropout_often"]["text"]["train"] == 100
    assert "| MQA, 1 of 12 heads | 0.0" in text
    assert "8.3%" in text
    assert found["caches"]["cases"]["MQA"]["cache_bytes"] == 2 * 4 * 8 * 32  # 2 tensors, 4 bytes, D=8, 32 tokens
    assert "| forward: explicit matrices | 105 | 419 |" in text
    assert "longest T in 128 MiB, forward: explicit 1,152, SDPA 16,384, fk 16,384" in text
    assert "not measured: --only train --studies init_deep" in text
    best = [
        min(loss for _, loss in r["0"]["held_out_curve"]) for r in found["studies"]["dropout_often"]["runs"].values()
    ]
    assert f"are {best[0]:.3f} without and {best[1]:.3f} with dropout" in " ".join(text.split())
    assert (tmp_path / "docs" / "placement_deep.png").read_bytes().startswith(b"\x89PNG")
    assert "![Losses on the way, placement deep](docs/placement_deep.png)" in text

    for module, name in ((training, "train"), (tables, "timed"), (speed, "timed"), (longest, "search")):
        monkeypatch.setattr(module, name, _again)
    assert program.main([*tiny]) == 0  # nothing is trained or measured twice
    # The page is made from what is kept beside it, without the folder of the runs.
    elsewhere = ["--only", "page", "--out", str(tmp_path / "empty"), "--page", str(tmp_path / "docs.md")]
    assert program.main(elsewhere) == 0
    assert (tmp_path / "docs.md").read_text() == text
    capsys.readouterr()
    assert program.main([*tiny, "--only", "train", "--steps", "3"]) == 2
    assert "was begun with --steps 2; got 3" in capsys.readouterr().err


def test_a_text_is_not_needed(tiny, monkeypatch):
    seen = []
    monkeypatch.setattr(studies, "train_all", lambda folder, path, *a, **k: seen.append(path))
    assert program.main([*tiny[2:], "--only", "train"]) == 0
    assert seen == [None, None, None]


def test_bad_options_are_refused(tmp_path, capsys):
    refused = [(["--steps", "0"], "--steps must be"), (["--threads", "0"], "--threads must be")]
    refused += [] if torch.cuda.is_available() else [(["--device", "cuda"], "finds no CUDA device")]
    for arguments, message in refused:
        assert program.main([*arguments, "--out", str(tmp_path / "out"), "--only", "train"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("power", "factor"), [(2, 96), (1, 8000)])
def test_the_longest_is_found(power, factor):
    budget = 128 * 2**20
    found = longest.search(lambda tokens: factor * tokens**power, budget)
    exact = (budget / factor) ** (1.0 / power)
    assert found["longest"] <= exact < found["longest"] * (1.0 + 1.0 / longest.PARTS)
    assert found["exponent"] == pytest.approx(power)
    assert found["peaks"][found["longest"]] <= budget
    assert longest.search(lambda tokens: budget + 1, budget)["longest"] is None


# --- the page ---------------------------------------------------------------------------------------------------------


def test_every_claim_has_a_measurement_and_an_explanation():
    assert WHY.keys() - set(page.FRAME) == claims.CLAIMS.keys()
    text = page.render({}, WHY, {})
    for claim in claims.CLAIMS.values():
        section = text.partition(f"## {claim.title}\n")[2].partition("\n## ")[0]
        assert re.search(r"\*\*Claimed:\*\* .+\n\n\*\*Measured:\*\* .+\n\n.+", section)
        assert "**Why it differs:**\n\n- " in section
        assert f"](#{page.anchor(claim.title)})" in text
    assert "{" not in text
    measured = [row for row in text.splitlines() if row.startswith("| [") and not row.endswith("| not measured |")]
    assert [row.partition("]")[0] for row in measured] == ["| [How many parameters a model has"]  # which takes no time


def test_explanations_name_only_numbers_that_there_are():
    with pytest.raises(UsageError, match=r"norms: there is no number \{invented\}"):
        page.fill("It is {invented}\n", {"there": "1"}, "norms")
    with pytest.raises(UsageError, match="look at norms"):
        page.explanations(page.WHY.read_text(encoding="utf-8").replace("<!-- norms -->", ""))
    # A number in the text that no result supports would be typed by hand.
    for key, text in WHY.items():
        if key not in page.FRAME:
            assert not re.search(r"\d\.\d+x|\d ?%", re.sub(r"equal within 3 %", "", text)), key


def test_the_page_is_that_of_its_results():
    kept = results.load(results.beside(program.PAGE))
    pictures = page.pictures(kept, program.PAGE.with_suffix(""))
    assert page.render(kept, WHY, pictures) == program.PAGE.read_text(encoding="utf-8")


def test_a_run_that_diverges_is_a_result(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 90)
    monkeypatch.setattr(training, "losses_by_position", lambda *a: torch.tensor([math.nan]))
    training.train_all(tmp_path, text, TINY, ["llama"], [0], may_diverge=True)
    assert training.load_run(tmp_path, "llama", 0)["held_out"] is None
    with pytest.raises(UsageError, match="gpt2 diverged"):
        training.train_all(tmp_path, text, TINY, ["gpt2"], [0])


# --- sums -------------------------------------------------------------------------------------------------------------


def test_sums_of_tutorials():
    cells = [row[1] for row in sums.rows()]
    assert cells == [
        "7,096,576",
        "4,999,424",
        "256 x 688",
        "embedding and head 3.9%, attention 31.9%, feed-forward 64.2%",
    ]
    assert sums.COUNTED_WIDTH == 341
    counted = sum(p.numel() for p in Transformer(sums.SMALL).parameters())
    assert counted == sums.SMALL.n_parameters
    # As the table writes it.
    total = eval(sums.rows()[0][2].partition(":")[0].replace(",", "").replace(" x ", " * "))
    assert total == counted
