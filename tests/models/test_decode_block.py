"""A whole block in one call: the same bits as of its parts one by one, and whose parts are called nevertheless."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from blocks import CONFIGS, DTYPES, arguments, counted, draw_tokens, make
from slow import rest_slow
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.core.extension import _C, build_info
from foundry_kernels.core.registry import OPS, override
from foundry_kernels.models import KVCache, Transformer, generate
from foundry_kernels.nn import RMSNorm, _linear_layers

pytestmark = pytest.mark.skipif(_linear_layers.MISSING is not None, reason=str(_linear_layers.MISSING))
#: (batch, new tokens, what the cache has before).
STEPS = [(1, 1, 0), (1, 1, 9), (3, 1, 4), (2, 4, 7), (8, 1, 20), (1, 3, 3)]


@torch.no_grad()
def step(
    model: Transformer,
    tokens: Tensor,
    start: int,
    monkeypatch: pytest.MonkeyPatch,
    allowed: bool = True,
    together: bool = False,
) -> tuple[list[Tensor], list[bool]]:
    """Logits of the tokens behind `start` and all keys and values, and whether each block was one call."""
    cache = model.make_cache(len(tokens), tokens.shape[1] + 1)
    with counted(monkeypatch, allowed=False):
        if start:
            model(tokens[:, :start], cache=cache)
    with counted(monkeypatch, allowed, together) as taken:
        logits = model(tokens[:, start:], cache=cache)
    stored = [t[:, :, : cache.length] for t in (*cache.k, *cache.v)]
    return [logits, *stored], taken


def assert_same_bits(model: Transformer, batch: int, count: int, start: int, patch: pytest.MonkeyPatch) -> None:
    tokens = draw_tokens(batch, start + count)
    expected, never = step(model, tokens, start, patch, allowed=False)
    assert not any(never)
    for together in (False, True):
        got, taken = step(model, tokens, start, patch, together=together)
        assert taken == [True] * len(model.layers)
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_block_has_the_bits_of_its_parts(config: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(dtype, **CONFIGS[config])
    for batch, count, start in STEPS:
        assert_same_bits(model, batch, count, start, monkeypatch)


@pytest.mark.parametrize("isa", build_info().get("usable_instruction_sets", []))
def test_every_instruction_set_has_them(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build_info()["instruction_set"]
    _C.force_instruction_set(isa)
    try:
        for dtype in DTYPES:
            assert_same_bits(make(dtype, **CONFIGS["heads-of-96"]), 2, 3, 70, monkeypatch)
    finally:
        _C.force_instruction_set(before)


@pytest.mark.parametrize("threads", rest_slow([7, 2, 1, 3]))
def test_any_number_of_threads_has_them(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many keys that they are split over tasks, too."""
    model, before = make(**CONFIGS["threads"]), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same_bits(model, 1, 1, 1100, monkeypatch)
        for _ in range(3):
            assert_same_bits(model, 2, 2, 30, monkeypatch)
    finally:
        torch.set_num_threads(before)


def test_a_hook_on_a_block_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = make(), []
    model.layers[1].register_forward_hook(lambda module, args, out: seen.append(len(out)))
    _, taken = step(model, draw_tokens(1, 4), 3, monkeypatch, together=True)
    assert seen == [2, 2]
    assert taken == [True, True]  # inside of it, there is none


def test_float32_norms_of_a_bfloat16_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.float()
    assert_same_bits(model, 2, 1, 3, monkeypatch)


# --- what keeps a block from being one call -----------------------------------------------------------------------


def _hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, out: None)


def _bias(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.ones(layer.out_features))


def _own_forward(module: nn.Module) -> None:
    module.forward = module.forward


def _plain_weight(layer: nn.Linear) -> None:
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = weight


def _subclass(module: nn.Module) -> None:
    module.__class__ = type("Other", (type(module),), {})


CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "hook-attention": ("attention", _hook),
    "hook-projection": ("attention.wv", _hook),
    "hook-norm": ("ffn_norm", _hook),
    "hook-feed-forward": ("feed_forward", _hook),
    "hook-down": ("feed_forward.w2", _hook),
    "forward-of-its-own": ("feed_forward.w2", _own_forward),
    "weight-that-is-no-parameter": ("feed_forward.w2", _plain_weight),
    "bias": ("attention.wo", _bias),
    "subclass-of-block": ("", _subclass),
    "subclass-of-attention": ("attention", _subclass),
    "subclass-of-norm": ("attention_norm", _subclass),
    "subclass-of-linear": ("feed_forward.w1", _subclass),
    "other-eps": ("ffn_norm", lambda norm: setattr(norm, "eps", 0.1)),
    "named-reference": ("ffn_norm", lambda norm: norm.backends.update(add_rms_norm="reference")),
    "reference-attention": ("attention", lambda a: a.backends.update(flash_attention="reference")),
    "not-causal": ("attention", lambda attention: setattr(attention, "causal", False)),
    "no-rotation": ("attention", lambda attention: setattr(attention, "rope", None)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_is_more_is_called_by_parts(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    path, alter = CHANGES[change]
    alter(model.layers[1].get_submodule(path))
    tokens = draw_tokens(2, 6)
    got, taken = step(model, tokens, 5, monkeypatch)
    expected, _ = step(model, tokens, 5, monkeypatch, allowed=False)
    assert taken == ([True] if change == "subclass-of-block" else [True, False])  # a subclass is not asked
    assert all(map(torch.equal, got, expected))
    got, taken = step(model, tokens, 5, monkeypatch, together=True)
    assert taken == ([True] if change == "subclass-of-block" else [True, False])  # one by one
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_experts": 2},
        {"qk_norm": True},
        {"norm": "layer_norm"},
        {"positions": "alibi"},
        {"activation": "gelu"},
        {"attention_bias": True},
        {"parallel_residual": True},
    ],
    ids=str,
)
def test_other_models_are_called_by_parts(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, taken = step(make(**changes), draw_tokens(1, 4), 3, monkeypatch)
    assert not any(taken)


def test_where_no_block_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make(), draw_tokens(1, 4)

    def taken(tokens: Tensor = tokens, start: int = 3, model: Transformer = model) -> bool:
        return any(any(step(model, tokens, start, monkeypatch, together=each)[1]) for each in (False, True))

    assert taken()
    with fk.batch_invariant():
        assert not taken()
    with override(OPS["rope"], "native"):  # whatever it is replaced by
        assert not taken()
    with torch.autocast("cpu", torch.bfloat16):
        with counted(monkeypatch) as found, torch.no_grad():
            model(tokens[:, :1], cache=KVCache(model.config, 1, dtype=torch.bfloat16))
        assert not any(found)
    assert not taken(draw_tokens(3, 6), 3)  # nine rows
    assert not taken(model=make(torch.float64))
    with counted(monkeypatch) as found, torch.no_grad():
        model(tokens)  # no cache
        cache = model.make_cache(1)
        model(tokens[:, :1], cache=cache, lengths=torch.tensor([1]))
    assert not any(found)


def test_dropout_in_training_is_called_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(residual_dropout=0.5)
    assert all(step(model, draw_tokens(1, 4), 3, monkeypatch)[1])
    assert not any(step(model.train(), draw_tokens(1, 4), 3, monkeypatch)[1])


@torch.no_grad()
def test_a_cache_that_does_not_fit_is_named_as_ever() -> None:
    model = make()
    block, x = model.layers[0], torch.randn(1, 2, 64)
    cache = KVCache(model.config, 1, 1).layer(0)
    with pytest.raises(ValueError, match=r"k must fit \[1, 4, at most 1, 16\]"):
        block(None, x, cache)
    with pytest.raises(ValueError, match=r"k must be torch\.bfloat16"):
        block(None, x, KVCache(model.config, 1, 4, dtype=torch.bfloat16).layer(0))
    block.attention_norm = RMSNorm(32)
    with pytest.raises(ValueError, match="must have dim=64"):
        block(None, x[..., :32], KVCache(model.config, 1, 4).layer(0))


@torch.no_grad()
def test_the_cache_knows_that_it_was_written() -> None:
    model = make()
    cache = model.make_cache(1)
    before = cache.k[0]._version, cache.v[0]._version
    model(draw_tokens(1, 1), cache=cache)
    assert cache.k[0]._version > before[0]
    assert cache.v[0]._version > before[1]


# --- the operator -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_operator_by_opcheck() -> None:
    op = torch.ops.foundry_kernels.decode_block.default
    torch.library.opcheck(op, arguments())
    torch.library.opcheck(op, arguments(branch=None, window_left=2, interleaved=True, activation="gelu"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"start": 7}, ValueError, "no room for 3 positions from 7"),
        ({"start": -1}, ValueError, "no room for 3 positions from -1"),
        ({"n_heads": 3}, ValueError, "n_heads must be a multiple of the cache's 2"),
        ({"branch": torch.ones(2, 3, 23)}, ValueError, "branch must have stream's shape"),
        ({"norms": [torch.ones(23)] * 2}, ValueError, "must have shape"),
        ({"v_cache": torch.zeros(2, 2, 9, 8).half()}, TypeError, "must have stream's dtype"),
        ({"cos": torch.ones(7, 4), "sin": torch.ones(7, 4)}, ValueError, "a row for each position"),
        ({"activation": "tanh"}, ValueError, "activation must be one of"),
        ({"k_cache": torch.zeros(2, 9, 2, 8).transpose(1, 2)}, ValueError, "must be contiguous"),
        ({"weights": []}, ValueError, "there must be 7 weights"),
    ],
    ids=str,
)
@torch.no_grad()
def test_the_operator_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    args = arguments(**changes)
    with pytest.raises(error, match=message):
        torch.ops.foundry_kernels.decode_block(*args)


