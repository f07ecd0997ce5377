"""What the parity cases do not cover: errors, threads, instruction sets, huge strides, what is computed and saved."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from table import rows, saved_tensors

import foundry_kernels as fk
from foundry_kernels.core import extension

OPS = ("rms_norm", "add_rms_norm")
KERNELS = [pytest.param(r.backend, r.device, id=r.id) for r in rows() if r.op.name == "rms_norm"]
needs_native = pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))

x, w = torch.ones(2, 3, 8), torch.ones(8)

BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no tensor": (lambda: fk.rms_norm([1.0]), TypeError, r"x must be a torch.Tensor; got list"),  # type: ignore[arg-type]
    "scalar": (lambda: fk.rms_norm(torch.tensor(1.0)), ValueError, r"x must have at least one dimension"),
    "integers": (
        lambda: fk.rms_norm(torch.ones(2, 8, dtype=torch.int64)),
        TypeError,
        r"x must be float.*got torch.int64",
    ),
    "complex": (lambda: fk.rms_norm(torch.ones(2, 8, dtype=torch.complex64)), TypeError, r"x must be float"),
    "zero width": (lambda: fk.rms_norm(torch.ones(2, 0)), ValueError, r"x must have a last dimension of at least 1"),
    "weight too short": (
        lambda: fk.rms_norm(x, torch.ones(7)),
        ValueError,
        r"weight must have shape \(8,\).*got \(7,\)",
    ),
    "weight rank": (
        lambda: fk.rms_norm(x, torch.ones(1, 8)),
        ValueError,
        r"x must end in normalized_shape \(1, 8\); got shape \(2, 3, 8\)",
    ),
    "shape": (lambda: fk.rms_norm(x, normalized_shape=(2, 8)), ValueError, r"x must end in .* \(2, 8\)"),
    "no shape": (lambda: fk.rms_norm(x, normalized_shape=()), ValueError, r"x must end in .* \(\)"),
    "weight of another shape": (
        lambda: fk.rms_norm(x, w, normalized_shape=(3, 8)),
        ValueError,
        r"weight must have shape \(3, 8\) \(normalized_shape\); got \(8,\)",
    ),
    "eps of no tensor": (lambda: fk.rms_norm([1.0], eps=None), TypeError, r"x must be a torch.Tensor"),  # type: ignore[arg-type]
    "weight integers": (lambda: fk.rms_norm(x, torch.ones(8, dtype=torch.int32)), TypeError, r"weight must be float"),
    "weight double": (lambda: fk.rms_norm(x, w.double()), TypeError, r"weight may be float64 only where x is"),
    "weight device": (lambda: fk.rms_norm(x, w.to("meta")), ValueError, r"weight must be on x's device cpu; got meta"),
    "weight as in F.rms_norm": (
        lambda: fk.rms_norm(x, (8,), w),
        TypeError,
        r"weight must be a torch.Tensor; got tuple",
    ),  # type: ignore[arg-type]
    "weight as an int": (lambda: fk.rms_norm(x, 8, w), TypeError, r"weight must be a torch.Tensor; got int"),  # type: ignore[arg-type]
    "weight as an int, sum": (lambda: fk.add_rms_norm(x, x, (8,), w), TypeError, r"weight must be a torch.Tensor"),  # type: ignore[arg-type]
    "weight for residual": (lambda: fk.add_rms_norm(x, w), ValueError, r"residual must have shape \(2, 3, 8\)"),
    "eps tensor": (lambda: fk.rms_norm(x, w, w), TypeError, r"eps must be a float; got Tensor"),  # type: ignore[arg-type]
    "order string": (
        lambda: fk.rms_norm(x, w, round_before_weight="yes"),  # type: ignore[arg-type]
        TypeError,
        r"round_before_weight must be a bool; got str",
    ),
    "eps negative": (lambda: fk.rms_norm(x, w, -1e-6), ValueError, r"eps must be finite and >= 0; got -1e-06"),
    "eps nan": (lambda: fk.rms_norm(x, w, math.nan), ValueError, r"eps must be finite"),
    "eps infinite": (lambda: fk.rms_norm(x, w, math.inf), ValueError, r"eps must be finite"),
    "eps string": (lambda: fk.rms_norm(x, w, "1e-6"), TypeError, r"eps must be a float; got str"),  # type: ignore[arg-type]
    "offset string": (lambda: fk.rms_norm(x, weight_offset="1"), TypeError, r"weight_offset must be a float"),  # type: ignore[arg-type]
    "residual shape": (lambda: fk.add_rms_norm(x, x[:1], w), ValueError, r"residual must have shape \(2, 3, 8\)"),
    "residual integers": (lambda: fk.add_rms_norm(x, x.int(), w), TypeError, r"residual must be float"),
    "residual device": (lambda: fk.add_rms_norm(x, x.to("meta"), w), ValueError, r"residual must be on x's device"),
    "add zero width": (lambda: fk.add_rms_norm(x[..., :0], x[..., :0]), ValueError, r"x must have a last dimension"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    function, error, message = BAD[what]
    with pytest.raises(error, match=message):
        function()


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_several_trailing_dimensions(backend: str, device: str) -> None:
    """The mean over all of them, by the weight's shape or by name; as torch's, and with a residual."""
    torch.manual_seed(0)
    a = torch.randn(5, 3, 4, device=device).transpose(0, 1).requires_grad_()
    weight = torch.randn(5, 4, device=device, requires_grad=True)
    dy = torch.randn(3, 5, 4, device=device)
    expected = F.rms_norm(a, (5, 4), weight, 1e-3)
    for y in (
        fk.rms_norm(a, weight, 1e-3, backend=backend),
        fk.rms_norm(a, weight, 1e-3, normalized_shape=(5, 4), backend=backend),
        fk.add_rms_norm(a, torch.zeros_like(a), weight, 1e-3, backend=backend)[0],
        fk.add_rms_norm(a, a, weight, 4e-3, backend=backend, normalized_shape=torch.Size((5, 4)))[0],
        fk.rms_norm(a, weight - 1.0, 1e-3, weight_offset=1.0, backend=backend),
    ):
        torch.testing.assert_close(y, expected)
        grads = (torch.autograd.grad(out, (a, weight), dy, retain_graph=True) for out in (y, expected))
        for actual, right in zip(*grads, strict=True):
            torch.testing.assert_close(actual, right)
    whole = fk.rms_norm(a, eps=1e-3, normalized_shape=(3, 5, 4), backend=backend)
    torch.testing.assert_close(whole, F.rms_norm(a, (3, 5, 4), None, 1e-3))
    assert torch.equal(
        fk.rms_norm(a, normalized_shape=4, backend=backend),  # type: ignore[arg-type]
        fk.rms_norm(a, backend=backend),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_no_eps_is_torchs_default(op: str, dtype: torch.dtype) -> None:
    """Rows so small that it decides."""
    a = torch.linspace(1e-4, 3e-4, 16).view(2, 8).to(dtype)
    weight = torch.ones(8, dtype=dtype)
    y = fk.rms_norm(a, weight, None) if op == "rms_norm" else fk.add_rms_norm(a, a * 0, weight, None)[0]
    torch.testing.assert_close(y, F.rms_norm(a, (8,), weight))
    assert torch.equal(y, fk.rms_norm(a, weight) if op == "rms_norm" else fk.add_rms_norm(a, a * 0, weight)[0])
    assert not torch.allclose(y, fk.rms_norm(a, weight, 1e-6))


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_an_offset_without_a_weight_has_no_effect(backend: str, device: str) -> None:
    a = torch.randn(3, 8, device=device)
    y = fk.rms_norm(a, weight_offset=1.0, backend=backend)
    assert torch.equal(y, fk.rms_norm(a, backend=backend))
    pair = fk.add_rms_norm(a, torch.zeros_like(a), weight_offset=1.0, backend=backend)
    assert torch.equal(pair[0], y)
    assert torch.equal(pair[1], a)


@needs_native
def test_the_bare_operator_checks_too() -> None:
    """torch.ops.foundry_kernels.rms_norm is reachable without the public function."""
    with pytest.raises(ValueError, match="weight must have shape"):
        torch.ops.foundry_kernels.rms_norm(x, torch.ones(7), 1e-6, 0.0, False)
    with pytest.raises(ValueError, match="last dimension"):
        torch.ops.foundry_kernels.rms_norm(x[..., :0], None, 1e-6, 0.0, False)
    with pytest.raises(TypeError, match="unsupported dtype"):
        torch.ops.foundry_kernels.rms_norm(x.double(), None, 1e-6, 0.0, False)


def test_the_reference_is_torch_rms_norm() -> None:
    a, weight = torch.randn(7, 33), torch.randn(33)
    torch.testing.assert_close(fk.rms_norm(a, weight, 1e-5, backend="reference"), F.rms_norm(a, (33,), weight, 1e-5))


def test_the_reference_is_the_llama_form() -> None:
    a, weight = torch.randn(7, 33).bfloat16(), torch.randn(33)
    rounded = (a.float() * torch.rsqrt(a.float().pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    for cast in (weight, weight.bfloat16()):
        expected = cast * rounded
        actual = fk.rms_norm(a, cast, 1e-5, round_before_weight=True, backend="reference")
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("backend", "device"), KERNELS)
@pytest.mark.parametrize("op", OPS)
def test_nothing_is_computed_for_what_needs_no_gradient(backend: str, device: str, op: str) -> None:
    """The backward operator returns empty tensors for the dW of a frozen weight and the dX of a frozen input."""
    name = "triton_rms_norm_bwd" if backend == "triton" else "rms_norm_bwd"
    backward = getattr(torch.ops.foundry_kernels, name)
    dy = torch.randn(4, 8, device=device)
    weight, rstd = torch.ones(8, device=device), torch.ones(4, device=device)
    for need_dx, need_dw in ((True, False), (False, True), (False, False)):
        dx, dw = backward(dy, dy if op == "add_rms_norm" else None, dy, weight, rstd, 0.0, False, need_dx, need_dw)
        assert (dx.numel(), dw.numel()) == (32 * need_dx, 8 * need_dw)


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_only_the_input_and_one_number_a_row_are_kept(backend: str, device: str) -> None:
    a = torch.randn(16, 256, device=device, requires_grad=True)
    weight = torch.ones(256, device=device, requires_grad=True)
    with saved_tensors() as saved:
        _, h = fk.add_rms_norm(a, a, weight, backend=backend)
        fk.rms_norm(a, weight, backend=backend)
    assert sum(t.numel() for t in saved) == 2 * (16 * 256 + 256 + 16)
    assert any(t.data_ptr() == a.data_ptr() for t in saved)
    assert any(t.data_ptr() == h.data_ptr() for t in saved)


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_offsets_beyond_32_bits(backend: str, device: str) -> None:
    """Rows 2^31 elements apart. The memory is reserved and, but for the rows, never touched."""
    stride = 2**31
    storage = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
    far = storage.as_strided((3, 64), (stride, 1))
    near = torch.randn(3, 64, device=device).bfloat16()
    far.copy_(near)
    results = []
    for a in (near, far):
        a = a.detach().requires_grad_()
        y = fk.rms_norm(a, backend=backend)
        results.append((y, *torch.autograd.grad(y, a, near)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    cotangent = storage.as_strided((3, 64), (stride, 1))
    a = near.clone().requires_grad_()
    (dx,) = torch.autograd.grad(fk.rms_norm(a, backend=backend), a, cotangent)
    assert torch.equal(dx, results[0][1])


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_non_finite_rows_stay_in_their_row(backend: str, device: str) -> None:
    a = torch.randn(4, 40, device=device)
    clean = fk.rms_norm(a, backend=backend)
    a[1, 3], a[2, 5] = math.nan, math.inf
    y = fk.rms_norm(a, backend=backend)
    assert y[1].isnan().all()
    assert y[2, 5].isnan()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_extremes_of_the_dtype(backend: str, device: str, dtype: torch.dtype) -> None:
    """Largest and subnormal values round as torch rounds them."""
    info = torch.finfo(dtype)
    a = torch.tensor([[info.max, info.max, -info.max], [info.tiny, info.tiny / 4, 0.0]], device=device).to(dtype)
    weight = torch.tensor([1.0, info.tiny, 0.5], device=device)
    for eps in (1.0, 1e-6):
        expected = fk.rms_norm(a, weight, eps, backend="reference")
        assert torch.equal(fk.rms_norm(a, weight, eps, backend=backend), expected)


@needs_native
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(1, 70001), (37, 4096), (3001, 65)], ids=str)
def test_the_number_of_threads_does_not_change_a_bit(shape: tuple[int, int]) -> None:
    results = []
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        g = torch.Generator().manual_seed(0)
        a, b = (torch.randn(shape, generator=g).requires_grad_() for _ in range(2))
        weight = torch.randn(shape[-1], generator=g).requires_grad_()
        y, h = fk.add_rms_norm(a, b, weight, backend="native")
        results.append((y, h, *torch.autograd.grad((y, h), (a, weight), (b.detach(), a.detach()))))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", extension.build_info().get("usable_instruction_sets", []))
def test_outputs_larger_than_the_caches(instruction_set: Callable[[str], None], name: str, dtype: torch.dtype) -> None:
    """Above 16 MB outputs are streamed: bitwise equal to small calls, whose outputs are not."""
    instruction_set(name)
    rows, width = (17 << 20) // (2048 * dtype.itemsize), 2048
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, width, generator=g).to(dtype) for _ in range(2))
    weight = torch.randn(width, generator=g).to(dtype)

    def step(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        y, h = fk.add_rms_norm(x, residual, weight, backend="native")
        plain = fk.rms_norm(x, weight, backend="native")
        return y, h, plain, *torch.autograd.grad((y, plain), x, (residual, residual))

    parts = [step(x, r) for x, r in zip(a.split(700), b.split(700), strict=True)]
    for whole, *pieces in zip(step(a, b), *parts, strict=True):
        assert whole.nbytes > 16 << 20
        assert torch.equal(whole, torch.cat(pieces))


@needs_native
@pytest.mark.parametrize("name", extension.build_info().get("usable_instruction_sets", []))
def test_every_half_precision_number_survives(instruction_set: Callable[[str], None], name: str) -> None:
    """Reading and rounding of all 2^16 bit patterns, against torch's: x + 0 is h."""
    instruction_set(name)
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(64, 1024)
    for dtype in (torch.bfloat16, torch.float16):
        a = bits.view(dtype)
        for scale in (1.0, 1.001, 3.0):  # values between those that the dtype has, too
            b = (a.float() * scale).to(dtype)
            _, h = fk.add_rms_norm(a, b, backend="native")
            expected = a + b
            assert torch.equal(h.isnan(), expected.isnan())
            assert torch.equal(h.nan_to_num(), expected.nan_to_num())


