"""PEFT's adapters and a patch: results, gradients, saving, loading and merging; where `lora_linear` serves them, and
where PEFT's own forward runs."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import runpy
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import limits
import processes
import pytest
import torch
from processes import adapters
from processes.outcomes import near as near_to
from processes.outcomes import outcome
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters import lora_layers
from foundry_kernels.integrations.adapters.tiny import tiny_model

peft = pytest.importorskip("peft")

IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
SOME = ["q_proj", "v_proj", "gate_proj", "down_proj"]

#: What an adapter may be, and whether the operation serves it.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "all": ({"target_modules": "all-linear"}, True),
    "some": ({"target_modules": SOME}, True),
    "rslora": ({"target_modules": SOME, "use_rslora": True}, True),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, True),
    "embedding": ({"target_modules": ["embed_tokens", "o_proj"]}, True),
    "dora": ({"target_modules": "all-linear", "use_dora": True}, False),
    "bias": ({"target_modules": "all-linear", "lora_bias": True}, False),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def adapted(kind: str, patched: str = "", family: str = "llama", **options: Any) -> tuple[Any, Any]:
    """A model with adapters, and the handle of its patch, made "before" or "after" they were added."""
    model: Any = tiny_model(family)
    handle = fk.patch(model) if patched == "before" else None
    torch.manual_seed(0)
    given = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False, **KINDS[kind][0], **options}
    model = peft.get_peft_model(model, peft.LoraConfig(**given))
    return model, fk.patch(model) if patched == "after" else handle


def step(model: Any, ids: Tensor = IDS, **options: Any) -> tuple[Tensor, Tensor]:
    """The loss, and the gradients of the adapters."""
    loss = model.train()(input_ids=ids, labels=ids, **options).loss
    loss.backward()
    found = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return loss.detach(), torch.cat(found)


def near(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 2e-5 * expected.abs().max())


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(input_ids=IDS, **options).logits
    return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of the operation had."""
    found: list[int] = []
    one, several = lora_layers.lora_linear, lora_layers.lora_linears

    def counted(x: Any, w: Any, a: Any, *rest: Any, **options: Any) -> Any:
        found.append(len(a) if isinstance(a, (tuple, list)) else 1)
        return (several if isinstance(a, (tuple, list)) else one)(x, w, a, *rest, **options)

    monkeypatch.setattr(lora_layers, "lora_linear", counted)
    monkeypatch.setattr(lora_layers, "lora_linears", counted)
    return found


@pytest.mark.parametrize("patched", ["before", "after"])
@kinds
def test_adapters_train_as_without(kind: str, patched: str, calls: list[int]) -> None:
    model, handle = adapted(kind, patched)
    report = handle.report()
    expected, _ = adapted(kind)
    for actual, other in zip(step(model), step(expected), strict=True):
        assert near(actual, other)
    served = KINDS[kind][1]
    assert bool(calls) == served
    layers = sum(isinstance(m, peft.tuners.lora.Linear) for m in model.modules())
    others = sum(isinstance(m, peft.tuners.lora.Embedding) for m in model.modules())
    assert sum(e.ops == ("lora_linear",) for e in report.replaced) == (layers if served else 0)
    assert sum("its own forward runs" in str(e.reason) for e in report.left) == others + (0 if served else layers)
    assert near(logits(model), logits(expected))
    with model.disable_adapter():
        assert near(logits(model), logits(tiny_model("llama")))
    handle.undo()
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize("how", ["add_adapter", "load_adapter", "inject", "copied", "pickled"])
def test_layers_that_an_adapter_adds_to_a_patched_model(how: str, calls: list[int], tmp_path: Path) -> None:
    """By each way of adding it, to copies too: the layers run on the operation, the report has them, and they are
    undone."""
    config = peft.LoraConfig(r=2, target_modules=["k_proj", "up_proj", "o_proj"], init_lora_weights=False)
    model: Any = adapted("some", "before")[0]
    model = (
        copy.deepcopy(model) if how == "copied" else pickle.loads(pickle.dumps(model)) if how == "pickled" else model
    )
    base = model.get_base_model()
    if how == "inject":
        base = model.unload()
        peft.inject_adapter_in_model(config, base, "b")
    elif how == "load_adapter":
        peft.get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path)
        model.load_adapter(str(tmp_path), "b")
    else:
        model.add_adapter("b", config)
    if how != "inject":
        model.set_adapter("b")
    patched = logits(base)
    assert calls == [1] * 6
    handle = fk.patch(base)
    report = handle.report()
    added = {e.name.split(".")[-1] for e in report.replaced if e.ops == ("lora_linear",)}
    assert added == {"k_proj", "up_proj", "o_proj"}
    fk.unpatch(base)
    assert handle.report() == report
    assert not [key for m in base.modules() for key in vars(m) if "foundry" in key]
    assert near(patched, logits(base))


