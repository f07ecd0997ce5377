"""`torch.nn.attention.activate_flash_attention_impl("foundry")`: torch's dispatch and autograd around these kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_loops import BACKENDS, draw
from slow import rest_slow
from torch import Tensor, nn
from torch.nn import attention

import foundry_kernels as fk
from foundry_kernels import compat
from foundry_kernels.compat import torch_flash
from foundry_kernels.ops.flash_attention import passes
from foundry_kernels.ops.flash_attention.checks import dense_options

pytestmark = [
    pytest.mark.skipif(not hasattr(attention, "register_flash_attention_impl"), reason="this torch has no registry"),
    pytest.mark.skipif("native" not in BACKENDS, reason="no kernels for the CPU in this build"),
]
aten = torch.ops.aten


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """While it is active: the passes that this package computed."""
    calls: list[str] = []
    for name in ("forward", "backward"):
        own = getattr(torch_flash, name)
        monkeypatch.setattr(torch_flash, name, lambda *a, _n=name, _f=own: calls.append(_n) or _f(*a))
    attention.activate_flash_attention_impl("foundry")
    yield calls
    attention.restore_flash_attention_impl(_raise_warn=False)
    calls.clear()
    F.scaled_dot_product_attention(*[torch.ones(1, 2, 3, 8)] * 3)
    assert not calls


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [draw(*s, seed=i).float().requires_grad_() for i, s in enumerate(shapes)]


def agree(found: Tensor, expected: Tensor, given: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    dout = draw(*found.shape, seed=9).float()
    pairs = zip(*(torch.autograd.grad(out, given, dout) for out in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
        assert a.stride() == b.stride()


def test_it_is_offered_and_not_active() -> None:
    assert "foundry" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": "bool"}, {"mask": "bias"}], ids=str
)
def test_sdpa(ours: list[str], options: dict[str, Any], transposed: bool) -> None:
    q, k, v = given = inputs((2, 3, 6, 8), (2, 3, 9, 8), (2, 3, 9, 8))
    if transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in given)
    options = dict(options)
    if kind := options.pop("mask", None):
        options["attn_mask"] = draw(6, 9, seed=5).float() if kind == "bias" else draw(6, 9, seed=5) > -1.0
    out = F.scaled_dot_product_attention(q, k, v, **options)
    assert ours == ["forward"]
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, **options)
    assert ours == ["forward"]
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    dout = draw(*out.shape, seed=9).float()
    for a, b in zip(*(torch.autograd.grad(y, given, dout) for y in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    assert ours == ["forward", "backward"]


def test_modules_and_code_that_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    expected = compiled(x)
    calls: list[str] = []
    own = torch_flash.forward
    monkeypatch.setattr(torch_flash, "forward", lambda *a: calls.append("forward") or own(*a))
    attention.activate_flash_attention_impl("foundry")
    try:
        torch.testing.assert_close(compiled(x), expected, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(module(x), expected, rtol=2e-5, atol=2e-5)
    finally:
        attention.restore_flash_attention_impl()
    assert calls == ["forward"] * 2
    assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("given", [{}, {"scale": -0.3}], ids=["float64", "scale"])
def test_what_no_kernel_takes_stays(ours: list[str], given: dict[str, Any]) -> None:
    x = torch.randn(2, 3, 6, 8, dtype=torch.float32 if given else torch.float64, requires_grad=True)
    out = F.scaled_dot_product_attention(x, x, x, **given)
    out.sum().backward()
    assert not ours
    torch.testing.assert_close(out, compat.scaled_dot_product_attention(x, x, x, **given))
    assert x.grad is not None
    with pytest.raises(RuntimeError, match=r"aten::_flash_attention_forward: no backend has a kernel for"):
        aten._flash_attention_forward(x, x, x, None, None, 3, 3, 0.0, False, False, **(given or {}))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)], ids=str)
def test_varlen_attn(ours: list[str], window: tuple[int, int]) -> None:
    """PyTorch's function has no kernel for CPUs of its own."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    cu = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    given = inputs((12, 4, 8), (12, 4, 8), (12, 4, 8))
    try:
        out, lse = varlen.varlen_attn(*given, cu, cu, 7, 7, return_aux=varlen.AuxRequest(lse=True), window_size=window)
    except TypeError:
        pytest.skip("this torch's varlen_attn has no window_size")
    assert ours == ["forward"]
    own, own_lse = compat.varlen_attn(*given, cu, cu, 7, 7, return_aux=varlen.AuxRequest(lse=True), window_size=window)
    agree(out, own, given)
    torch.testing.assert_close(lse, own_lse)
    if hasattr(varlen, "varlen_attn_out"):
        with torch.no_grad():
            into = torch.empty_like(out)
            used = torch.tensor([3, 0, 7], dtype=torch.int32)
            options: dict[str, Any] = {"window_size": window, "seqused_k": used}
            varlen.varlen_attn_out(into, *given, cu, cu, 7, 7, **options)
            torch.testing.assert_close(into, compat.varlen_attn(*given, cu, cu, 7, 7, **options))