@needs_native
@pytest.mark.parametrize("name", extension.build_info().get("usable_instruction_sets", []))
def test_any_nan_in_a_wide_weight_stays_nan(instruction_set: Callable[[str], None], name: str) -> None:
    """All its mantissa's bits set: rounding to bfloat16 must not carry into the exponent and the sign."""
    instruction_set(name)
    weight = torch.full((67,), 0x7FFFFFFF, dtype=torch.int32)
    weight[::3] = -1
    for dtype in (torch.bfloat16, torch.float16):
        a = torch.linspace(-2.0, 2.0, 67).to(dtype).expand(2, 67)
        y = fk.rms_norm(a, weight.view(torch.float32), round_before_weight=False, backend="native")
        assert y.dtype == dtype
        assert y.isnan().all()


@needs_native
def test_unknown_instruction_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown instruction set"):
        extension._C.force_instruction_set("avx1024")


@needs_native
def test_meta_tensors() -> None:
    """Shapes without data, as torch.compile and deferred initialisation use them."""
    y, h = torch.ops.foundry_kernels.add_rms_norm(
        torch.empty(2, 8, device="meta"), torch.empty(2, 8, device="meta"), None, 1e-6, 0.0, False
    )
    assert y.shape == h.shape == (2, 8)
    assert y.is_meta
