"""What `patch` replaces and what it leaves, and why; clear outcomes for bad input."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from typing import Any

import fresh
import pytest
import torch
from patching import IDS, close, logits, reasons, snapshot
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.base import PATCHABLE
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.patching import swap

# Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ops": ["rms_norm", "swigul"]}, ValueError, "'swigul'; there are rms_norm, swiglu, geglu"),
        ({"ops": "rms_norm"}, TypeError, "ops must be a list"),
        ({"ops": 3}, TypeError, "ops must be a list"),
        ({"backend": "trition"}, ValueError, "backend must be one of"),
        ({"backend": {"rms_nrom": "native"}}, ValueError, "unknown operation 'rms_nrom'"),
        ({"backend": 3}, TypeError, "backend must be a string or a mapping"),
        ({"recognise": "no"}, TypeError, "recognise must be"),
        ({"return_logits": 1}, TypeError, "return_logits must be"),
        ({"dense_masks": "eager"}, ValueError, "dense_masks must be one of kernels, refuse, sdpa"),
    ],
)
def test_bad_options_leave_the_model_as_it_was(options: Any, error: type[Exception], message: str) -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    with pytest.raises(error, match=message):
        fk.patch(model, **options)
    assert snapshot(model) == before


def test_no_module() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got dict"):
        fk.patch({})  # type: ignore[arg-type]


def test_patched_twice_and_undone_twice() -> None:
    model = tiny_model("llama")
    handle = fk.patch(model)
    patched = snapshot(model)
    assert fk.patch(model) is handle
    assert snapshot(model) == patched
    with pytest.raises(ValueError, match="is patched already"):
        fk.patch(model.model.layers[0])
    handle.undo()
    with pytest.raises(RuntimeError, match="undone already"):
        handle.undo()
    with pytest.raises(ValueError, match="is not patched"):
        fk.unpatch(model)
    fk.patch(model).undo()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "native"}, r"with backend='reference' where this call has 'native'.*; undo it first: .*unpatch"),
        ({}, r"with backend='reference' where this call has 'auto', ops=\['rms_norm', 'swiglu'\] where .* None;"),
        ({"ops": ["swiglu"]}, r"ops=\['rms_norm', 'swiglu'\] where this call has \['swiglu'\]"),
        ({"dense_masks": "sdpa", "return_logits": True}, r"dense_masks='kernels' where .*return_logits=False where"),
    ],
)
def test_patched_by_other_arguments(options: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    handle = fk.patch(model, backend="reference", ops=["swiglu", "rms_norm"])
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"model is patched already, .*{message}"):
        fk.patch(model, **options)
    assert snapshot(model) == before
    assert fk.patch(model, backend="reference", ops=("rms_norm", "swiglu")) is handle
    fk.unpatch(model)
    assert fk.patch(model, **options) is not handle


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def test_a_handle_that_was_thrown_away() -> None:
    """A cell of a notebook that runs again; and the model, which does not wait for the garbage collector."""
    model = tiny_model("llama")
    before, report = classes(model), fk.patch(model).report()
    handle = fk.patch(model)
    assert (handle.report(), fk.patch(model)) == (report, handle)
    handle.undo()
    assert classes(model) == before
    assert not [name for name in vars(model) if "foundry" in name]
    handle = fk.patch(model)
    fk.unpatch(model)
    assert classes(model) == before
    with pytest.raises(RuntimeError, match="undone already"):
        handle.undo()
    assert fk.patch(model) is not handle
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model, handle
        assert gone() is None
    finally:
        gc.enable()


def test_a_block_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama")
    before, handle = classes(model), fk.patch(model)
    patched = classes(model)
    with fk.patch(model) as outer:
        with fk.patch(model):
            assert outer is handle
        assert classes(model) == patched
    assert classes(model) == patched
    handle.undo()
    with fk.patch(model):
        with fk.patch(model):
            pass
        assert classes(model) == patched
    assert classes(model) == before


@pytest.mark.parametrize("inner", [False, True], ids=["language model", "decoder"])
def test_a_bound_forward_that_outlives_the_patch(inner: bool) -> None:
    """accelerate keeps one for autocast."""
    model: Any = tiny_model("llama")
    model = model.model if inner else model
    expected = model(IDS)[0]
    handle = fk.patch(model)
    kept = model.forward
    handle.undo()
    assert torch.equal(kept(IDS)[0], expected)
    if not inner:
        assert torch.equal(kept(IDS, labels=IDS).loss, model(IDS, labels=IDS).loss)


def test_a_model_of_which_a_part_was_undone_is_not_taken_for_patched() -> None:
    model = tiny_model("llama")
    handle = fk.patch(model)
    fk.unpatch(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match=r"model is patched already \("):
        fk.patch(model)
    with pytest.raises(RuntimeError, match="is not patched any more"):
        handle.undo()
    fk.unpatch(model)
    fk.patch(model).undo()


def test_a_part_patched_before_is_named() -> None:
    model = tiny_model("llama")
    fk.patch(model.model.layers[1].mlp)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp is"):
        fk.patch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_patch_that_fails_half_way_leaves_the_model_as_it_was(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    before, attention = snapshot(model), model.config._attn_implementation
    calls = 0
    apply = swap.apply

    def failing(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise MemoryError
        apply(*args)

    monkeypatch.setattr(swap, "apply", failing)
    with pytest.raises(MemoryError):
        fk.patch(model)
    assert snapshot(model) == before
    assert model.config._attn_implementation == attention


def test_nothing_to_patch_is_looked_at_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    report = fk.patch(model).report()
    assert str(report) == "Sequential: nothing to patch, it has no norm, gated MLP or attention"
    model.append(nn.RMSNorm(4))
    assert len(fk.patch(model).report().replaced) == 1


# What is left, and why ---------------------------------------------------------------------------------------------


def test_an_unknown_family() -> None:
    """Whose attention does not go through transformers' interface."""
    config = CONFIG_MAPPING["openai-gpt"](n_embd=32, n_positions=64, n_layer=2, n_head=2, vocab_size=128)
    model = AutoModelForCausalLM.from_config(config).eval()
    before = snapshot(model)
    handle = fk.patch(model)
    found = Counter((e.module_class, e.ops, e.by) for e in handle.report().replaced)
    assert found == {
        ("OpenAIGPTLMHeadModel", ("linear_cross_entropy", "cross_entropy"), "recognised"): 1,
        ("LayerNorm", ("layer_norm",), "row"): 4,
        ("MLP", ("bias_gelu",), "recognised"): 2,
    }
    assert {e.module_class: e.reason for e in handle.report().left} == {
        "Attention": "no adapter for this class: its weights are none that flash_attention computes, or "
        "have another use"
    }
    handle.undo()
    assert snapshot(model) == before


