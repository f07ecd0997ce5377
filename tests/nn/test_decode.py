"""Few rows at a time: keys rotated into the cache, projections in one pass over their weights, what keeps a layer from
taking part, and that nothing is kept of weights between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from table import cpu_setting
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import foundry_kernels as fk
from foundry_kernels.core.extension import build_info
from foundry_kernels.models import KVCache, ModelConfig, Transformer
from foundry_kernels.nn import _linear_layers

pytestmark = pytest.mark.skipif(_linear_layers.MISSING is not None, reason=str(_linear_layers.MISSING))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CONFIG = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=97, max_seq_len=64, init_std=0.2)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Called(TorchDispatchMode):
    """The names of this package's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "foundry_kernels":
            self.names.append(func.name().removeprefix("foundry_kernels::"))
        return func(*args, **(kwargs or {}))


def called(call: Callable[[], object]) -> list[str]:
    with Called() as seen:
        call()
    return seen.names


# --- the rotation into a cache ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_rotation_by_opcheck() -> None:
    cos, sin = fk.rope_table(8, 16)
    args = (draw(2, 3, 8 * 8), cos, sin, False, torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 8), 4, 5)
    torch.library.opcheck(torch.ops.foundry_kernels.rope_append.default, args)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_rotated_into_the_cache(dtype: torch.dtype, interleaved: bool) -> None:
    cos, sin = fk.rope_table(12, 32)
    for batch, tokens, start, heads, kv_heads in ((2, 1, 5, 4, 2), (1, 7, 0, 3, 1), (3, 2, 8, 2, 2)):
        x = draw(batch, tokens, (heads + 2 * kv_heads) * 16, dtype=dtype)
        q, k, v = x.view(batch, tokens, -1, 16).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
        table = cos[start : start + tokens], sin[start : start + tokens]
        expected_q, expected_k = fk.rope(q, k, *table, interleaved=interleaved, backend="native")
        k_cache, v_cache = draw(2, batch, kv_heads, 10, 16, dtype=dtype, seed=1)
        before = k_cache.clone(), v_cache.clone()
        versions = k_cache._version, v_cache._version
        got = torch.ops.foundry_kernels.rope_append(x, cos, sin, interleaved, k_cache, v_cache, heads, start)
        assert torch.equal(got, expected_q)
        assert got.transpose(1, 2).is_contiguous()
        for cache, old, new in ((k_cache, before[0], expected_k), (v_cache, before[1], v)):
            old[:, :, start : start + tokens] = new
            assert torch.equal(cache, old)
        assert k_cache._version > versions[0]
        assert v_cache._version > versions[1]


@torch.no_grad()
def test_the_rotation_into_a_cache_refuses() -> None:
    cos, sin = fk.rope_table(8, 16)
    x, cache = draw(1, 2, 8 * 8), torch.zeros(1, 2, 9, 8)

    def append(x: Tensor = x, k: Tensor = cache, v: Tensor = cache, heads: int = 4, start: int = 0) -> Tensor:
        return torch.ops.foundry_kernels.rope_append(x, cos, sin, False, k, v, heads, start)

    longer = torch.zeros(1, 2, 20, 8)
    for options, message in (
        ({"start": 8}, "no room for 2 positions from 8"),
        ({"start": -1}, "no room for 2 positions from -1"),
        ({"heads": 3}, r"k_cache must be \[B, Hk, S, D\] with qkv's B"),
        ({"k": cache.mT.contiguous().mT}, "must be contiguous"),
        ({"k": longer, "v": longer, "start": 15}, "cos must have a row for each position up to 17"),
    ):
        with pytest.raises(ValueError, match=message):
            append(**options)
    with pytest.raises(TypeError, match="must have qkv's dtype"):
        append(x=x.half())
    with torch.enable_grad(), pytest.raises(ValueError, match="has no gradient"):
        append(x=x.clone().requires_grad_())


# --- modules ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def run(model: Transformer, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
    """Logits of tokens that come one at a time."""
    cache = model.make_cache(len(tokens)) if cache is None else cache
    return torch.cat([model(tokens[:, n : n + 1], cache=cache) for n in range(tokens.shape[1])], 1)


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG)


TOKENS = torch.randint(97, (2, 6), generator=torch.Generator().manual_seed(0))


