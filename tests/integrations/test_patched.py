"""A patched model is the model that it was: hooks, wrappers, copies, checkpoints, mixed precision, functional calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patching import IDS, close, gradients, logits, snapshot
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_config, tiny_model

# What stays --------------------------------------------------------------------------------------------------------


def test_a_subclass_without_a_forward_is_served() -> None:
    class Mine(LlamaRMSNorm):
        pass

    model = tiny_model("llama")
    model.model.norm.__class__ = Mine
    with fk.patch(model) as handle:
        assert "model.norm" in {e.name for e in handle.report().replaced}
        assert isinstance(model.model.norm, Mine)
    assert type(model.model.norm) is Mine


def test_hooks_and_wrapped_projections_keep_working() -> None:
    class Lora(nn.Module):
        """A projection as PEFT wraps it."""

        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    def wrap(layer: Any) -> None:
        torch.manual_seed(0)
        layer.self_attn.q_proj, layer.mlp.gate_proj = Lora(layer.self_attn.q_proj), Lora(layer.mlp.gate_proj)

    plain, model = tiny_model("qwen3"), tiny_model("qwen3")
    for layer in plain.model.layers:
        wrap(layer)
    wrap(model.model.layers[0])  # one before, one after
    handle = fk.patch(model)
    wrap(model.model.layers[1])
    calls: list[str] = []
    for name in ("self_attn.q_norm", "self_attn.q_proj", "mlp", "input_layernorm"):
        module = model.model.layers[0].get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    assert close(logits(model), logits(plain))
    assert sorted(calls) == ["input_layernorm", "mlp", "self_attn.q_norm", "self_attn.q_proj"]
    handle.undo()
    assert torch.equal(logits(model), logits(plain))


def test_models_do_not_influence_each_other() -> None:
    """Three models of one config object: the modules of transformers and the config are shared, the patch is not."""
    config = tiny_config("qwen3", attn_implementation="sdpa")
    plain, native, reference = (Qwen3ForCausalLM(config).eval() for _ in range(3))
    before, expected = snapshot(plain), logits(plain)
    first = fk.patch(native, dense_masks="sdpa")
    second = fk.patch(reference, backend="reference", ops=["rms_norm", "flash_attention"])
    assert config._attn_implementation == plain.config._attn_implementation == "sdpa"
    assert native.config._attn_implementation == "foundry_or_sdpa"
    assert reference.config._attn_implementation == "foundry"
    assert snapshot(plain) == before
    assert torch.equal(logits(plain), expected)
    native.config.use_cache = False  # what is changed meanwhile stays
    first.undo()
    assert (native.config.use_cache, plain.config.use_cache) == (False, True)
    assert native.config._attn_implementation == "sdpa"
    assert reference.config._attn_implementation == "foundry"
    assert reference.model.norm._foundry.backends == {"rms_norm": "reference", "add_rms_norm": "reference"}
    second.undo()
    assert snapshot(plain) == before


def test_undo_is_refused_where_a_class_has_changed() -> None:
    model = tiny_model("llama")
    handle = fk.patch(model)
    norm: Any = model.model.norm
    own = type(norm)
    norm.__class__ = type("FSDPNorm", (own,), {})  # as fully_shard does
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="got the class FSDPNorm since"):
        handle.undo()
    assert snapshot(model) == before
    norm.__class__ = own
    handle.undo()


def test_an_attention_that_was_set_meanwhile_stays() -> None:
    model = tiny_model("llama")
    with fk.patch(model):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_a_layer_by_itself() -> None:
    """It gets the masks that the model makes: none where there is no padding, else a dense one."""
    model = tiny_model("llama")
    expected = logits(model)
    with fk.patch(model.model.layers[0]) as handle:
        assert len(handle.report().replaced) == 4
        assert close(logits(model), expected)
        padding = torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0)
        padded = logits(model, attention_mask=padding)
    assert close(padded[:, 1:], logits(model, attention_mask=padding)[:, 1:])


def test_an_error_inside_of_the_block_undoes_the_patch() -> None:
    model = tiny_model("llama")
    before = [type(m) for m in model.modules()]
    with pytest.raises(KeyError), fk.patch(model):
        raise KeyError
    assert [type(m) for m in model.modules()] == before
    with fk.patch(model) as handle:
        handle.undo()


def test_meta_device() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_config("llama")).eval()
    real = tiny_model("llama")
    handle = fk.patch(model)
    assert len(handle.report().replaced) == 10
    assert model(IDS.to("meta")).logits.shape == (2, 12, 128)
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    model.model.rotary_emb.inv_freq = real.model.rotary_emb.inv_freq
    assert close(logits(model), logits(real))


# Mixed precision and memory ----------------------------------------------------------------------------------------


def test_saved_tensor_hooks_and_functional_call() -> None:
    model = tiny_model("llama")
    with fk.patch(model):
        expected = gradients(model)
        with torch.autograd.graph.save_on_cpu():
            assert torch.equal(gradients(model), expected)
        values = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
        moved = torch.func.functional_call(model, values, (IDS,)).logits
        model.load_state_dict(values, strict=False)
        assert torch.equal(moved, model(IDS).logits)


def test_torch_func_grad_and_second_derivatives() -> None:
    """The reference has both, and "auto" takes it under a transform; kernels have neither, and say so."""
    model = tiny_model("llama")
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (IDS,), {"labels": IDS}).loss

    expected = torch.func.grad(loss)(values)
    for backend in ("reference", "auto"):
        with fk.patch(model, backend=backend):
            for name, gradient in torch.func.grad(loss)(values).items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    if fk.OPS["rms_norm"].why_not("native", "cpu"):
        return
    parameters = list(model.parameters())
    with fk.patch(model, backend={"rms_norm": "native"}):
        with pytest.raises(fk.BackendUnavailable, match=r"rms_norm: backend 'native' supports neither torch\.func"):
            torch.func.grad(loss)(values)
        assert torch.autograd.grad(model(IDS, labels=IDS).loss, parameters)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(model(IDS, labels=IDS).loss, parameters, create_graph=True)
