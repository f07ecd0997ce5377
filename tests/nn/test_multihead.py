"""`nn.MultiheadAttention` against torch's: outputs, weights and all gradients, masks of each kind, nested tensors."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from slow import rest_slow
from torch import Tensor
from torch._dynamo.utils import counters

import foundry_kernels as fk
from foundry_kernels.nn import MultiheadAttention

BACKENDS = ("reference", *(("native",) if "native" in fk.OPS["flash_attention"].backends("cpu") else ()))
over_backends = pytest.mark.parametrize("backend", BACKENDS)

B, H, T, S, E = 3, 4, 7, 9, 16
LENGTHS = (7, 4, 2)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(backend: str = "auto", **options: Any) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
    """torch's and ours, with the same parameters."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(E, H, **options)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.5)
    ours = MultiheadAttention(E, H, **options, backend=backend)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def hidden(*shape: int, seed: int = 3) -> Tensor:
    """A mask in torch's sense, in which each query sees its first key."""
    mask = draw(*shape, seed=seed) > 0.3
    mask[..., 0] = False
    return mask


def masks(n: int) -> dict[str, dict[str, Tensor]]:
    """Those of T queries and n keys."""
    padding, pairs, of_heads = hidden(B, n), hidden(T, n, seed=4), hidden(B * H, T, n, seed=5)
    soft, bias = draw(B, n, seed=6), draw(T, n, seed=7)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "bool": {"attn_mask": pairs},
        "of heads": {"attn_mask": of_heads},
        "bool, padding": {"attn_mask": pairs, "key_padding_mask": padding},
        "bias": {"attn_mask": bias},
        "bias of heads, padding": {"attn_mask": draw(B * H, T, n, seed=8), "key_padding_mask": padding},
        "bias, soft padding": {"attn_mask": bias, "key_padding_mask": soft},
        "bool, soft padding": {"attn_mask": pairs, "key_padding_mask": soft},
    }


def check_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.shape == wanted.shape
        torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-5 * max(4.0, float(wanted.detach().abs().max())))