def test_a_step_takes_one_pass_a_group_of_projections(model: Transformer) -> None:
    names = called(lambda: run(model, TOKENS[:, :1]))
    # Queries, keys and values; their output; both inner projections; the outer one; and the head.
    assert names.count("decode_linear") == 4 * 2 + 1
    assert names.count("rope_append") == 2
    assert "rope_apply" not in names


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_steps_give_what_the_reference_gives(batch: int, tied: bool) -> None:
    config = ModelConfig(**{**vars(CONFIG), "tie_embeddings": tied})
    torch.manual_seed(0)
    ours, plain = Transformer(config), Transformer(config, "reference")
    plain.load_state_dict(ours.state_dict())
    tokens = torch.randint(97, (batch, 6), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(run(ours, tokens), plain(tokens))
    assert not called(lambda: run(plain, tokens))


class Scaled(nn.Linear):
    """Stands for an adapter: its forward is not that of nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _double(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, args, y: 2 * y)


def _own_forward(layer: nn.Module) -> None:
    inner = layer.forward
    layer.forward = lambda x: 2 * inner(x)


def _bias(layer: nn.Module) -> None:
    layer.bias = nn.Parameter(torch.ones(layer.out_features))


def _parametrized(layer: nn.Module) -> None:
    class Twice(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    nn.utils.parametrize.register_parametrization(layer, "weight", Twice())


def _another_class(layer: nn.Module) -> None:
    layer.__class__ = Scaled


@pytest.mark.parametrize("change", [_double, _own_forward, _bias, _parametrized, _another_class])
@pytest.mark.parametrize("path", ["attention.wq", "attention.wv", "attention.wo", "feed_forward.w3", "feed_forward.w2"])
def test_a_layer_that_does_more_is_called(model: Transformer, path: str, change: Callable[[nn.Module], None]) -> None:
    plain = Transformer(CONFIG, "reference")
    plain.load_state_dict(model.state_dict())
    before = run(model, TOKENS)
    for changed in (model, plain):
        change(changed.layers[1].get_submodule(path))
    after = run(model, TOKENS)
    torch.testing.assert_close(after, plain(TOKENS))
    assert (after - before).abs().max() > 1e-2
    # Gate and up need each other: the outer projection follows what they are.
    assert called(lambda: run(model, TOKENS[:, :1])).count("decode_linear") == (7 if path.endswith("w3") else 8)


def test_a_rotation_with_hooks_is_called(model: Transformer) -> None:
    seen = []
    model.layers[0].attention.rope.register_forward_hook(lambda module, args, out: seen.append(args[2]))
    names = called(lambda: run(model, TOKENS))
    assert seen == [n for n in range(6) for _ in range(2)]  # the layers share it
    assert "rope_append" not in names


def test_global_hooks_see_every_layer(model: Transformer) -> None:
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        run(model, TOKENS[:, :1])
    finally:
        handle.remove()
    assert sum(isinstance(module, nn.Linear) for module in seen) == 7 * 2 + 1


def test_nothing_is_kept_of_a_weight(model: Transformer) -> None:
    """However a weight changes, the next step reads the new one."""
    plain = Transformer(CONFIG, "reference")

    def agrees() -> None:
        plain.load_state_dict(model.state_dict())
        # Sums of float32 differ by 1e-5; the weights, and so the logits, by 0.1 and more.
        torch.testing.assert_close(run(model, TOKENS), plain(TOKENS), rtol=1e-4, atol=1e-4)

    agrees()
    other = Transformer(CONFIG).state_dict()
    model.load_state_dict(other)
    agrees()
    model.load_state_dict({k: v.clone() * 1.5 for k, v in other.items()}, assign=True)
    agrees()
    with torch.no_grad():
        model.layers[0].attention.wk.weight.mul_(-1)
        model.layers[1].feed_forward.w1.weight.data = draw(*model.layers[1].feed_forward.w1.weight.shape, seed=3)
    agrees()
    model(TOKENS, TOKENS)[1].backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    agrees()
    swapped = {"layers.0.attention.wq.weight": draw(32, 32, seed=4)}
    cache = model.make_cache(2)
    with torch.no_grad():
        new = torch.func.functional_call(model, other | swapped, (TOKENS[:, :1],), {"cache": cache})
    plain.load_state_dict(other | swapped)
    torch.testing.assert_close(new, plain(TOKENS[:, :1]))


def test_where_few_rows_are_not_decoded(model: Transformer) -> None:
    layer, x = model.layers[0].feed_forward, draw(1, 2, 32)

    def taken(call: Callable[[], object]) -> bool:
        return "decode_linear" in called(call)

    with torch.no_grad():
        assert taken(lambda: layer(x))
        assert not taken(lambda: layer(draw(1, 9, 32)))
        assert not taken(lambda: copy.deepcopy(layer).double()(x.double()))
        assert not taken(lambda: Transformer(CONFIG, "reference").layers[0].feed_forward(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert not taken(lambda: layer(x))
            assert layer(x).dtype == torch.bfloat16
        torch.testing.assert_close(torch.func.vmap(layer)(x[0])[None], layer(x))
    assert not taken(lambda: layer(x))  # its weights are to have gradients
    layer(x).sum().backward()
    assert layer.w1.weight.grad is not None


@torch.no_grad()
@pytest.mark.parametrize("isa", _linear_layers.MAX_BATCHED_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_that_is_served_takes_more_rows(dtype: torch.dtype, isa: str) -> None:
    if isa not in build_info()["usable_instruction_sets"]:
        pytest.skip(f"this processor has no {isa}")
    layer, x = copy.deepcopy(Transformer(CONFIG).layers[0].feed_forward).to(dtype), draw(1, 33, 32, dtype=dtype)
    with cpu_setting(isa, torch.get_num_threads()):
        with _linear_layers.batched_decode():
            assert "decode_linear" in called(lambda: layer(x[:, :32]))
            assert "decode_linear" not in called(lambda: layer(x))
            assert torch.equal(layer(x[:, :32])[:, 24:], layer(x[:, 24:32]))
        assert "decode_linear" not in called(lambda: layer(x[:, :9]))


class Lowered(Tensor):
    """A weight of a class of its own, as a quantised one is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight = args[0], args[1].as_subclass(Tensor)
            return F.linear(x, weight.round(decimals=1))
        return super().__torch_function__(func, types, args, kwargs or {})


@torch.no_grad()
def test_weights_of_another_class_are_left_to_it(model: Transformer) -> None:
    layer, x = model.layers[0].feed_forward, draw(1, 1, 32)
    before = layer(x)
    layer.w2.weight = nn.Parameter(layer.w2.weight.as_subclass(Lowered), requires_grad=False)
    assert (layer(x) - before).abs().max() > 1e-4
