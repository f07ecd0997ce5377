"""`patch` of torch.nn's own transformer: parity in training and inference, and that nothing passes kernels by."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from patching import reasons, saved, snapshot
from slow import rest_slow
from torch import Tensor, nn
from torch._dynamo.utils import counters

import foundry_kernels as fk
from foundry_kernels.integrations import unpatch
from foundry_kernels.integrations.adapters import torch_nn
from foundry_kernels.integrations.patching import swap

BACKENDS = ("reference", *(("native",) if "native" in fk.OPS["flash_attention"].backends("cpu") else ()))

B, S, T, E = 3, 7, 9, 16
LENGTHS = torch.tensor([7, 4, 2])
PADDING = torch.arange(S) >= LENGTHS[:, None]
TARGET_PADDING = torch.arange(T) >= torch.tensor([9, 5, 3])[:, None]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(T)
MEMORY = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(module: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3, generator=generator)
    return module


# In every layer: what PyTorch cannot leave to its fast path it warns of.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:Support for mismatched")


def transformer(**options: Any) -> Any:
    layers = options.pop("layers", 2)
    return filled(nn.Transformer(E, 4, layers, layers, 32, **{"dropout": 0.0, "batch_first": True, **options}))


def encoder(**options: Any) -> Any:
    layer = nn.TransformerEncoderLayer(E, 4, 32, **{"dropout": 0.0, "batch_first": True, **options})
    return filled(nn.TransformerEncoder(layer, 2, nn.LayerNorm(E))).eval()


def check_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.shape == wanted.shape
        torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-5 * max(4.0, float(wanted.detach().abs().max())))


@pytest.fixture
def no_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernels that pass modules by fail."""

    def passed_by(*args: Any) -> None:
        raise AssertionError("PyTorch's own kernel was called")

    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        monkeypatch.setattr(torch, name, passed_by)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", passed_by)
    monkeypatch.setattr(nn.functional, "layer_norm", passed_by)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": MEMORY,
    "padding, causal": {**MEMORY, "tgt_key_padding_mask": TARGET_PADDING, "tgt_mask": CAUSAL},
    "bool masks": {"src_mask": draw(S, S) > 1.0, "tgt_mask": CAUSAL.isinf(), "memory_mask": draw(T, S) > 1.0},
    "bias": {"tgt_mask": draw(T, T), "memory_mask": draw(B * 4, T, S, seed=1)},
}


def outputs_and_gradients(model: Any, mode: str, given: dict[str, Any]) -> list[Tensor]:
    shapes = ((B, S, E), (B, T, E)) if model.batch_first else ((S, B, E), (T, B, E))
    src, tgt = (draw(*shape, seed=n).requires_grad_(mode != "inference") for n, shape in enumerate(shapes))
    model.train(mode == "training")
    with torch.set_grad_enabled(mode != "inference"):
        y = model(src, tgt, **given)
    if mode == "inference":
        return [y]
    return [y, *torch.autograd.grad(y, [src, tgt, *model.parameters()], draw(*y.shape, seed=5))]


@pytest.mark.parametrize("mode", ["training", "evaluation", "inference"])
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_first": True, "activation": "gelu"}, {"batch_first": False, "activation": nn.GELU("tanh")},
     {"bias": False, "norm_first": True, "batch_first": False}],
    ids=["", "norm first, gelu", "TBE, gelu tanh", "no bias, norm first, TBE"],
)  # fmt: skip
def test_transformer(options: Any, mode: str) -> None:
    model = transformer(**options)
    for given in MASKS.values():
        expected = outputs_and_gradients(model, mode, given)
        with fk.patch(model):
            check_close(outputs_and_gradients(model, mode, given), expected)


@pytest.mark.usefixtures("no_fast_path")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_everything_is_reached(mode: str, backend: str) -> None:
    model = transformer(activation="gelu")
    handle = fk.patch(model, backend=backend)
    assert not handle.report().left
    outputs_and_gradients(model, mode, MASKS["padding, causal"])
    handle.undo()
    with pytest.raises(AssertionError, match="PyTorch's own kernel was called"):
        outputs_and_gradients(model, mode, {})


@pytest.mark.parametrize("cls", [nn.RMSNorm, nn.LayerNorm])
def test_norms_of_layers(cls: Any) -> None:
    model = nn.Sequential(nn.Linear(E, E), cls((B, E), eps=1e-3), nn.Linear(E, E), cls(E))
    layer = nn.TransformerEncoderLayer(E, 4, 32, 0.0, batch_first=True, norm_first=True)
    layer.norm1, layer.norm2 = cls(E), cls(E)
    for module in (filled(model), filled(layer)):
        x = draw(2, B, E).requires_grad_()
        found = []
        for _ in range(2):
            y = module(x)
            found.append([y, *torch.autograd.grad(y, [x, *module.parameters()], draw(2, B, E, seed=2))])
            fk.patch(module) if len(found) == 1 else unpatch(module)
        check_close(found[1], found[0])


