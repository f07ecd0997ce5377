"""Calls that go to the native kernels directly (csrc/direct.cpp): the same results, and nothing kept from anyone
who wants to see a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from built import needs_native
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import foundry_kernels as fk
from foundry_kernels._triton import devices
from foundry_kernels.core.registry import OPS, OpSpec, no_direct_call, override
from foundry_kernels.testing import make_cotangents, run

pytestmark = needs_native

#: All but the losses over hidden states, which add in another order (tests/ops/test_linear_loss_engine.py).
DIRECT = tuple(s for s in OPS.values() if s.direct is not no_direct_call and not s.name.startswith("linear_"))


@contextmanager
def direct(spec: OpSpec, call: Callable[..., Any]) -> Iterator[None]:
    before, spec.direct = spec.direct, call
    try:
        yield
    finally:
        spec.direct = before


@contextmanager
def counted(spec: OpSpec) -> Iterator[list[bool]]:
    """Whether each call took the direct path."""
    taken: list[bool] = []
    before = spec.direct

    def call(*args: Any) -> Any:
        out = before(*args)
        taken.append(out is not None)
        return out

    with direct(spec, call):
        yield taken


def test_which_operations_are_called_directly() -> None:
    names = {"rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "swiglu", "geglu", "glu", "reglu"}
    names |= {"bias_gelu", "bias_silu", "bias_relu", "rope", "qk_norm_rope", "flash_attention", "cross_entropy"}
    names |= {"combine_experts", "grouped_mm", "gated_delta_rule_step", "log_probs", "kl_div", "lora_linear"}
    assert {spec.name for spec in DIRECT} == names


@pytest.mark.parametrize("spec", DIRECT, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_same_bits_as_the_general_path(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Each kind of case has equal outputs, gradients and strides; with adapters, whose direct call leaves float32 sums
    and few rows to PyTorch's matmuls, equal ones up to the order of sums."""
    if (reason := spec.why_not("native", device)) or (device == "cuda" and (reason := devices.why_no_gpu())):
        pytest.skip(str(reason))
    cases = [case for case in spec.cases.CASES[spec.name] if sum(map(elements, case.args.values())) < 20000]
    with counted(spec) as taken:
        for case in cases:
            args = case.make(dtype, device)
            with direct(spec, no_direct_call):
                expected = run(spec, args, case.options, backend="native")
                cotangents = make_cotangents(expected.outputs, case.cotangent)
                expected = run(spec, args, case.options, cotangents, backend="native")
            got = run(spec, args, case.options, cotangents, backend="native")
            assert got.items().keys() == expected.items().keys()
            for name, tensor in expected.items().items():
                mine = got.items()[name]
                within = 0.0 if spec.name != "lora_linear" else 2e-6 if tensor.dtype == torch.float32 else 2**-7
                equal = torch.equal(mine, tensor) or mine.isnan().any()
                assert equal or (mine - tensor).abs().max() <= within * tensor.abs().max(), f"{case.id}: {name}"
                assert mine.stride() == tensor.stride(), f"{case.id}: {name}"
                assert mine.requires_grad == tensor.requires_grad, f"{case.id}: {name}"
    # Masks, sinks, dropout and further results go the general path.
    general = {"attn_mask", "sinks", "dropout_p", "return_entropy", "return_lse"}
    plain = [c for c in cases if general.isdisjoint((*c.args, *c.options))]
    assert sum(taken) > len(plain) / 2


def elements(arg: Any) -> int:
    return 0 if arg is None else torch.Size(arg.shape).numel()


X, W = torch.linspace(-1, 1, 24).view(2, 3, 4), torch.ones(4)


def is_direct(call: Callable[[], Any]) -> bool:
    """Whether a call of rms_norm takes the direct path."""
    with counted(OPS["rms_norm"]) as calls:
        call()
    assert len(calls) == 1
    return calls[0]


def test_what_is_usual() -> None:
    assert is_direct(lambda: fk.rms_norm(X, W))
    assert is_direct(lambda: fk.rms_norm(X, torch.nn.Parameter(W)))
    assert is_direct(lambda: fk.rms_norm(X.transpose(0, 1), W, backend="native"))
    with torch.inference_mode():
        assert is_direct(lambda: fk.rms_norm(X + 1, W))
    with torch.autocast("cpu"):  # no concern of a norm's
        assert is_direct(lambda: fk.rms_norm(X, W))


@pytest.mark.parametrize(
    "call",
    [
        lambda: fk.rms_norm(X, W, backend="reference"),
        lambda: fk.rms_norm(X.double(), W),
        lambda: fk.rms_norm(X.to("meta"), W.to("meta")),
        lambda: fk.rms_norm(X, W, eps=1),
        lambda: fk.rms_norm(torch.complex(X, X).conj().imag, W),  # a negated view
        lambda: fk.rms_norm(X.as_subclass(type("Mine", (Tensor,), {})), W),
    ],
)
def test_what_is_not(call: Callable[[], Any]) -> None:
    assert not is_direct(call)


def test_a_mode_sees_every_call() -> None:
    class Functions(TorchFunctionMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Functions():
        fk.rms_norm(X, W)
    with Operators():
        fk.rms_norm(X, W)
    assert any("rms_norm" in name for name in Functions.seen)
    assert "foundry_kernels::rms_norm_fwd" in Operators.seen
    with FakeTensorMode() as mode:
        assert fk.rms_norm(mode.from_tensor(X), mode.from_tensor(W)).shape == X.shape
    graph = make_fx(lambda x, w: fk.rms_norm(x, w))(X, W).graph
    assert any("rms_norm" in str(node.target) for node in graph.nodes)
    traced = torch.jit.trace(lambda x: fk.rms_norm(x, W), X)
    assert torch.equal(traced(2 * X), fk.rms_norm(2 * X, W))


def test_derivatives_that_kernels_have_not() -> None:
    expected = torch.func.vmap(torch.func.grad(lambda x: fk.rms_norm(x, W).sum()))(X[0])
    x = X[0].clone().requires_grad_()
    assert torch.allclose(expected, torch.autograd.grad(fk.rms_norm(x, W).sum(), x)[0], atol=1e-6)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(fk.rms_norm(forward_ad.make_dual(X, torch.ones_like(X)), W)).tangent
        assert tangent is not None
        assert not tangent.isnan().any()


def test_autocast_casts_attention() -> None:
    q = torch.randn(1, 2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert fk.flash_attention(q, q, q).dtype == torch.bfloat16


def test_an_override_is_called() -> None:
    spec = OPS["rms_norm"]
    with override(spec, "native", fn=lambda *_: "mine"):
        assert fk.rms_norm(X, W) == "mine"
    with override(spec, "native", missing="not today"):
        assert not fk.rms_norm(X, W).isnan().any()
        with pytest.raises(fk.BackendUnavailable, match="not today"):
            fk.rms_norm(X, W, backend="native")
    assert is_direct(lambda: fk.rms_norm(X, W))


@pytest.mark.parametrize("window", [None, (2, None), (None, 1), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_reads_its_options(window: Any, causal: bool) -> None:
    q, kv = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 7, 8)
    for align in ("bottom_right", "top_left"):
        options = {"window": window, "causal": causal, "align": align, "softcap": 3.0, "scale": 0.3}
        with counted(OPS["flash_attention"]) as calls:
            got = fk.flash_attention(q, kv, kv, **options)
        assert calls == [True]
        expected = fk.flash_attention(q, kv, kv, **options, backend="reference")
        assert torch.allclose(got, expected, atol=1e-5)
