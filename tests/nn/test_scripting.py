"""TorchScript: every module says that it cannot be scripted, and what it says works instead does."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow import rest_slow
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.nn.moe import dispatch

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.*` is (deprecated|not supported)", "ignore::torch.jit.TracerWarning"
)
REFUSED = (
    r"^{} cannot be compiled by torch\.jit\.script: foundry_kernels is not TorchScript\. "
    r"Use torch\.jit\.trace within torch\.no_grad\(\), torch\.compile or torch\.export"
)


class Calls(nn.Module):
    """A module whose forward pass takes what is no tensor, or that has none, within one that has."""

    def __init__(self, inner: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


X, ROWS = torch.randn(2, 5, 16), torch.randn(5, 16)
HEADS = torch.randn(2, 4, 5, 4), torch.randn(2, 2, 5, 4)
TARGETS = torch.tensor([0, 3, -100, 8, 1])
NARROW = {"qk_nope_head_dim": 6, "v_head_dim": 5}

#: A module of every class, the inputs of a call, and how a module calls it whose forward pass is not of tensors alone.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], Callable[[Any, Tensor], Tensor] | None]] = {
    "AlibiSlopes": (lambda: fk.nn.AlibiSlopes(4), (X,), lambda m, x: x[..., :4] * m.slopes),
    "Attention": (lambda: fk.nn.Attention(16, 4, 2, rope=fk.nn.RotaryEmbedding(4)), (X,), None),
    "Experts": (
        lambda: fk.nn.Experts(16, 8, 4),
        (ROWS,),
        lambda m, x: m(x, torch.ones(5, 1), dispatch(torch.tensor([[0], [3], [1], [3], [0]]), 4)),
    ),
    "GatedDeltaNet": (lambda: fk.nn.GatedDeltaNet(16, 4, 2, 8), (X,), None),
    "GatedMLP": (lambda: fk.nn.GatedMLP(16, 24), (X,), None),
    "KimiDeltaAttention": (lambda: fk.nn.KimiDeltaAttention(16, 4, 2, 8), (X,), None),
    "LatentAttention": (
        lambda: fk.nn.LatentAttention(16, 4, 8, rope=fk.nn.RotaryEmbedding(4), qk_rope_head_dim=4, **NARROW),
        (X,),
        None,
    ),
    "LayerNorm": (lambda: fk.nn.LayerNorm(16), (X,), None),
    "Mamba2": (lambda: fk.nn.Mamba2(16, 4, 2, 8, 6), (X,), None),
    "LinearCrossEntropy": (lambda: fk.nn.LinearCrossEntropy(16, 9), (ROWS, TARGETS), None),
    "MLP": (lambda: fk.nn.MLP(16, 24), (X,), None),
    "MoE": (lambda: fk.nn.MoE(16, 8, 4, 2), (X,), None),
    "MultiheadAttention": (lambda: fk.nn.MultiheadAttention(16, 4, batch_first=True), (X, X, X), None),
    "RMSNorm": (lambda: fk.nn.RMSNorm(16), (X,), None),
    "RelativeBias": (lambda: fk.nn.RelativeBias(4), (HEADS[0],), lambda m, x: x @ x.mT + m(5, 5)),
    "RotaryEmbedding": (lambda: fk.nn.RotaryEmbedding(4), HEADS, None),
    "Router": (lambda: fk.nn.Router(16, 4, 2), (X,), None),
    "SinusoidalEmbedding": (lambda: fk.nn.SinusoidalEmbedding(16, 32), (X,), None),
    "SwiGLU": (lambda: fk.nn.SwiGLU(16, 24), (X,), None),
}


def tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [x for x in found if isinstance(x, Tensor)]


def traced_and_saved(module: nn.Module, given: tuple[Tensor, ...]) -> Any:
    """What a process that has imported this package loads."""
    with torch.no_grad():
        trace = torch.jit.trace(module, given)
    file = io.BytesIO()
    torch.jit.save(trace, file)
    file.seek(0)
    return torch.jit.load(file)


def works_otherwise(module: nn.Module, given: tuple[Tensor, ...]) -> None:
    """Traced, compiled and exported."""
    with torch.no_grad():
        expected = tensors(module(*given))
        calls = {
            "trace": traced_and_saved(module, given),
            "compile": torch.compile(module, backend="aot_eager"),
            "export": torch.export.export(module, given).module(),
        }
        for way, call in calls.items():
            found = tensors(call(*given))
            assert len(found) == len(expected), way
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda text, way=way: f"{way}: {text}")


def test_all_modules_are_here() -> None:
    classes = {name for name in fk.nn.__all__ if isinstance(getattr(fk.nn, name), type)}
    assert {name for name in classes if issubclass(getattr(fk.nn, name), nn.Module)} == set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_refuses_to_be_scripted(name: str) -> None:
    make, _, _ = MODULES[name]
    message = REFUSED.format(name) + "$"
    for module in (make(), nn.Sequential(nn.Identity(), nn.ModuleList([make()]))):
        with pytest.raises(RuntimeError, match=message):
            torch.jit.script(module)
    derived = type("Derived", (type(make()),), {})
    module = make()
    module.__class__ = derived
    with pytest.raises(RuntimeError, match=REFUSED.format("Derived")):
        torch.jit.script(module)


@pytest.mark.parametrize("name", rest_slow(list(MODULES), 2))
def test_what_the_message_says_works(name: str) -> None:
    torch.compiler.reset()
    make, given, call = MODULES[name]
    torch.manual_seed(0)
    module = make().eval()
    works_otherwise(module if call is None else Calls(module, call), given)


@pytest.mark.slow
def test_a_model() -> None:
    config = ModelConfig(dim=16, n_layers=1, n_heads=4, vocab_size=23, max_seq_len=16)
    model = Transformer(config)
    model.init_weights(torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match=REFUSED.format(r"\w+")):
        torch.jit.script(model)
    works_otherwise(model.eval(), (torch.tensor([[3, 4, 5], [6, 7, 8]]),))


# --- patched ----------------------------------------------------------------------------------------------------------

PATCHED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(16), (X,)),
    "RMSNorm": (lambda: nn.RMSNorm(16), (X,)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(16, 4, batch_first=True), (X, X, X)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (X,)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), (X, X)),
}


@pytest.mark.parametrize("name", rest_slow(list(PATCHED)))
def test_a_patched_module(name: str) -> None:
    """It says so too; undone, it is scripted as before."""
    torch.compiler.reset()
    torch.manual_seed(0)
    make, given = PATCHED[name]
    module = make().eval()
    with fk.patch(module):
        for given_to in (module, nn.Sequential(module)):
            with pytest.raises(RuntimeError, match=REFUSED.format(r"\w+") + ", or undo the patch$"):
                torch.jit.script(given_to)
        works_otherwise(module, given)
    with torch.no_grad():
        for a, b in zip(*(tensors(m(*given)) for m in (torch.jit.script(module), module)), strict=True):
            torch.testing.assert_close(a, b)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("family", rest_slow(["llama", "gpt2", "mixtral"]))
def test_a_patched_model_of_transformers(family: str) -> None:
    pytest.importorskip("transformers")
    from foundry_kernels.integrations.adapters.tiny import tiny_model

    torch.compiler.reset()
    model = Logits(tiny_model(family).eval())
    with fk.patch(model):
        with pytest.raises(RuntimeError, match=REFUSED.format(r"\w+") + ", or undo the patch$"):
            torch.jit.script(model)
        works_otherwise(model, (torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0)),))
