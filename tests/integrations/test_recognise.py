"""Norms and MLPs are recognised by what they compute, whatever their classes are called; near misses are left."""

from __future__ import annotations

import copy
import json
import math
import weakref
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
import torch.nn.functional as F
from planted import LEFT
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.integrations import recognise
from foundry_kernels.integrations.adapters.base import MLP, Adapter, Norm
from foundry_kernels.integrations.adapters.gpt_like import PlainMLP
from foundry_kernels.integrations.adapters.table import LLAMA_LIKE
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.families import FAMILIES
from foundry_kernels.integrations.recognise import recognised


@pytest.fixture(autouse=True)
def _nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(recognise, "_KNOWN", {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of modules that were run beside the forms."""
    classes: list[str] = []
    find = recognise._found

    def found(module: nn.Module, *others: Any) -> Any:
        classes.append(type(module).__name__)
        return find(module, *others)

    monkeypatch.setattr(recognise, "_found", found)
    return classes


# Near misses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEFT)
def test_what_differs_in_one_detail_is_left(name: str) -> None:
    found = recognised(LEFT[name]())
    assert found is None or isinstance(found, str), found
    assert "asking what it computes" not in str(found)  # which is an error of ours


def test_there_are_enough_of_them() -> None:
    assert len(LEFT) >= 50
    for found in (planted.Norm(), planted.made(planted.Norm, planted.NORM), planted.Mlp(),
                  planted.made(planted.Mlp, planted.MLP)):  # fmt: skip
        assert isinstance(recognised(found), Adapter)


# Forms -------------------------------------------------------------------------------------------------------------


class Literal(nn.Module):
    """Its eps is in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(48))

    def forward(self, input: Tensor) -> Tensor:
        wide = input.to(torch.float32)
        return (wide / (wide.square().mean(-1, True) + 3e-5).sqrt() * self.g).to(input.dtype)


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.ones(48)), nn.Parameter(torch.zeros(48))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.scale.shape, self.scale, self.offset, 1e-4)


class BareNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=1e-3)


class Plus1(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Config:
    layer_norm_eps = 1e-3


class OfConfig(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.config = nn.Parameter(torch.ones(48)), Config()

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x.float()).type_as(x) * self.weight

    def normalize(self, x: Tensor) -> Tensor:
        return x * (x * x).mean(dim=-1, keepdim=True).add(self.config.layer_norm_eps).rsqrt()


class Packed(nn.Module):
    """GEGLU with the gate last, biases, and a dropout."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.fc, self.proj, self.dropout = nn.Linear(48, 192), nn.Linear(96, 48), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.fc(x).chunk(2, dim=-1)
        return self.dropout(self.proj(up * F.gelu(gate, approximate="tanh")))


class NanoGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.dropout = nn.Linear(48, 192), nn.Linear(192, 48), nn.Dropout(0.0)
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Titan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(a, b, bias=False) for a, b in ((48, 80), (80, 48), (48, 80)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Written(nn.Module):
    """GELU as GPT-2 wrote it, and a `Dropout` and an `Identity` in between, as in timm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop1, self.norm = nn.Linear(48, 80), nn.Linear(80, 48), nn.Dropout(0.1), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.drop1(new_gelu(self.fc1(x)))))


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Silu(NanoGpt):
    def __init__(self) -> None:
        super().__init__()
        self.gelu = nn.SiLU()  # type: ignore[assignment]


class Relu(NanoGpt):
    def __init__(self) -> None:
        super().__init__()
        del self.gelu
        self.gelu = F.relu  # type: ignore[assignment]


class Multiplied(planted.Mlp):
    """As Falcon-H1's."""

    def __init__(self) -> None:
        super().__init__()
        self.of_gate, self.of_all = 0.3, 1.7

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.act(self.gate(x) * self.of_gate)) * self.of_all


FORMS: list[tuple[Any, Adapter]] = [
    (planted.Norm, Norm("eps", round_before_weight=True, takes="x")),
    (Literal, Norm(3e-5, weight="g", takes="input")),
    (Torchs, Norm(1e-4, op="layer_norm", weight="scale", bias="offset", takes="x")),
    (BareNorm, Norm(1e-3, weight="", takes="x")),
    (lambda: Plus1(48), Norm("eps", 1.0, op="layer_norm", bias="bias", takes="input")),
    (OfConfig, Norm("config.layer_norm_eps", round_before_weight=True, takes="x")),
    (planted.Mlp, MLP("gate", "up", "down", kernel=("swiglu", ""))),
    (Multiplied, MLP("gate", "up", "down", kernel=("swiglu", ""), gate_scale="of_gate", scale="of_all")),
    (Titan, MLP("w1", "w3", "w2", kernel=("swiglu", ""))),
    (Packed, MLP("fc", "", "proj", up_first=True, kernel=("geglu", "tanh"), outer="dropout")),
    (NanoGpt, PlainMLP("c_fc", "c_proj", ("bias_gelu", "none"), outer="dropout", takes="x")),
    (Silu, PlainMLP("c_fc", "c_proj", ("bias_silu", ""), outer="dropout", takes="x")),
    (Relu, PlainMLP("c_fc", "c_proj", ("bias_relu", ""), outer="dropout", takes="x")),
    (Written, PlainMLP("fc1", "fc2", ("bias_gelu", "tanh"), inner="drop1", takes="x")),
]


