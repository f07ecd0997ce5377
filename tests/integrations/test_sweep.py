"""Every generative class of the installed transformers: a patched model computes what the model computed before, and
none gets worse than it was."""

from __future__ import annotations

import dis
import inspect
from typing import Any

import pytest
import served
import torch
import transformers
from models import generative, inputs, tiny
from packaging.version import Version
from packed import BY_POSITIONS, IDS, leaks, refused
from torch import Tensor, nn

import foundry_kernels as fk

#: In every test run: what the issue of this sweep names. The others are slow tests.
QUICK = (
    "CohereForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Llama4ForCausalLM",
    "MllamaForConditionalGeneration",
    "NemotronForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
)
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in generative()]
pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="the models are those of the newest releases"
)

#: Of results, relative to the largest value; of a gradient, in norm. What exceeds it is compared with float64.
TOLERANCE = 1e-5
#: How much farther from float64 than the unpatched model's a result may be that exceeds it.
FACTOR = 4.0


def step(model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """Logits, then the loss of a step of training and the gradient of every parameter, by name."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}  # statistics of batches
    unlabelled = {name: value for name, value in given.items() if name != "labels"}
    if model.config.is_encoder_decoder:
        unlabelled["decoder_input_ids"] = given["labels"].clamp(min=0)
    with torch.no_grad():
        logits = model(**unlabelled).logits
    torch.manual_seed(0)  # of routers that draw
    model.train().zero_grad()
    loss = model(**given).loss
    loss.backward()
    model.eval()
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits, "loss": loss.detach(), **gradients}


def error_of(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm())


def sizes(results: dict[str, Tensor]) -> dict[str, float]:
    """The norm of each. Gradients are as large as a hundredth of the largest one, at least: of keys' biases they are 0
    up to rounding."""
    norms = {name: float(x.norm()) for name, x in results.items()}
    least = 1e-2 * max(norm for name, norm in norms.items() if name not in ("loss", "logits"))
    return {name: norm if name in ("loss", "logits") else max(norm, least) for name, norm in norms.items()}


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """What differs by more than `TOLERANCE`."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape, name
        assert ours[name].dtype == expected.dtype, name
    return [name for name, size in sizes(theirs).items() if not error_of(ours[name], theirs[name]) <= TOLERANCE * size]


def snapshot(model: nn.Module) -> list[Any]:
    """The class of each module, and what is on it that is not torch's or its class's."""
    return [
        (name, type(module), [key for key in vars(module) if key == "forward" or "foundry" in key])
        for name, module in model.named_modules()
    ]


def generated(model: Any, ids: Tensor) -> Tensor:
    result: Tensor = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    return result


@pytest.mark.parametrize("name", EVERY)
def test_a_patched_model_computes_what_it_did(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name)
    given = inputs(model)
    theirs = step(model, given)
    tokens = attempt(generated, model, given.get("input_ids"))
    ways = [how for how in BY_POSITIONS if takes_positions(model) and attempt(with_documents, model, how) is not None]
    before, handle = snapshot(model), fk.patch(model)
    try:
        ours = step(model, given)
        if tokens is not None:
            assert torch.equal(generated(model, given["input_ids"]), tokens)
        with torch.no_grad():
            for how in ways:
                documents = BY_POSITIONS[how]
                assert refused(model, IDS, **documents) or not leaks(model, **documents), how
    finally:
        handle.undo()
    if different := differing(ours, theirs):
        double = {key: v.double() if torch.is_floating_point(v) else v for key, v in given.items()}
        exact = step(tiny(name).double(), double)
        size = sizes(theirs)
        own = max(error_of(theirs[what], exact[what]) / size[what] for what in size)
        errors = {what: error_of(ours[what], exact[what]) / size[what] for what in different}
        assert max(errors.values()) <= FACTOR * own, f"{errors}, the model's own {own:.1e}"
    assert snapshot(model) == before
    read: list[Any] = []
    follow = dis.get_instructions

    def followed(code: Any) -> Any:
        read.append(code)
        return follow(code)

    monkeypatch.setattr(dis, "get_instructions", followed)
    fk.patch(model).undo()
    assert not read, "the code of known classes is followed again"
    again = step(model, given)
    assert all(torch.equal(again[what], tensor) for what, tensor in theirs.items())


def attempt(call: Any, *args: Any) -> Tensor | None:
    """The result of a call, or None where it fails without a patch."""
    try:
        return call(*args)
    except Exception:
        return None


def takes_positions(model: Any) -> bool:
    arguments = [*inspect.signature(model.forward).parameters]
    return not model.config.is_encoder_decoder and arguments[0] == "input_ids" and "position_ids" in arguments


def with_documents(model: Any, how: str) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS, **BY_POSITIONS[how])[0]
    return result


@pytest.mark.slow
def test_the_table_of_the_page() -> None:
    """`python tests/integrations/sweep/served.py --write` writes it."""
    if f"transformers {transformers.__version__}:" not in served.PAGE.read_text():
        pytest.skip("the table is that of another release")
    text = served.PAGE.read_text().partition(served.BEGIN)[2].partition(served.END)[0]
    assert text == served.section(served.all_of_them())