def test_layers_with_one_input_share_a_call(calls: list[int]) -> None:
    """q, k and v, and gate and up; with dropout each has its own mask."""
    step(adapted("all", "after")[0])
    assert calls == [3, 1, 2, 1] * 2
    calls.clear()
    step(adapted("all", "after", lora_dropout=0.5)[0])
    assert calls == [1] * 14


#: A value of each field of PEFT's LoraConfig, and the reason why some layers run PEFT's own forward, if they do.
FIELDS: dict[str, tuple[Any, str]] = {
    "r": (3, ""),
    "lora_alpha": (5, ""),
    "lora_dropout": (0.5, ""),
    "target_modules": (["v_proj", "down_proj"], ""),
    "exclude_modules": (["v_proj"], ""),
    "bias": ("all", ""),
    "use_rslora": (True, ""),
    "modules_to_save": (["norm"], ""),
    "init_lora_weights": ("gaussian", ""),
    "layers_to_transform": ([1], ""),
    "rank_pattern": ({"v_proj": 2}, ""),
    "alpha_pattern": ({"v_proj": 2}, ""),
    "trainable_token_indices": ({"embed_tokens": [4, 5]}, "no operation for this class"),
    "layer_replication": ([[0, 2], [1, 2]], ""),
    "use_dora": (True, "its adapter is a Dora"),
    "lora_bias": (True, "its adapter has a bias"),
    "target_parameters": (["embed_tokens.weight"], "the layer below does not run on grouped_mm"),
    "alora_invocation_tokens": ([5, 6], "its adapter is a ALora"),
}
#: Fields that name a file, need a layer or data of another kind (`test_other_layers`, `test_experts`), or choose how an
#: adapter begins. A variant of the adapter's arithmetic is left by its name, as DoRA is.
OTHER_FIELDS = """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode fan_in_fan_out
    layers_pattern megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config velora_config
    use_qalora qalora_group_size monteclora_config runtime_config use_bdlora arrow_config kasa_config
    ensure_weight_tying"""


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_of_the_configuration(field: str, calls: list[int]) -> None:
    """Results are those without a patch, and the report has each layer of PEFT, with the reason if its own forward
    runs."""
    known = {each.name for each in dataclasses.fields(peft.LoraConfig)}
    assert known <= {*FIELDS, *OTHER_FIELDS.split()}
    if field not in known:
        pytest.skip("this PEFT has no such field")
    value, reason = FIELDS[field]
    results = []
    for patched in ("", "before"):
        model, handle = adapted("some", patched, **{field: value})
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
        results.append(logits(model))
    assert bool(calls) != reason.startswith("its adapter")
    assert near(*reversed(results))
    layers = sum(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in model.modules())
    report = handle.report()
    own = [str(e.reason) for e in report.left if "its own forward runs" in str(e.reason)]
    assert len(own) + sum("lora_linear" in e.ops for e in report.replaced) == layers
    assert {reason in each for each in own} <= {True}
    assert bool(own) == bool(reason)


def test_twenty_steps_are_those_of_peft() -> None:
    """Losses equal to rounding, and adapters in the end."""
    losses, ends = [], []
    for patched in ("", "after"):
        model, _ = adapted("head", patched, target_modules=["q_proj", "k_proj", "v_proj", *SOME[2:], "lm_head"])
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        found = []
        for i in range(20):
            ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(i % 4))
            loss = model.train()(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        losses.append(torch.stack(found))
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]))
    assert losses[0][-4:].mean() < losses[0][:4].mean()
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-5, atol=0)
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-4 * float(ends[0].abs().max()))