def test_the_report() -> None:
    model = tiny_model("gpt_oss")
    model.set_experts_implementation("eager")
    report = fk.patch(model, backend="reference").report()
    assert len(report.replaced) == 8
    assert {e.name for e in report.left} == {f"model.layers.{i}.mlp.experts" for i in (0, 1)}
    assert str(report).splitlines() == [
        "GptOssForCausalLM: 8 of 10 modules replaced (float32 on cpu)",
        "replaced",
        "     1  GptOssForCausalLM  recognised  linear_cross_entropy: reference, cross_entropy: reference; logits of a "
        "call with labels are None in training mode; return_logits=True keeps them",
        "     2  GptOssAttention    row         rope: reference, flash_attention: reference",
        "     5  GptOssRMSNorm      recognised  rms_norm: reference",
        "left as it was",
        "     2  GptOssExperts      experts_implementation='eager' has its activation inside a loop; 'grouped_mm' and "
        "'batched_mm' do not",
    ]


def test_a_config_that_returns_attentions() -> None:
    model = tiny_model("llama", attn_implementation="eager", output_attentions=True)
    assert "output_attentions" in str(reasons(model)["model.layers.0.self_attn"])
    with fk.patch(model):
        assert model(IDS).attentions[0].shape == (2, 4, 12, 12)