def test_lse_has_its_gradient(ours: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the output's and alone, compiled too, where PyTorch's own backward pass drops it. It requires none in a
    call that no kernel here serves, and of PyTorch's operators. First one token, of which the gradients are known."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    aux = varlen.AuxRequest(lse=True)
    one = [torch.full((1, 1, 1), x, requires_grad=True) for x in (1.0, 1.0, 2.0)]
    several = inputs((12, 4, 8), (12, 4, 8), (12, 4, 8))

    def losses(attend: Any, given: list[Tensor], ends: list[int], **options: Any) -> list[Tensor]:
        cu, length = torch.tensor([0, *ends], dtype=torch.int32), given[0].shape[0]
        out, lse = attend(*given, cu, cu, length, length, return_aux=aux, **options)
        return [(out.mean(-1) * torch.sigmoid(lse.t())).sum(), lse.sin().sum(), out.sin().sum()]

    def gradients(loss: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, given, retain_graph=True, materialize_grads=True)

    found = torch.cat(gradients(losses(varlen.varlen_attn, one, [1], scale=1.0)[0], one)).flatten()
    torch.testing.assert_close(found, torch.tensor([0.39322, 0.39322, 0.73106]), rtol=1e-4, atol=0)
    for ends, options in (([5, 5, 12], {}), ([12], {"scale": 0.3})):
        expected = losses(compat.varlen_attn, several, ends, **options)
        for loss, exact in zip(losses(varlen.varlen_attn, several, ends, **options), expected, strict=True):
            torch.testing.assert_close(gradients(loss, several), gradients(exact, several), rtol=2e-4, atol=2e-5)
        compiled = torch.compile(losses, backend="aot_eager", fullgraph=True)
        loss, exact = sum(compiled(varlen.varlen_attn, several, ends, **options)), sum(expected)
        torch.testing.assert_close(gradients(loss, several), gradients(exact, several), rtol=2e-4, atol=2e-5)
    q, k, v = one
    cu, dense = torch.tensor([0, 1], dtype=torch.int32), [x[None] for x in one]
    answers = iter([True, False])  # to the kernel, which on a CPU must be ours, and to autograd
    monkeypatch.setattr(torch_flash, "_serves", lambda q, scale: next(answers))
    out, lse = varlen.varlen_attn(*one, cu, cu, 1, 1, return_aux=aux)
    assert out.requires_grad
    assert not lse.requires_grad
    monkeypatch.undo()
    for made in (
        aten._scaled_dot_product_flash_attention(*dense, 0.0, False, False),
        aten._scaled_dot_product_flash_attention_for_cpu(*dense, 0.0, False),
        aten._flash_attention_forward(*dense, None, None, 1, 1, 0.0, False, False),
        aten._flash_attention_forward(q, k, v, cu, cu, 1, 1, 0.0, False, False),
    ):
        assert made[0].requires_grad
        assert not made[1].requires_grad


def test_nothing_is_left_of_the_gradient_of_lse() -> None:
    """Nor is what somebody else has put there since taken away, and a torch without these names is served."""
    operator: Any = pytest.importorskip("torch.nn.attention.varlen")._varlen_attn

    def both() -> tuple[Any, Any]:
        return operator._setup_context_fn, operator._backward_fn

    own = both()
    attention.activate_flash_attention_impl("foundry")
    assert not set(own) & set(both())
    attention.restore_flash_attention_impl()
    assert both() == own
    handle = torch_flash.activate()
    try:
        operator._setup_context_fn = print
        handle.remove()
        assert operator._setup_context_fn is print
        del operator._setup_context_fn
        torch_flash.activate().remove()
        assert not hasattr(operator, "_setup_context_fn")
    finally:
        operator._setup_context_fn, operator._backward_fn = own


def test_the_operator_for_gpus(ours: list[str]) -> None:
    """The one that PyTorch chooses on a GPU, with dropout and grouped heads; here by name, on the CPU."""
    q, k, v = given = inputs((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    torch.manual_seed(3)
    out, lse, _, _, max_q, max_k, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.25, True, False)
    torch.manual_seed(3)
    expected, expected_lse = fk.flash_attention(q, k, v, causal=True, dropout_p=0.25, return_lse=True)
    agree(out, expected, given)
    torch.testing.assert_close(lse, expected_lse)
    assert lse.dtype == torch.float32
    assert (max_q, max_k) == (6, 6)
    assert ours == ["forward", "backward"]
    with pytest.raises(RuntimeError, match="return_debug_mask must be False"):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.25, True, True)


KERNELS = [name for name in fk.OPS["flash_attention"].backends("cpu") if name != "reference"]


@pytest.mark.parametrize("backend", rest_slow(KERNELS))
def test_the_passes_of_each_backend(backend: str) -> None:
    """With lse kept in float32 between them: as autograd has it, but for that rounding."""
    shapes = ((1, 2, 5, 8), (1, 1, 6, 8), (1, 1, 6, 4))
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        q, k, v = given = [x.detach().to(dtype).requires_grad_() for x in inputs(*shapes)]
        options = dense_options(q, k, causal=True, dropout_p=0.25, dropout_seed=4)
        out, lse = passes.forward(backend, q, k, v, options)
        grads = passes.backward(backend, torch.ones_like(out), q, k, v, out, lse, options)
        expected = fk.flash_attention(q, k, v, causal=True, dropout_p=0.25, dropout_seed=4, backend=backend)
        assert torch.equal(out, expected)
        assert lse.dtype == torch.float32
        for a, b in zip(grads, torch.autograd.grad(expected.sum(), given), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_the_operator_with_tokens_first(ours: list[str]) -> None:
    q, k, v = given = inputs((2, 6, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8))
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    torch.manual_seed(3)
    args = (None, None, 6, 9, 0.25, True, False)
    out = aten._flash_attention_forward(q, k, v, *args, window_size_left=4, window_size_right=-1)[0]
    torch.manual_seed(3)
    agree(out, compat.flash_attn_func(q, k, v, 0.25, None, True, (4, -1)), given)  # type: ignore[arg-type]
    with torch.no_grad():
        out = aten._flash_attention_forward(q, k, v, None, None, 6, 9, 0.0, True, False, alibi_slopes=slopes)[0]
    torch.testing.assert_close(out, compat.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes))
    with pytest.raises(RuntimeError, match="seqused_k must be None without cum_seq_q"):
        aten._flash_attention_forward(q, k, v, None, None, 6, 9, 0.0, True, False, seqused_k=torch.tensor([1, 2]))
