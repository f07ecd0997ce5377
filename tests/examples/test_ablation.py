"""The ablation and the extrapolation: that variants are what they are called, that phases leave what they say and go on
where they were, what is refused. No time decides a test."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("tqdm", reason="training needs tqdm")

from examples.studies import extrapolation
from examples.studies.ablation import __main__ as ablation
from examples.studies.ablation import memory, speed, tables, variants
from examples.studies.ablation.settings import UsageError
from examples.studies.ablation.training import losses_by_position
from examples.training import loop as train_loop
from examples.training.text import Text
from foundry_kernels.models import Transformer

pytestmark = pytest.mark.slow

SHAPE = variants.Shape()
TINY = ["--dim", "48", "--layers", "1", "--heads", "4", "--kv-heads", "1", "--seq-len", "16", "--batch", "2"]
TINY += ["--steps", "3", "--dtype", "float32", "--seeds", "0"]
NAMES = ["gpt2", "gpt2+swiglu", "gpt2+gqa"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n\xff" * 90)
    return path


@pytest.fixture(scope="module")
def trained_once(text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    arguments = ["--text", str(text_file), "--out", str(out), "--only", "train", "--variants", *NAMES]
    assert ablation.main([*TINY, *arguments]) == 0
    return out


@pytest.fixture
def trained(trained_once, tmp_path):
    return Path(shutil.copytree(trained_once, tmp_path / "out"))


def no_training(*arguments, **options):
    raise AssertionError("trained again")


# --- the variants -----------------------------------------------------------------------------------------------------


def test_variants_have_the_same_parameters():
    configs = {name: variants.config_of(name, SHAPE) for name in variants.names(SHAPE, back=True)}
    assert len(configs) == 14
    variants.check_parameters(configs)
    counts = {name: config.n_parameters for name, config in configs.items()}
    assert all(abs(count / counts["gpt2"] - 1.0) < 0.03 for count in counts.values()), counts
    for name in ("gpt2", "llama"):
        assert sum(p.numel() for p in Transformer(configs[name]).parameters()) == counts[name]


def differences(one: str, other: str) -> set[str]:
    a, b = (dataclasses.asdict(variants.config_of(name, SHAPE)) for name in (one, other))
    return {field for field in a if a[field] != b[field]}


@pytest.mark.parametrize("name", variants.changes(SHAPE))
def test_a_single_change_is_single(name):
    fields = set(variants.changes(SHAPE)[name].fields)
    assert differences("gpt2", f"gpt2+{name}") - {"hidden_dim"} == fields
    assert differences("llama", f"llama-{name}") - {"hidden_dim"} == fields
    # Only what would change the number of parameters is made up for.
    assert ("hidden_dim" in differences("gpt2", f"gpt2+{name}")) == (name == "gqa")
    assert ("hidden_dim" in differences("llama", f"llama-{name}")) == (name in ("gqa", "swiglu"))


def test_all_changes_together_are_llama():
    config = variants.config_of("llama", SHAPE)
    for change in variants.changes(SHAPE).values():
        assert {field: getattr(config, field) for field in change.fields} == change.fields
    assert not any("bias" in name for name in Transformer(config).state_dict())


@pytest.mark.parametrize("name", ["gpt2-rope", "llama+rope", "gpt2+nonsense", "gpt3", "llama-"])
def test_unknown_variants_are_refused(name):
    with pytest.raises(ValueError, match="variant must be one of"):
        variants.config_of(name, SHAPE)


# --- phases -----------------------------------------------------------------------------------------------------------


def test_phases_go_on_where_they_were(trained, text_file, tmp_path, monkeypatch, capsys):
    lost = trained / "run-gpt2+gqa-seed0.json"
    before = json.loads(lost.read_text())
    lost.unlink()
    calls = []
    monkeypatch.setattr(train_loop, "train", lambda *a, f=train_loop.train, **k: calls.append(a) or f(*a, **k))
    again = ["--text", str(text_file), "--out", str(trained), "--seeds", "0", "--variants", *NAMES]
    assert ablation.main([*again, "--only", "train"]) == 0  # settings are the folder's
    assert len(calls) == 1
    assert json.loads(lost.read_text())["held_out"] == before["held_out"]
    monkeypatch.setattr(train_loop, "train", no_training)
    assert ablation.main([*again, "--only", "train"]) == 0
    capsys.readouterr()
    assert ablation.main([*again, "--only", "train", "--steps", "4"]) == 2
    assert "was begun with --steps 3; got 4" in capsys.readouterr().err
    other = tmp_path / "other.txt"
    other.write_bytes(text_file.read_bytes()[1:])
    assert ablation.main(["--text", str(other), *again[2:], "--only", "train"]) == 2
    assert "is of another text, text.txt" in capsys.readouterr().err


def test_every_phase_reaches_the_report(trained, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")

    def peak_bytes(prepare, **options):  # without a process for each; see below
        prepare()()
        return 10**6

    for module in (speed, tables):
        monkeypatch.setattr(module, "peak_bytes", peak_bytes)
    monkeypatch.setattr(speed, "SECONDS", 0.05)
    sizes = tables.Sizes(tokens=32, heads=4, head_dim=8, layers=1, new_tokens=2, rows=8, width=32, seconds=0.01)
    monkeypatch.setattr(tables, "SIZES", sizes)
    doc = tmp_path / "ablation.md"
    parts = ("variants", "heads", "attention", "norms")
    doc.write_text("".join(f"## {p}\n<!-- {p} -->\nold\n<!-- end of {p} -->\n" for p in parts) + "the end\n")
    arguments = ["--out", str(trained), "--seeds", "0", "--variants", *NAMES, "--page", str(doc)]
    assert ablation.main([*arguments, "--only", "speed", "tables", "report"]) == 0
    text = doc.read_text()
    assert "old" not in text
    assert text.endswith("the end\n")
    for expected in (
        "| GPT-2 + GQA |",
        "| MQA, Hk=1 |",
        "fk.flash_attention |",
        "| forward bfloat16 |",
        "1.9x and 1.8x",
    ):
        assert expected in text, expected
    row = next(line for line in text.splitlines() if line.startswith("| GPT-2 + GQA"))
    assert row.endswith("| 96 |")  # bytes of keys and values: 2 tensors, 1 layer, 1 head of 12, 4 bytes
    assert "–" not in row
    beside = tmp_path / "ablation"
    assert {p.name for p in beside.iterdir()} == {"results.json", "variants.png", "curves.png"}
    json.loads((beside / "results.json").read_text(), parse_constant=pytest.fail)
    for part in ("steps", "tokens"):
        monkeypatch.setattr(speed, part, no_training)
    assert ablation.main([*arguments, "--only", "speed", "tables"]) == 0  # nothing is measured twice


def test_report_without_measurements_says_so(trained, capsys):
    assert ablation.main(["--out", str(trained), "--seeds", "0", "--only", "report", "--variants", *NAMES]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Not measured yet: --only tables.") == 3
    assert "not measured yet: --only speed" in printed
    assert (trained / "report.md").read_text() in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--text is needed to train"),
        (["--only", "report"], "has no run of gpt2"),
        (["--steps", "0", "--only", "report"], "--steps must be at least 1; got 0"),
        (["--lr", "inf", "--only", "report"], "--lr must be finite"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--minutes", "3", "--steps", "5", "--only", "speed"], "excludes --steps"),
        (["--variants", "gpt5", "--only", "speed"], "variant must be one of gpt2,"),
        (["--dim", "48", "--heads", "4", "--kv-heads", "1", "--only", "speed"], r"gpt2\+rope has .* at most 3%"),
        (["--heads", "5", "--only", "speed"], "dim must be a multiple of n_heads=5"),
    ],
)
def test_bad_options_are_refused(arguments, message, tmp_path, capsys):
    out = tmp_path / "out"
    assert ablation.main([*arguments, "--out", str(out)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists()


def test_minutes_choose_the_steps(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(ablation.time, "perf_counter", iter(range(10**6)).__next__)  # each step takes a second
    configs = {name: variants.config_of(name, SHAPE) for name in NAMES}
    monkeypatch.setattr(speed.OneStep, "__call__", lambda self: lambda: None)
    assert ablation.plan_steps(ablation.Settings(), configs, seeds=2, minutes=10.0) == 90
    with pytest.raises(UsageError, match="less than one step"):
        ablation.plan_steps(ablation.Settings(), configs, seeds=2, minutes=0.05)


def _allocate():
    return lambda: torch.ones(16 * 2**20).sum()


def test_memory_is_that_of_the_work():
    assert memory.peak_bytes(_allocate) == pytest.approx(64 * 2**20, rel=0.1)


def test_materialized_attention_is_the_kernels():
    found = [attend(*tables._qkv(tables.Sizes(tokens=33), torch.float32)) for attend in tables.ATTENTION.values()]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


# --- extrapolation ----------------------------------------------------------------------------------------------------


class Bigram(torch.nn.Module):
    """Knows no positions: its loss cannot depend on how the text is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))

    def forward(self, tokens):
        return self.table[tokens]


