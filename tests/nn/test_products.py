"""Linear layers by the extension's products: with the path forced, on any machine and at any size, every module that
has such layers, and models of other packages that are patched, are what they are without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from slow import rest_slow
from tiny_encoders import FAMILIES as ENCODERS
from tiny_encoders import tiny_batch, tiny_encoder
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.table import PATCHED
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.nn import _linear_layers
from foundry_kernels.ops.grouped_mm import GROUPED_MM

pytestmark = pytest.mark.skipif(
    GROUPED_MM.why_not("native", "cpu") is not None, reason=str(GROUPED_MM.why_not("native", "cpu"))
)

DIM = 32


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(_linear_layers, "OWN_PRODUCTS", frozenset([torch.float32]))
    monkeypatch.setattr(_linear_layers, "WORTH", 0)
    return monkeypatch


def called(function: Callable[[], Any]) -> set[str]:
    """The operators that are called, products alone."""
    with torch.profiler.profile() as record:
        function()
    kinds = {"foundry_kernels::grouped_mm_fwd": "ours", "aten::linear": "linear", "aten::addmm": "linear"}
    return {kinds[event.name] for event in record.events() if event.name in kinds}


def model(**options: Any) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(dim=DIM, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=48, hidden_dim=56)
    return Transformer(config, **options)


class _Tokens(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner((x[..., 0].abs() * 40).long() % 48)
        return logits


def _itself(module: nn.MultiheadAttention) -> nn.Module:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x, x, x, need_weights=False)[0]
            return y

    return Whole()


def _patched(module: nn.Module) -> nn.Module:
    fk.patch(module)
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{
        f"swiglu-{how}": lambda how=how: fk.nn.SwiGLU(DIM, 56, recompute=how)
        for how in ("none", "product", "projections")
    },
    "mlp": lambda: fk.nn.MLP(DIM, 56),
    "mlp-recomputed": lambda: fk.nn.MLP(DIM, 56, recompute="product"),
    "attention": lambda: fk.nn.Attention(DIM, 4, 2),
    "multihead": lambda: _itself(fk.nn.MultiheadAttention(DIM, 4, batch_first=True)),
    "model": lambda: _Tokens(model()),
    "encoder-layer": lambda: _patched(nn.TransformerEncoderLayer(DIM, 4, 56, batch_first=True, activation="gelu")),
}


@pytest.fixture
def widened(forced: pytest.MonkeyPatch, bfloat16_choice: Callable[..., None]) -> None:
    """As on a processor whose instructions for products of bfloat16 are slow."""
    bfloat16_choice(False, False, False)
    forced.setattr(_linear_layers, "OWN_PRODUCTS", frozenset([torch.float32, torch.bfloat16]))


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    found = torch.autograd.grad(y.square().mean(), [x, *module.parameters()], allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


@pytest.mark.parametrize("name", MODULES)
def test_values_and_gradients(name: str, forced: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name]().eval(), torch.randn(3, 20, DIM)
    found = gradients(module, x)
    assert called(lambda: gradients(module, x)) == {"ours"}
    forced.setattr(_linear_layers, "OWN_PRODUCTS", frozenset())
    wanted = gradients(module, x)
    assert "ours" not in called(lambda: gradients(module, x))
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert a.stride() == b.stride()


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("name", MODULES)
def test_values_and_gradients_of_bfloat16(name: str, forced: pytest.MonkeyPatch) -> None:
    """As near to those of float32 as with PyTorch's products."""
    torch.manual_seed(0)
    module = MODULES[name]().eval().bfloat16()
    x = torch.randn(3, 20, DIM).bfloat16()
    found = gradients(module, x)
    assert called(lambda: gradients(module, x)) == {"ours"}
    forced.setattr(_linear_layers, "OWN_PRODUCTS", frozenset())
    theirs = gradients(module, x)
    assert "ours" not in called(lambda: gradients(module, x))
    exact = gradients(module.float(), x.float())
    for a, b, wanted in zip(found, theirs, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert a.stride() == b.stride()
        error, allowed = (float((g.float() - wanted).norm()) for g in (a, b))
        assert error <= 1.5 * allowed + 2e-3 * float(wanted.norm())


#: Families of which no attention and no feed-forward class has an adapter: their layers call nn.Linear themselves.
THEIR_OWN = {"bart", "whisper"}


#: One with gates, one with experts, an encoder, and one of `THEIR_OWN`.
FIRST = ("llama", "gpt_oss", "bert", "whisper")


@pytest.mark.parametrize("family", rest_slow([*FIRST, *(f for f in (*PATCHED, *ENCODERS) if f not in FIRST)], 4))
def test_patched_models(family: str, forced: pytest.MonkeyPatch) -> None:
    """Of every family: gradients are those of PyTorch's products, too."""
    pytest.importorskip("transformers")
    if family in PATCHED:
        whole, batch = tiny_model(family), {"input_ids": torch.arange(3, 43).view(2, 20)}
    else:
        whole, batch = tiny_encoder(family), tiny_batch(family)
    patched = _patched(whole)

    def run() -> list[Tensor]:
        out = patched(**batch)[0]
        wanted = [p for p in patched.parameters() if p.requires_grad]
        grads = torch.autograd.grad(out.square().mean(), wanted, allow_unused=True)
        return [out.detach(), *(g for g in grads if g is not None)]

    found = run()
    assert ("ours" in called(run)) == (family not in THEIR_OWN)
    forced.setattr(_linear_layers, "OWN_PRODUCTS", frozenset())
    wanted = run()
    assert len(found) == len(wanted)
    largest = max(float(w.norm()) for w in wanted)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).norm()) <= 1e-5 * max(float(b.norm()), 1e-2 * largest)


