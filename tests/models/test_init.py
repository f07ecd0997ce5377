"""The initial weights: their means and deviations by the formulas, and what no choice changes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from foundry_kernels.core.choices import INITS
from foundry_kernels.models import EncoderDecoder, ModelConfig, Transformer

WIDE = ModelConfig(dim=64, n_layers=3, n_heads=4, n_kv_heads=1, vocab_size=600, max_seq_len=16, init_std=0.05)
EXPERTS = dataclasses.replace(WIDE, n_experts=4, hidden_dim=96, shared_expert_dim=80, shared_expert_gate=True)
HYBRID = ("linear_attention", "full_attention", "linear_attention")
MODELS = {
    "llama": lambda init: Transformer(dataclasses.replace(WIDE, init=init)),
    "gpt2": lambda init: Transformer(
        dataclasses.replace(
            WIDE, init=init, positions="learned", norm="layer_norm", activation="silu", mlp_bias=True, output_bias=True
        )
    ),
    "experts": lambda init: Transformer(dataclasses.replace(EXPERTS, init=init)),
    "hybrid": lambda init: Transformer(
        dataclasses.replace(WIDE, init=init, layer_types=HYBRID, attention_gate=True, tie_embeddings=True)
    ),
    "t5": lambda init: EncoderDecoder(
        dataclasses.replace(WIDE, init=init, positions="relative", activation="reglu"), share_embeddings=True
    ),
}
INTO_STREAM = ("wo.weight", "w2.weight", "down_proj", "out_proj.weight")


def deviation(init: str, name: str, weight: Tensor) -> float:
    """What the name and the shape of a weight say."""
    if "embeddings" in name or "relative_bias" in name:
        return 0.05
    if init == "xavier":
        return math.sqrt(2 / 160) if "gate_up_proj" in name else math.sqrt(2 / (weight.shape[-2] + weight.shape[-1]))
    return 0.05 / math.sqrt(2 * 3) if init == "depth_scaled" and name.endswith(INTO_STREAM) else 0.05


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_weights_have_the_deviation_of_their_formula(kind, init):
    torch.manual_seed(0)
    model = MODELS[kind](init)
    for name, parameter in model.named_parameters():
        values = parameter.detach().double()
        if name.endswith("A_log"):
            assert values.exp().min() >= 0.01
            assert values.exp().max() <= 16.0
            continue
        if "conv1d" in name:  # uniform, as of nn.Conv1d
            assert values.abs().max() <= 0.5
            assert abs(values.square().mean().sqrt() - 0.5 / 3**0.5) < 0.02
            continue
        if parameter.dim() == 1:  # a norm's weight, or a bias
            one = name.endswith("norm.weight") or "dt_bias" in name
            assert torch.equal(values, torch.full_like(values, float(one))), name
            continue
        expected, n = deviation(init, name, values), values.numel()
        assert abs(values.mean()) < 5 * expected / math.sqrt(n), name
        assert abs(values.square().mean().sqrt() / expected - 1) < 5 / math.sqrt(2 * n), name
        assert values.abs().max() > 1.8 * expected or n < 100, name  # which a uniform distribution never reaches


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_the_meta_device_gets_the_same_weights(kind, init):
    torch.manual_seed(1)
    expected = MODELS[kind](init)
    with torch.device("meta"):
        late = MODELS[kind](init)
    late.to_empty(device="cpu")
    expected.init_weights(torch.Generator().manual_seed(2))
    late.init_weights(torch.Generator().manual_seed(2))
    theirs = expected.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in late.state_dict().items())


def test_the_default_draws_what_it_has_always_drawn():
    """Seeds of before `init` repeat their weights: one draw a matrix, in the order of the modules."""
    model = Transformer(WIDE)
    model.init_weights(torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            drawn = torch.empty_like(module.weight).normal_(0.0, 0.05, generator=generator)
            assert torch.equal(module.weight, drawn)


def test_depth_scaled_keeps_the_sum_of_the_branches_small():
    """Why it is there: the stream of a deep model grows with the depth, and with it does not."""

    def size(init: str) -> float:
        torch.manual_seed(0)
        model = Transformer(dataclasses.replace(WIDE, n_layers=24, init_std=0.2, init=init))
        streams: list[Tensor] = []
        model.layers[-1].register_forward_hook(lambda module, inputs, outputs: streams.append(outputs[1]))
        with torch.no_grad():
            model(torch.arange(16)[None])
        return float(streams[0].square().mean().sqrt())

    assert size("depth_scaled") < 0.3 * size("normal")