def test_the_operator_is_for_inference() -> None:
    with pytest.raises(ValueError, match="no gradient"):
        torch.ops.foundry_kernels.decode_block(*arguments())
    caches = {name: torch.zeros(3, 2, 9, 8) for name in ("k_cache", "v_cache")}
    many = arguments(branch=None, stream=torch.ones(3, 3, 24), **caches)
    with torch.no_grad(), pytest.raises(ValueError, match="at most 8 rows"):
        torch.ops.foundry_kernels.decode_block(*many)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", rest_slow([torch.float32, torch.bfloat16]), ids=str)
def test_a_compiled_step_has_the_operator(dtype: torch.dtype) -> None:
    model, tokens = make(dtype), draw_tokens(1, 5)
    alike: list[Any] = [False, True, {}]
    plain, *compiled = (generate(model, tokens, 8, compile=how)[0] for how in alike)
    assert all(torch.equal(plain, each) for each in compiled)
    graphs: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    generate(model, tokens, 3, compile={"backend": look})
    assert sum("decode_block" in name for name in graphs) == 2
    assert not any("rope_append" in name for name in graphs)


def test_nothing_is_compiled_where_one_call_runs_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless options for the compiler are given, or a block must be called by itself."""
    steps: list[Any] = []

    def compiler(step: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
        return lambda *args: steps.append(args) or step(*args)  # type: ignore[func-returns-value]

    monkeypatch.setattr(torch, "compile", compiler)

    def compiled(model: Transformer, how: Any, batch: int = 1) -> int:
        steps.clear()
        generate(model, draw_tokens(batch, 5), 4, compile=how)
        return len(steps)

    model = make()
    assert compiled(model, True) == 0
    assert compiled(model, True, batch=8) == 0
    assert compiled(model, True, batch=9) == 3  # more rows than the operator takes
    assert compiled(model, {}) == 3
    model.layers[1].register_forward_hook(lambda *_: None)
    assert compiled(model, True) == 3
    assert compiled(Transformer(model.config, "reference"), True) == 3


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_generation_is_what_it_was(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = make(), [[3, 1, 4, 1, 5], [9, 2]]
    with mode():
        got = generate(model, prompts, 12)
        with counted(monkeypatch, allowed=False):
            expected = generate(model, prompts, 12)
    assert all(map(torch.equal, got, expected))