@pytest.mark.parametrize(("make", "adapter"), FORMS, ids=[str(i) for i in range(len(FORMS))])
def test_forms(make: Any, adapter: Adapter) -> None:
    """Which is found, and that a patched model computes and derives what it did; called by the argument's name too."""
    torch.manual_seed(0)
    model = nn.Sequential(make()).eval()
    taken = type(model[0]).forward.__code__.co_varnames[1]
    x, direction = torch.randn(2, 5, 48, requires_grad=True), torch.randn(2, 5, 48)
    results = []
    for patched in (False, True):
        if patched:
            [entry] = fk.patch(model).report().replaced
            assert entry.by == "recognised"
            assert model[0]._foundry_row == adapter
        y = model[0](**{taken: x})
        results.append([y, *torch.autograd.grad(y, [x, *model.parameters()], direction)])
    for ours, theirs in zip(*reversed(results), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.detach().abs().max()))
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))
    fk.unpatch(model)
    assert torch.equal(model(x), results[0][0])


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_families_are_recognised_as_what_is_known_of_them(family: str) -> None:
    """The norms are those by which `from_hf` makes a model of this package."""
    model = tiny_model(family)
    norms = {found for m in model.modules() if isinstance(found := recognised(m), Norm)}
    offset, before = {"llama": (0.0, True), "rounded_once": (0.0, False), "gemma": (1.0, False)}[FAMILIES[family].norm]
    assert {(n.op, n.weight_offset, n.round_before_weight, n.one_dtype) for n in norms} == {
        ("rms_norm", offset, before, False)
    }
    mlps = {found.kernel for m in model.modules() if isinstance(found := recognised(m), MLP)}
    gelu = family in ("gemma", "gemma2", "gemma3")
    assert mlps <= {("geglu", "tanh") if gelu else ("swiglu", "")}
    assert mlps or family in ("mixtral", "gpt_oss", "qwen3_moe")


# Once for each class, and nothing changes ----------------------------------------------------------------------------


def test_each_class_is_asked_once(asked: list[str]) -> None:
    """Whatever the number of layers; of another size it is the same class."""
    fk.patch(tiny_model("llama", num_hidden_layers=12))
    assert sorted(asked) == ["LlamaMLP", "LlamaRMSNorm"]
    recognise._KNOWN.clear()  # as in another process
    with torch.device("meta"):
        model = type(tiny_model("llama"))(tiny_model("llama").config.__class__(num_hidden_layers=1))
    report = fk.patch(model).report()
    assert sorted(asked) == ["LlamaMLP", "LlamaRMSNorm"]
    assert [e.by for e in report.replaced if e.module_class == "LlamaMLP"] == ["recognised"]


@pytest.mark.parametrize("state", ["corrupt", "another adapter", "unwritable"])
def test_a_cache_that_is_of_no_use(state: str, asked: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "foundry_kernels"
    if state == "unwritable":
        folder.write_text("")  # a file where the folder would be
    assert isinstance(recognised(planted.Norm()), Norm)
    for path in folder.glob("recognised/*"):
        text = {"adapter": "Norm", "fields": {"weight_offset": ["x"]}}
        path.write_text("{" if state == "corrupt" else json.dumps(text))
    recognise._KNOWN.clear()
    assert isinstance(recognised(planted.Norm()), Norm)
    assert asked == ["Norm", "Norm"]


def test_another_code_is_another_class(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a function that a class calls, too."""
    assert isinstance(recognised(Written()), PlainMLP)
    monkeypatch.setitem(globals(), "new_gelu", lambda x: F.silu(x))
    found = recognised(Written())
    assert isinstance(found, PlainMLP)
    assert found.kernel == ("bias_silu", "")
    module = Written()
    module.fc2 = nn.Linear(80, 48, bias=False)
    assert isinstance(recognised(module), PlainMLP)
    assert asked == ["Written"] * 3


def test_nothing_changes_by_being_asked() -> None:
    """In whatever state the process is."""
    module = nn.Sequential(planted.Norm(), planted.Mlp())
    torch.manual_seed(3)
    before = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    held = {name: dict(vars(m)) for name, m in module.named_modules()}
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            found = [recognised(m) for m in module]
            assert torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert [type(each) for each in found] == [Norm, MLP]
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), before[0].values(), strict=True))
    assert torch.equal(torch.get_rng_state(), before[1])
    assert {name: dict(vars(m)) for name, m in module.named_modules()} == held


def test_no_module_is_kept() -> None:
    module = planted.Norm()
    gone = weakref.ref(module.weight)
    recognised(module)
    del module
    assert gone() is None


def test_rows_alone() -> None:
    model = tiny_model("qwen3")
    with fk.patch(model, recognise=False) as handle:
        report = handle.report()
        assert {e.by for e in report.replaced} == {"row"}
        assert {e.module_class for e in report.left} == {"Qwen3RMSNorm", "Qwen3MLP", "Qwen3ForCausalLM"}
        assert {e.ops for e in report.replaced if e.module_class == "Qwen3Attention"} == {("rope", "flash_attention")}
        with pytest.raises(ValueError, match="recognise=False where this call has True"):
            fk.patch(model)
    fk.patch(model)
