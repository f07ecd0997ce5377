"""The example's health over a run: in the log, drawn, across an interruption, and without a trace in the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tqdm", reason="the example needs tqdm")

from examples import train
from examples.training import log as train_log
from examples.training import loop as train_loop
from examples.training import text as train_text
from foundry_kernels.diagnostics import SigmaReparam
from foundry_kernels.diagnostics import checkpoint as diagnosed
from foundry_kernels.models import Transformer

OPTIONS = ["--dim", "16", "--layers", "2", "--heads", "2", "--batch", "4", "--seq-len", "16", "--device", "cpu"]
OPTIONS += ["--steps", "6", "--sample-tokens", "0", "--backend", "auto", "--evaluate-every", "0"]


def make_recipe(*more: str) -> train_loop.Recipe:
    return train.make_recipe(train.parse([*OPTIONS, *more]), 5)


def health_in(log: Path) -> list[dict[str, Any]]:
    return [event for event in train_log.read(log) if event["event"] == "health"]


def test_diagnosing_is_no_step_of_a_power_iteration(text_file: Path) -> None:
    text = train_text.read_text(text_file, 16)
    runs = [
        train_loop.train(make_recipe("--sigma-reparam", *more), "auto", text, None, progress=False)
        for more in ((), ("--diagnose-every", "1"))
    ]
    assert runs[0].losses == runs[1].losses


def test_a_run_that_is_diagnosed_is_the_same_run(text_file: Path, tmp_path: Path) -> None:
    """Bit for bit the losses of one that is not, and in the log the norms of the gradients before they are clipped."""
    text, log = train_text.read_text(text_file, 16), tmp_path / "log"
    plain = train_loop.train(make_recipe("--accumulate", "2"), "auto", text, None, progress=False)
    recipe = make_recipe("--accumulate", "2", "--diagnose-every", "2")
    run = train_loop.train(recipe, "auto", text, None, progress=False, log=log)
    assert run.losses == plain.losses
    found = health_in(log)
    assert [e["step"] for e in found] == run.health.steps == [1, 2, 4, 6]
    assert [e["concerns"] for e in found] == [[]] * 4
    for event, health in zip(found, run.health.healths, strict=True):
        assert [layer["name"] for layer in event["layers"]] == ["layers.0.attention", "layers.1.attention"]
        assert all(0.9 < entropy <= 1.0 for layer in event["layers"] for entropy in layer["entropy"])
        assert [layer["max_logit"] for layer in event["layers"]] == [layer.max_logit for layer in health.layers]
    torch.manual_seed(recipe.seed)
    model = Transformer(recipe.model, "auto")
    for part in zip(*(x.chunk(2) for x in text.batch(4, 16, torch.Generator().manual_seed(recipe.seed))), strict=True):
        (model(*part)[1] / 2).backward()
    for block, layer in zip(model.layers, found[0]["layers"], strict=True):
        for name, part in (("attention", block.attention), ("feed_forward", block.feed_forward)):
            norm = torch.nn.utils.get_total_norm([p.grad for p in part.parameters()])
            assert layer[f"{name}_gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_a_run_that_was_killed_has_one_history(text_file: Path, tmp_path: Path) -> None:
    text = train_text.read_text(text_file, 16)
    recipe = make_recipe("--checkpoint-every", "3", "--diagnose-every", "2")
    whole = train_loop.train(recipe, "auto", text, None, progress=False, log=tmp_path / "whole")
    checkpoint, log = tmp_path / "checkpoint", tmp_path / "log"

    def kill(step: int) -> bool:
        if step == 5:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        train_loop.train(recipe, "auto", text, checkpoint, stop=kill, progress=False, log=log)
    assert [e["step"] for e in health_in(log)] == [1, 2, 4]
    run = train_loop.train(recipe, "auto", text, checkpoint, resume=True, progress=False, log=log)
    assert health_in(log) == health_in(tmp_path / "whole")
    assert run.health.steps == whole.health.steps
    assert run.health.healths == whole.health.healths


def test_the_command_draws_it_and_says_what_collapsed(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    arguments = [*OPTIONS, "--text", str(text_file), "--out", str(out), "--diagnose-every", "3"]
    assert train.main([*arguments, "--lr", "3", "--steps", "12"]) == 0
    printed = capsys.readouterr().out
    assert "Health of auto at step 12, and since step 1:\n  layer 0 (layers.0.attention): entropy collapse" in printed
    assert (out / "health-auto.png").read_bytes()[:4] == b"\x89PNG"
    assert train.main([*OPTIONS, "--text", str(text_file), "--out", str(tmp_path / "plain")]) == 0
    undiagnosed = ["--out", str(tmp_path / "plain"), "--diagnose-every", "3", "--resume"]
    assert train.main([*OPTIONS, "--text", str(text_file), *undiagnosed]) == 0  # it has ended, and has no history
    assert "Health of" not in capsys.readouterr().out
    damaged = out / "log-auto.jsonl"
    damaged.write_text(damaged.read_text().replace('"max_logit"', '"logit"'))
    assert train.main([*arguments, "--lr", "3", "--steps", "12", "--resume"]) == 2
    assert "log-auto.jsonl is damaged: the health at step 1: KeyError" in capsys.readouterr().err
    for more, message in (
        (["--diagnose-every", "-1"], "--diagnose-every must be at least 0"),
        (["--diagnose-every", "1", "--parallel", "tp"], "--diagnose-every needs all heads"),
        (["--sigma-reparam", "--parallel", "tp"], "--sigma-reparam needs whole weights"),
    ):
        assert train.main([*OPTIONS, "--text", str(text_file), *more]) == 2
        assert message in capsys.readouterr().err


def test_sigma_reparam_from_training_to_the_checkpoint(text_file: Path, tmp_path: Path) -> None:
    """A run goes on bit for bit; afterwards its weights are plain, and `diagnostics` reads these of the checkpoint."""
    text, checkpoint = train_text.read_text(text_file, 16), tmp_path / "checkpoint"
    recipe = make_recipe("--sigma-reparam", "--checkpoint-every", "3", "--diagnose-every", "3")
    whole = train_loop.train(recipe, "auto", text, None, progress=False)
    train_loop.train(recipe, "auto", text, checkpoint, stop=lambda step: step == 3, progress=False)
    run = train_loop.train(recipe, "auto", text, checkpoint, resume=True, progress=False)
    assert run.losses == whole.losses
    assert run.model is not None
    assert not SigmaReparam.is_in(run.model.state_dict())
    norm = torch.linalg.matrix_norm(run.model.layers[0].attention.wq.weight.detach(), 2)  # type: ignore[union-attr]
    assert norm.item() == pytest.approx(1.0, rel=0.05)
    model, _ = diagnosed.load(checkpoint)
    for name, weight in run.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    with pytest.raises(train.CheckpointError, match="with --sigma-reparam True, not None"):
        train_loop.train(make_recipe(), "auto", text, checkpoint, resume=True, progress=False)