def test_a_forward_that_was_replaced() -> None:
    model = tiny_model("llama")
    model.model.norm.forward = lambda x: x  # as the hooks of accelerate do
    assert reasons(model) == {
        "model.norm": "its forward was replaced on the instance, by a hook of another library perhaps"
    }

    class Mine(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = tiny_model("llama")
    model.model.layers[0].mlp.__class__ = Mine
    assert "it computes none of the MLPs" in str(reasons(model)["model.layers.0.mlp"])


# Which operations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", PATCHABLE)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "glm4"])
def test_one_operation_alone(family: str, op: str) -> None:
    model = tiny_model(family)
    expected, config = logits(model), model.config
    with fk.patch(model, ops=[op]) as handle:
        assert close(logits(model), expected)
        assert {o for e in handle.report().replaced for o in e.ops} <= {op}
        assert (model.config is config) == (op != "flash_attention")
        assert all(e.reason.startswith("ops does not name") for e in handle.report().left if e.reason)
        absent = {"swiglu" if family == "gemma3" else "geglu", "layer_norm", "grouped_mm", "gated_delta_rule", "ssd"}
        absent |= {"glu", "reglu", "lora_linear", *(["qk_norm_rope"] if family == "glm4" else [])}
        assert bool(handle.report().replaced) == (op not in absent and not op.startswith("bias"))


def test_a_named_backend() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    expected = logits(model)
    with fk.patch(model, backend="triton") as handle:
        assert set(handle.report().backends.values()) == {"triton"}
        if not fk.OPS["rms_norm"].why_not("triton", "cpu"):
            assert close(logits(model), expected)
    with fk.patch(model, backend={"rms_norm": "reference"}) as handle:
        assert handle.report().backends["rms_norm"] == "reference"


NORMS = {
    "rms": (nn.RMSNorm, [{}, {"eps": None}, {"elementwise_affine": False}]),
    "layer": (nn.LayerNorm, [{}, {"bias": False}, {"elementwise_affine": False}]),
}


@pytest.mark.parametrize("shape", [(8,), (2, 8)])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_torch_anywhere(kind: str, shape: tuple[int, ...]) -> None:
    cls, choices = NORMS[kind]
    for options in choices:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), cls(shape, **{"eps": 1e-3, **options}))
        for parameter in model[1].parameters():
            nn.init.normal_(parameter)
        x = torch.randn(3, 2, 8)
        expected, keys = model(x), list(model.state_dict())
        with fk.patch(model) as handle:
            assert [(e.name, e.ops) for e in handle.report().replaced] == [("1", (f"{kind}_norm",))]
            assert list(model.state_dict()) == keys
            assert isinstance(model[1], cls)
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(copy.deepcopy(model)(x), model(x))
        assert type(model[1]) is cls
        assert torch.equal(model(x), expected)


def test_our_own_model() -> None:
    config = fk.models.ModelConfig(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=64)
    model = fk.models.Transformer(config)
    before = snapshot(model)
    with fk.patch(model, backend="reference") as handle:
        assert set(handle.report().backends.values()) == {"reference"}
        assert not handle.report().left
        assert set(model.backends.values()) == {"reference"}
        assert set(model.layers[0].attention_norm.backends.values()) == {"reference"}
        with pytest.raises(ValueError, match="patched already, with backend='reference' where this call has 'auto'"):
            fk.patch(model)
    assert snapshot(model) == before
    with fk.patch(model, backend="reference", ops=["swiglu"]):
        assert model.layers[0].feed_forward.backends == {"swiglu": "reference"}
        assert set(model.layers[0].attention_norm.backends.values()) == {"auto"}


# Without transformers ----------------------------------------------------------------------------------------------


def test_without_transformers() -> None:
    """It is not imported unless it is needed, and may be missing."""
    done = fresh.python(
        "-c",
        "import sys, torch, foundry_kernels as fk\n"
        "print(fk.patch(torch.nn.Sequential(torch.nn.RMSNorm(4))).report())\n"
        "print('transformers' in sys.modules)\n"
        "sys.modules['transformers'] = None\n"
        "from foundry_kernels.__main__ import main\n"
        "main(['patch-report'])",
    )
    assert done.returncode == 2
    assert "1 of 1 modules replaced" in done.stdout
    assert done.stdout.endswith("False\n")
    assert "transformers cannot be imported" in done.stderr
