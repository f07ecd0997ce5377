"""Classes whose code is that of a class with a row are served as it is; one that differs in a statement, or in a
function that it calls, is not."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import tiny
from patching import close, logits

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.table import TABLE
from foundry_kernels.integrations.adapters.tiny import tiny_config
from foundry_kernels.integrations.recognise.code import twin_of

NUMBERS = itertools.count()
NAMES = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_5": "Qwen3_5", "mixtral": "Mixtral"}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """A function that makes the modeling file of a family under other names, with a change."""

    def make(family: str, old: str = "", new: str = "") -> ModuleType:
        home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        source, name = inspect.getsource(home), f"transformers.models.{family}.planted_{next(NUMBERS)}"
        assert old in source
        source = source.replace(old, new).replace(NAMES[family], "Planted")
        path = tmp_path / "planted.py"
        path.write_text(re.sub(r"Planted(\w*Config)", rf"{NAMES[family]}\1", source))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, made)
        spec.loader.exec_module(made)
        return made

    return make


SAME = {
    "nothing": ("llama", "Attention", "", ""),
    "a docstring": ("llama", "Attention", '"""Rotates half the hidden dims of the input."""', '"""Other."""'),
    "a local variable": ("llama", "Attention", "input_shape", "leading"),
    "an annotation": ("llama", "Attention", "cache: Cache | None = None", "cache = None"),
    "norms of heads": ("qwen3", "Attention", "", ""),
    "linear attention": ("qwen3_5", "GatedDeltaNet", "", ""),
}


@pytest.mark.parametrize("what", SAME)
def test_equal_code_has_the_adapter_of_the_row(what: str, planted: Any) -> None:
    family, end, old, new = SAME[what]
    cls = getattr(planted(family, old, new), f"Planted{end}")
    row = TABLE[f"transformers.models.{family}.modeling_{family}", NAMES[family] + end]
    assert twin_of(cls, TABLE) == row


OUT, KEYS = "self.o_proj(attn_output)", "self.k_proj(hidden_states)"
CHANGED = {
    "llama Attention": {
        "a clamp": (OUT, "self.o_proj(attn_output.clamp(-20, 20))"),
        "a residual": (OUT, f"{OUT} + hidden_states"),
        "a shared projection": ("self.v_proj(hidden_states)", KEYS),
        "values that are rotated": ("pos_emb(query_states, key_states,", "pos_emb(query_states, value_states,"),
        "a scale": ("scaling=self.scaling", "scaling=self.scaling * 1.001"),
        "no dropout": ("0.0 if not self.training else self.attention_dropout", "0.0"),
        "a sign in rotate_half": ("torch.cat((-x2, x1)", "torch.cat((x2, -x1)"),
        "a rotation of pairs": ("x1 = x[..., : x.shape[-1] // 2]", "x1 = x[..., ::2]"),
        "a rotation in float32": ("(q * cos)", "(q.float() * cos)"),
        "another dimension of the tables": ("unsqueeze_dim=1", "unsqueeze_dim=2"),
        "eager attention in the dtype": ("dtype=torch.float32).to(query.dtype)", "dtype=query.dtype)"),
        "eager attention with a cap": ("* scaling\n", "* scaling\n    attn_weights = attn_weights.tanh()\n"),
        "repeated keys in another order": ("[:, :, None, :, :].expand", "[:, None, :, :, :].expand"),
    },
    "qwen3 Attention": {
        "a norm of the result": (OUT, "self.o_proj(self.q_norm(attn_output))"),
        "a norm of queries alone": (f"self.k_norm({KEYS}", f"self.q_norm({KEYS}"),
        "a window that is wider": ("sliding_window=self.sliding_window", "sliding_window=self.sliding_window + 1"),
    },
    "qwen3_5 GatedDeltaNet": {
        "another eps": ("eps: float = 1e-6", "eps: float = 1e-5"),
        "a decay that is doubled": ("-self.A_log.float().exp()", "-2 * self.A_log.float().exp()"),
    },
}


@pytest.mark.parametrize(("cls", "what"), [(cls, what) for cls, changes in CHANGED.items() for what in changes])
def test_code_that_differs_is_another_class(cls: str, what: str, planted: Any) -> None:
    family, end = cls.split()
    assert twin_of(getattr(planted(family, *CHANGED[cls][what]), f"Planted{end}"), TABLE) is None


def test_a_model_of_equal_code_computes_the_same(planted: Any) -> None:
    made = planted("qwen3")
    model = made.PlantedForCausalLM(tiny_config("qwen3")).eval()
    expected = logits(model)
    report = fk.patch(model).report()
    found = {entry.module_class: entry for entry in report.replaced}["PlantedAttention"]
    assert (found.by, found.ops) == ("recognised", ("qk_norm_rope", "flash_attention"))
    assert close(logits(model), expected)


def test_only_rows_are_served_where_nothing_is_to_be_recognised() -> None:
    model = tiny("OlmoeForCausalLM")
    with fk.patch(model) as handle:
        assert any(entry.module_class == "OlmoeExperts" for entry in handle.report().replaced)
    left = {entry.module_class for entry in fk.patch(model, recognise=False).report().left}
    assert "OlmoeExperts" in left


DECORATOR = "@use_experts_implementation\n"
ACTIVATION = "        self.act_fn = ACT2FN[config.hidden_act]\n"
CLAMPED = """
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=0.5)) * up
"""
EXPERTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "as they are": ("", "", ("grouped_mm", "swiglu")),
    "a gate of their own": (ACTIVATION, ACTIVATION + CLAMPED, ("grouped_mm",)),
    "an activation without a kernel": (ACTIVATION, "        self.act_fn = nn.Softsign()\n", ("grouped_mm",)),
    "a norm of each expert's result": (DECORATOR, "@use_experts_implementation(has_post_expert_norm=True)\n", ()),
    "no decorator": (DECORATOR, "", ()),
    "an interface of their own": (
        DECORATOR,
        "@use_experts_implementation(experts_interface=type('Own', (), {'get_interface': lambda s, n, f: f})())\n",
        (),
    ),
}


@pytest.mark.parametrize("what", EXPERTS)
def test_experts_of_any_class(what: str, planted: Any) -> None:
    old, new, ops = EXPERTS[what]
    model = planted("mixtral", old, new).PlantedForCausalLM(tiny_config("mixtral")).eval()
    for layer in model.model.layers:
        layer.mlp.experts.post_expert_norm = torch.nn.Identity()
    expected = logits(model)
    report = fk.patch(model).report()
    found = {entry.module_class: entry.ops for entry in (*report.replaced, *report.left)}
    assert found.get("PlantedExperts", ()) == ops
    assert close(logits(model), expected)
