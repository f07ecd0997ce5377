"""The mixture of experts in our model and in those of transformers: its losses, its checkpoints, what is refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from tiny_model import TINY, draw, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import foundry_kernels as fk
from foundry_kernels.models import Transformer
from foundry_kernels.nn import load_balancing_loss, router_z_loss


def close(actual: Tensor, expected: Tensor, error: float) -> None:
    assert float((actual - expected).detach().abs().max()) <= error * (float(expected.detach().abs().max()) or 1.0)


ROUTED = dataclasses.replace(TINY, n_experts=4, top_k=2, hidden_dim=12, load_balancing_coef=0.3, router_z_coef=0.2)


def test_losses_of_routers_are_part_of_the_loss_in_training():
    model, tokens = make(ROUTED), draw()
    _, cross_entropy = model.eval()(tokens, tokens)
    logits, loss, stats = model.train()(tokens, tokens, return_logits=True, return_router_stats=True)
    _, same = model(tokens, tokens)
    assert len(stats) == ROUTED.n_layers
    close(loss, cross_entropy + 0.3 * load_balancing_loss(stats) + 0.2 * router_z_loss(stats), 1e-6)
    close(same, loss, 1e-6)
    model.eval()
    alone, _ = model(tokens, return_router_stats=True)
    close(alone, logits, 1e-5)
    with pytest.raises(ValueError, match="return_router_stats needs a model with experts"):
        make(TINY)(tokens, return_router_stats=True)


@pytest.mark.parametrize("changes", [{}, {"norm_placement": "post"}, {"parallel_residual": True}], ids=str)
def test_checkpointed_blocks_keep_the_gradients_of_these_losses(changes):
    model = make(dataclasses.replace(ROUTED, **changes)).train()
    results = []
    for reentrant in (None, False, True):
        model.zero_grad()
        for block in model.layers:
            block.__dict__.pop("forward", None)
            if reentrant is not None:
                block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
        model(draw(), draw())[1].backward()
        results.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))
    model.zero_grad()
    without = make(dataclasses.replace(ROUTED, **changes, load_balancing_coef=0.0, router_z_coef=0.0)).train()
    without(draw(), draw())[1].backward()
    router = "layers.0.feed_forward.router.weight"
    name = [n for n, _ in model.named_parameters()].index(router)
    assert not torch.allclose(results[0][name], without.get_parameter(router).grad, rtol=1e-2)


def test_the_coefficient_of_mixtrals_routers_is_read():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, output_router_logits=True, router_aux_loss_coef=0.5)
    assert Transformer.from_hf(transformers.MixtralForCausalLM(config)).config.load_balancing_coef == 0.5


# --- in models of transformers ----------------------------------------------------------------------------------------


def patched(**options: Any) -> tuple[nn.Module, Any]:
    pytest.importorskip("transformers")
    from foundry_kernels.integrations.adapters.tiny import tiny_model

    model = tiny_model("mixtral")
    return model, fk.patch(model, **options)


def test_patched_experts_run_grouped_where_that_is_asked_for(monkeypatch):
    calls = []
    from foundry_kernels.integrations.adapters import experts

    monkeypatch.setattr(
        experts, "run_experts", lambda *args, **kw: calls.append(1) or fk.nn.moe.run_experts(*args, **kw)
    )
    for ops, grouped in ((None, 2), (["grouped_mm"], 2), (["swiglu"], 0)):
        calls.clear()
        model, handle = patched(ops=ops)
        with torch.no_grad(), handle:
            actual = model(draw()).logits
        assert len(calls) == grouped
        with torch.no_grad():
            close(actual, model(draw()).logits, 1e-5)
    model, handle = patched()
    model.set_experts_implementation("eager")  # a choice made since
    calls.clear()
    with torch.no_grad():
        model(draw())
    assert not calls


def test_patched_experts_that_live_on_several_devices():
    """Experts are split as under expert parallelism: this device has experts 0 to 3, and others' come with a weight of
    0."""
    model, handle = patched()
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(5, 64)
    index, weights = torch.tensor([[0, 4], [1, 2], [4, 4], [3, 0], [4, 1]]), torch.rand(5, 2)
    weights = weights.masked_fill(index == 4, 0.0)
    experts._is_expert_parallel = True
    with torch.no_grad():
        actual = experts(x, index, weights)
        handle.undo()
        close(actual, experts(x, index, weights), 1e-5)
    assert not actual[2].any()


def test_experts_with_kernels_of_somebodys_choice_are_left():
    model, handle = patched()
    handle.undo()
    model.config._experts_implementation = "sonicmoe"
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "sonicmoe"
    reasons = {e.reason for e in fk.patch(model).report().left}
    assert reasons == {"experts_implementation='sonicmoe' explicitly chooses other kernels"}
