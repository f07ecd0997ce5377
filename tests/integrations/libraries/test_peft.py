"""PEFT's adapters and a patch: results, gradients, saving, loading and merging; where `lora_linear` serves them, and
where PEFT's own forward runs."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model
from tests.integrations.libraries.peft_models import KINDS, SOME, adapted, kinds, logits, near, peft, step


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
