"""What the forms of linear_cross_entropy in Triton multiply, launch and allocate, of Llama 3's head at its full size.

No GPU is needed: tensors have no memory, launches are counted in place of being made, and products are those of a
GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foundry_kernels import _triton

if _triton.MISSING is not None:
    pytest.skip("needs Triton", allow_module_level=True)

from foundry_kernels._triton import devices
from foundry_kernels.ops import _products
from foundry_kernels.ops._linear_loss import chunks, class_blocks, sizes
from foundry_kernels.ops._linear_loss.problem import ALL, NOTHING, TILES, Call, Inputs, Needs
from foundry_kernels.ops.linear_cross_entropy import triton as forms
from foundry_kernels.ops.linear_cross_entropy.loss import LOSS
from foundry_kernels.ops.linear_cross_entropy.options import LinearCrossEntropyOptions
from foundry_kernels.ops.linear_cross_entropy.triton import launchers

N, D, V = 8192, 4096, 128256
LOGITS, HIDDEN, WEIGHT = 2 * N * V, 2 * N * D, 2 * V * D  # bytes in bfloat16
#: Of a number a token or two, and of a class.
SMALL = 1 << 20
BOTH = Needs(True, True, False)


class Recorder(TorchDispatchMode):
    """Products by their sizes (rows, summed, columns) and the dtype of what they give, and the most bytes that lived at
    a time of what was allocated meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, int, int, torch.dtype]] = []
        self.dtypes: set[tuple[tuple[int, ...], torch.dtype]] = set()
        self.peak = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and (storage := t.untyped_storage())._cdata not in given:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.dtypes.add((tuple(t.shape), t.dtype))
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            a, b = [t for t in args if isinstance(t, Tensor)][-2:]
            self.products.append((*a.shape, b.shape[1], result.dtype))
        return result


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    found = Recorder()
    monkeypatch.setattr(launchers, "launch", lambda kernel, *_: found.launches.append(kernel.__name__))
    monkeypatch.setattr(sizes, "INTERPRET", False)
    monkeypatch.setattr(_products, "sums_in_float32", lambda x: True)
    devices.record_for(90)
    yield found
    devices.record_for(None)


def call(
    recorder: Recorder, chunk_size: int, *, needs: Needs = BOTH, reduction: str = "mean",
    dtype: torch.dtype = torch.bfloat16, tokens: int = N, **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """What the operators do, of Llama 3's head, forward and, where that has not made the gradients, backward."""
    defaults = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0} | more
    options = LinearCrossEntropyOptions(-100, reduction, *defaults.values(), chunk_size, False, False)
    hidden, weight = (torch.empty(size, D, dtype=dtype, device="meta") for size in (tokens, V))
    target = torch.empty(tokens, dtype=torch.int64, device="meta")
    inputs = Inputs(hidden, weight, target, None)
    later = any(needs) and (reduction == "none" or chunk_size == TILES)
    of = class_blocks if chunk_size == TILES else chunks
    with recorder:
        rows = forms.Rows(inputs, (None,), options)
        saves = frozenset(("loss", *LOSS.saved) if later else ("loss",))
        made = of.forward(Call(LOSS, rows, inputs, options, NOTHING if later else needs, saves))
        if not later:
            return made.get("dhidden"), made.get("dweight")
        of_tokens = torch.empty(tokens, device="meta")
        dloss = of_tokens if reduction == "none" else torch.empty((), device="meta")
        return of.backward(Call(LOSS, rows, inputs, options, needs), dloss, of_tokens, of_tokens)[:2]


BF, F32 = torch.bfloat16, torch.float32
FWD, BWD = "linear_cross_entropy_fwd_kernel", "linear_cross_entropy_bwd_kernel"
#: The products of all rows at once: the logits, hidden's gradient, weight's.
WHOLE = [(N, D, V, BF), (N, V, D, BF), (V, N, D, BF)]


@pytest.mark.parametrize("more", [{}, {"logit_scale": 0.5, "softcap": 30.0}], ids=["usual", "scaled-and-capped"])
def test_all_rows_at_once(recorder: Recorder, more: dict[str, Any]) -> None:
    """Three products of full size and one kernel; beside the logits and the gradients that are returned a copy of
    hidden, without its ignored tokens, and no float32 sum."""
    dhidden, dweight = call(recorder, ALL, **more)
    assert recorder.products == WHOLE
    assert recorder.launches == [FWD]
    assert dhidden.dtype == dweight.dtype == BF
    assert recorder.peak <= LOGITS + WEIGHT + 2 * HIDDEN + SMALL
    assert ((V, D), F32) not in recorder.dtypes


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_has_no_product(recorder: Recorder, frozen: str) -> None:
    call(recorder, ALL, needs=Needs(frozen != "hidden", frozen != "weight", False))
    assert recorder.products == [p for p in WHOLE if p != WHOLE[1 if frozen == "hidden" else 2]]
    assert recorder.peak <= LOGITS + (WEIGHT if frozen == "hidden" else HIDDEN) + HIDDEN + SMALL


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_blocks_of_classes(recorder: Recorder, reduction: str) -> None:
    """Eight of 16128 and what is left; hidden's gradient is summed in float32 by the products, the weight's rounded
    once by them. 0.6 GiB beyond the gradients that are returned."""
    call(recorder, TILES, reduction=reduction)
    sizes = [16128] * 7 + [V - 7 * 16128]
    forward, later = recorder.products[:8], recorder.products[8:]
    assert forward == [(N, D, k, BF) for k in sizes]
    assert later == [p for k in sizes for p in ((N, D, k, BF), (N, k, D, F32), (k, N, D, BF))]
    assert recorder.launches == [FWD] * 8 + [BWD] * 8
    assert ((V, D), F32) not in recorder.dtypes
    assert recorder.peak - WEIGHT - HIDDEN <= 0.45 * 2**30
    assert recorder.peak - WEIGHT - HIDDEN <= 2 * N * 16128 + HIDDEN + 2 * HIDDEN + SMALL


def test_chunks_of_rows(recorder: Recorder) -> None:
    """Three products each, the last of which adds to the float32 sum: nothing of its size beside it, nor a second block
    of a chunk's logits."""
    dhidden, dweight = call(recorder, 2048)
    each = [(2048, D, V, BF), (2048, V, D, BF), (V, 2048, D, F32)]
    assert recorder.products == 4 * each
    assert recorder.launches == [FWD] * 4
    assert (dhidden.dtype, dweight.dtype) == (BF, F32)
    assert recorder.peak <= LOGITS // 4 + 2 * WEIGHT + 2 * HIDDEN + SMALL