# Inference with padding, which PyTorch leaves out of the computation and gives 0 for ---------------------------------


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.usefixtures("no_fast_path")
def test_padding_is_packed_away(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = encoder(activation="gelu"), draw(B, S, E)
    padding = PADDING if kind == "bool" else torch.zeros(B, S).masked_fill(PADDING, -torch.inf)
    packed: list[int] = []
    run = torch_nn._packed_layer

    def noted(layer: Any, of: Any) -> Tensor:
        packed.append(len(of.tokens))
        return run(layer, of)

    monkeypatch.setattr(torch_nn, "_packed_layer", noted)
    with fk.patch(model), torch.no_grad():
        found = model(x, src_key_padding_mask=padding)
        assert packed == [13, 13]
        # Not where padding is in between, or with a mask beside it, or where a float mask says more than padding.
        for others in (
            {"src_key_padding_mask": PADDING.flip(1)},
            {"src_key_padding_mask": PADDING, "mask": torch.zeros(S, S).bool()},
            {"src_key_padding_mask": draw(B, S)},
        ):
            assert model(x, **others).isfinite().all()
        with torch.enable_grad():  # nor where the weights get a gradient
            assert model(x, src_key_padding_mask=padding).requires_grad
        assert len(packed) == 2
    monkeypatch.undo()
    with torch.no_grad():
        check_close([found], [model(x, src_key_padding_mask=padding)])


@pytest.mark.parametrize("ops", [None, ["layer_norm"], ["flash_attention"], ["bias_gelu"]], ids=str)
@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
def test_inference_with_some_operations(ops: list[str] | None, hooked: bool) -> None:
    model, x = encoder(activation="gelu"), draw(B, S, E)
    nested = torch.nested.nested_tensor([row[:n] for row, n in zip(x, LENGTHS, strict=True)])

    def results() -> list[Tensor]:
        with torch.no_grad():
            return [
                model(x), model(x, src_key_padding_mask=PADDING), model.layers[0](x, src_key_padding_mask=PADDING),
                *(m(nested).to_padded_tensor(0.0) for m in (model, model.layers[0])),
            ]  # fmt: skip

    expected, calls = results(), []
    if hooked:
        model.layers[1].register_forward_hook(lambda *args: calls.append(1))
    with fk.patch(model, ops=ops):
        check_close(results(), expected)
    assert len(calls) == 3 * hooked


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
def test_nested_tensors_in_training_too(layout: torch.layout, norm_first: bool) -> None:
    model = encoder(norm_first=norm_first).train()
    parts = [draw(n, E, seed=n) for n in LENGTHS.tolist()]
    expected = torch.cat([model(part[None])[0] for part in parts])
    grads = torch.autograd.grad(expected, [*model.parameters()], draw(*expected.shape, seed=9))
    with fk.patch(model):
        y = model(torch.nested.nested_tensor(parts, layout=layout))
        assert y.layout == layout
        found = torch.cat(y.unbind())
        check_close(
            [found, *torch.autograd.grad(found, [*model.parameters()], draw(*found.shape, seed=9))], [expected, *grads]
        )
        with pytest.raises(ValueError, match="must be None where src is a nested tensor"):
            model.layers[0](torch.nested.nested_tensor(parts, layout=layout), src_mask=torch.zeros(7, 7).bool())


# Dropout --------------------------------------------------------------------------------------------------------------


def test_dropout_of_the_sum_is_in_its_pass() -> None:
    layer = nn.TransformerEncoderLayer(E, 4, 32, 0.0, batch_first=True, norm_first=True)
    filled(layer).linear2.weight.data.zero_()
    x = draw(B, S, E)
    fk.patch(layer)
    whole = layer(x) - x - layer.linear2.bias
    layer.dropout1.p = 0.5
    torch.manual_seed(0)
    dropped = layer(x) - x - layer.linear2.bias
    kept = (dropped.abs() > 1e-5).float()
    assert 0.4 < float(kept.mean()) < 0.6
    torch.testing.assert_close(dropped, 2 * kept * whole, rtol=1e-4, atol=1e-5)
    torch.manual_seed(0)
    assert torch.equal(layer(x) - x - layer.linear2.bias, dropped)
    layer.dropout1.p = 1.0  # which PyTorch allows
    torch.testing.assert_close(layer(x), x + layer.linear2.bias)
    layer.eval()
    torch.testing.assert_close(layer(x) - x - layer.linear2.bias, whole)


# What is left ---------------------------------------------------------------------------------------------------------


class OwnBlock(nn.TransformerEncoderLayer):
    def _sa_block(self, *args: Any, **options: Any) -> Tensor:
        return 2 * super()._sa_block(*args, **options)


class FloatMasks(nn.TransformerEncoderLayer):
    """Counts on what PyTorch's encoder makes of bool masks."""

    def forward(
        self, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
    ) -> Tensor:
        return self._sa_block(src, src_mask * 2.0, src_key_padding_mask)


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


def test_what_is_left() -> None:
    model = nn.TransformerEncoder(OwnBlock(E, 4, 32, 0.0), 1, enable_nested_tensor=False)
    assert "a _sa_block of its own" in str(reasons(model)["layers.0"])
    x = draw(S, B, E)
    expected = model(x)
    with fk.patch(model):
        check_close([model(x)], [expected])
    model = nn.TransformerEncoder(FloatMasks(E, 4, 32, 0.0), 1, enable_nested_tensor=False)
    masks = {"mask": draw(S, S) > 1.0, "src_key_padding_mask": PADDING}
    expected = model(x, **masks)
    assert set(reasons(model)) == {"layers.0"}
    with fk.patch(model):
        check_close([model(x, **masks)], [expected])
    assert "a forward of its own" in str(reasons(OwnForward(E, 4))[""])
    assert "dropout must be in [0, 1); got 1.0" in str(reasons(nn.MultiheadAttention(E, 4, 1.0))[""])
    wide = nn.TransformerEncoderLayer(1024, 1, 8, 0.0)
    assert "at most 512 for each of the heads; got 1024" in str(reasons(wide)["self_attn"])
    x = draw(2, 1, 1024)
    expected = wide(x)
    with fk.patch(wide):
        check_close([wide(x)], [expected])
    layer = nn.TransformerEncoderLayer(E, 4, 32)
    layer.self_attn = nn.Identity()  # type: ignore[assignment]
    assert "its self_attn is Identity" in str(fk.patch(layer).report())


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, more: bool = False) -> None: ...

    monkeypatch.setattr(nn.MultiheadAttention, "forward", forward)
    assert "its forward differs in attn_mask, average_attn_weights" in str(reasons(nn.MultiheadAttention(E, 4))[""])


