"""fk.compat.use_sdpa: who reaches this package's attention while it is on, and that nothing of it is left."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_loops import BACKENDS, close, draw, over_backends
from slow import rest_slow
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_before

import foundry_kernels as fk
from foundry_kernels.compat import _replace, scaled_dot_product_attention, sdpa_switch, use_sdpa
from foundry_kernels.compat.sdpa import TORCHS


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The backend of each call that this package served; afterwards, PyTorch's own must be back."""
    calls: list[str] = []

    @functools.wraps(scaled_dot_product_attention)
    def spy(*args: Any, backend: str) -> Any:
        calls.append(backend)
        return scaled_dot_product_attention(*args, backend=backend)

    monkeypatch.setattr(sdpa_switch, "scaled_dot_product_attention", spy)
    yield calls
    assert F.scaled_dot_product_attention is TORCHS
    assert imported_before is TORCHS
    assert not sdpa_switch.SdpaSwitch.replacement.replaced


q, k = draw(2, 3, 4, 8).float(), draw(2, 3, 6, 8, seed=1).float()


def test_as_a_switch_and_as_a_block(served: list[str]) -> None:
    expected = F.scaled_dot_product_attention(q, k, k)
    handle = use_sdpa()
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k), expected)
    imported_before(query=q, key=k, value=k, attn_mask=None, scale=0.5)
    assert served == ["auto"] * 2
    handle.undo()
    handle.undo()
    F.scaled_dot_product_attention(q, k, k)
    with use_sdpa("reference"):
        F.scaled_dot_product_attention(q, k, k)
    with pytest.raises(RuntimeError, match="of the block"), use_sdpa():
        raise RuntimeError("of the block")
    assert served == ["auto", "auto", "reference"]


def test_the_last_switch_counts_and_may_end_first_or_last(served: list[str]) -> None:
    first = use_sdpa("reference")
    second = use_sdpa("auto")
    F.scaled_dot_product_attention(q, k, k)
    first.undo()
    F.scaled_dot_product_attention(q, k, k)
    third = use_sdpa("reference")
    third.undo()
    F.scaled_dot_product_attention(q, k, k)
    second.undo()
    assert served == ["auto"] * 3


