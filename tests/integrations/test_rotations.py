"""Rotations of queries and keys by functions of a model's file: which are recognised, and what a model does then."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from any_family import any_family
from patching import close, gradients
from slow import rest_slow
from tiny_hf import SIZES, randomise
from torch import Tensor, nn
from torch._dynamo.utils import counters

import foundry_kernels as fk
from foundry_kernels.integrations.recognise.rotations import rotation_of
from foundry_kernels.integrations.recognise.tables import structure

MODELS = Path(transformers.__file__).parent / "models"


def function_of(family: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


# What is recognised -------------------------------------------------------------------------------------------------

#: Function -> layout, tables, sign, whether wider heads are rotated in part, whether the result keeps the dtype.
FORMS = {
    "llama apply_rotary_pos_emb": ("halves", "halves", 1, False, False),
    "olmo2 apply_rotary_pos_emb": ("halves", "halves", 1, False, True),
    "glm4_moe apply_rotary_pos_emb": ("halves", "halves", 1, True, False),
    "glm4 apply_rotary_pos_emb": ("pairs", "first", 1, True, False),
    "ernie4_5 apply_rotary_pos_emb": ("pairs", "first", 1, False, True),
    "cohere apply_rotary_pos_emb": ("pairs", "pairs", 1, False, True),
    "glm4v apply_rotary_pos_emb": ("pairs", "pairs", 1, True, False),
    "gpt_oss apply_rotary_pos_emb": ("halves", "half", 1, False, False),
    "gptj apply_rotary_pos_emb": ("pairs", "half", 1, False, False),
    "nanochat apply_rotary_pos_emb": ("halves", "halves", -1, False, False),
    "gemma4 apply_rotary_pos_emb": ("halves", "halves", 1, False, False),
    "qwen2_vl apply_rotary_pos_emb_vision": ("halves", "halves", 1, False, True),
    "deepseek_v3 apply_rotary_pos_emb_interleave": ("from_pairs_to_halves", "first", 1, False, False),
    "deepseek_v2 apply_rotary_emb": ("pairs", "complex", 1, False, True),
    "llama4 apply_rotary_emb": ("pairs", "complex", 1, False, True),
}


@pytest.mark.parametrize("which", FORMS)
def test_forms_of_families(which: str) -> None:
    family, name = which.split()
    try:
        function = function_of(family, name)
    except (ImportError, AttributeError):
        pytest.skip("this transformers has no such function")
    found = rotation_of(function)
    assert found is not None
    assert (found.layout, found.tables, found.sign, found.partial, found.casts) == FORMS[which]
    assert rotation_of(function) is found


#: Functions of these names that no form of `rope` is, and the families that have them.
LEFT = {
    "apply_rotary_pos_emb": {
        "clvp", "deepseek_v4", "dinov3_vit", "eomt_dinov3", "muse_glimmer_assistant", "pe_audio", "pe_audio_video",
        "pe_video", "qwen4_exp", "sapiens2",
    },
    "apply_rotary_pos_emb_2d": {"sam2_video", "sam3_tracker_video"},
    "apply_rotary_pos_emb_2d_cross_attn": {"edgetam_video"},
    "apply_multidimensional_rope": {"gemma4"},
    "vision_apply_rotary_emb": {"llama4"},
    "apply_rotary_time_emb": {"musicflamingo"},
}  # fmt: skip


@pytest.mark.slow
def test_every_rotation_function_of_transformers_is_asked() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        names = [
            node.name for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("apply_")
            and ("rotary" in node.name or "rope" in node.name)
        ]  # fmt: skip
        home = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}") if names else None
        for name in names:
            if rotation_of(getattr(home, name)) is None:
                found.setdefault(name, set()).add(path.parent.name)
    unknown = {name: families - LEFT.get(name, set()) for name, families in found.items()}
    assert not any(unknown.values()), unknown


# Functions that differ by one detail --------------------------------------------------------------------------------


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def right(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def planted() -> dict[str, Callable[..., Any]]:
    """Functions that are `right` but for one detail, made from its source with one replacement."""
    lines = {
        "the sign of the keys": ("k * cos + rotate_half(k) * sin", "k * cos - rotate_half(k) * sin"),
        "sine and cosine of the keys": ("k * cos + rotate_half(k) * sin", "k * sin + rotate_half(k) * cos"),
        "a scale": ("return q * cos", "return 1.001 * q * cos"),
        "a tiny scale": ("return q * cos", "return (1 + 1e-9) * q * cos"),
        "an offset": ("return q * cos", "return 1e-9 + q * cos"),
        "keys as they are": ("k * cos + rotate_half(k) * sin", "k"),
        "keys without a gradient": ("k * cos + rotate_half(k) * sin", "(k * cos + rotate_half(k) * sin).detach()"),
        "keys twice": ("k * cos + rotate_half(k) * sin", "k * cos + rotate_half(k) * sin + k * 0.001"),
        "a clamp beyond 20": ("return q * cos", "q = q.clamp(-20, 20); return q * cos"),
        "a clamp by where": ("return q * cos", "q = torch.where(q > 20, 20.0, q); return q * cos"),
        "a decision by a value": ("return q * cos", "q = q if q[0, 0, 0, 0] < 99 else -q; return q * cos"),
        "a decision by a size": ("return q * cos", "q = q if q.shape[2] < 99 else -q; return q * cos"),
        "dropout": ("return q * cos", "q = torch.dropout(q, 0.0, True); return q * cos"),
        "noise": ("return q * cos", "q = q + 0 * torch.randn(()); return q * cos"),
        "a write to its input": ("return q * cos", "q[0] = q[0]; return q * cos"),
        "a write in place": ("return q * cos", "q.mul_(1); return q * cos"),
        "a global variable": ("return q * cos", "q = q * SCALE; return q * cos"),
        "a lower dtype": ("return q * cos", "q = q.bfloat16().double(); return q * cos"),
        "a section less": ("return q * cos", "cos = torch.cat((cos[..., 1:], cos[..., :1]), -1); return q * cos"),
        "another half": ("return q * cos", "sin = torch.cat(sin.chunk(2, -1)[::-1], -1) * 2; return q * cos"),
        "a token later": ("return q * cos", "cos = torch.cat((cos[:, :, 1:], cos[:, :, :1]), 2); return q * cos"),
        "a result of three": ("* sin, k", "* sin, q, k"),
        "one tensor alone": ("* sin, k * cos + rotate_half(k) * sin", "* sin, None"),
        "an import": ("return q * cos", "import math; return q * cos"),
    }
    source = (
        "def turned(q, k, cos, sin, unsqueeze_dim=1):\n"
        "    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)\n"
        "    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin\n"
    )
    made: dict[str, Callable[..., Any]] = {}
    for what, (before, after) in {"nothing": ("", ""), **lines}.items():
        assert before in source
        home: dict[str, Any] = {"torch": torch, "rotate_half": rotate_half, "SCALE": 1.0}
        exec(source.replace(before, after) if before else source, home)
        made[what] = home["turned"]
    return made


def test_functions_that_differ_by_a_detail_are_left() -> None:
    found = {what: rotation_of(function) for what, function in planted().items()}
    assert found.pop("nothing") is not None
    assert len(found) >= 24
    assert not any(found.values()), [what for what, form in found.items() if form]


def test_asking_leaves_the_caller_alone() -> None:
    state = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert rotation_of.__wrapped__(right) is not None
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)


class Halves(nn.Module):
    """A maker of tables; `change` is what it does to them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(torch.arange(4.0))
        self.change = change

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].float() * self.inv_freq
        return self.change(torch.cat((angle.cos(),) * 2, -1)), self.change(torch.cat((angle.sin(),) * 2, -1))


