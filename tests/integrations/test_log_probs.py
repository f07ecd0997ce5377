"""`PatchHandle.log_probs`: log-probabilities of labels by a patched language model, without its logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patching import BUILDABLE, CHANGES, IDS, LABELS, close
from table import Allocations
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters import log_probs
from foundry_kernels.integrations.adapters.tiny import tiny_model

#: Families that differ in their heads or their bodies; the others are slow.
TOLD = ("llama", "gemma2", "granite", "mixtral", "gpt2", "bloom")
OPTIONS = {"return_entropy": True, "return_lse": True}


def expected_of(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> list[Tensor]:
    """The same from logits, in plain PyTorch: log-probabilities, entropies, log-sum-exps."""
    x = logits[:, :-1].float() / temperature
    after = labels[:, 1:]
    log_p = x.log_softmax(-1)
    picked = log_p.gather(-1, after.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    found = [picked, -(log_p.exp() * log_p).sum(-1), x.logsumexp(-1)]
    return [nn.functional.pad(x.masked_fill(after == -100, 0.0), (1, 0)) for x in found]


def gradients_of(results: Any, model: nn.Module) -> Tensor:
    """Of a sum in which each result and position has a weight of its own."""
    model.zero_grad()
    weights = torch.linspace(0.5, 1.5, results[0].numel()).view_as(results[0])
    sum((n + 1) * (x * weights).sum() for n, x in enumerate(results)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", [f if f in TOLD else pytest.param(f, marks=pytest.mark.slow) for f in BUILDABLE])
def test_values_and_gradients(family: str) -> None:
    """Of each family's own logits, with its soft cap and scale; in both modes."""
    model = tiny_model(family, **CHANGES.get(family, {}))
    for training, temperature in ((True, 1.0), (False, 0.7)):
        model.train(training)
        expected = expected_of(model(IDS).logits, LABELS, temperature)
        gradients = gradients_of(expected, model)
        with fk.patch(model) as handle:
            results = handle.log_probs(IDS, LABELS, temperature=temperature, **OPTIONS)
            assert all(map(close, results, expected))
            assert all(x.dtype == torch.float32 for x in results)
            patched = gradients_of(results, model)
            assert float((patched - gradients).norm()) <= 1e-5 * float(gradients.norm())
            alone = handle.log_probs(IDS, LABELS, temperature=temperature)
            assert torch.equal(alone, results[0])
            entropy = handle.log_probs(IDS, LABELS, temperature=temperature, return_entropy=True)
            assert len(entropy) == 2
            assert torch.equal(entropy[1], results[1])


POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)
TOTALS = torch.tensor([0, 5, 8, 12, 17, 20, 24], dtype=torch.int32)
WAYS = {
    "position_ids": {"position_ids": POSITIONS},
    "cu_seq_lens": {
        "position_ids": POSITIONS,
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), TOTALS),
        **dict.fromkeys(("max_length_q", "max_length_k"), 5),
    },
    "segments": {
        "position_ids": POSITIONS,
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]]).expand(2, -1).contiguous(),
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", ["read", "called"])
def test_packed_documents(way: str, head: str) -> None:
    """Each has the values that it has alone; nothing predicts its first token, whose value is 0."""
    model = tiny_model("llama").eval()
    with fk.patch(model) as handle:
        pieces = [handle.log_probs(ids, ids) for ids in IDS.split([5, 3, 4], 1)]
        hook = model.lm_head.register_forward_hook(lambda *_: None) if head == "called" else None
        packed = handle.log_probs(IDS, IDS, **WAYS[way])
        assert close(packed, torch.cat(pieces, 1))
        assert not packed[:, [0, 5, 8]].any()
        if hook is not None:
            hook.remove()


def test_padding_and_embeddings() -> None:
    model = tiny_model("llama").eval()
    mask = torch.ones_like(IDS).index_fill(1, torch.tensor([0, 1]), 0)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with fk.patch(model) as handle:
        alone = handle.log_probs(IDS[:, 2:], IDS[:, 2:])
        padded = handle.log_probs(IDS, IDS, attention_mask=mask, position_ids=positions)
        assert close(padded[:, 3:], alone[:, 1:])
        embedded = handle.log_probs(None, IDS, inputs_embeds=model.model.embed_tokens(IDS))
        assert torch.equal(embedded, handle.log_probs(IDS, IDS))


def test_a_head_that_must_be_called() -> None:
    """Then its logits exist, and the results are the same. So with `return_logits` and with another loss."""
    model: Any = tiny_model("gemma2", **CHANGES["gemma2"]).train()
    with fk.patch(model) as handle:
        expected = handle.log_probs(IDS, LABELS, temperature=0.7, **OPTIONS)
        calls: list[Any] = []
        hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: calls.append(logits.shape))
        found = handle.log_probs(IDS, LABELS, temperature=0.7, **OPTIONS)
        hook.remove()
        assert len(calls) == 1
        assert all(map(close, found, expected))
        hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: 2 * logits)
        assert not close(handle.log_probs(IDS, LABELS), expected[0])
        hook.remove()
    with fk.patch(model, return_logits=True) as handle:
        assert all(map(torch.equal, handle.log_probs(IDS, LABELS, temperature=0.7, **OPTIONS), expected))