#: What is done to adapters while a model is patched.
ACTIONS: dict[str, Callable[[Any], Any]] = {
    "added": lambda m: m.add_adapter("b", peft.LoraConfig(r=2, target_modules=SOME, init_lora_weights=False)),
    "switched": lambda m: m.set_adapter("b"),
    "two active": lambda m: m.base_model.set_adapter(["default", "b"]),
    "one again": lambda m: m.set_adapter("default"),
    "disabled": lambda m: m.base_model.disable_adapter_layers(),
    "enabled": lambda m: m.base_model.enable_adapter_layers(),
    "scaled": lambda m: [x.scale_layer(3.0) for x in m.modules() if hasattr(x, "scale_layer")],
    "merged": lambda m: m.merge_adapter(),
    "unmerged": lambda m: m.unmerge_adapter(),
    "weighted": lambda m: m.add_weighted_adapter(["default", "b"], [0.5, 0.5], "c", combination_type="cat"),
    "weighted active": lambda m: m.set_adapter("c"),
    "back": lambda m: m.set_adapter("default"),
    "deleted": lambda m: m.delete_adapter("b"),
    "moved": lambda m: m.to(torch.bfloat16).to(torch.float32),
}


@pytest.mark.parametrize("kind", ["all", "head", "dora"])
def test_adapters_live_as_without(kind: str) -> None:
    """State dicts have the same bits after everything that PEFT does."""
    (model, _), (expected, _) = adapted(kind, "after"), adapted(kind)
    for name, act in ACTIONS.items():
        if kind != "all" and name.startswith("weighted"):
            continue
        for each in (model, expected):
            torch.manual_seed(1)
            act(each)
        assert near(logits(model), logits(expected)), name
        if name not in ("disabled", "merged"):
            assert all(near(a, e) for a, e in zip(step(model), step(expected), strict=True)), name
        ours, theirs = model.state_dict(), expected.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs), name
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied), logits(model))


@pytest.mark.parametrize("kind", ["all", "dora", "head"])
def test_adapters_are_saved_and_loaded_around_a_patch(kind: str, tmp_path: Path) -> None:
    """Saved from a patched model, loaded into one that is not, and the other way round; and merged."""
    model, _ = adapted(kind, "after")
    model.save_pretrained(tmp_path / "patched")
    plain, _ = adapted(kind)
    plain.save_pretrained(tmp_path / "plain")
    expected = logits(plain)
    names = [path.name for path in sorted((tmp_path / "patched").iterdir())]
    assert names == [path.name for path in sorted((tmp_path / "plain").iterdir())]
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "patched")
    assert torch.equal(logits(loaded), expected)
    base = tiny_model("llama")
    with fk.patch(base):
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "plain")
        assert near(logits(loaded), expected)
    assert torch.equal(logits(loaded), expected)
    merged = model.merge_and_unload()
    assert near(logits(merged), expected)
    fk.unpatch(merged)
    assert near(logits(merged), expected)


def test_batches_of_several_adapters_run_peft() -> None:
    results = []
    for patched in ("", "after"):
        model, _ = adapted("all", patched)
        torch.manual_seed(1)
        model.add_adapter("b", peft.LoraConfig(r=2, target_modules=SOME, init_lora_weights=False))
        results.append(logits(model, adapter_names=["b", "__base__"]))
    assert near(*results)


def test_checkpoints_and_compiled_models(calls: list[int]) -> None:
    """Gradient checkpointing of both kinds, and one graph."""
    expected = step(adapted("all")[0])
    for reentrant in (True, False):
        model, _ = adapted("all", "after")
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert all(near(a, e) for a, e in zip(step(model), expected, strict=True))
    assert len(calls) == 2 * 2 * 8
    for kind in ("all", "head"):
        torch._dynamo.reset()
        model, _ = adapted(kind, "after")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        loss, gradients = step(compiled)
        other, others = step(adapted(kind)[0])
        assert near(loss, other)
        assert near(gradients, others)


@pytest.mark.parametrize("kind", ["all", "head"])
def test_autocast(kind: str) -> None:
    """Adapters stay float32 in ours, so that ours is the nearer one to float32."""
    exact = step(adapted(kind)[0])
    found = []
    for patched in ("", "after"):
        model, _ = adapted(kind, patched)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.train()(input_ids=IDS, labels=IDS).loss
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        found.append((float((loss - exact[0]).abs()), float((gradients - exact[1]).norm())))
    assert found[1][0] <= 2 * found[0][0] + 1e-2
    assert found[1][1] <= 1.25 * found[0][1]


