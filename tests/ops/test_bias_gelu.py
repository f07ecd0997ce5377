"""What the parity cases of bias_gelu do not cover: errors, torch's own answers, what is infinite, instruction sets,
what is computed and saved."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from table import cpu_setting, rows, saved_tensors

import foundry_kernels as fk
from foundry_kernels.core import extension

KERNELS = [pytest.param(r.backend, r.device, id=r.id) for r in rows() if r.op.name == "bias_gelu"]
INSTRUCTION_SETS = extension.build_info().get("usable_instruction_sets", [])
needs_native = pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))

x, b = torch.ones(2, 3, 8), torch.ones(8)

BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no tensor": (lambda: fk.bias_gelu(1.0), TypeError, r"x must be a torch.Tensor; got float"),  # type: ignore[arg-type]
    "scalar": (lambda: fk.bias_gelu(torch.tensor(1.0)), ValueError, r"x must have at least one dimension"),
    "integers": (lambda: fk.bias_gelu(x.int()), TypeError, r"x must be float.*got torch.int32"),
    "bias shape": (lambda: fk.bias_gelu(x, torch.ones(7)), ValueError, r"bias must have shape \(8,\).*got \(7,\)"),
    "bias integers": (lambda: fk.bias_gelu(x, b.int()), TypeError, r"bias must be float.*got torch.int32"),
    "bias double": (lambda: fk.bias_gelu(x, b.double()), TypeError, r"bias may be float64 only where x is"),
    "bias device": (lambda: fk.bias_gelu(x, b.to("meta")), ValueError, r"bias must be on x's device cpu; got meta"),
    "form": (
        lambda: fk.bias_gelu(x, b, approximate="sigmoid"),
        ValueError,
        r"approximate must be one of none, tanh; got 'sigmoid'",
    ),
    "backend": (lambda: fk.bias_gelu(x, backend="fast"), ValueError, r"backend must be one of auto, .*'fast'"),
}
forms = pytest.mark.parametrize("approximate", ["none", "tanh"])


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    function, error, message = BAD[what]
    with pytest.raises(error, match=message):
        function()


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_is_torchs_gelu_rounded_once(approximate: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    a, bias = torch.randn(7, 33, generator=g).to(dtype), torch.randn(33, generator=g).to(dtype)
    expected = F.gelu(a.float() + bias.float(), approximate=approximate).to(dtype)
    assert torch.equal(fk.bias_gelu(a, bias, approximate=approximate, backend="reference"), expected)
    assert torch.equal(
        fk.bias_gelu(a, approximate=approximate, backend="reference"),
        F.gelu(a.float(), approximate=approximate).to(dtype),
    )


@forms
@pytest.mark.parametrize("backend", fk.OPS["bias_gelu"].backends("cpu"))
def test_far_out_it_is_zero_or_the_identity(backend: str, approximate: str) -> None:
    """The sum decides, not its terms; NaN stays in its element."""
    a = torch.tensor([[-300.0, 300.0, -1e4, 1e4, math.nan, 3.0]], requires_grad=True)
    bias = torch.tensor([200.0, -200.0, 0.0, 0.0, 0.0, -3.0])
    y = fk.bias_gelu(a, bias, approximate=approximate, backend=backend)
    (dx,) = torch.autograd.grad(y, a, torch.ones_like(y))
    torch.testing.assert_close(y, torch.tensor([[0.0, 100.0, 0.0, 1e4, math.nan, 0.0]]), equal_nan=True)
    torch.testing.assert_close(dx, torch.tensor([[0.0, 1.0, 0.0, 1.0, math.nan, 0.5]]), equal_nan=True)


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_nothing_is_computed_for_what_needs_no_gradient(backend: str, device: str) -> None:
    backward = getattr(torch.ops.foundry_kernels, "triton_bias_act_bwd" if backend == "triton" else "bias_act_bwd")
    dy, bias = torch.randn(4, 8, device=device), torch.ones(8, device=device)
    for wanted in ((True, False), (False, True), (False, False)):
        dx, dbias = backward(dy, dy, bias, "gelu", *wanted)
        assert (dx.numel(), dbias.numel()) == (32 * wanted[0], 8 * wanted[1])


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_only_the_inputs_are_kept(backend: str, device: str) -> None:
    a, bias = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((16, 32), (32,)))
    with saved_tensors() as saved:
        fk.bias_gelu(a, bias, backend=backend)
    assert {t.data_ptr() for t in saved} == {a.data_ptr(), bias.data_ptr()}
    assert sum(t.numel() for t in saved) == 16 * 32 + 32


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_outputs_and_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    """Above 16 MB outputs are streamed: bitwise equal to small calls, whose outputs are not."""
    a, bias = torch.randn((17 << 20) // (2048 * dtype.itemsize), 2048).to(dtype), torch.randn(2048).to(dtype)

    def step(part: torch.Tensor, threads: int) -> tuple[torch.Tensor, ...]:
        part, into = part.detach().requires_grad_(), bias.detach().requires_grad_()
        with cpu_setting(INSTRUCTION_SETS[-1], threads):
            y = fk.bias_gelu(part, into, backend="native")
            return y, *torch.autograd.grad(y, (part, into), part.detach())

    whole, parts = step(a, 2), [step(part, 1)[:2] for part in a.split(700)]
    assert whole[0].nbytes > 16 << 20
    assert torch.equal(whole[2], step(a, 5)[2])
    for one, *pieces in zip(whole[:2], *parts, strict=True):
        assert torch.equal(one, torch.cat(pieces))