def test_names_that_modules_imported(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it was on, they get PyTorch's back; while it was on, they keep a function that asks."""
    before, during, own = (types.ModuleType(n) for n in ("imported_before", "imported_during", "replaced_since"))
    for module in (before, own):
        module.sdpa = TORCHS  # type: ignore[attr-defined]
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    with use_sdpa():
        before.sdpa(q, k, k)
        during.sdpa, own.sdpa = F.scaled_dot_product_attention, abs  # type: ignore[attr-defined]
        during.sdpa(q, k, k)
    assert before.sdpa is TORCHS
    assert own.sdpa is abs
    assert torch.equal(during.sdpa(q, k, k), TORCHS(q, k, k))
    assert served == ["auto"] * 2


def test_all_threads(served: list[str]) -> None:
    with use_sdpa():
        thread = threading.Thread(target=F.scaled_dot_product_attention, args=(q, k, k))
        thread.start()
        thread.join()
    assert served == ["auto"]


@pytest.mark.parametrize("backend", rest_slow([*reversed(BACKENDS)]))
def test_torchs_samples(backend: str, served: list[str]) -> None:
    """All of them, in several dtypes, against PyTorch in float64; with dropout, whose choice differs, the shape."""
    from torch.testing._internal.common_methods_invocations import op_db

    info = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    count = 0
    tolerances = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    if backend == "reference":  # which rounds the scores to 16 bits
        tolerances = {torch.float32: 1e-5, torch.float64: 1e-12}
    for dtype, tolerance in tolerances.items():
        for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
            count += 1
            with use_sdpa(backend):
                out = F.scaled_dot_product_attention(sample.input, *sample.args, **sample.kwargs)
            out.sum().backward()
            assert all(x.grad is not None for x in (sample.input, *sample.args))
            wide = [x.detach().double() for x in (sample.input, *sample.args)]
            options = dict(sample.kwargs)
            if options.get("attn_mask") is not None and options["attn_mask"].dtype != torch.bool:
                options["attn_mask"] = options["attn_mask"].detach().double()
            expected = TORCHS(*wide, **options)
            assert (out.shape, out.dtype) == (expected.shape, dtype)
            if not options.get("dropout_p"):
                size = max(1.0, float(expected.abs().max()))
                close(out.detach() / size, expected / size, tolerance)
    assert len(served) == count >= 50


@pytest.mark.parametrize("backend", rest_slow([*reversed(BACKENDS)]))
def test_compiled_code_follows_the_switch(backend: str) -> None:
    """What was compiled before is compiled again; every kernel is in the graph, in training too."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def attend(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, mask) + imported_before(q, k, k, is_causal=True)

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=keep)
    mask = torch.rand(4, 6) > 0.2
    mask[:, 0] = True
    expected = compiled(q, k, mask)
    with use_sdpa(backend):
        query = q.clone().requires_grad_()
        out = compiled(query, k, mask)
        (grad,) = torch.autograd.grad(out.sum(), query)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    after = compiled(q, k, mask)
    assert torch.equal(after, expected)
    query = q.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(attend(query, k, mask).sum(), query)[0], rtol=2e-4, atol=2e-5)
    names = [[str(node.target) for node in g.graph.nodes] for g in graphs]
    torchs = [any("scaled_dot_product" in name for name in n) for n in names]
    assert torchs[:2] == [True, False]
    if backend == "native":
        assert sum("foundry_kernels.flash_attention" in name for name in names[1]) == 2


def test_export_and_modules(served: list[str]) -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = draw(2, 5, 8).float()
    expected, _ = attention(x, x, x, need_weights=False)
    with use_sdpa():
        out, _ = attention(x, x, x, need_weights=False)
        torch.testing.assert_close(out, expected)

        class Attend(torch.nn.Module):
            def forward(self, q: Tensor, k: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(q, k, k)

        program = torch.export.export(Attend(), (q, k))
    assert len(served) >= 2
    assert not any("scaled_dot_product" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(q, k), TORCHS(q, k, k))


def test_a_model_of_transformers(served: list[str]) -> None:
    """Its "sdpa", padded and not, in training: the loss and all gradients."""
    pytest.importorskip("transformers")
    from foundry_kernels.integrations.adapters.tiny import tiny_model

    model = tiny_model("llama").train()
    model.set_attn_implementation("sdpa")
    tokens = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(tokens)
    padding[0, :4] = 0
    for mask in (None, padding):
        found = []
        for route in (False, True):
            served.clear()
            model.zero_grad()
            handle = use_sdpa() if route else None
            loss = model(tokens, attention_mask=mask, labels=tokens).loss
            loss.backward()
            if handle is not None:
                handle.undo()
            assert len(served) == (2 if route else 0)
            found.append((loss.detach(), *(p.grad.clone() for p in model.parameters())))
        torch.testing.assert_close(found[1], found[0], rtol=2e-4, atol=2e-5)


def attend(q: Tensor, k: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.5)


def attend_by_name(q: Tensor, k: Tensor) -> Tensor:
    return imported_before(q, k, k, None, 0.0, True)


#: What TorchScript compiles of torch's own modules and of a caller's functions.
SCRIPTED: dict[str, Callable[[], Any]] = {
    "function": lambda: attend,
    "name": lambda: attend_by_name,
    "attention": lambda: torch.nn.MultiheadAttention(8, 2),
    "layer": lambda: torch.nn.TransformerDecoderLayer(8, 2, 16, 0.0),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is (deprecated|not supported)")
@pytest.mark.parametrize("what", rest_slow(list(SCRIPTED), 2))
def test_torchscript_is_left_alone(what: str, served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted while a switch is on, it is what it is without: the same code, which calls torch's function."""
    # Else what another test has compiled would be taken.
    monkeypatch.setattr(torch.jit._recursive, "concrete_type_store", torch.jit._recursive.ConcreteTypeStore())
    monkeypatch.setattr(torch.jit._state, "_jit_caching_layer", weakref.WeakKeyDictionary())
    torch.manual_seed(0)
    made = SCRIPTED[what]()
    given = (q, k) if what in ("function", "name") else (draw(5, 2, 8).float(),) * (3 if what == "attention" else 2)
    with use_sdpa():
        scripted = torch.jit.script(made)
        out = scripted(*given)
    assert not served
    assert "scaled_dot_product_attention" in str(scripted.inlined_graph)
    after = torch.jit.script(SCRIPTED[what]())
    assert scripted.code == after.code
    torch.testing.assert_close(out, made(*given))
    torch.testing.assert_close(scripted(*given), out)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is (deprecated|not supported)")
def test_torchscript_of_a_name_that_was_imported_meanwhile() -> None:
    with use_sdpa():
        meanwhile: Any = F.scaled_dot_product_attention
    assert meanwhile is sdpa_switch.routed

    def attend(q: Tensor, k: Tensor) -> Tensor:
        out: Tensor = meanwhile(q, k, k)
        return out

    assert torch.equal(torch.jit.script(attend)(q, k), TORCHS(q, k, k))


def test_torchscripts_private_table_may_be_another(monkeypatch: pytest.MonkeyPatch, served: list[str]) -> None:
    monkeypatch.delattr(torch.jit._builtins, "_register_builtin")
    routing = _replace.Replacement(TORCHS, lambda *given: "ours")
    monkeypatch.setitem(__import__("sys").modules, "torch.jit._builtins", None)
    _replace.Replacement(TORCHS, abs)
    routing.put()
    assert F.scaled_dot_product_attention(q, k, k) == "ours"  # type: ignore[comparison-overlap]
    routing.restore()


# --- what stays with PyTorch, and what sees the call first ------------------------------------------------------------


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(n, 2, 8) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)


