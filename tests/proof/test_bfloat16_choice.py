"""Which results depend on how bfloat16 matmuls are computed (`core/bfloat16.py`), over the whole registry: the bits of
an operation follow from the parts of the choice that it is said to use here, and from nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from table import Row, rows
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.core.registry import short_dtype
from foundry_kernels.ops import _products
from foundry_kernels.testing import Case, call, make_cotangents, run
from foundry_kernels.tools.check import numel

#: By operation, the parts of a choice that its bfloat16 matmuls use: attention's tiles, pairs, oneDNN's products.
USED = {
    "flash_attention": ("tiles", "pairs"),
    "flash_attention_varlen": ("tiles", "pairs"),
    "decode_linear": ("pairs",),
    "grouped_mm": ("pairs", "products"),
    "linear_cross_entropy": ("products",),
    "linear_kl_div": ("products",),
    "linear_log_probs": ("products",),
}
PARTS = ("tiles", "pairs", "products")
#: Both ways of multiplying rarely differ after rounding: in one of several thousand numbers.
SELDOM = ("decode_linear",)
#: Numbers in a case's arguments: sums of few products may round to the same bits in any order.
MOST = 1 << 22
#: And where no part is used, in which they have the same bits in any number.
MOST_UNUSED = 1 << 14
CHOICES = tuple(itertools.product((True, False), repeat=len(PARTS)))


NATIVE = [
    pytest.param(row, dtype, id=f"{row.id}-{short_dtype(dtype)}")
    for row in rows()
    if row.backend == "native" and row.device == "cpu" and not row.cuda_on_cpu
    for dtype in row.dtypes
]


def bits(row: Row, dtype: torch.dtype, case: Case) -> list[Tensor]:
    args = case.make(dtype, row.device)
    outputs = call(row.op, args, case.options, backend=row.backend)
    if any(o.requires_grad for o in outputs):
        cotangents = make_cotangents(outputs, case.cotangent)
        found = run(row.op, args, case.options, cotangents, backend=row.backend)
        outputs = tuple(found.items().values())
    return [o.detach().nan_to_num() for o in outputs]


@pytest.mark.parametrize(("row", "dtype"), NATIVE)
def test_bits_depend_on_what_is_used(
    row: Row,
    dtype: torch.dtype,
    bfloat16_choice: Callable[[bool, bool, bool], None],
    request: pytest.FixtureRequest,
) -> None:
    def choose(*choice: bool) -> None:
        bfloat16_choice(*choice)
        for asked_once in (_products.fast_products, _products.has_own_products):
            asked_once.cache_clear()

    request.addfinalizer(lambda: choose(*chosen))
    chosen = extension._C.bfloat16_choice()
    used = USED.get(row.op.name, ()) if dtype == torch.bfloat16 else ()
    changed = False
    most = MOST if used else MOST_UNUSED
    for case in sorted((case for case in row.cases if numel(case) < most), key=numel)[-4:]:
        found: dict[tuple[bool, ...], list[Tensor]] = {}
        for choice in CHOICES if used else (CHOICES[0], CHOICES[-1]):
            choose(*choice)
            got = bits(row, dtype, case)
            expected = found.setdefault(tuple(on for part, on in zip(PARTS, choice, strict=True) if part in used), got)
            assert all(map(torch.equal, got, expected)), (case.id, choice)
        first, *others = found.values()
        changed |= any(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    if used and row.op.name not in SELDOM and extension.build_info()["instruction_set"] in ("avx512_bf16", "amx_bf16"):
        assert changed, f"no part of the choice changes {row.op.name}, though {', '.join(used)} are listed"
