"""The loss of patched language models: in training without logits, and otherwise as it was."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from patching import CHANGES, IDS, LABELS, close
from table import Allocations
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.causal_lm import NO_LOGITS
from foundry_kernels.integrations.adapters.table import GPT_LIKE
from foundry_kernels.integrations.adapters.tiny import tiny_model


def train(model: Any, **given: Any) -> tuple[Any, Tensor]:
    """The output of a step, and all gradients in one vector."""
    model.train()
    model.zero_grad()
    out = model(IDS, **({"labels": LABELS} | given))
    out.loss.backward()
    return out, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def same(model: Any, return_logits: bool = False, **given: Any) -> None:
    """Patched and as it is: the losses, the gradients, and all outputs but the logits."""
    expected, gradients = train(model, **given)
    with fk.patch(model, return_logits=return_logits):
        out, patched = train(model, **given)
    assert out.loss.dtype == expected.loss.dtype
    assert close(out.loss, expected.loss)
    assert float((patched - gradients).norm()) <= 1e-5 * float(gradients.norm())
    assert set(expected) - set(out) == (set() if return_logits else {"logits"})
    if return_logits:
        assert close(out.logits, expected.logits)
    if "aux_loss" in expected:
        assert close(out.aux_loss, expected.aux_loss)


@pytest.mark.parametrize("family", ["llama", *CHANGES, *GPT_LIKE])
def test_loss_and_gradients_of_a_step(family: str) -> None:
    model = tiny_model(family, **CHANGES.get(family, {}))
    with fk.patch(model) as handle:
        assert {e.ops for e in handle.report().replaced if e.name == ""} == {("linear_cross_entropy", "cross_entropy")}
    same(model)
    if family in CHANGES:
        same(model, return_logits=True)


NEXT = nn.functional.pad(LABELS, (0, 1), value=-100)[:, 1:]
KEPT = torch.tensor([1, 4, 6, 7])


@pytest.mark.parametrize(
    "given",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"labels": LABELS.masked_fill(LABELS == -100, 5), "ignore_index": 5},
        {"shift_labels": NEXT.flip(0)},
        {"shift_labels": NEXT[:, KEPT], "logits_to_keep": KEPT},
        {"shift_labels": NEXT[:, -3:].clone(), "logits_to_keep": 3},
        {"output_hidden_states": True},
        {"attention_mask": torch.ones_like(IDS).index_fill(1, torch.tensor([0, 1]), 0)},
    ],
    ids=lambda given: "-".join(f"{n}-{type(v).__name__}" for n, v in given.items()),
)
@pytest.mark.parametrize("return_logits", [False, True], ids=["", "logits"])
def test_what_a_call_may_say_of_the_loss(given: dict[str, Any], return_logits: bool) -> None:
    same(tiny_model("llama", num_hidden_layers=1), return_logits, **given)


def test_labels_that_all_count_nothing() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    with fk.patch(model):
        out, gradients = train(model, labels=torch.full_like(IDS, -100))
    assert out.loss == 0
    assert not gradients.any()


@pytest.mark.parametrize("return_logits", [False, True], ids=["", "logits"])
@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor(0.0)], ids=repr)
def test_a_count_of_nothing(count: Any, return_logits: bool) -> None:
    """0 where no label counts. Where one does, the count is wrong, and the loss says so as it does without a patch."""
    model = tiny_model("llama", num_hidden_layers=1)
    nothing = torch.full_like(IDS, -100)
    with fk.patch(model, return_logits=return_logits):
        out, gradients = train(model, labels=nothing, num_items_in_batch=count)
        assert (out.logits is None) is not return_logits
        assert out.loss == 0
        assert len(gradients) > 0
        assert not gradients.any()
        model.eval()
        assert model(IDS, labels=nothing, num_items_in_batch=count).loss == 0
        assert train(model, num_items_in_batch=count)[0].loss == float("inf")
    assert train(model, num_items_in_batch=count)[0].loss == float("inf")


def test_no_tensor_is_as_large_as_the_logits() -> None:
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=4001)
    ids = torch.randint(3, 4001, (4, 64))
    largest = []
    for return_logits in (False, True):
        model.train()
        with fk.patch(model, return_logits=return_logits), Allocations() as made:
            model(ids, labels=ids).loss.backward()
        largest.append(made.largest)
    assert largest[0] <= 4001 * 64 < ids.numel() * 4001 <= largest[1]  # the gradient of the head


def test_evaluation_and_generation_have_their_logits() -> None:
    model = tiny_model("llama", num_hidden_layers=1).eval()
    expected = model(IDS, labels=LABELS)
    with fk.patch(model):
        out = model(IDS, labels=LABELS)
        assert close(out.logits, expected.logits)
        assert close(out.loss, expected.loss)
        model.train()
        assert close(model(IDS).logits, expected.logits)
        assert model.generate(IDS[:, :4], max_new_tokens=2, do_sample=False).shape == (2, 6)


def test_tuples() -> None:
    model = tiny_model("llama", num_hidden_layers=1).train()
    expected = model(IDS, labels=LABELS, return_dict=False)
    with fk.patch(model):
        loss, cache = model(IDS, labels=LABELS, return_dict=False)
        assert close(loss, expected[0])
        assert type(cache) is type(expected[2])
        assert len(model(IDS, return_dict=False)) == 2


# What others see of the model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_it_goes_by_the_name_that_it_had(family: str, tmp_path: Any) -> None:
    """Its name is in saved configs, and a trainer looks at its arguments to see what of a batch it takes."""
    model = tiny_model(family)
    original = type(model)
    arguments = [p.name for p in inspect.signature(model.forward).parameters.values()]
    with fk.patch(model):
        assert type(model) is not original
        assert isinstance(model, original)
        assert [p.name for p in inspect.signature(model.forward).parameters.values()] == arguments
        model.save_pretrained(tmp_path)
    assert f'"{original.__name__}"' in (tmp_path / "config.json").read_text()
    assert type(model) is original


def test_undone_under_a_class_that_fully_shard_derived() -> None:
    """Its class stays, as others may share it; what it does is what the model did."""
    model = tiny_model("llama", num_hidden_layers=1)
    before = train(model)
    handle = fk.patch(model)
    model.__class__ = type("FSDPLlamaForCausalLM", (type(model),), {})
    assert train(model)[0].logits is None
    handle.undo()
    after = train(model)
    assert torch.equal(after[0].logits, before[0].logits)
    assert torch.equal(after[1], before[1])
    with fk.patch(model) as again:
        assert {e.module_class: e.reason for e in again.report().left} == {
            "FSDPLlamaForCausalLM": "its loss stays, with the logits: its class was derived from a patched one"
        }


# What is left, and why -----------------------------------------------------------------------------------------------


def entry(model: nn.Module, **options: Any) -> Any:
    with fk.patch(model, **options) as handle:
        report = handle.report()
        [found] = [e for e in (*report.replaced, *report.left) if e.name == ""]
        return found


def test_the_report_says_that_there_are_no_logits() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    assert entry(model).reason == NO_LOGITS
    assert entry(model, return_logits=True).reason is None
    assert entry(model, return_logits=True).ops == ("cross_entropy",)
    assert entry(model, ops=["rms_norm"]).reason == "ops does not name linear_cross_entropy or cross_entropy"


def test_a_head_that_must_be_called() -> None:
    class Doubled(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.base(x)

    model: Any = tiny_model("llama", num_hidden_layers=1)
    model.lm_head = Doubled(model.lm_head)
    assert entry(model).ops == ("cross_entropy",)
    assert "its lm_head is no plain linear layer (Doubled) or has hooks" in entry(model).reason
    same(model, return_logits=True)
    model.lm_head = model.lm_head.base
    with fk.patch(model):  # and a hook that comes later
        without = train(model)[0]
        hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: 2 * logits)
        out = train(model)[0]
        hook.remove()
    assert without.logits is None
    assert out.logits is not None
    assert not close(out.loss, without.loss)


def test_another_loss_is_left_and_another_forward_is_not() -> None:
    model: Any = tiny_model("llama", num_hidden_layers=1)
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    same(model, return_logits=True)
    with fk.patch(model):
        assert train(model)[0].logits is not None
        model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum() * 2
    assert train(model)[0].loss == train(model)[0].logits.sum() * 2

    class Mine(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = tiny_model("llama", num_hidden_layers=1)
    model.__class__ = Mine
    assert entry(model).reason == NO_LOGITS
    same(model)


def test_a_loss_that_takes_more_is_left(monkeypatch):
    """Stands for another version of transformers."""
    from transformers.loss import loss_utils

    def newer(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, label_smoothing=0.0, **kwargs):
        raise AssertionError

    monkeypatch.setattr(loss_utils, "ForCausalLMLoss", newer)
    handle = fk.patch(tiny_model("llama"))
    (entry,) = [e for e in handle.report().left if e.module_class == "LlamaForCausalLM"]
    assert entry.reason == "its loss takes label_smoothing: another version of it than this package knows"
    handle.undo()