STAYS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "nested": lambda: (nested(),) * 3,
    "wide": lambda: (torch.randn(1, 1, 2, 600),) * 3,
    "wide values": lambda: (q, k, torch.randn(2, 3, 6, 513)),
    "no width": lambda: (q[..., :0], k[..., :0], k),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", STAYS)
def test_what_stays_with_torch(what: str, served: list[str]) -> None:
    given = STAYS[what]()
    expected = TORCHS(*given)
    with use_sdpa():
        out = F.scaled_dot_product_attention(*given)
    assert not served
    found = scaled_dot_product_attention(*given)
    for a in (out, found):
        pairs = [(a, expected)] if not a.is_nested else list(zip(a.unbind(), expected.unbind(), strict=True))
        assert all(torch.equal(x, y) for x, y in pairs)
    if what != "nested":
        with pytest.raises(ValueError, match="head dimension of at"):
            scaled_dot_product_attention(*given, backend="reference")


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases(make: Callable[..., Any], served: list[str]) -> None:
    bias = make(4, 6)
    expected = TORCHS(q, k, k, bias._materialize())
    for backend in BACKENDS:
        torch.testing.assert_close(scaled_dot_product_attention(q, k, k, bias, backend=backend), expected)
    with use_sdpa():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, bias), expected)
    assert served == ["auto"]
    with pytest.raises(ValueError, match=r"attn_mask must be of 4 queries and 6 keys; got \(5, 6\)"):
        scaled_dot_product_attention(q, k, k, causal_upper_left(5, 6))
    with pytest.raises(ValueError, match="attn_mask must be None with is_causal=True"):
        scaled_dot_product_attention(q, k, k, bias, is_causal=True)


def test_a_mode_sees_the_call(served: list[str]) -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                return "the mode's"
            return func(*args, **(kwargs or {}))

    with use_sdpa(), Mode():
        assert F.scaled_dot_product_attention(q, k, k) == "the mode's"  # type: ignore[comparison-overlap]
    assert not served


@over_backends
def test_a_probability_of_one(backend: str) -> None:
    given = [x.clone().requires_grad_() for x in (q, k, k)]
    out = scaled_dot_product_attention(*given, dropout_p=1.0, backend=backend)
    assert torch.equal(out, TORCHS(q, k, k, dropout_p=1.0))
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), given))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*; got 'flash'"):
        use_sdpa("flash")
    with use_sdpa():
        with pytest.raises(RuntimeError):  # in PyTorch's words
            F.scaled_dot_product_attention(*[torch.ones(1, 2, 3, 4, dtype=torch.int64)] * 3)
        with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\); got 1.5"):
            F.scaled_dot_product_attention(q, k, k, dropout_p=1.5)
        with pytest.raises(ValueError, match="attn_mask must be None with is_causal=True"):
            F.scaled_dot_product_attention(q, k, k, torch.ones(4, 6), is_causal=True)
        with pytest.raises(TypeError, match="positional"):
            F.scaled_dot_product_attention(q, k, k, None, 0.0, False, 1.0)  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"key must have query's dtype torch.float32; got torch.float64"):
        scaled_dot_product_attention(q, k.double(), k)
    with pytest.raises(TypeError, match=r"query must be float32, .*; got torch.int64"):
        scaled_dot_product_attention(q.long(), k, k)
    if not fk.OPS["flash_attention"].backends("cpu").count("triton"):
        with use_sdpa("triton"), pytest.raises(fk.BackendUnavailable, match="triton"):
            F.scaled_dot_product_attention(q, k, k)
