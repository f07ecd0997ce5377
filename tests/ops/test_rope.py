"""RoPE: the reference against complex multiplication, norms before the rotation, and what is saved for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from table import saved_tensors
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.core.layout import storage_order
from foundry_kernels.ops.rms_norm import rms_norm
from foundry_kernels.ops.rope import qk_norm_rope, rope, rope_table
from foundry_kernels.testing import lay_out

B, H, HK, T, D = 2, 4, 3, 5, 12

BACKENDS = fk.OPS["rope"].backends("cpu")
over_backends = pytest.mark.parametrize("backend", BACKENDS)
interpreted = pytest.mark.skipif(not _triton.INTERPRET, reason="runs Triton's kernels on the CPU")


def inputs(dtype: torch.dtype = torch.float64, layout: str = "contiguous", tokens: int = T) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, h, tokens, D, generator=generator, dtype=torch.float64).to(dtype) for h in (H, HK))
    return lay_out(q, layout), lay_out(k, layout)


def by_complex_numbers(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [B, H, T, D] float64 rotated by angles [T, R/2] or [B, 1, T, R/2]: multiplication by exp(i angle)."""
    half = angles.shape[-1]
    paired, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        z = torch.view_as_complex(paired.reshape(*x.shape[:-1], half, 2).contiguous())
    else:
        z = torch.complex(paired[..., :half].contiguous(), paired[..., half:].contiguous())
    z = z * torch.polar(torch.ones_like(angles), angles)
    rotated = torch.view_as_real(z).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    return torch.cat([rotated, rest], -1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary", [2, 6, 12])
@pytest.mark.parametrize("where", ["rows", "longer-table", "T", "BT", "table-BT", "table-1T", "positions-1T"])
def test_equals_complex_multiplication(interleaved: bool, rotary: int, where: str) -> None:
    q, k = inputs()
    angles = torch.randn(9, rotary // 2, dtype=torch.float64)
    positions = None
    if where == "T":
        positions = torch.tensor([8, 0, 3, 3, 1])
        used = angles[positions]
    elif where == "BT":
        positions = torch.tensor([[8, 0, 3, 3, 1], [0, 1, 2, 3, 4]], dtype=torch.int32)
        used = angles[positions.long()].unsqueeze(1)
    elif where == "positions-1T":
        positions = torch.tensor([[8, 0, 3, 3, 1]])
        used = angles[positions[0]]
    elif where == "table-BT":
        angles = torch.randn(B, T, rotary // 2, dtype=torch.float64)
        used = angles.unsqueeze(1)
    elif where == "table-1T":
        angles = torch.randn(1, T, rotary // 2, dtype=torch.float64)
        used = angles[0]
    else:
        angles = angles if where == "longer-table" else angles[:T]
        used = angles[:T]
    got = rope(q, k, angles.cos(), angles.sin(), interleaved=interleaved, positions=positions, backend="reference")
    for actual, x in zip(got, (q, k), strict=True):
        torch.testing.assert_close(actual, by_complex_numbers(x, used, interleaved), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_once(dtype: torch.dtype) -> None:
    q, k = inputs(dtype)
    cos, sin = rope_table(8, T)
    for actual, exact in zip(
        rope(q, k, cos, sin, backend="reference"),
        rope(q.float(), k.float(), cos, sin, backend="reference"),
        strict=True,
    ):
        assert torch.equal(actual, exact.to(dtype))


def test_storage_order_of_dimensions_without_a_place() -> None:
    assert storage_order(torch.empty(2, 5, 3, 8).transpose(1, 2)) == [0, 2, 1, 3]
    assert storage_order(torch.empty(1, 5, 3, 8).transpose(1, 2).expand(4, -1, -1, -1)) == [0, 2, 1, 3]
    assert storage_order(torch.empty(2, 3, 1, 8)) == [0, 1, 2, 3]
    assert storage_order(torch.empty(8, 3, 2).transpose(0, 2)) == [1, 0, 2]


@interpreted
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_the_kernel_gives_nan_for_a_position_outside_of_the_table(
    interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, where an error would need a synchronization: no other token or dimension is affected."""
    q, k = inputs(torch.float32)
    cos, sin = rope_table(8, 9)
    options: dict[str, Any] = {"interleaved": interleaved, "backend": "triton"}
    good = rope(q, k, cos, sin, positions=torch.tensor([0, 8, 2, 3, 5]), **options)
    monkeypatch.setattr(torch.Tensor, "aminmax", lambda x: (torch.tensor(0), torch.tensor(0)))
    bad = rope(q, k, cos, sin, positions=torch.tensor([0, 9, 2, -1, 5]), **options)
    for g, b in zip(good, bad, strict=True):
        assert b[:, :, [1, 3], :8].isnan().all()
        assert torch.equal(b[:, :, [0, 2, 4]], g[:, :, [0, 2, 4]])
        assert torch.equal(b[..., 8:], g[..., 8:])


@over_backends
def test_dimensions_that_are_not_rotated_are_copied_beside_infinities(backend: str) -> None:
    """0 * inf is NaN: a dimension that is only copied must not be multiplied by anything."""
    q, k = inputs(torch.float32)
    q[..., 9], q[..., 10], k[..., 8] = torch.inf, torch.nan, -torch.inf
    for interleaved in (False, True):
        for x, y in zip((q, k), rope(q, k, *rope_table(8, T), interleaved=interleaved, backend=backend), strict=True):
            assert y[..., :8].isfinite().all()
            assert torch.equal(y[..., 8:].nan_to_num(7e7), x[..., 8:].nan_to_num(7e7))


NORMS: list[dict[str, Any]] = [{}, {"eps": 0.1}, {"weight_offset": 1.0}, {"round_before_weight": True}]


@pytest.mark.parametrize("options", NORMS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_norms_before_the_rotation_are_rms_norm(options: dict[str, Any], interleaved: bool) -> None:
    """Outputs and all gradients are those of rms_norm and then rope, in float64, where nothing is rounded."""
    q, k = (x.requires_grad_() for x in inputs(layout="swapped"))
    weights = [torch.linspace(0.5, 2.0, D, dtype=torch.float64).requires_grad_() for _ in range(2)]
    cos, sin = (x.double() for x in rope_table(8, 20))
    rotation: dict[str, Any] = {"interleaved": interleaved, "positions": torch.tensor([3, 0, 19, 7, 7])}
    fused = qk_norm_rope(q, k, *weights, cos, sin, **options, **rotation, backend="reference")
    apart = (rms_norm(x, w, backend="reference", **options) for x, w in zip((q, k), weights, strict=True))
    expected = rope(*apart, cos, sin, **rotation, backend="reference")
    cotangents = [torch.randn_like(y) for y in expected]
    wanted = [q, k, *weights]
    for a, e in zip(
        (*fused, *torch.autograd.grad(fused, wanted, cotangents)),
        (*expected, *torch.autograd.grad(expected, wanted, cotangents)),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


KERNELS = [b for b in BACKENDS if b != "reference"]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("frozen", ["q", "q q_weight", "k k_weight"])
def test_norms_keep_their_input_and_one_number_a_row(backend: str, frozen: str) -> None:
    """And nothing of a side that takes no gradient."""
    q, k = inputs(torch.bfloat16)
    given = {"q": q, "k": k, "q_weight": torch.ones(D), "k_weight": torch.ones(D)}
    for name, tensor in given.items():
        tensor.requires_grad_(name not in frozen.split())
    tables = rope_table(D, T)
    with saved_tensors() as saved:
        outputs = qk_norm_rope(**given, cos=tables[0], sin=tables[1], backend=backend)
    known = {t.data_ptr(): name for name, t in (*given.items(), ("cos", tables[0]), ("sin", tables[1]))}
    found = sorted(known.get(t.data_ptr(), f"rstd {tuple(t.shape)} {t.dtype}") for t in saved)
    expected = ["cos", "sin"]
    for x, y in (("q", outputs[0]), ("k", outputs[1])):
        wanted = given[x].requires_grad or given[x + "_weight"].requires_grad
        assert y.requires_grad == wanted
        if wanted:
            expected += [x, x + "_weight", f"rstd {tuple(given[x].shape[:3])} torch.float32"]
    assert found == sorted(expected)


@interpreted
def test_nothing_is_launched_for_what_takes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen side is not in the backward launch, and the sums of weights are made for wanted gradients only."""
    from foundry_kernels.ops.rope import triton as kernels

    given: list[tuple[Any, ...]] = []
    own = kernels.launch_backward
    monkeypatch.setattr(kernels, "launch_backward", lambda *args: given.append(args) or own(*args))
    (q, k), weight = inputs(torch.float32), torch.ones(D)
    for wanted in (weight, q):
        wanted.requires_grad_()
        out = qk_norm_rope(q, k, weight, torch.ones(D), *rope_table(D, T), backend="triton")
        torch.autograd.grad(out[0].sum(), wanted)
        wanted.requires_grad_(False)
        dq_out, dk_out, q_, k_, *_, dq, dk, dq_weight, dk_weight = given.pop()
        assert [x is not None for x in (dq, dq_weight)] == [wanted is q, wanted is weight]
        assert [x is None for x in (dq_out, q_, dk_out, k_, dk, dk_weight)] == [False] * 2 + [True] * 4
