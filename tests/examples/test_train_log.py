"""The example's log and curve, its schedule and optimizer, evaluation at an interval, and the choice of a model."""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from slow import rest_slow

pytest.importorskip("tqdm", reason="the example needs tqdm")

from examples import train
from examples.training import log as train_log
from examples.training import loop as train_loop
from examples.training import optimizer as train_optimizer
from examples.training import report as train_report
from examples.training import text as train_text
from foundry_kernels import RopeScaling
from foundry_kernels.models import ModelConfig, Transformer

OPTIONS = ["--dim", "16", "--layers", "1", "--heads", "2", "--batch", "2", "--seq-len", "16", "--device", "cpu"]
OPTIONS += ["--steps", "6", "--sample-tokens", "0", "--backend", "reference", "--evaluate-every", "4"]
SAME = ("event", "step", "loss", "lr", "grad_norm", "perplexity", "bits_per_byte")  # in every run, bit for bit


def make_recipe(*more: str) -> train_loop.Recipe:
    return train.make_recipe(train.parse([*OPTIONS, *more]), 5)


def events(path: Path) -> list[tuple[Any, ...]]:
    """What is the same in every run."""
    return [tuple(event.get(name) for name in SAME) for event in train_log.read(path)]


# --- the log ----------------------------------------------------------------------------------------------------------


