"""Calls without a backward pass: they run where a gradient could be wanted, and say so when one is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_loops import BACKENDS, draw
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import compat
from foundry_kernels.compat import flash_attn_3
from foundry_kernels.core.inference import cut, without_backward
from foundry_kernels.models import EncoderDecoder, ModelConfig, PagedKVCache, Transformer
from foundry_kernels.ops.decode_linear import decode_linear

PAGES = "pages are for inference: no gradient flows with block_table"
CACHE = "a cache is for inference: no gradient flows through it"
OF_MODEL = "cache is for inference: gradients do not flow through it"
CPU = [backend for backend in BACKENDS if backend != "triton"]


def made(*shape: int, seed: int) -> Tensor:
    return draw(*shape, seed=seed).float()


CU = torch.tensor([0, 1, 3], dtype=torch.int32)
TABLE, USED = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32)
SINKS, SLOPES = {"sinks": (4,)}, {"alibi_slopes": (4,)}
PAGED = {"q": (3, 4, 8), "k": (4, 3, 2, 8), "v": (4, 3, 2, 8)}
ROWS = {"q": (2, 1, 4, 8), "k_cache": (2, 9, 2, 8), "v_cache": (2, 9, 2, 8), "k": (2, 1, 2, 8), "v": (2, 1, 2, 8)}
TABLES = {"rotary_cos": (9, 4), "rotary_sin": (9, 4)}
IN_PAGES = ROWS | {"k_cache": (4, 4, 2, 8), "v_cache": (4, 4, 2, 8)}
TOGETHER = IN_PAGES | {"q": (3, 4, 8), "k": (3, 2, 8), "v": (3, 2, 8)}

#: The shapes of a call's tensors, any of which may require a gradient; the call; and what its backward pass says.
CALLS: dict[str, tuple[dict[str, tuple[int, ...]], Callable[..., Any], str]] = {
    "flash_attention_varlen": (
        PAGED | SINKS | SLOPES,
        lambda **given: fk.flash_attention_varlen(
            **given, cu_seqlens_q=CU, cu_seqlens_k=None, max_seqlen_q=2, max_seqlen_k=6, block_table=TABLE,
            seqused_k=USED, return_lse=True,
        ),
        PAGES,
    ),
    "flash_attn_varlen_func": (
        PAGED,
        lambda q, k, v, backend: compat.flash_attn_varlen_func(
            q, k, v, CU, torch.tensor([0, 5, 11]), 2, 6, return_attn_probs=True, block_table=TABLE, backend=backend
        )[:2],
        PAGES,
    ),
    "varlen_attn": (
        PAGED,
        lambda q, k, v, backend: compat.varlen_attn(
            q, k, v, CU, None, 2, 6, enable_gqa=True, seqused_k=USED, block_table=TABLE, backend=backend
        ),
        PAGES,
    ),
    "flash_attn_with_kvcache": (
        ROWS | TABLES | SLOPES,
        lambda **given: compat.flash_attn_with_kvcache(**given, cache_seqlens=USED, return_softmax_lse=True),
        CACHE,
    ),
    "flash_attn_with_kvcache, one length": (
        ROWS | TABLES,
        lambda **given: compat.flash_attn_with_kvcache(**given, cache_seqlens=5, causal=True),
        CACHE,
    ),
    "flash_attn_with_kvcache, pages": (
        IN_PAGES | TABLES | SLOPES,
        lambda **given: compat.flash_attn_with_kvcache(
            **given, cache_seqlens=USED, block_table=TABLE, return_softmax_lse=True
        ),
        CACHE,
    ),
    "flash_attn_3": (
        ROWS,
        lambda **given: flash_attn_3.flash_attn_with_kvcache(**given, cache_seqlens=USED, return_softmax_lse=True),
        CACHE,
    ),
    "flash_attn_3, pages": (
        TOGETHER,
        lambda **given: flash_attn_3.flash_attn_with_kvcache(
            **given, cache_seqlens=USED, page_table=TABLE, cu_seqlens_q=CU, cu_seqlens_k_new=CU, return_softmax_lse=True
        ),
        CACHE,
    ),
    "decode_linear": (
        {"x": (2, 8), "weight": (3, 8), "weight2": (5, 8)},
        decode_linear,
        r"decode_linear has no gradient; use torch\.no_grad\(\)",
    ),
}  # fmt: skip


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: made(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize(("name", "wanted"), [(name, each) for name, call in CALLS.items() for each in call[0]])
def test_the_backward_pass_alone_is_refused(name: str, wanted: str, backend: str) -> None:
    shapes, call, why = CALLS[name]
    plain, given = tensors(shapes), tensors(shapes)
    expected = call(**plain, backend=backend)
    leaf = given[wanted].requires_grad_()
    other = torch.ones((), requires_grad=True)
    results = call(**given, backend=backend)
    for found, exact in zip(*(x if isinstance(x, tuple) else (x,) for x in (results, expected)), strict=True):
        assert torch.equal(found, exact)
        assert found.requires_grad
        loss = (found * 2).sum() + other * 3
        assert torch.autograd.grad(loss, other, retain_graph=True)[0] == 3  # which needs nothing of what is refused
        for cache in ("k_cache", "v_cache"):
            if cache in given:
                given[cache].detach().zero_()  # as a later call writes to it
        with pytest.raises(RuntimeError, match=why):
            torch.autograd.grad(loss, leaf, retain_graph=True)
        with pytest.raises(RuntimeError, match=why):
            loss.backward()
    # What is written to a cache is no part of a graph, which the next token would make longer.
    assert all(x.grad_fn is None for x in given.values())


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_copied_where_no_gradient_is_wanted(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, call, _ = CALLS[name]
    given = {n: x.requires_grad_() for n, x in tensors(shapes).items()}
    monkeypatch.setattr(torch.Tensor, "clone", None)
    with torch.no_grad():
        results = call(**given, backend=backend)
    assert not any(x.requires_grad for x in (results if isinstance(results, tuple) else (results,)))


def test_statistics_have_no_gradient_as_ever() -> None:
    given = tensors(PAGED)
    given["q"].requires_grad_()
    call = CALLS["flash_attention_varlen"][1]
    out, lse, *stats = call(**given, return_stats=True)
    assert out.requires_grad
    assert lse.requires_grad
    assert len(stats) == 2
    assert not any(x.requires_grad for x in stats)


@pytest.mark.parametrize("name", ["flash_attention_varlen", "decode_linear"])
def test_compiled(name: str) -> None:
    """The forward pass in one graph with the refusal, which the compiler must not raise as it traces."""
    shapes, call, why = CALLS[name]
    given = tensors(shapes)
    expected = call(**given)
    next(iter(given.values())).requires_grad_()
    compiled = torch.compile(lambda **given: call(**given), backend="aot_eager", fullgraph=True)
    out, exact = (x[0] if isinstance(x, tuple) else x for x in (compiled(**given), expected))
    torch.testing.assert_close(out, exact)
    with pytest.raises(RuntimeError, match=why):
        out.sum().backward()


def test_transforms() -> None:
    """Of `torch.func`, which the reference serves."""
    shapes, call, why = CALLS["flash_attention_varlen"]
    given = tensors(shapes)

    def loss(q: Tensor) -> Tensor:
        out: Tensor = call(**{**given, "q": q}, backend="reference")[0]
        return out.sum()

    with pytest.raises(RuntimeError, match=why):
        torch.func.grad(loss)(given["q"])


def test_results_may_be_written_to() -> None:
    x = torch.ones(3, requires_grad=True)
    wanted, (inner, kept) = cut(x, "kept")
    assert not inner.requires_grad
    assert kept == "kept"
    out, other = without_backward((inner * 2, inner * 3), wanted, "no")
    out += other  # which is refused of views that a function has made
    assert torch.equal(out, torch.full((3,), 5.0))
    with pytest.raises(RuntimeError, match="no"):
        out.sum().backward()


# --- models -----------------------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 23, "max_seq_len": 32}
TOKENS = torch.randint(23, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("kind", ["rows", "pages"])
def test_a_model_with_a_cache(kind: str, backend: str) -> None:
    """In the mode of training, step by step: the logits of inference, which no gradient goes through."""
    model = Transformer(ModelConfig(**SHAPE), backend)
    model.init_weights(torch.Generator().manual_seed(1))
    found = []
    for recording in (False, True):
        cache: Any = model.make_cache(2)
        if kind == "pages":
            cache = PagedKVCache(model.config, 9, 4)
            cache.add(), cache.add()
        with torch.set_grad_enabled(recording):
            logits = [model(part, cache=cache) for part in TOKENS.split((3, 1, 2), 1)]
        found.append(torch.cat(logits, 1))
        assert not any(x.requires_grad for x in (*cache.k, *cache.v))
    assert torch.equal(*found)
    assert not found[0].requires_grad
    for leaf in (model.tok_embeddings.weight, model.layers[1].attention.wq.weight):
        with pytest.raises(RuntimeError, match=OF_MODEL):
            torch.autograd.grad(found[1].sum(), leaf)
    model.requires_grad_(False)
    assert not model(TOKENS[:, :1], cache=cache).requires_grad


def test_all_results_of_a_model_with_a_cache() -> None:
    """The loss, logits and what routers return; and nothing of a call without a cache."""
    model = Transformer(ModelConfig(**SHAPE, n_experts=4, top_k=2), CPU[-1])
    logits, stats = model(TOKENS, cache=model.make_cache(2), return_router_stats=True)
    floats = [x for of_layer in stats for x in of_layer if x is not None and x.is_floating_point()]
    assert len(floats) >= 2
    for x in (logits, *floats):
        with pytest.raises(RuntimeError, match=OF_MODEL):
            x.sum().backward()
    model(TOKENS).sum().backward()
    assert model.tok_embeddings.weight.grad is not None


@pytest.mark.parametrize("read", [False, True])
def test_what_a_decoder_reads_gets_no_gradient_with_a_cache(read: bool) -> None:
    """Of a frozen decoder, and of an encoder whose graph the call has not cut."""
    model = EncoderDecoder(ModelConfig(**SHAPE, context_dim=32), share_embeddings=False)
    model.decoder.requires_grad_(False)
    source: Any = model.read(TOKENS) if read else TOKENS
    logits = model(source, TOKENS, cache=model.make_cache(2))
    weight = model.encoder.layers[0].attention.wq.weight
    with pytest.raises(RuntimeError, match=OF_MODEL):
        torch.autograd.grad(logits.sum(), weight)
    assert torch.autograd.grad(model(source, TOKENS).sum(), weight)[0].any()