def _hooked(layer: nn.Linear) -> None:
    layer.register_forward_hook(lambda *_: None)


def _another_class(layer: nn.Linear) -> None:
    layer.__class__ = type("Mine", (nn.Linear,), {})


@pytest.mark.parametrize("change", [_hooked, _another_class])
def test_a_layer_that_does_more_is_called(change: Callable[[nn.Linear], None]) -> None:
    block = fk.nn.SwiGLU(DIM, 56)
    for layer in (block.w1, block.w2, block.w3):
        change(layer)
    assert called(lambda: block(torch.randn(40, DIM))) == {"linear"}


def test_pytorchs_products_where_they_are_asked_for() -> None:
    """By a backend, autocast, another dtype, another precision of products, a transform, or a batch-invariant pass."""
    block, x = fk.nn.SwiGLU(DIM, 56), torch.randn(40, DIM)
    assert called(lambda: block(x)) == {"ours"}
    assert "linear" in called(lambda: fk.nn.SwiGLU(DIM, 56, backend="reference")(x))
    assert "linear" in called(lambda: fk.nn.SwiGLU(DIM, 56, dtype=torch.bfloat16)(x.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert "linear" in called(lambda: block(x))
    assert "linear" in called(lambda: torch.func.vmap(block)(x[None]))
    torch.set_float32_matmul_precision("high")
    try:
        assert "linear" in called(lambda: block(x))
    finally:
        torch.set_float32_matmul_precision("highest")
    with fk.batch_invariant():
        alone = block(x[:1])
        assert torch.equal(block(x)[:1], alone)


def test_small_products_are_pytorchs(forced: pytest.MonkeyPatch) -> None:
    forced.setattr(_linear_layers, "WORTH", 40 * DIM * 56 + 1)
    assert called(lambda: fk.nn.SwiGLU(DIM, 56)(torch.randn(40, DIM))) == {"linear"}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", rest_slow([True, False]))
def test_it_compiles_whole(dynamic: bool) -> None:
    torch._dynamo.reset()
    whole = model()
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (20, 33):
        tokens = torch.arange(length)[None] % 48
        found, wanted = (
            torch.autograd.grad(f(tokens).square().mean(), list(whole.parameters())) for f in (compiled, whole)
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