def test_low_precision_is_as_exact_as_peft() -> None:
    """A bfloat16 model with float32 adapters, as PEFT makes them, over a few batches."""
    for kind in ("all", "head"):
        errors = torch.zeros(2, 2)
        for seed in range(4):
            ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(seed))
            exact = step(adapted(kind)[0].bfloat16().float(), ids)
            for i in range(2):
                model = adapted(kind)[0].bfloat16()
                for name, p in model.named_parameters():
                    if "lora_" in name:
                        p.data = p.data.float()
                if i:
                    fk.patch(model)
                found = zip(step(model, ids), exact, strict=True)
                errors[i] += torch.stack([(a.float() - e).norm() / e.norm() for a, e in found])
        assert errors[1, 0] <= 2 * errors[0, 0], kind
        assert errors[1, 1] <= 1.25 * errors[0, 1], kind


def saved(model: Any, ids: Tensor) -> dict[torch.dtype, int]:
    """Bytes that a step saves for its backward pass, by dtype, without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        seen.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = model.train()(input_ids=ids, labels=ids).loss
    found: dict[torch.dtype, int] = {}
    for at, x in seen.items():
        if at not in own:
            found[x.dtype] = found.get(x.dtype, 0) + x.untyped_storage().nbytes()
    del kept
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_a_step(dtype: torch.dtype) -> None:
    """At most 1.4 times what the frozen model saves, and of the adapters nothing but x A^T in float32. PEFT's own takes
    more than 1.6 times."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    ids = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    sizes = {}
    for kind in ("peft", "patched", "frozen"):
        model: Any = LlamaForCausalLM(config).to(dtype)
        if kind == "frozen":
            model.requires_grad_(False).model.embed_tokens.weight.requires_grad_(True)
        else:
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        if kind != "peft":
            fk.patch(model)
        sizes[kind] = saved(model, ids)
    total = {kind: sum(found.values()) for kind, found in sizes.items()}
    assert total["patched"] <= 1.4 * total["frozen"] < 1.6 * total["frozen"] < total["peft"]
    if dtype == torch.bfloat16:
        low = 2 * 7 * ids.numel() * 4 * 4  # layers, adapters, tokens, rank, bytes
        assert sizes["patched"][torch.float32] - sizes["frozen"][torch.float32] <= low


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3"])
def test_other_layers(family: str, calls: list[int]) -> None:
    """A Conv1D below, layers with biases, and packed projections."""
    results = []
    for patched in ("", "after"):
        model, _ = adapted("all", patched, family, fan_in_fan_out=family == "gpt2")
        results.append((*step(model), logits(model)))
    assert calls
    for actual, expected in zip(*results, strict=True):
        assert near(actual, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_layers_are_called(bits: int, calls: list[int]) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    results = []
    for patched in ("", "after"):
        model: Any = tiny_model("llama").bfloat16()
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is nn.Linear and name != "lm_head":
                    sizes = (layer.in_features, layer.out_features)
                    made: Any = (
                        bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
                        if bits == 4
                        else bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
                    )
                    made.load_state_dict(layer.state_dict())
                    setattr(parent, name, made.to("cpu"))
        model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
        torch.manual_seed(0)
        options = {"r": 4, "target_modules": SOME, "task_type": "CAUSAL_LM", "init_lora_weights": False}
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
        if patched:
            fk.patch(model)
        assert sum(f"Linear{bits}bit" in type(m).__name__ for m in model.modules()) > 8
        results.append(step(model))
    assert calls == [2, 1, 1] * 2
    torch.testing.assert_close(results[1][0], results[0][0], rtol=2e-2, atol=0)
    assert float((results[1][1] - results[0][1]).norm()) <= 3e-2 * float(results[0][1].norm())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts(family: str) -> None:
    """An adapter of the experts' parameters multiplies by its factors: nothing of the weights' size is saved."""
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    results, sizes = [], []
    for patched in ("", "after"):
        model, handle = adapted("some", patched, family, **targets)
        assert not patched or "ParamWrapper" in {e.module_class for e in handle.report().replaced}
        results.append((*step(model), logits(model)))
        sizes.append(sum(saved(model, IDS).values()))
        model.base_model.set_adapter([])
        results[-1] += (logits(model),)
        model.base_model.set_adapter(["default"])
        with model.disable_adapter():
            results[-1] += (logits(model),)
        model.merge_adapter()
        results[-1] += (logits(model),)
    for actual, expected in zip(*results, strict=True):
        assert near(actual, expected)
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=" ".join)
def test_log_probabilities(targets: list[str]) -> None:
    """Patched below the adapters or with them; a head with an adapter has no logits either. Tokens that PEFT adds are
    refused."""
    adapters = peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    model: Any = peft.get_peft_model(tiny_model("llama"), adapters).eval()
    expected = model(IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    with model.disable_adapter():
        without = model(IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    with fk.patch(model) as handle:
        torch.testing.assert_close(handle.log_probs(IDS, IDS)[:, 1:], expected)
        with model.disable_adapter():
            torch.testing.assert_close(handle.log_probs(IDS, IDS)[:, 1:], without)
    with fk.patch(model.get_base_model()) as handle:
        torch.testing.assert_close(handle.log_probs(IDS, IDS, model=model)[:, 1:], expected)
    prompted: Any = peft.get_peft_model(
        tiny_model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with fk.patch(prompted) as handle, pytest.raises(ValueError, match="PeftModelForCausalLM does not hand the call"):
        handle.log_probs(IDS, IDS)


def test_sharded_by_torch(tmp_path: Path) -> None:
    """By the layers' inputs and outputs with their adapters, by the head's classes, and fully, in two processes: the
    loss and gradients of one. An adapter that is sharded in a call runs PEFT's forward, which the report says."""
    hooked = {"its own forward runs: a part of its adapter is no plain layer, or has hooks"}
    expected: dict[str, tuple[Any, ...]] = {
        "alone": ({}, 14, set()),
        "tp": ({"all_reduce": 8}, 0, hooked),
        "vocabulary": ({"all_reduce": 2}, 14, set()),
        "fsdp": (None, 14, set()),
    }
    for results in outcome(processes.run({"adapters": adapters.sharded}, tmp_path / "processes"), "adapters"):
        *_, loss, gradients, _ = results["alone"]
        assert results.keys() == expected.keys()
        for name, (no_logits, collectives, served, own_loss, own, reasons) in results.items():
            assert no_logits, name
            counts = expected[name][0] and collectives  # those of fully_shard are its own
            assert (counts, served, reasons) == expected[name], name
            near_to(name, own_loss, loss)
            assert own.keys() == gradients.keys()
            for key, value in gradients.items():
                near_to(f"{name}: {key}", own[key], value)


def test_an_adapter_of_the_head_makes_no_logits() -> None:
    model, _ = adapted("head", "after")
    assert model.train()(input_ids=IDS, labels=IDS).logits is None
    model.merge_adapter()
    assert model(input_ids=IDS, labels=IDS).logits is None
    model, handle = adapted("head", "after", use_dora=True)
    assert "lm_head is no plain linear layer" in str(handle.report())
    assert model.train()(input_ids=IDS, labels=IDS).logits is not None


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its losses are PEFT's, and PEFT loads the adapter that it writes."""
    options = ["--steps", "5", "--rows", "2", "--length", "32", "--rank", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["lora.py", *options])
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "lora.py"), run_name="__main__")
    shown = capsys.readouterr().out.split("step")[1]
    losses = [[float(x) for x in line.split()[1:]] for line in shown.splitlines()[1:6]]
    assert losses[-1][0] < losses[0][0] - 0.2
    assert all(abs(ours - theirs) < 2e-2 for theirs, ours in losses)
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    assert any("lora_B" in name and bool(p.any()) for name, p in loaded.named_parameters())


def test_pefts_own_tests_of_lora(tmp_path: Path) -> None:
    """The source distribution of the installed version has them; skipped where the package index is out of reach."""
    name = f"peft=={peft.__version__}"
    got = limits.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "peft", name, "-d", "."], cwd=tmp_path
    )
    if got.returncode:
        pytest.skip(f"cannot download {name}: {got.stderr.splitlines()[-1]}")
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (tests,) = tmp_path.glob("peft-*/tests")
    (tests / "__init__.py").touch()
    here = Path(__file__).resolve()
    done = limits.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "pefts_own", "-p", "no:cacheprovider", "-o", "addopts=", "-W",
            "ignore", "-k", "LoraConfig", str(tests / "test_custom_models.py"),
        ],
        cwd=tests.parent,
        env={**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{here.parents[3]}", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 40