def results(module: Any, inputs: list[Tensor], given: dict[str, Any], same: tuple[int, ...]) -> list[Tensor]:
    """Output, weights and all gradients; `same` says which of the inputs are query, key and value."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    given = dict(given)
    learned = []
    if (mask := given.get("attn_mask")) is not None and mask.is_floating_point():
        given["attn_mask"] = mask.clone().requires_grad_()
        learned = [given["attn_mask"]]
    made = [x for x in module(*(inputs[i] for i in same), **given) if x is not None]
    loss = sum((x * draw(*x.shape, seed=9).to(x.dtype)).sum() for x in made)
    return [*made, *torch.autograd.grad(loss, [*inputs, *module.parameters(), *learned])]


KINDS = {"self": (0, 0, 0), "keys": (0, 1, 1), "cross": (0, 1, 2)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True},
    "widths": {"kdim": 12, "vdim": 20},
    "widths, no bias, zeros": {"kdim": 12, "vdim": 20, "bias": False, "add_zero_attn": True},
}
#: Keys and values of other widths are other tensors than the queries.
CASES = [(kind, name) for kind in KINDS for name in OPTIONS if kind == "cross" or "kdim" not in OPTIONS[name]]


@over_backends
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("batch_first", [True, False], ids=["BTE", "TBE"])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_outputs_weights_and_gradients_are_torchs(kind: str, options: str, batch_first: bool, backend: str) -> None:
    made = OPTIONS[options]
    modules = pair(backend, batch_first=batch_first, **made)
    n, same = (T if kind == "self" else S), KINDS[kind]
    widths = ((T, E), (n, made.get("kdim", E)), (n, made.get("vdim", E)))
    shapes = [(B, t, e) if batch_first else (t, B, e) for t, e in widths]
    inputs = [draw(*shapes[i], seed=i) for i in sorted(set(same))]
    for masked, weights in [
        *itertools.product(masks(n).values(), (None, False)),
        (masks(n)["bias, soft padding"], True),
    ]:
        asked = {"need_weights": False} if weights is None else {"average_attn_weights": weights}
        found, expected = (results(module, inputs, {**masked, **asked}, same) for module in modules[::-1])
        check_close(found, expected)


@over_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_as_exact_as_torchs(dtype: torch.dtype, backend: str) -> None:
    n = 70
    modules = [module.to(dtype) for module in pair(backend, batch_first=True)]
    x, given = draw(B, n, E).to(dtype), {"key_padding_mask": hidden(B, n)}
    oracle = results(copy.deepcopy(modules[0]).double(), [x.double()], given, (0, 0, 0))
    theirs, ours = (results(module, [x], given, (0, 0, 0)) for module in modules)
    for actual, other, exact in zip(ours, theirs, oracle, strict=True):
        assert actual.dtype == other.dtype == dtype
        error, allowed = ((a.double() - exact).square().mean().sqrt() for a in (actual, other))
        assert error <= 1.2 * allowed + 1e-3 * torch.finfo(dtype).eps * exact.abs().max()


def test_autocast() -> None:
    theirs, ours = pair(batch_first=True)
    inputs = draw(B, T, E), *2 * (draw(B, S, E),)
    exact = theirs(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found, other = ours(*inputs), theirs(*inputs)
    for actual, theirs_, wanted in zip(found, other, exact, strict=True):
        assert actual.dtype == theirs_.dtype == torch.bfloat16
        error, allowed = ((a - wanted).square().mean().sqrt() for a in (actual, theirs_))
        assert error <= 1.2 * allowed


# The causal hint -----------------------------------------------------------------------------------------------------

CAUSAL = torch.ones(T, T).triu(1).bool()


@pytest.mark.parametrize("mask", [CAUSAL, torch.zeros(T, T).masked_fill(CAUSAL, -torch.inf)], ids=["bool", "float"])
@pytest.mark.parametrize("weights", [True, False], ids=["weights", ""])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
def test_the_causal_hint(mask: Tensor, weights: bool, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from foundry_kernels.nn import multihead

    theirs, ours = pair(batch_first=True)
    seen: dict[str, Any] = {}
    attend = multihead.flash_attention

    def noted(*args: Any, **options: Any) -> Any:
        seen.update(options)
        return attend(*args, **options)

    monkeypatch.setattr(multihead, "flash_attention", noted)
    x, given = draw(B, T, E), {"attn_mask": mask, "need_weights": weights, "is_causal": True}
    if padded:
        given["key_padding_mask"] = torch.arange(T) >= torch.tensor(LENGTHS)[:, None]
    torch.testing.assert_close(ours(x, x, x, **given), theirs(x, x, x, **given), rtol=1e-4, atol=2e-5)
    assert seen["causal"]
    assert (seen["attn_mask"] is None) == (not padded)  # the T x T mask is not read


def test_where_the_hint_is_not_enough() -> None:
    _, ours = pair(batch_first=True, add_bias_kv=True)
    x = draw(B, T, E)
    hinted, plain = (ours(x, x, x, attn_mask=CAUSAL, is_causal=is_causal) for is_causal in (True, False))
    torch.testing.assert_close(hinted, plain)
    assert hinted[1][..., -1].gt(0).all()  # the added key is behind all others, and seen
    _, ours = pair(batch_first=True)
    learned = torch.zeros(T, T).masked_fill(CAUSAL, -torch.inf).requires_grad_()
    ours(x, x, x, attn_mask=learned, is_causal=True, need_weights=False)[0].square().sum().backward()
    assert learned.grad is not None
    assert learned.grad.tril().abs().max() > 0


# Rows, dropout and copies ---------------------------------------------------------------------------------------------


@over_backends
def test_a_query_that_sees_no_key(backend: str) -> None:
    _, ours = pair(backend, batch_first=True)
    x = draw(B, T, E).requires_grad_()
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1] = True
    y, weights = ours(x, x, x, key_padding_mask=padding)
    assert torch.equal(y[1], ours.out_proj.bias.expand(T, E))
    assert weights is not None
    assert not weights[1].any()
    (y.sum() + weights.square().sum()).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@over_backends
def test_dropout(backend: str) -> None:
    _, ours = pair(backend, dropout=0.5, batch_first=True)
    x = draw(B, T, E)

    def seeded(**options: Any) -> Any:
        torch.manual_seed(1)
        return ours(x, x, x, **options)

    y, weights = seeded(average_attn_weights=False)
    assert 0.3 < float((weights == 0).float().mean()) < 0.7
    # The weights are those that the values were multiplied by.
    v = torch.nn.functional.linear(x, ours.in_proj_weight[2 * E :], ours.in_proj_bias[2 * E :])
    by_hand = ours.out_proj((weights @ v.unflatten(-1, (H, -1)).transpose(1, 2)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(y, by_hand, rtol=1e-4, atol=2e-5)
    assert torch.equal(seeded(need_weights=False)[0], y)
    assert not torch.equal(ours(x, x, x)[0], y)
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_state_dicts_and_copies() -> None:
    theirs, ours = pair(kdim=12, add_bias_kv=True)
    assert isinstance(ours, torch.nn.MultiheadAttention)
    theirs.load_state_dict(ours.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    inputs = draw(T, B, E), draw(S, B, 12), draw(S, B, E)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(*inputs)[0], ours(*inputs)[0])
        assert other.backends == ours.backends
    torch.manual_seed(5)
    first = torch.nn.MultiheadAttention(E, H).in_proj_weight
    torch.manual_seed(5)
    assert torch.equal(MultiheadAttention(E, H).in_proj_weight, first)
    assert "backend='auto'" in repr(ours)


@pytest.mark.parametrize("weights", rest_slow([False, True]))
def test_one_graph_for_every_length(weights: bool) -> None:
    counters.clear()
    theirs, ours = pair(batch_first=True)
    run = torch.compile(ours, fullgraph=True, backend="eager")
    for n in (5, 7, 9):
        x, padding = draw(B, n, E).requires_grad_(), hidden(B, n)
        given = {"key_padding_mask": padding, "attn_mask": hidden(n, n, seed=4), "need_weights": weights}
        grads = []
        for module in (run, theirs):
            y, w = module(x, x, x, **given)
            grads.append(torch.autograd.grad(y.square().sum() + (0 if w is None else w.square().sum()), x)[0])
        check_close(grads[:1], grads[1:])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the first length, and all others


# Nested tensors and packed sequences ----------------------------------------------------------------------------------

LAYOUTS = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)


def nested(layout: torch.layout, lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    parts = [draw(n, E, seed=seed + n) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=layout, requires_grad=True), parts


@LAYOUTS
def test_nested_tensors(layout: torch.layout) -> None:
    theirs, ours = pair(batch_first=True)
    x, parts = nested(layout, LENGTHS)
    y, none = ours(x, x, x, need_weights=False)
    assert none is None
    assert y.layout == layout
    padded, weights = ours(x, x, x)
    for one, again, part, row in zip(y.unbind(), padded.unbind(), parts, weights, strict=True):
        wanted, w = theirs(part, part, part)
        for found in (one, again):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
        n = len(part)
        torch.testing.assert_close(row[:n, :n], w, rtol=1e-4, atol=2e-5)
        assert row.count_nonzero() == n * n
    sum(one.square().sum() for one in y.unbind()).backward()
    got = [p.grad for p in ours.parameters()]
    sum(theirs(part, part, part)[0].square().sum() for part in parts).backward()
    for a, p in zip(got, theirs.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-4)
    assert x.grad is not None


@LAYOUTS
def test_nested_queries_over_nested_keys(layout: torch.layout) -> None:
    theirs, ours = pair(batch_first=True)
    (x, queries), (memory, keys) = nested(layout, LENGTHS), nested(layout, (3, 9, 1), seed=20)
    y, _ = ours(x, memory, memory, need_weights=False)
    for one, q, k in zip(y.unbind(), queries, keys, strict=True):
        torch.testing.assert_close(one, theirs(q, k, k)[0], rtol=1e-4, atol=2e-5)


def test_packed_sequences() -> None:
    theirs, ours = pair()
    parts = [draw(n, E, seed=n) for n in LENGTHS]
    y = ours.forward_packed(torch.cat(parts), torch.tensor([0, 7, 11, 13]), 7)
    torch.testing.assert_close(y, torch.cat([theirs(p, p, p)[0] for p in parts]), rtol=1e-4, atol=2e-5)