def test_tables_with_other_halves() -> None:
    assert structure(Halves(lambda t: t.to(torch.bfloat16))) == {"halves"}
    assert structure(Halves(lambda t: t[..., :4].repeat_interleave(2, -1))) == {"pairs"}
    assert structure(Halves(lambda t: torch.cat((t[..., :7], t[..., 7:] + 1e-6), -1))) == frozenset()
    assert structure(Halves(lambda t: t.roll(1, -1))) == {"halves"}
    assert structure(Halves(lambda t: t.flip(-1).cumsum(-1))) == frozenset()


# Models -------------------------------------------------------------------------------------------------------------

FAMILIES = (
    "cohere", "deepseek_v2", "deepseek_v3", "ernie4_5", "gemma4_text", "glm", "gptj", "llama4_text", "nanochat",
    "stablelm", "olmo", "phi",
)  # fmt: skip
VISUAL = ("Qwen2VL", "Glm4v")


def visual(name: str) -> Any:
    sizes: dict[str, Any] = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = getattr(transformers, f"{name}Config")(
        text_config={**sizes, "rope_parameters": rope}, vision_config=vision
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    randomise(model)
    return model


@functools.cache
def model_of(name: str) -> Any:
    return visual(name) if name in VISUAL else any_family(name)


@pytest.mark.parametrize("name", [*rest_slow(FAMILIES, 6), *rest_slow(VISUAL)])
def test_a_model_that_rotates_is_the_same(name: str) -> None:
    model = copy.deepcopy(model_of(name))
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "labels": ids}
    expected, theirs = model(ids).logits.detach(), gradients(model, **given)
    with fk.patch(model, ops=["rope"]) as handle:
        turned = [e for e in handle.report().replaced if e.ops == ("rope",) and e.reason is None]
        assert turned
        assert not any("rotation stays" in str(e.reason) for e in handle.report().replaced)
        assert close(model(ids).logits, expected)
        assert float((gradients(model, **given) - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())
        again = pickle.loads(pickle.dumps(model))
        assert close(again(ids).logits, expected)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("name", rest_slow(["stablelm", "llama4_text", "deepseek_v3"]))
def test_a_compiled_model_rotates_by_the_operation(name: str) -> None:
    model = copy.deepcopy(model_of(name)).eval()
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    expected, graphs = model(ids).logits, []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.code))
        return graph

    with fk.patch(model, ops=["rope"]), torch.no_grad():
        counters.clear()
        assert close(torch.compile(model, backend=backend, fullgraph=True)(ids).logits, expected)
    assert any("foundry_kernels.rope" in code or "foundry_kernels_rope" in code for code in graphs), graphs[0][:2000]
