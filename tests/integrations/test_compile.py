"""A patched Llama under torch.compile and torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patching import close
from slow import rest_slow
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.table import PATCHED
from foundry_kernels.integrations.adapters.tiny import tiny_model

IDS = torch.randint(3, 128, (3, 12), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones_like(IDS)
LEFT[0, :4] = LEFT[1, :1] = 0


def compiled(model: Any, backend: str = "aot_eager", **options: Any) -> Any:
    counters.clear()
    return torch.compile(model, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("kind", rest_slow(["training", "evaluation", "recomputed"]))
def test_one_graph_forward_and_backward_for_every_length(kind: str) -> None:
    """And for every count of items, of nothing too."""
    training, recomputed = kind != "evaluation", kind == "recomputed"
    model = tiny_model("llama", num_hidden_layers=2 if recomputed else 1).train(training)
    fk.patch(model)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    run = compiled(model, dynamic=recomputed or None)
    for length in (12, 7, 9):
        ids = IDS[:, :length]
        given = {"labels": ids.clone(), "num_items_in_batch": torch.tensor(ids.numel()), "use_cache": False}
        expected = model(ids, **given)
        expected.loss.backward()
        gradient = model.model.embed_tokens.weight.grad
        model.zero_grad()
        out = run(ids, **given)
        out.loss.backward()
        assert close(out.loss, expected.loss)
        assert out.logits is None if training else close(out.logits, expected.logits)
        assert close(model.model.embed_tokens.weight.grad, gradient)
        model.zero_grad()
    given |= {"labels": torch.full_like(ids, -100), "num_items_in_batch": torch.tensor(0)}
    loss = run(ids, **given).loss
    loss.backward()
    assert loss == 0
    assert not any(p.grad.any() for p in model.parameters())
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the first length, or numbers as symbols; and all others


@pytest.mark.slow
def test_padding_between_tokens_is_found_where_it_is_refused() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    fk.patch(model, dense_masks="refuse")
    broken = LEFT.clone()
    broken[2, 5] = 0
    with pytest.raises(RuntimeError, match="padding between the tokens of a row"):
        compiled(model)(IDS, attention_mask=broken)


@pytest.mark.slow
def test_a_dense_mask_and_weights() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    mask = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.3
    mask = mask.tril() | torch.eye(12, dtype=torch.bool)
    expected = model(IDS, attention_mask=mask, use_cache=False, output_attentions=True).logits  # and has its hooks now
    fk.patch(model)
    out = compiled(model)(IDS, attention_mask=mask, use_cache=False, output_attentions=True)
    assert close(out.logits, expected)
    assert close(out.attentions[0], model(IDS, attention_mask=mask, output_attentions=True).attentions[0])
    assert not counters["graph_break"]


@torch.no_grad()
@pytest.mark.slow
def test_packed_sequences_of_a_model_that_names_its_attention() -> None:
    """They must be given by their lengths; without a patch, attention alone can find that they are not."""
    plain = tiny_model("llama", num_hidden_layers=1)
    ids, positions = IDS.view(1, 36), torch.tensor([[*range(20), *range(16)]])
    model = tiny_model("llama", num_hidden_layers=1, attn_implementation="foundry")
    run = compiled(model, "eager")
    totals = torch.tensor([0, 20, 36], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": totals, "cu_seq_lens_k": totals, "max_length_q": 20, "max_length_k": 20}
    given = {"position_ids": positions, "use_cache": False}
    assert close(run(ids, **given, **lengths).logits, plain(ids, **given).logits)
    with pytest.raises(RuntimeError, match="position_ids restart"):
        run(ids, **given)


@pytest.mark.slow
def test_what_inductor_compiles() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    fk.patch(model)
    ids = IDS[:1]
    expected = model(ids, use_cache=False).logits
    with torch.no_grad():
        assert close(compiled(model, backend="inductor")(ids, use_cache=False).logits, expected)
    assert not counters["graph_break"]


@pytest.mark.slow
def test_static_cache_decoding() -> None:
    """What generate() compiles on a GPU: the mask is made outside, and the step has as many graphs as without patch."""
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True

    def generate(model: Any) -> tuple[Tensor, int]:
        torch.compiler.reset()
        counters.clear()
        tokens = model.generate(
            IDS,
            attention_mask=LEFT,
            max_new_tokens=5,
            do_sample=False,
            eos_token_id=None,
            cache_implementation="static",
            compile_config=compile_config,
        )
        assert not counters["graph_break"]
        return tokens, counters["stats"]["unique_graphs"]

    plain, model = (tiny_model("llama", num_hidden_layers=1) for _ in range(2))
    fk.patch(model)
    tokens, graphs = generate(plain)
    ours, ours_graphs = generate(model)
    assert torch.equal(ours, tokens)
    assert ours_graphs == graphs >= 1


def test_export_for_any_length() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    fk.patch(model)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, use_cache=False).logits

    lengths = {"ids": {1: torch.export.Dim.AUTO}}
    exported = torch.export.export(Logits(), (IDS,), dynamic_shapes=lengths, strict=False)
    for ids in (IDS, IDS[:, :7]):
        assert close(exported.module()(ids), model(ids).logits)


#: Quickly for one with a norm, an MLP and attention of other kinds than Llama's, which the tests above have.
@pytest.mark.parametrize("family", rest_slow(["gpt_oss", *(f for f in PATCHED if f != "gpt_oss")]))
def test_every_family_in_one_graph(family: str) -> None:
    """Tracing only, with recomputation and dynamic shapes: what differs between families is Python."""
    model = tiny_model(family).train()
    expected = model(IDS, attention_mask=LEFT, use_cache=False).logits
    fk.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    logits = compiled(model, "eager", dynamic=True)(IDS, attention_mask=LEFT, use_cache=False).logits
    assert close(logits[LEFT.bool()], expected[LEFT.bool()])
    assert not counters["graph_break"]
