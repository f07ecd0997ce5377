"""linear_cross_entropy in tiles on the CPU: blocks of the vocabulary in the backward pass."""

from __future__ import annotations

import pytest
import torch
from table import saved_tensors

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.core.registry import no_direct_call
from foundry_kernels.ops._linear_loss import chunks, class_blocks, sizes
from foundry_kernels.ops._linear_loss.problem import TILES, Call, Inputs, Needs
from foundry_kernels.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, linear_cross_entropy
from foundry_kernels.ops.linear_cross_entropy.cases import CASES
from foundry_kernels.ops.linear_cross_entropy.loss import LOSS
from foundry_kernels.ops.linear_cross_entropy.options import LinearCrossEntropyOptions
from foundry_kernels.testing import assert_parity

if extension.MISSING is not None:
    pytest.skip(extension.MISSING, allow_module_level=True)
from foundry_kernels.ops.linear_cross_entropy import native

TILED = [case for case in CASES["linear_cross_entropy"] if case.options.get("chunk_size") == "tiles"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low", [False, True], ids=["float32-products", "fast-products"])
@pytest.mark.parametrize("case", TILED, ids=lambda case: case.id)
def test_several_blocks_of_classes(
    case: fk.testing.Case, low: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose last is narrower than the others; the parity suite's cases are of one."""
    monkeypatch.setattr(sizes, "_LEAST_CLASSES", 16)
    monkeypatch.setattr(sizes, "_LOGITS", 16)
    if low:
        monkeypatch.setattr(LINEAR_CROSS_ENTROPY, "direct", no_direct_call)
        monkeypatch.setattr(sizes, "SMALL", 0)
        monkeypatch.setattr(chunks, "fast_products", lambda dtype: True)
    assert_parity(LINEAR_CROSS_ENTROPY, case, backend="native", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_exists_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the size of the logits or, in 16 bits, of float32 copies of the weight, is made by any operation."""
    monkeypatch.setattr(sizes, "_LOGITS", 64 * 100)
    monkeypatch.setattr(sizes, "_LEAST_CLASSES", 32)
    hidden = torch.randn(100, 24, dtype=dtype, requires_grad=True)
    weight = torch.randn(3000, 24, dtype=dtype, requires_grad=True)
    made: list[torch.Tensor] = []

    class All(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            made.extend(t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
            return result

    with saved_tensors() as saved:
        loss = linear_cross_entropy(hidden, weight, torch.arange(100), chunk_size="tiles", backend="native")
    assert max(t.numel() for t in saved) == weight.numel()
    *inputs, class_weight, lse, lse_low = loss.grad_fn.saved_tensors
    options = LinearCrossEntropyOptions(-100, "mean", 0.0, 0.0, None, 1.0, TILES, False, False)
    with torch.no_grad(), All():
        rows = native.Rows(Inputs(*inputs), (class_weight,), options)
        call = Call(LOSS, rows, Inputs(*inputs), options, Needs(True, True, False))
        class_blocks.backward(call, torch.ones(()), lse, lse_low)
    large = [t for t in made if t.untyped_storage().nbytes() > 6400 * dtype.itemsize * 2]
    assert len(made) > 100
    assert {(t.untyped_storage().nbytes(), t.dtype) for t in large} <= {(weight.numel() * dtype.itemsize, dtype)}


@pytest.mark.parametrize(
    ("dtype", "chunk_size", "learns", "matrices", "tiled"),
    [
        (torch.bfloat16, None, True, True, True),
        (torch.bfloat16, None, True, False, False),
        (torch.bfloat16, None, False, True, False),
        (torch.bfloat16, 7, True, True, False),
        (torch.float32, None, True, True, False),
    ],
    ids=str,
)
def test_who_takes_which_strategy(
    dtype: torch.dtype, chunk_size: int | None, learns: bool, matrices: bool, tiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tiles of tokens too many for a single chunk, where products of bfloat16 are so fast that a fourth takes less time
    than the weight's gradient does to be summed: here they are said to be."""
    monkeypatch.setattr(LINEAR_CROSS_ENTROPY, "direct", no_direct_call)
    monkeypatch.setattr(sizes, "_FAST_PRODUCTS", True)
    monkeypatch.setattr(sizes, "_TILES_ARE_FASTER", matrices)
    monkeypatch.setattr(sizes, "_ONE_CHUNK", 2 * 20 * 30 - 1)
    hidden = torch.randn(20, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(30, 8, dtype=dtype, requires_grad=learns)
    loss = linear_cross_entropy(hidden, weight, torch.arange(20), chunk_size=chunk_size, backend="native")
    assert (weight.data_ptr() in {t.data_ptr() for t in loss.grad_fn.saved_tensors if t is not None}) == tiled


def test_a_single_chunk_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are complete as they are made: no float32 copy of the weight's is kept, unless it is small."""
    monkeypatch.setattr(LINEAR_CROSS_ENTROPY, "direct", no_direct_call)
    monkeypatch.setattr(sizes, "SMALL", 0)
    monkeypatch.setattr(sizes, "_FAST_PRODUCTS", True)
    monkeypatch.setattr(sizes, "_ONE_CHUNK", 2 * 20 * 30)
    hidden = torch.randn(20, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.bfloat16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.arange(20), backend="native")
    saved = {t.shape: t.dtype for t in loss.grad_fn.saved_tensors if t.numel() > 1}
    assert saved == {hidden.shape: torch.bfloat16, weight.shape: torch.bfloat16}
    each = linear_cross_entropy(hidden, weight, torch.arange(20), reduction="none", backend="native")
    assert weight.data_ptr() in {t.data_ptr() for t in each.grad_fn.saved_tensors if t is not None}


@pytest.mark.parametrize("low", [False, True], ids=["float32-products", "fast-products"])
@pytest.mark.parametrize(
    "case", [c for c in CASES["linear_cross_entropy"] if "chunk_size" not in c.options], ids=lambda case: case.id
)
def test_a_single_chunk_in_bfloat16(case: fk.testing.Case, low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_FAST_PRODUCTS", True)
    if low:
        monkeypatch.setattr(LINEAR_CROSS_ENTROPY, "direct", no_direct_call)
        monkeypatch.setattr(sizes, "SMALL", 0)
        monkeypatch.setattr(chunks, "fast_products", lambda dtype: True)
    assert_parity(LINEAR_CROSS_ENTROPY, case, backend="native", dtype=torch.bfloat16)
