"""What the parity cases do not cover of the native rope and qk_norm_rope: storage order, positions outside the table,
and the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import needs_native
from table import Row, checked_rows, rows
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.core.layout import inverse
from foundry_kernels.ops.rope import rope, rope_table
from foundry_kernels.testing import call

OPS = ("rope", "qk_norm_rope")
SETS = extension.build_info().get("usable_instruction_sets", [])
ROWS = [r for r in checked_rows() if r.op.name in OPS and r.backend == "native"]
over_rows = pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in ROWS])
pytestmark = needs_native


def inputs(
    heads: tuple[int, int], tokens: int, width: int, dtype: torch.dtype = torch.float32, batch: int = 2
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, h, tokens, width, generator=g).to(dtype) for h in heads)
    return q, k


def arguments(op: str, q: Tensor, k: Tensor, **options: Any) -> dict[str, Any]:
    """Returns the public function's arguments: full tables, and weights of their own where there are norms."""
    cos, sin = (t.to(q.device) for t in rope_table(q.shape[-1], q.shape[2]))
    made = {"q": q, "k": k, "cos": cos, "sin": sin, **options}
    if op == "qk_norm_rope":
        weight = torch.linspace(0.5, 1.5, q.shape[-1], device=q.device)
        made |= {"q_weight": weight, "k_weight": weight.flip(0)}
    return made


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("name", SETS)
def test_any_nan_in_a_wide_table_stays_nan(
    instruction_set: Callable[[str], None], name: str, interleaved: bool
) -> None:
    """All its mantissa's bits set: rounding to bfloat16 must not carry into the exponent and the sign."""
    instruction_set(name)
    q, k = inputs((2, 1), 3, 148, torch.bfloat16)
    bits = torch.full((3, 74), 0x7FFFFFFF, dtype=torch.int32)
    bits[:, ::3] = -1
    table = bits.view(torch.float32)
    for out in rope(q, k, table, table, interleaved=interleaved, backend="native"):
        assert out.isnan().all()


@pytest.mark.parametrize(
    ("order", "sliced"), [((0, 1, 2, 3), True), ((0, 2, 1, 3), False), ((2, 0, 1, 3), True), ((1, 2, 0, 3), False)]
)
@pytest.mark.parametrize(
    "row", [pytest.param(r, id=r.id) for r in (*rows("reference"), *checked_rows()) if r.op.name in OPS]
)
def test_outputs_and_gradients_keep_the_storage_order(row: Row, order: tuple[int, ...], sliced: bool) -> None:
    """Whatever the order of the incoming gradients; the shapes that a compiler is told agree."""
    made = []
    for x in inputs((4, 3), 5, 12):
        x = x.permute(order).contiguous()
        x = (torch.cat([x, x], -1)[..., :12] if sliced else x).permute(inverse(list(order)))
        made.append(x.requires_grad_())
    given = arguments(row.op.name, *made, interleaved=True)
    outputs = call(row.op, given, {}, backend=row.backend)
    assert [o.stride() for o in outputs] == [o.stride() for o in call(row.op, given, {}, backend="reference")]
    for cotangents in ([o.detach().contiguous() for o in outputs], [o.detach() for o in outputs]):
        grads = torch.autograd.grad(outputs, made, cotangents, retain_graph=True)
        for tensor in (*outputs, *grads):
            assert tensor.permute(order).is_contiguous()
    if row.backend != "native":
        return
    meta = {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in given.items()}
    for name in "qk":  # .to("meta") has made it dense
        meta[name] = torch.empty_strided(given[name].shape, given[name].stride(), device="meta")
    options = () if row.op.name == "rope" else (meta["q_weight"], meta["k_weight"])
    tail = (True, None) if row.op.name == "rope" else (1e-6, 0.0, False, True, None)
    impl = getattr(torch.ops.foundry_kernels, row.op.name)
    for fake, real in zip(impl(meta["q"], meta["k"], *options, meta["cos"], meta["sin"], *tail), outputs, strict=True):
        assert fake.stride() == real.stride()


@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("outside", [9, -1, 2**31 - 1])
@over_rows
def test_a_position_outside_of_the_table(row: Row, outside: int, index: torch.dtype) -> None:
    """An error on the CPU. A GPU cannot raise without a synchronization: nothing is read and the token becomes NaN."""
    q, k = (x.requires_grad_() for x in inputs((4, 3), 5, 16))
    positions = torch.tensor([[0, 1, 2, 3, outside], [4, 3, 2, 1, 0]], dtype=index)
    cos, sin = rope_table(12, 9)
    given = arguments(row.op.name, q, k) | {"cos": cos, "sin": sin, "positions": positions}
    if row.device == "cpu" and not row.cuda_on_cpu:
        with pytest.raises(IndexError, match=rf"positions must lie in 0 .. 8, .*; got {outside}"):
            call(row.op, given, {}, backend="native")
        return
    outputs = call(row.op, given, {}, backend="native")
    grads = torch.autograd.grad(outputs, (q, k), [torch.ones_like(o) for o in outputs])
    expected = call(row.op, given | {"positions": positions.clamp(0, 8)}, {}, backend="native")
    for tensor in (*outputs, *grads):
        assert tensor[0, :, 4].isnan().all()
        assert tensor[0, :, :4].isfinite().all()
        assert tensor[1].isfinite().all()
    for actual, right in zip(outputs, expected, strict=True):
        assert torch.equal(actual[0, :, :4], right[0, :, :4])
        assert torch.equal(actual[1], right[1])


def test_the_bare_operators_check_too() -> None:
    """torch.ops.foundry_kernels.* are reachable without the public functions."""
    q, k = inputs((2, 1), 3, 8)
    cos, sin = rope_table(8, 3)
    op, normed = torch.ops.foundry_kernels.rope, torch.ops.foundry_kernels.qk_norm_rope
    for message, given in (
        ("k must be", (q, k[:, :, :2], cos, sin, False, None)),
        ("q and k must be", (q[0], k, cos, sin, False, None)),
        ("sin must have cos's shape", (q, k, cos, sin[:2], False, None)),
        ("R/2 of 1 to D/2", (q[..., :6], k[..., :6], cos, sin, False, None)),
        ("a row for each position", (q, k, cos[:2], sin[:2], False, None)),
        ("positions must be .T.", (q, k, cos, sin, False, torch.arange(4))),
    ):
        with pytest.raises(ValueError, match=message):
            op(*given)
    with pytest.raises(TypeError, match="positions must be int32 or int64"):
        op(q, k, cos, sin, False, torch.zeros(3))
    with pytest.raises(TypeError, match="unsupported dtype"):
        op(q.double(), k.double(), cos, sin, False, None)
    with pytest.raises(ValueError, match="q_weight must have shape"):
        normed(q, k, torch.ones(7), None, cos, sin, 1e-6, 0.0, False, False, None)
    with pytest.raises(ValueError, match="q must have a last dimension of at least 2"):
        normed(q[..., :0], k[..., :0], None, None, cos[:, :0], sin[:, :0], 1e-6, 0.0, False, False, None)