def test_our_own_attention_inside() -> None:
    """Which PyTorch's layer would pass by in inference."""
    layer = nn.TransformerEncoderLayer(E, 4, 32, batch_first=True).eval()
    ours = fk.nn.MultiheadAttention(E, 4, batch_first=True)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    x = draw(B, S, E)
    with torch.no_grad():
        expected = layer(x)
        with fk.patch(layer, backend="reference"):
            assert ours.backends["flash_attention"] == "reference"
            check_close([layer(x)], [expected])
    assert ours.backends["flash_attention"] == "auto"


# Copies, and the compiler ---------------------------------------------------------------------------------------------


def test_copies_and_undo() -> None:
    model = transformer()
    before, keys = snapshot(model), [*model.state_dict()]
    plain = outputs_and_gradients(model, "training", MEMORY)
    handle = fk.patch(model)
    expected = outputs_and_gradients(model, "training", MEMORY)
    assert [*model.state_dict()] == keys
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved(model)):
        assert [swap.is_patched(m) for m in other.modules()] == [swap.is_patched(m) for m in model.modules()]
        for a, b in zip(outputs_and_gradients(other, "training", MEMORY), expected, strict=True):
            assert torch.equal(a, b)
        unpatch(other)
        assert [type(m) for m in other.modules()] == [type(m) for m in transformer().modules()]
    handle.undo()
    assert snapshot(model) == before
    for a, b in zip(outputs_and_gradients(model, "training", MEMORY), plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("training", rest_slow([True, False]), ids=["training", "inference"])
def test_one_graph(training: bool) -> None:
    counters.clear()
    model = transformer(activation="gelu", layers=1).train(training)
    fk.patch(model)
    run = torch.compile(model, fullgraph=True, backend="eager")
    given = {**MASKS["padding, causal"], "tgt_is_causal": True}
    src, tgt = draw(B, S, E), draw(B, T, E)
    with torch.set_grad_enabled(training):
        expected = model(src, tgt, **given)
        seen = ~TARGET_PADDING
        # Padding of the source is computed here, and packed away there: neither is attended to.
        check_close([run(src, tgt, **given)[seen]], [expected[seen]])
    assert not counters["graph_break"]