def test_log_of_a_run(text_file: Path, tmp_path: Path) -> None:
    text, log, recipe = train_text.read_text(text_file, 16), tmp_path / "log", make_recipe()
    run = train_loop.train(recipe, "reference", text, None, progress=False, log=log)
    start, *found = [json.loads(line) for line in log.read_text().splitlines()]
    assert [e["event"] for e in found] == [*["step"] * 4, "evaluation", "step", "step", "evaluation", "summary"]
    assert start["event"] == "start"
    assert start["settings"]["--steps"] == 6
    steps = [e for e in found if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4, 5, 6]
    assert [e["loss"] for e in steps] == run.losses
    assert [32 / e["tokens_per_second"] for e in steps] == pytest.approx(run.seconds)
    assert all(e["peak_bytes"] >= 0 for e in steps)
    first, last = (e for e in found if e["event"] == "evaluation")
    assert [(e["step"], e["loss"]) for e in (first, last)] == [(e.step, e.loss) for e in run.evaluations]
    assert first["loss"] != last["loss"] == run.held_out
    assert last["perplexity"] == pytest.approx(math.exp(run.held_out))
    assert last["bits_per_byte"] == pytest.approx(run.held_out / math.log(2))
    assert found[-1]["held_out_loss"] == run.held_out
    assert found[-1]["loss"] == pytest.approx(sum(run.losses) / 6)

    torch.manual_seed(recipe.seed)
    model = Transformer(recipe.model, "reference")
    _, loss = model(*text.batch(2, 16, torch.Generator().manual_seed(recipe.seed)))
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert steps[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_picture_of_the_schedule_is_what_a_run_does(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    recipe, log = make_recipe("--steps", "23", "--lr", "3e-3"), tmp_path / "log"
    text = train_text.read_text(text_file, 16)
    train_loop.train(recipe, "reference", text, None, progress=False, log=log)
    logged = {e["step"]: e["lr"] for e in train_log.read(log) if e["event"] == "step"}
    kept: list[Any] = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **named: (kept.append(self), save(self, *args, **named)))
    path = tmp_path / "new" / "schedule.png"
    assert train.main([*OPTIONS, "--steps", "23", "--lr", "3e-3", "--plot-schedule", str(path)]) == 0
    assert path.read_bytes()[:4] == b"\x89PNG"
    line = kept[0].axes[0].lines[0]
    assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == logged
    assert train.main(["--plot-schedule", str(path), "--steps", "0"]) == 2
    assert train.main(["--plot-schedule", str(tmp_path / "schedule.none"), "--steps", "2"]) == 2
    said = capsys.readouterr().err
    assert "--steps must be at least 1" in said
    assert "--plot-schedule: no plot: cannot write" in said


@pytest.mark.parametrize("dropout", rest_slow([0.3, 0.0]))
def test_killed_run_goes_on_as_if_it_had_not_been(dropout: float, text_file: Path, tmp_path: Path) -> None:
    """Losses, rates and norms of each step once and bit for bit, although the log was ahead of the checkpoint."""
    text = train_text.read_text(text_file, 16)
    recipe = make_recipe("--checkpoint-every", "3", "--set", f"residual_dropout={dropout}")
    whole = train_loop.train(recipe, "reference", text, None, progress=False, log=tmp_path / "whole")
    checkpoint, log = tmp_path / "checkpoint", tmp_path / "log"

    def kill(step: int) -> bool:
        if step == 6:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        train_loop.train(recipe, "reference", text, checkpoint, stop=kill, progress=False, log=log)
    log.write_text(log.read_text() + '{"event": "step", "st')  # cut off as it was written
    assert [e["step"] for e in train_log.read(log)] == [0, 1, 2, 3, 4, 4, 5]
    torch.manual_seed(1234)
    run = train_loop.train(recipe, "reference", text, checkpoint, resume=True, progress=False, log=log)
    assert events(log) == events(tmp_path / "whole")
    assert run.evaluations == whole.evaluations
    if dropout:
        without = train_loop.train(make_recipe(), "reference", text, None, progress=False)
        assert run.losses[0] != without.losses[0], "nothing was dropped"
    again = train_loop.train(recipe, "reference", text, checkpoint, resume=True, progress=False, log=log)
    assert events(log) == events(tmp_path / "whole"), "a finished run is summed up once"
    assert again.evaluations == whole.evaluations


@pytest.mark.parametrize(
    "content", rest_slow(["a diary\n", '{"event": "step"}\n', "\xff\n", "[1]\n", '{"event": "step", "step": "1"}\n'], 2)
)
def test_foreign_log_is_refused_and_kept(content: str, text_file: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    arguments = [*OPTIONS, "--text", str(text_file), "--out", str(out)]
    assert train.main(arguments) == 0
    log = out / "log-reference.jsonl"
    log.write_text(content, encoding="latin-1")
    capsys.readouterr()
    assert train.main([*arguments, "--resume"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(log) in line
    assert log.read_text(encoding="latin-1") == content


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with train_log.Log(tmp_path / "log", 0) as log:
        log.write("step", step=1, loss=math.nan, lr=math.inf)
    assert train_log.read(tmp_path / "log") == [{"event": "step", "step": 1, "loss": None, "lr": None}]


def test_curves_are_those_of_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **options: drawn.append(self))
    curves = {"a": [3.0, 2.0, 1.5], "b": [3.0, None, 1.25]}
    for name, losses in curves.items():
        with train_log.Log(tmp_path / name, 0) as log:
            log.write("start", step=0, token="byte")
            for step, loss in enumerate(losses, 1):
                log.write("step", step=step, loss=loss)
            log.write("evaluation", step=2, loss=9.0)
    assert train_report.plot({name: tmp_path / name for name in curves}, tmp_path / "loss.png") is None
    [upper, lower] = drawn[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in upper.get_lines()}
    held_out = [[2, 9]]
    assert lines == {
        "a": [[1, 3], [2, 2], [3, 1.5]], "a, held-out": held_out, "b": [[1, 3], [3, 1.25]], "b, held-out": held_out
    }  # fmt: skip
    assert upper.get_ylabel() == "loss (nats per byte)"
    assert lower.get_lines()[0].get_xydata().tolist()[1:] == [[3, 0.25]]


# --- optimizer, schedule, evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 10, 75])
def test_learning_rates(steps: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = train_optimizer.make_optimizer(torch.nn.ParameterList([parameter]), 0.5)
    schedule = train_optimizer.make_schedule(optimizer, steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    warm_up = max(1, steps // 10)
    rise = [0.5 * (step + 1) / warm_up for step in range(warm_up)]
    cosine = [math.cos(math.pi * step / (steps - warm_up)) for step in range(steps - warm_up)]
    assert rates == pytest.approx(rise + [0.05 + 0.45 * 0.5 * (1 + c) for c in cosine])


def test_only_matrices_decay() -> None:
    model = Transformer(ModelConfig.gpt2(dim=8, n_layers=1, n_heads=2, vocab_size=16, max_seq_len=8), "reference")
    optimizer = train_optimizer.make_optimizer(model, 1e-3)
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
    assert decayed["fused"] is kept["fused"] is True


def test_evaluation_makes_no_logits_and_changes_nothing(text_file: Path) -> None:
    text, recipe = train_text.read_text(text_file, 16), make_recipe("--set", "residual_dropout=0.5")
    model = Transformer(recipe.model, "reference")
    returned: list[Any] = []
    model.register_forward_hook(lambda module, args, out: returned.append((module.training, args[0].clone(), out[0])))
    twice = [train_loop.evaluate(model, recipe, text, 3) for _ in range(2)]
    assert twice[0] == twice[1]
    assert model.training
    assert {(training, logits) for training, _, logits in returned} == {(False, None)}
    windows = [tokens for _, tokens, _ in returned]
    assert all(torch.equal(a, b) for a, b in zip(windows[:4], windows[4:], strict=True))
    often = train_loop.train(recipe, "reference", text, None, progress=False)
    seldom = dataclasses.replace(recipe, evaluate_every=0)
    assert train_loop.train(seldom, "reference", text, None, progress=False).losses == often.losses


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "falcon", "mixtral"])
def test_families(family: str) -> None:
    found = make_recipe("--family", family, "--heads", "4", "--dim", "32").model
    assert (found.dim, found.n_layers, found.n_heads, found.vocab_size) == (32, 1, 4, 256)
    preset = getattr(ModelConfig, family)()
    sizes = {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len", "multiple_of"}
    sizes |= {"ffn_dim_multiplier", "load_balancing_coef"}
    for field in dataclasses.fields(ModelConfig):
        if field.name not in sizes:
            assert getattr(found, field.name) == getattr(preset, field.name), field.name
    assert found.kv_heads == {"llama": 4, "gpt2": 4, "bloom": 4, "falcon": 1, "mixtral": 4}[family]
    assert make_recipe("--family", family, "--kv-heads", "2").model.kv_heads == 2


def test_single_choices() -> None:
    chosen = ("--set", "norm=layer_norm", "positions=alibi", "--set", "head_dim=null", "tie_embeddings=true")
    found = make_recipe(*chosen, "residual_dropout=0.25", "qk_norm=true").model
    assert (found.norm, found.positions, found.head_dim) == ("layer_norm", "alibi", None)
    assert (found.tie_embeddings, found.residual_dropout, found.qk_norm) == (True, 0.25, True)
    scaled = make_recipe("--set", 'rope_scaling={"rope_type": "linear", "factor": 2.0}').model
    assert scaled.rope_scaling == RopeScaling("linear", 2.0)
    assert make_recipe("--family", "gpt2", "--set", "positions=rope").model.positions == "rope"
    assert make_recipe("--family", "gpt2", "--sample-tokens", "50").model.max_seq_len == 16, "learned ones are trained"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "colour=red"], "--set takes FIELD=VALUE with a field of ModelConfig; got colour=red"),
        (["--set", "norm"], "--set takes FIELD=VALUE with a field of ModelConfig; got norm"),
        (["--set", "dim=8"], "--set dim: use --dim instead; got dim=8"),
        (["--set", "positions=polar"], "the model's shape: positions must be one of 'rope'"),
        (["--set", "qk_norm=yes"], "the model's shape: qk_norm must be a bool; got str"),
        (["--set", "residual_dropout=much"], "the model's shape: residual_dropout must be a number; got str"),
        (["--set", "rope_scaling=3"], "--set rope_scaling=3: "),
        (["--family", "bloom", "--set", "rope_dim=4"], "the model's shape: rope_dim needs positions='rope'"),
        (["--evaluate-every", "-1"], "--evaluate-every must be at least 0; got -1"),
    ],
    ids=" ".join,
)
def test_bad_choices_are_refused(arguments: list[str], message: str, text_file: Path, capsys) -> None:
    out = text_file.parent / "out"
    assert train.main([*OPTIONS, *arguments, "--text", str(text_file), "--out", str(out)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not out.exists()


def test_learned_positions_leave_no_room_for_a_sample(text_file: Path, capsys) -> None:
    arguments = [*OPTIONS, "--text", str(text_file), "--out", str(text_file.parent / "out"), "--family", "gpt2"]
    assert train.main([*arguments, "--sample-tokens", "9", "--prompt", "over the lazy dog"]) == 0
    assert "No sample: learned positions end at 16; the prompt has 17 bytes." in capsys.readouterr().out


def test_run_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """`python -m examples.train`; as a file it is run where it is interrupted."""
    monkeypatch.setattr(sys, "argv", ["train", "--steps", "0"])
    monkeypatch.delitem(sys.modules, "examples.train")
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("examples.train", run_name="__main__")
    assert capsys.readouterr().err == "error: --steps must be at least 1; got 0\n"


def test_tensorboard_is_named_where_it_is_missing(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    out = tmp_path / "out"
    assert train.main([*OPTIONS, "--text", str(text_file), "--out", str(out), "--tensorboard"]) == 2
    assert capsys.readouterr().err == "error: --tensorboard needs TensorBoard: pip install tensorboard\n"
    assert not out.exists()
