"""Mixed precision and memory on the whole model and on every kernel: low-precision parameters, float32 norms, gradient
scaling, saved tensors kept elsewhere, parameters from outside, and the transforms that kernels refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import Row, over_rows
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

import foundry_kernels as fk
from foundry_kernels import BackendUnavailable
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.testing import make_cotangents

CONFIG = ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, max_seq_len=32)


def make_model(backend: str = "auto") -> Transformer:
    """A model whose weights bfloat16 can hold, norms away from 1."""
    torch.manual_seed(0)
    model = Transformer(CONFIG, backend)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.3)
            parameter.copy_(parameter.bfloat16())
    return model


def draw() -> Tensor:
    return torch.randint(CONFIG.vocab_size, (4, 24), generator=torch.Generator().manual_seed(0))


def results(model: Transformer, loss_of: Callable[[Transformer], Tensor] | None = None) -> dict[str, Tensor]:
    """Loss and gradients by name."""
    model.zero_grad()
    loss = model(draw(), draw())[1] if loss_of is None else loss_of(model)
    loss.backward()
    return {"loss": loss.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


# --- low precision ----------------------------------------------------------------------------------------------------


def bfloat16(model: Transformer) -> Transformer:
    return model.bfloat16()


def float32_norms(model: Transformer) -> Transformer:
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, fk.nn.RMSNorm):
            module.float()
    return model


@pytest.mark.parametrize("lower", [bfloat16, float32_norms])
def test_low_precision_training_is_as_exact_as_the_reference(lower: Callable[[Transformer], Transformer]) -> None:
    """Loss and gradients of bfloat16 parameters, of all of them or all but the norms', against float64."""
    model = lower(make_model())
    actual, reference = results(model), results(lower(make_model("reference")))
    oracle = results(make_model("reference").double())
    expected = {name: p.dtype for name, p in model.named_parameters()}
    assert set(expected.values()) == ({torch.bfloat16} if lower is bfloat16 else {torch.bfloat16, torch.float32})
    for name, tensor in actual.items():
        assert tensor.dtype == expected.get(name, torch.float32)
    # Two backward passes round at different places: which of the two is nearer to the truth is luck in any one tensor.
    error = {k: _distance(r, oracle) for k, r in (("kernels", actual), ("reference", reference))}
    assert error["kernels"] <= 1.1 * error["reference"]


def _distance(found: dict[str, Tensor], oracle: dict[str, Tensor]) -> float:
    """Root mean square, over the tensors, of each one's relative error."""
    relative = [(found[name].double() - o).norm() / o.norm() for name, o in oracle.items()]
    return float(torch.stack(relative).square().mean().sqrt())


def test_autocast_training_is_as_exact_as_the_reference() -> None:
    def low(model: Transformer) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(draw(), draw())[1]

    actual, reference = results(make_model(), low), results(make_model("reference"), low)
    oracle = results(make_model("reference").double())
    assert {tensor.dtype for tensor in actual.values()} == {torch.float32}
    assert _distance(actual, oracle) <= 1.1 * _distance(reference, oracle)


def test_gradient_scaling() -> None:
    """A scale that is a power of two changes no bit of a float32 gradient; an infinite gradient skips the step."""
    model = make_model()
    expected = results(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    scaler.scale(model(draw(), draw())[1]).backward()
    scaler.unscale_(optimizer)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-6, atol=1e-9)
    before = [p.detach().clone() for p in model.parameters()]
    model.layers[0].ffn_norm.weight.grad[0] = torch.inf
    optimizer.zero_grad()
    scaler.update()
    scaler.scale(model(draw(), draw())[1] * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, before, model.parameters()))
    assert scaler.get_scale() == 2.0**9


# --- memory -----------------------------------------------------------------------------------------------------------


@over_rows(gradients=True)
def test_saved_tensors_come_back_from_hooks(row: Row) -> None:
    """What a kernel keeps for its backward pass goes through the hooks, and what they return is what it uses."""
    for case in row.small_cases[:2]:
        gradients = []
        for hooked in (False, True):
            args = case.make(torch.float32, row.device)
            packed: list[Tensor] = []

            def pack(t: Tensor, packed: list[Tensor] = packed) -> tuple[int, Tensor]:
                packed.append(t)
                copy = t.detach().clone()
                return len(packed), copy

            wanted = [t for t in args.values() if t is not None and t.requires_grad]
            if hooked:
                with saved_tensors_hooks(pack, lambda kept: kept[1]):
                    outputs = row.op.public(**args, **case.options, backend=row.backend)
                assert packed
            else:
                outputs = row.op.public(**args, **case.options, backend=row.backend)
            outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.requires_grad]
            cotangents = make_cotangents(tuple(outputs), "contiguous")
            gradients.append(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))
        for a, e in zip(*gradients, strict=True):
            assert (a is None and e is None) or torch.equal(a, e), case.id


# --- functional use ---------------------------------------------------------------------------------------------------


def test_functional_call_uses_the_parameters_it_is_given() -> None:
    model, other = make_model(), make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    expected = results(other)
    given = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    _, loss = torch.func.functional_call(model, given, (draw(), draw()))
    grads = torch.autograd.grad(loss, list(given.values()))
    assert torch.equal(loss, expected["loss"])
    assert all(torch.equal(grad, expected[name]) for name, grad in zip(given, grads, strict=True))
    assert all(p.grad is None for p in model.parameters())


def _first(row: Row) -> tuple[Callable[..., Tensor], Tensor]:
    """The first output of a call as a function of its first argument, for a backend; and that argument."""
    case = row.small_cases[0]
    args = {k: None if t is None else t.detach() for k, t in case.make(torch.float32, row.device).items()}
    name = next(iter(args))

    def function(backend: str, x: Tensor) -> Tensor:
        outputs = row.op.public(**(args | {name: x}), **case.options, backend=backend)
        return outputs[0] if isinstance(outputs, tuple) else outputs

    return function, args[name]


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (_direction(x),))[1],
    "second derivative": lambda f, x: torch.func.grad(
        lambda x: torch.func.grad(lambda x: f(x).square().sum())(x).square().sum()
    )(x),
    "forward mode": lambda f, x: _dual(f, x),
}


def _direction(x: Tensor) -> Tensor:
    """One in which results change: adding the same to all logits changes no softmax."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)


def _dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, _direction(x)))).tangent
        assert tangent is not None
        return tangent


@over_rows(gradients=True)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused_by_kernels_and_served_by_auto(transform: str, row: Row) -> None:
    """A kernel has no rule for them, and torch would take its derivative for zero."""
    function, x = _first(row)
    with pytest.raises(BackendUnavailable, match=f"{row.op.name}: backend '{row.backend}' supports neither torch.func"):
        TRANSFORMS[transform](lambda x: function(row.backend, x), x)
    expected = TRANSFORMS[transform](lambda x: function("reference", x), x)
    assert torch.equal(TRANSFORMS[transform](lambda x: function("auto", x), x), expected)
    assert expected.abs().max() > 0


def test_transforms_under_the_compiler() -> None:
    """The choice is made anew where a transform surrounds a call that was compiled without."""
    x, weight = torch.randn(3, 8), torch.randn(8)

    def norm(x: Tensor) -> Tensor:
        return fk.rms_norm(x, weight)

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(norm, (x,), (torch.ones_like(x),))[1]

    compiled = torch.compile(tangent, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), tangent(x))
    assert tangent(x).abs().max() > 0
    torch.testing.assert_close(torch.compile(norm, backend="aot_eager")(x), norm(x))
