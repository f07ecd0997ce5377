"""Models with PEFT's adapters and a patch: compiled, in low precision, quantised, with experts, sharded; memory, the
example, and PEFT's own tests."""

from __future__ import annotations

import os
import runpy
import sys
import tarfile
from pathlib import Path
from typing import Any

import limits
import processes
import pytest
import torch
from processes import adapters
from processes.outcomes import near as near_to
from processes.outcomes import outcome
from torch import nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model
from tests.integrations.libraries.peft_models import IDS, SOME, adapted, logits, near, peft, saved, step


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