def test_every_length_predicts_the_same_bytes():
    data = torch.randint(256, (1000,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    count = extrapolation.predictions(Text("text", data, data, ""), [16, 24, 32, 128])
    assert count == 768
    model = Bigram()
    expected = F.cross_entropy(model(data[:count].long()), data[1 : count + 1].long()).item()
    for length in (16, 24, 32, 128):
        of = losses_by_position(model, data, length, count)
        assert of.shape == (length,)
        assert of.mean().item() == pytest.approx(expected, abs=1e-6)
    first = torch.arange(0, count, 16)
    by_hand = F.cross_entropy(model(data[first].long()), data[first + 1].long()).item()
    assert losses_by_position(model, data, 16, count)[0].item() == pytest.approx(by_hand, abs=1e-6)
    with pytest.raises(UsageError, match="--text must hold out more than 1536 bytes"):
        extrapolation.predictions(Text("text", data, data, ""), [512, 768])


def test_positions_beyond_the_trained_length():
    learned, rope = (variants.config_of(name, SHAPE) for name in ("gpt2", "gpt2+rope"))
    assert extrapolation.extended(learned, None, 256) == learned
    assert extrapolation.extended(learned, None, 257) is None
    for kind in ("linear", "dynamic", "yarn", "llama3"):
        assert extrapolation.extended(rope, kind, 256) == rope
        longer = extrapolation.extended(rope, kind, 1024)
        assert longer.max_seq_len == 1024
        assert longer.rope_scaling.rope_type == kind
        assert longer.rope_scaling.factor == (1.0 if kind == "dynamic" else 4.0)


def test_extrapolation_reports_and_goes_on(trained, text_file, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["--text", str(text_file), "--out", str(trained), "--seeds", "0", "--factors", "1", "1.5", "4"]
    assert extrapolation.main(arguments) == 0
    table = (trained / "extrapolation.md").read_text()
    assert table.count("no rows beyond 16") == 2
    rows = json.loads((trained / "extrapolation.json").read_text())["rows"]
    assert rows["learned"]["lengths"]["24"] is None
    at = {name: row["lengths"]["64"]["losses"] for name, row in rows.items() if name != "learned"}
    assert len({tuple(losses) for losses in at.values()}) == len(at)  # each its own
    assert all(math.isfinite(losses[0]) for losses in at.values())
    assert rows["RoPE, YaRN"]["lengths"]["16"] == rows["RoPE"]["lengths"]["16"]
    assert (trained / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(train_loop, "train", no_training)
    monkeypatch.setattr(extrapolation, "losses_by_position", no_training)
    assert extrapolation.main(arguments) == 0
    capsys.readouterr()
    assert extrapolation.main([*arguments, "--factors", "0.5"]) == 2
    assert "--factors must be at least 1; got 0.5" in capsys.readouterr().err
