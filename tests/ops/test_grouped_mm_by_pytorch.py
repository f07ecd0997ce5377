"""The gradients of grouped_mm that PyTorch computes, where it is faster: which calls these are, and that what PyTorch
leaves open is done. Its products are those of the CPU here; on a GPU the parity suite has a case that takes them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
import torch
from slow import rest_slow
from torch import Tensor
from torch.nn import functional

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.ops.grouped_mm import reference

if _triton.MISSING is not None:
    pytest.skip(str(_triton.MISSING), allow_module_level=True)

from foundry_kernels.ops.grouped_mm import triton as launchers
from foundry_kernels.ops.grouped_mm.cases import CASES
from foundry_kernels.ops.grouped_mm.triton import by_pytorch

needs_interpreter = pytest.mark.skipif(not _triton.INTERPRET, reason="needs Triton's interpreter")
BF16, E8, E64 = torch.bfloat16, (8, 4096, 14336), (64, 2048, 1408)


#: By what an H100 measured, both gradients, TFLOP/s of ours and of PyTorch: 562 and 722 (E8), 341 and 409 (E64).
@pytest.mark.parametrize(
    ("dtype", "arch", "rows", "weight", "batch_invariant", "faster"),
    [
        (BF16, 90, 16384, E8, False, True),
        (BF16, 90, 16384, E64, False, True),
        (BF16, 90, 16384, E8, True, False),  # the bits of a row would depend on the others
        (torch.float16, 90, 16384, E8, False, False),  # PyTorch waits for the sizes on the host
        (BF16, 80, 16384, E8, False, False),  # here too
        (BF16, 100, 16384, E8, False, False),  # not measured, and wrong for empty groups
        (BF16, 0, 16384, E8, False, False),
        (BF16, 90, 64 * 127, E64, False, False),  # not measured from here on
        (BF16, 90, 16384, (8, 64, 14336), False, False),
        (BF16, 90, 16384, (8, 4096, 1412), False, False),  # rows of 8 bytes more than a multiple of 16
        (BF16, 90, 1 << 20, (1024, 128, 128), False, False),  # PyTorch refuses so many groups
    ],
)
def test_which_gradients_are_pytorchs(
    dtype: torch.dtype, arch: int, rows: int, weight: tuple[int, ...], batch_invariant: bool, faster: bool
) -> None:
    assert by_pytorch.is_faster(dtype, arch, rows, weight, batch_invariant) is faster


def test_a_case_of_the_parity_suite_takes_them_on_an_h100() -> None:
    taken = [
        case.id
        for case in CASES["grouped_mm"]
        if (x := case.args["x"]) is not None
        and (weight := case.args["weight"]) is not None
        and by_pytorch.is_faster(BF16, 90, x.shape[0], weight.shape, False)
    ]
    assert len(taken) == 1


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def _offset(x: Tensor) -> Tensor:
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x)


def _padded(x: Tensor) -> Tensor:
    """Rows that begin 2 bytes after multiples of 16."""
    return torch.cat([x, x[..., :1]], -1)[..., :-1]


def _transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def _strided(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


def draw(k: int = 24, n: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (20, n), (20, k), (3, k, n)
    dy, x, weight = (torch.randn(shape, generator=g).bfloat16() for shape in shapes)
    return dy, x, weight


LAYOUTS = [torch.Tensor.contiguous, _expanded, _offset, _padded, _transposed, _strided]
OFFS = (5, 5, 17)


@dataclass
class Products:
    """PyTorch's products, which are watched. A gradient of an empty group's matrix is made NaN: it promises none."""

    calls: list[tuple[Tensor, Tensor, list[int]]] = field(default_factory=list)

    def __call__(self, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        self.calls.append((a, b, offs.tolist()))
        y = functional.grouped_mm(a, b, offs=offs)
        if b.dim() == 2:
            for group, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
                if start == end:
                    y[group] = torch.nan
        return y


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    made = Products()
    monkeypatch.setattr(by_pytorch, "functional", SimpleNamespace(grouped_mm=made))
    return made


def gradients(dy: Tensor, x: Tensor, weight: Tensor, ends: tuple[int, ...] = OFFS, **needs: bool) -> tuple[Any, Any]:
    offs = torch.tensor(ends, dtype=torch.int32)
    return by_pytorch.gradients(dy, x, weight, offs, **{"need_dx": True, "need_dweight": True} | needs)


@needs_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("layout", rest_slow(LAYOUTS[::-1], 4), ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", ["dy", "x", "weight"])
def test_gradients(which: str, layout: Callable[[Tensor], Tensor], products: Products) -> None:
    """An empty group, rows of none, any strides; and what PyTorch is given is what it takes on a GPU."""
    tensors = dict(zip(("dy", "x", "weight"), draw(), strict=True))
    tensors[which] = layout(tensors[which])
    dy, x, weight = tensors.values()
    if (which, layout) != ("dy", _expanded):
        dy[17:] = torch.nan
    dx, dweight = gradients(dy, x, weight)
    offs = torch.tensor(OFFS, dtype=torch.int32)
    exact = reference._bwd(dy.float(), x.float(), weight.float(), offs, False, True, True)
    for found, e, like in zip((dx, dweight), exact, (x, weight), strict=True):
        assert found.shape == like.shape
        torch.testing.assert_close(found.float(), e, rtol=2**-8, atol=1e-5)
    assert not dx[17:].any()
    assert not dweight[1].any()
    assert dx.is_contiguous()
    assert (dweight.mT if (which, layout) == ("weight", _transposed) else dweight).is_contiguous()
    for a, b, _ in products.calls:
        for t in (a, b):
            *outer, down, across = t.stride()
            assert t.data_ptr() % 16 == 0
            assert all(stride % 8 == 0 for stride in (*outer, max(down, across)))
            assert (across == 1 and down >= t.shape[-1]) or (down == 1 and across >= t.shape[-2])
    (rows, _, _), (a, b, _) = products.calls
    assert rows.stride(1) == b.stride(1) == a.stride(0) == 1, "what an empty group needs of two ragged sides"


@needs_interpreter
def test_a_gradient_that_is_not_wanted_is_not_computed(products: Products) -> None:
    dx, dweight = gradients(*draw(), need_dweight=False)
    assert dx is not None
    assert dweight is None
    dx, dweight = gradients(*draw(), need_dx=False)
    assert dx is None
    assert dweight is not None
    assert [b.dim() for _, b, _ in products.calls] == [3, 2]


@needs_interpreter
@pytest.mark.parametrize("ends", [(30, 10, 2**31 - 1), (-5, -(2**31), 4), (20, 0, 20), OFFS])
def test_pytorch_never_sees_ends_that_lead_outside(ends: tuple[int, ...], products: Products) -> None:
    gradients(*draw(), ends)
    assert len(products.calls) == 2
    for _, _, seen in products.calls:
        assert seen == sorted(seen)
        assert 0 <= seen[0] <= seen[-1] <= 20
        assert ends != OFFS or seen == [*OFFS]


@needs_interpreter
def test_the_backward_pass_takes_them_where_the_rule_says_so(
    products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast to another dtype too."""
    monkeypatch.setattr(launchers, "_by_pytorch", lambda x, weight, batch_invariant: not batch_invariant)
    dy, x, weight = draw()
    x.requires_grad_()
    weight.requires_grad_()
    offs = torch.tensor(OFFS, dtype=torch.int32)
    found = []
    for batch_invariant in (False, True):
        y = fk.grouped_mm(x, weight, offs, batch_invariant=batch_invariant, backend="triton")
        with torch.autocast("cpu", torch.float16):
            found.append(torch.autograd.grad(y, (x, weight), dy))
    assert len(products.calls) == 2
    for a, b in zip(*found, strict=True):
        assert a.dtype == BF16
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-2)


@pytest.mark.slow
def test_its_kernels_compile() -> None:
    """For the one device that launches them, in a process in which Triton compiles."""
    code = """
    import torch
    from triton.runtime.jit import JITFunction
    from foundry_kernels.ops.grouped_mm.triton import by_pytorch
    from foundry_kernels.tools.inspect import aot

    launches = []
    JITFunction.run = lambda kernel, *args, grid, warmup=False, **kw: launches.append(aot._launch(kernel, args, kw, ""))
    by_pytorch.functional.grouped_mm = lambda a, b, offs: a.new_empty(2, 128)
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((256, 128), (256, 128), (2, 128, 128))]
    for wanted in ((True, True), (True, False), (False, True)):
        by_pytorch.gradients(*tensors, torch.empty(2, dtype=torch.int32), *wanted)
    for launch in launches:
        cost = aot.compile_for(launch, 90)
        print(launch.name, cost.problems(aot.GPUS[90]), cost.access_bytes[0])
    """
    done = fresh.python(
        "-c",
        textwrap.dedent(code),
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr
    one = ["grouped_mm_ends_kernel [] 4", "grouped_mm_zeros_kernel [] 16"]
    assert done.stdout.splitlines() == one * 3
