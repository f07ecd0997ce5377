"""transformers' Trainer with `PatchCallback`: the model is patched while it trains, and trains as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_config, tiny_model
from foundry_kernels.integrations.patching.swap import is_patched

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments

from foundry_kernels.integrations.trainer import PatchCallback

DATA = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 128, (8, 12)).unbind()]


class Watch(TrainerCallback):
    """How many modules are patched, at each step and evaluation."""

    def __init__(self) -> None:
        self.patched: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.patched.append(sum(map(is_patched, kwargs["model"].modules())))

    on_evaluate = on_step_begin


def make_trainer(
    folder: Path, *callbacks: Any, model: Any = None, learning_rate: float = 1e-2, **options: Any
) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, logging_steps=1,
        learning_rate=learning_rate, report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    model = tiny_model("llama") if model is None else model
    return Trainer(model, arguments, train_dataset=DATA, eval_dataset=DATA[:2], callbacks=list(callbacks))


def losses(trainer: Trainer) -> Tensor:
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def test_patched_while_it_trains(tmp_path: Path) -> None:
    logged: list[str] = []
    watch = Watch()
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(tmp_path / "ours", PatchCallback(log=logged.append), watch, **options)
    ours = losses(trainer)
    theirs = losses(make_trainer(tmp_path / "theirs", **options))
    assert torch.allclose(ours, theirs, rtol=1e-4)
    assert ours[-1] < ours[0]
    (report,) = logged
    assert report.startswith("LlamaForCausalLM: 10 of 10 modules replaced")
    assert len(watch.patched) == 5  # three steps, two evaluations
    assert min(watch.patched) >= 10
    assert not any(map(is_patched, trainer.model.modules()))
    assert trainer.model(DATA[0]["input_ids"][None], labels=DATA[0]["labels"][None]).logits is not None
    saved = json.loads((tmp_path / "ours" / "checkpoint-3" / "config.json").read_text())
    assert "foundry" not in json.dumps(saved)


def test_the_class_alone_prints_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, PatchCallback)
    for again in (False, True):
        assert is_patched(trainer.model) != again
        trainer.train()
        assert capsys.readouterr().out.count("10 of 10 modules replaced") == 1
        assert not any(map(is_patched, trainer.model.modules()))


def test_the_fused_loss_under_autocast(tmp_path: Path) -> None:
    """accelerate puts a forward of its own on the model where training begins: the patch must be there before."""
    logits: list[Any] = []

    class WithLogits(Watch):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            forward = model.forward

            def watched(*args: Any, **kwargs: Any) -> Any:
                out = forward(*args, **kwargs)
                logits.append(out.logits)
                return out

            model.forward = watched

    logged: list[str] = []
    trainer = make_trainer(tmp_path / "ours", PatchCallback(log=logged.append), WithLogits(), bf16=True)
    ours = losses(trainer)
    assert logged[0].startswith("LlamaForCausalLM: 10 of 10 modules replaced")
    assert logits == [None] * 3
    theirs = losses(make_trainer(tmp_path / "theirs", bf16=True))
    assert torch.allclose(ours, theirs, rtol=0.02)
    plain = tiny_model("llama")
    plain.load_state_dict(trainer.model.state_dict())
    with torch.no_grad():
        expected = plain(DATA[0]["input_ids"][None], labels=DATA[0]["labels"][None])
        actual = trainer.model.train()(DATA[0]["input_ids"][None], labels=DATA[0]["labels"][None])
    assert torch.allclose(actual.logits, expected.logits, atol=0.1)
    assert torch.allclose(actual.loss, expected.loss, rtol=0.02)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"])
def test_hybrids_under_autocast(family: str, tmp_path: Path) -> None:
    """Trained, with steps that do not amplify what rounding changes, and evaluated."""
    options: dict[str, Any] = {"bf16": True, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-4}
    # All experts, so that none comes and goes with the last bit.
    every = {"num_experts_per_tok": 4} if hasattr(tiny_config(family), "num_experts_per_tok") else {}
    found = []
    for callbacks in ([PatchCallback(log=None)], []):
        trainer = make_trainer(tmp_path / str(len(found)), *callbacks, model=tiny_model(family, **every), **options)
        found.append((losses(trainer), torch.tensor(trainer.evaluate()["eval_loss"])))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=0.02)


def test_a_model_of_each_training(tmp_path: Path) -> None:
    made: list[Any] = []
    trainer = make_trainer(tmp_path)
    arguments, data = trainer.args, DATA

    def make() -> Any:
        made.append(tiny_model("llama"))
        return made[-1]

    trainer = Trainer(model_init=make, args=arguments, train_dataset=data, callbacks=[PatchCallback(log=None)])
    trainer.train()
    assert len(made) == 2
    assert not any(is_patched(module) for model in made for module in model.modules())


def test_a_training_that_an_error_ended(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        raises = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.raises:
                raise KeyboardInterrupt

    stop = Stop()
    trainer = make_trainer(tmp_path, PatchCallback(ops=["rms_norm", "swiglu"], log=None), stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    stop.raises = False
    trainer.train()
    assert not any(map(is_patched, trainer.model.modules()))


def test_a_patch_of_the_users_own(tmp_path: Path) -> None:
    model = tiny_model("llama")
    handle = fk.patch(model)
    make_trainer(tmp_path / "same", PatchCallback(log=None), model=model).train()
    assert is_patched(model)
    with pytest.raises(ValueError, match="model is patched already, with return_logits=False where this call has True"):
        make_trainer(tmp_path / "other", PatchCallback(return_logits=True), model=model).train()
    handle.undo()


def test_a_training_does_not_fail_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, PatchCallback(log=None))
    monkeypatch.setattr(
        "foundry_kernels.integrations.patching.swap.why_not_revertible", lambda module: "has a derived class"
    )
    with pytest.warns(UserWarning, match="the model stays patched: cannot undo: .* has a derived class"):
        trainer.train()
    assert (tmp_path / "checkpoint-3").exists()


@pytest.mark.parametrize(
    ("arguments", "error"), [({"ops": "rms_norm"}, TypeError), ({"dense_masks": "none"}, ValueError)], ids=str
)
def test_bad_arguments_are_named_where_training_begins(
    arguments: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"{next(iter(arguments))} must be"):
        make_trainer(tmp_path, PatchCallback(**arguments)).train()