@pytest.mark.parametrize("training", [False, True])
def test_no_tensor_is_as_large_as_the_logits(training: bool) -> None:
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=4001).train(training)
    ids = torch.randint(3, 4001, (4, 64))
    with fk.patch(model) as handle, Allocations() as made:
        handle.log_probs(ids, ids).sum().backward()
    assert made.largest <= 4001 * 64 < ids.numel() * 4001  # the gradient of the head


@pytest.mark.parametrize("head", ["read", "called"])
def test_the_backend_of_the_patch(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama", num_hidden_layers=1).eval()
    name = "linear_log_probs" if head == "read" else "log_probs"
    own, used = getattr(log_probs, name), []
    monkeypatch.setattr(log_probs, name, lambda *args, **given: (used.append(given["backend"]), own(*args, **given))[1])
    hook = model.lm_head.register_forward_hook(lambda *_: None) if head == "called" else None
    for backend in ("reference", {"linear_cross_entropy": "reference", "cross_entropy": "reference"}, "auto"):
        with fk.patch(model, backend=backend) as handle:
            handle.log_probs(IDS, IDS)
    assert used == ["reference", "reference", "auto"]
    if hook is not None:
        hook.remove()


def test_through_a_wrapper() -> None:
    """A wrapper is called instead of the model, and gives all arguments on."""

    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.calls = model, 0

        def forward(self, **given: Any) -> Any:
            self.calls += 1
            return self.model(**given)

    class Prompted(Wrapper):
        def forward(self, input_ids: Tensor, labels: Tensor, **given: Any) -> Any:
            more = nn.functional.pad(input_ids, (2, 0), value=5), nn.functional.pad(labels, (2, 0), value=-100)
            return self.model(more[0], labels=more[1], **given)

    model = tiny_model("llama", num_hidden_layers=1)
    wrapper = Wrapper(model)
    with fk.patch(model) as handle:
        assert torch.equal(handle.log_probs(IDS, IDS, model=wrapper), handle.log_probs(IDS, IDS))
        assert wrapper.calls == 1
        with pytest.raises(ValueError, match="Prompted does not hand the call to the patched model as it is"):
            handle.log_probs(IDS, IDS, model=Prompted(model))
    with fk.patch(wrapper) as handle:  # and a patched one, of which the model is a part
        assert handle.log_probs(IDS, IDS).shape == IDS.shape
        assert wrapper.calls == 2


@pytest.mark.slow
def test_compiled() -> None:
    model = tiny_model("llama", num_hidden_layers=1).train()
    torch.compiler.reset()
    with fk.patch(model) as handle:
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        expected = handle.log_probs(IDS, LABELS, temperature=0.5, **OPTIONS)
        found = handle.log_probs(IDS, LABELS, temperature=0.5, model=compiled, **OPTIONS)
        assert all(map(close, found, expected))
        assert close(gradients_of(found, model), gradients_of(expected, model))


@pytest.mark.parametrize(
    ("labels", "given", "error", "message"),
    [
        (IDS.float(), {}, TypeError, "labels must be int32 or int64; got torch.float32"),
        (IDS[:, 1:], {}, ValueError, r"labels must be \[B, T\] like the tokens, \[2, 12\]; got shape \[2, 11\]"),
        (IDS[0], {}, ValueError, r"labels must be \[B, T\] like the tokens, \[2, 12\]; got shape \[12\]"),
        (IDS.clone().fill_(4000), {}, IndexError, "4000"),
        (IDS, {"temperature": 0.0}, ValueError, "temperature must be"),
        (IDS, {"return_entropy": 1}, TypeError, "return_entropy must be a bool"),
        (IDS, {"ignore_index": 1.0}, TypeError, "ignore_index must be an int"),
        (IDS, {"logits_to_keep": 3}, ValueError, "logits_to_keep must be left out"),
        (IDS, {"shift_labels": IDS}, ValueError, "shift_labels must be left out"),
        (IDS, {"model": 3}, TypeError, "model must be a torch.nn.Module or None; got int"),
    ],
)
def test_bad_input(labels: Any, given: dict[str, Any], error: type[Exception], message: str) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    with fk.patch(model) as handle, pytest.raises(error, match=message):
        handle.log_probs(IDS, labels, **given)


def test_models_without_a_head_and_patches_undone() -> None:
    model: Any = tiny_model("llama", num_hidden_layers=1)
    with fk.patch(model.model) as handle, pytest.raises(ValueError, match="needs a causal language model with a head"):
        handle.log_probs(IDS, IDS)
    with fk.patch(model, ops=["rms_norm"]) as handle, pytest.raises(ValueError, match="whose loss is patched"):
        handle.log_probs(IDS, IDS)
    with fk.patch(model) as handle, pytest.raises(TypeError, match="input_ids must be a tensor, or None with"):
        handle.log_probs(None, IDS)
    with pytest.raises(RuntimeError, match="undone already"):
        handle.log_probs(IDS, IDS)
