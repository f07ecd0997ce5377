"""The same bits in any batch: over the registry, and of attention in decoding, in chunks and in a whole prompt.

What a row or sequence gets, and the gradients of its inputs, is compared bit by bit with what it gets alone, at another
place and among others. Where an operation has an option for it, that is on. `sharding.py` of an operation says along
which dimension its work falls into parts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from attention_inputs import plain_options
from bits import same
from built import needs_native
from parts import batch_dims, options_for, part_of
from slow import first_dtype, representative
from table import Row, checked_rows, cpu_setting, hopper_rows, rows
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.core import extension
from foundry_kernels.core.registry import short_dtype
from foundry_kernels.testing import Case, call, make_cotangents, run
from foundry_kernels.tools.check import numel

SETS = extension.build_info().get("usable_instruction_sets", [])
#: Cases of a row that is emulated, and their elements, where not all are tried.
FEW, SMALL = 1, 3_000


def suitable(row: Row, most: int | None) -> Iterator[tuple[Case, dict[str, Any], dict[str, int]]]:
    for case in row.cases:
        if most is not None and numel(case) > most:
            continue
        # CUDA's kernels read rows that are not aligned by single numbers, and a part of a batch is a copy that is.
        if row.cuda_on_cpu and any(arg is not None and arg.layout != "contiguous" for arg in case.args.values()):
            continue
        options = options_for(row, case)
        if (dims := batch_dims(row, case, options)) is not None:
            yield case, options, dims


def check_parts(row: Row, case: Case, options: dict[str, Any], dims: dict[str, int], dtype: torch.dtype) -> None:
    args = case.make(dtype, row.device)
    outputs = call(row.op, args, options, backend=row.backend)
    cotangents = make_cotangents(outputs, case.cotangent)
    whole = run(row.op, args, options, cotangents, backend=row.backend)
    name, at = next(iter(dims.items()))
    size = args[name].shape[at]  # type: ignore[union-attr]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size)).tolist()
    for chosen in ([0], [size - 1], order, order[: size // 2 + 1]):
        index = torch.tensor(chosen, device=row.device)
        part = run(
            row.op, part_of(args, dims, index), options, tuple(c.index_select(0, index) for c in cotangents),
            backend=row.backend,
        )  # fmt: skip
        where = f"{case.id}, parts {chosen} of {size}"
        for i, (a, b) in enumerate(zip(part.outputs, whole.outputs, strict=True)):
            assert same(a, b.index_select(0, index)), f"{where}: output {i}"
        for name in dims:
            if name in part.grads:
                expected = whole.grads[name].index_select(dims[name], index)
                assert same(part.grads[name], expected), f"{where}: gradient of {name}"


def emulated(row: Row) -> bool:
    return row.backend == "triton" or row.cuda_on_cpu


def _tried() -> list[Any]:
    # Not the reference: PyTorch's functions round the last numbers of a tensor another way than the rest.
    every = (*checked_rows(), *(r for r in hopper_rows() if r.op.name == "flash_attention"))
    tried = [(r, d) for r in every for d in (torch.float32, torch.bfloat16) if d in r.dtypes]
    low = [pytest.mark.slow]
    return [
        pytest.param(r, d, id=f"{r.id}-{short_dtype(d)}", marks=low if emulated(r) and d != first_dtype(r) else ())
        for r, d in tried
    ]


@pytest.mark.parametrize(("row", "dtype"), _tried())
@pytest.mark.parametrize("part", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_a_part_of_a_batch_has_the_bits_that_it_has_alone(row: Row, dtype: torch.dtype, part: str) -> None:
    limits = emulated(row) and part == "few"
    most = 10 * SMALL if row.hopper else SMALL  # its cases are larger, and it is quick
    found = list(suitable(row, most if limits else None))
    if part == "all":
        found = [one for one in found if representative(row, dtype, one[0])]
    for case, options, dims in found[: FEW if limits else None]:
        check_parts(row, case, options, dims, dtype)


# --- attention --------------------------------------------------------------------------------------------------------

ATTENTION = [r for r in (*checked_rows(), *hopper_rows()) if r.op.name == "flash_attention"]
#: A causal mask alone, a window that begins anywhere, and what changes scores or the softmax.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (21, 0)},
    "scores": {"softcap": 3.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "return_lse": True},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
}


@pytest.fixture
def sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiles in Triton's interpreter add in the order of the inner dimension, as a device does for every row
    alike. NumPy's, where the processor has no AVX-512, depend on where in the tile a row is."""
    if not _triton.INTERPRET:
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = d.data.copy()
        for i in range(a.data.shape[-1]):
            total += a.data[..., :, i, None] * b.data[..., i, None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def over_attention(*names: str) -> pytest.MarkDecorator:
    """Every backend, with the CPU's kernels in every instruction set and on one to three threads."""
    params = []
    for row in ATTENTION:
        settings = [(s, 1 + i % 3) for i, s in enumerate(SETS)] if not emulated(row) else [(None, 1)]
        for name in names:
            for isa, threads in settings:
                own = f"{row.id}-{name}" + (f"-{isa}" if isa else "")
                marks = pytest.mark.slow if emulated(row) and name != "window" else ()
                params.append(pytest.param(row, OPTIONS[name], isa, threads, id=own, marks=marks))
    return pytest.mark.parametrize(("row", "options", "instruction_set", "n_threads"), params)


@contextmanager
def setting(instruction_set: str | None, threads: int) -> Iterator[None]:
    with nullcontext() if instruction_set is None else cpu_setting(instruction_set, threads):
        yield


def draw(length: int, n_kv_heads: int, width: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q [4, T, D], k and v [Hk, T, D] of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, length, width), *[(n_kv_heads, length, width)] * 2)
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)  # type: ignore[return-value]


def attend(row: Row, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    found = fk.flash_attention(q, k, v, causal=True, batch_invariant=True, backend=row.backend, **options)
    return found if isinstance(found, tuple) else (found,)


def dtypes_of(row: Row) -> tuple[torch.dtype, ...]:
    dtypes = (torch.float32,) if row.backend == "triton" else (torch.float32, torch.bfloat16)
    return tuple(d for d in dtypes if d in row.dtypes)


@over_attention(*OPTIONS)
@pytest.mark.usefixtures("sums_in_order")
def test_a_query_has_the_same_bits_in_decoding_and_in_a_prompt(
    row: Row, options: dict[str, Any], instruction_set: str | None, n_threads: int
) -> None:
    """Whether it comes alone, in a chunk of a prompt or in the whole prompt, and beside another sequence or not."""
    rng = random.Random(f"{row.id} {sorted(options)}")
    length, width = (40, 16) if emulated(row) else (rng.randrange(600, 1300), rng.choice((40, 64)))
    length = 300 if row.hopper else length  # its tiles are of 128 keys
    for dtype in dtypes_of(row):
        sequences = [draw(length, 2, width, seed, dtype) for seed in (1, 2)]
        q, k, v = (torch.stack(each) for each in zip(*sequences, strict=True))
        with setting(instruction_set, n_threads):
            whole = attend(row, q, k, v, options)
            ends = sorted({*rng.sample(range(1, length), 3), length})
            chunks = [*pairwise([0, *ends]), *((i, i + 1) for i in rng.sample(range(length), 3))]
            for first, end in chunks:
                for n in (slice(0, 2), slice(1, 2)) if end > first + 1 else (slice(rng.randrange(2), 2),):
                    part = attend(row, q[n, :, first:end], k[n, :, :end], v[n, :, :end], options)
                    for a, b in zip(part, whole, strict=True):
                        assert same(a, b[n, :, first:end]), f"queries {first} to {end} of {length}, {dtype}"


def packed(
    row: Row, sequences: list[tuple[Tensor, ...]], order: list[int], options: dict[str, Any]
) -> list[list[Tensor]]:
    """Of each of these sequences, (q, k, v, dout) ``[T, heads, D]``, the output and three gradients."""
    *inputs, dout = (torch.cat([sequences[i][j] for i in order]) for j in range(4))
    q, k, v = (x.requires_grad_() for x in inputs)
    sizes = [sequences[i][0].shape[0] for i in order]
    cu_seqlens = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
    out = fk.flash_attention_varlen(
        q, k, v, cu_seqlens, cu_seqlens, max(sizes), max(sizes), causal=True, batch_invariant=True,
        backend=row.backend, **options,
    )  # fmt: skip
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return [list(each) for each in zip(*(x.detach().split(sizes) for x in (out, *grads)), strict=True)]


@over_attention("causal", "window")
def test_a_packed_sequence_has_the_bits_that_it_has_alone(
    row: Row, options: dict[str, Any], instruction_set: str | None, n_threads: int
) -> None:
    """Its output and the gradients of its queries, keys and values: among others, in any order, and not packed."""
    rng = random.Random(f"{row.id} {sorted(options)} packed")
    lengths = [1, 5, 34] if emulated(row) else [1, 7, *(rng.randrange(20, 1500) for _ in range(3))]
    lengths += [150, 270] if row.hopper else []
    every = (*checked_rows(), *hopper_rows())
    varlen = next(r for r in every if r.op.name == "flash_attention_varlen" and r.id[-11:] == row.id[-11:])
    for dtype in dtypes_of(row):
        drawn = [(*draw(n, 1, 32, n, dtype), draw(n, 1, 32, n + 1, dtype)[0]) for n in lengths]
        sequences = [tuple(x.transpose(0, 1) for x in each) for each in drawn]
        with setting(instruction_set, n_threads), varlen.active():
            alone = [packed(row, sequences, [i], options)[0] for i in range(len(lengths))]
            for order in (list(range(len(lengths))), rng.sample(range(len(lengths)), len(lengths))):
                for i, found in zip(order, packed(row, sequences, order, options), strict=True):
                    for name, a, b in zip(("out", "dq", "dk", "dv"), found, alone[i], strict=True):
                        assert same(a, b), f"{name} of {lengths[i]} tokens in {[lengths[j] for j in order]}, {dtype}"
        with setting(instruction_set, n_threads):
            *inputs, dout = (x.unsqueeze(0) for x in drawn[-1])
            q, k, v = (x.requires_grad_() for x in inputs)
            (out,) = attend(row, q, k, v, options)
            grads = torch.autograd.grad(out, (q, k, v), dout)
            for a, b in zip((out.detach(), *grads), alone[-1], strict=True):
                assert same(a.squeeze(0).transpose(0, 1), b), "not packed"


def test_the_reference_computes_each_sequence_by_itself() -> None:
    case = {"attn_mask": torch.rand(3, 1, 5, 7) > 0.3, "alibi_slopes": torch.rand(3, 4), "dropout_p": 0.4}
    q, k = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 7, 8)
    options: dict[str, Any] = {"batch_invariant": True, "backend": "reference", "dropout_seed": 3}
    whole = fk.flash_attention(q, k, k, **case, **options)
    torch.testing.assert_close(whole, fk.flash_attention(q, k, k, **case, **options | {"batch_invariant": False}))
    del case["dropout_p"]
    whole, options = fk.flash_attention(q, k, k, **case, **options), options
    for n in range(3):
        own = {name: x[n : n + 1] for name, x in case.items()}
        assert same(fk.flash_attention(q[n : n + 1], k[n : n + 1], k[n : n + 1], **own, **options), whole[n : n + 1])


# --- products ---------------------------------------------------------------------------------------------------------


GROUPED = [
    pytest.param(r, d, id=f"{r.id}-{short_dtype(d)}")
    for r in (*checked_rows(), *rows("reference"))
    if r.op.name == "grouped_mm"
    for d in dtypes_of(r)
]


@pytest.mark.parametrize(("row", "dtype"), GROUPED)
@pytest.mark.usefixtures("sums_in_order")
def test_rows_of_groups(row: Row, dtype: torch.dtype) -> None:
    """A row's product and the gradient of its input are the same alone, and among other groups of other sizes."""
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(90, n, generator=generator).to(dtype) for n in (40, 24))
    weight = torch.randn(3, 40, 24, generator=generator).to(dtype)

    def run_groups(sizes: list[int], index: list[int]) -> tuple[Tensor, Tensor]:
        offs = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
        own = x[index].requires_grad_()
        y = fk.grouped_mm(own, weight, offs, batch_invariant=True, backend=row.backend)
        return y.detach(), torch.autograd.grad(y, own, dy[index])[0]

    whole = run_groups([20, 3, 67], list(range(90)))
    for sizes, index in (
        ([1, 0, 0], [7]), ([0, 1, 0], [21]), ([0, 0, 67], list(range(23, 90))),
        ([5, 1, 17], [4, 3, 2, 1, 0, 22, *range(40, 57)]), ([0, 2, 1], [22, 20, 89]),
    ):  # fmt: skip
        for name, a, b in zip(("y", "dx"), run_groups(sizes, index), whole, strict=True):
            assert same(a, b[index]), f"{name} of {sizes}"


@needs_native
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_layers(name: str, dtype: torch.dtype) -> None:
    """Rows, and gradients of inputs, do not depend on the other rows; those of weights not on the number of threads."""
    layer = torch.nn.Linear(200, 130, dtype=dtype)
    x, dy = torch.randn(3, 67, 200).to(dtype), torch.randn(3, 67, 130).to(dtype)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()

    def run_rows(index: Any) -> tuple[Tensor, ...]:
        own = x[index].detach().requires_grad_()
        y = layer(own)
        return (y.detach(), *torch.autograd.grad(y, (own, layer.weight, layer.bias), dy[index]))

    with fk.batch_invariant():
        with cpu_setting(name, 1):
            whole = run_rows(...)
        torch.testing.assert_close(whole[0].double(), exact, rtol=0, atol=0.05 if dtype == torch.bfloat16 else 1e-5)
        for threads in (1, 2, 5):
            with cpu_setting(name, threads):
                assert all(map(same, run_rows(...), whole))
                for index in ((slice(1, 2),), (0, slice(9, 10)), (slice(0, 2), slice(3, 40))):
                    for a, b in zip(run_rows(index)[:2], whole, strict=False):
                        assert same(a, b[index]), f"rows {index}"


# --- what a GPU would launch ------------------------------------------------------------------------------------------


@pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_launches_on_a_gpu_do_not_depend_on_the_batch(capability: int) -> None:
    """Tiles, warps, stages and what the compiler knows; a group's heads and the keys are never split."""
    from foundry_kernels._triton.devices import record_for
    from foundry_kernels.ops.flash_attention.triton import backward_launch, launch, problem
    from foundry_kernels.ops.flash_attention.triton.kernel_options import TensorOptions
    from foundry_kernels.ops.grouped_mm.triton import _plan

    def compiled(plan: Any) -> dict[str, Any]:
        return {n: x for n, x in plan.constants.items() if n.isupper() or n in ("num_warps", "num_stages", "maxnreg")}

    device, found = torch.device("cpu"), []
    record_for(capability)
    try:
        for dtype, width, left in product((torch.bfloat16, torch.float32), (64, 128, 256), (None, 100)):
            plans = set()
            for batch, queries, keys in ((1, 1, 8), (1, 1, 5000), (1, 40, 40), (64, 512, 512), (3, 2000, 2000)):
                options = plain_options(queries, keys, window_right=0, window_left=left, batch_invariant=True)
                shapes = [(batch, 8, queries, width), *[(batch, 2, keys, width)] * 2]
                layouts = [(s, torch.empty(s, device="meta").stride()) for s in shapes]
                none = TensorOptions(0, None, False, None, False, None, ())
                p = problem._Problem(*layouts, dtype, device, None, none, options)
                q, k, v = (strides for _, strides in layouts)
                assert not p.few_queries
                dkdv, splits, sums = backward_launch._plan_dkdv(p, q, k, v)
                assert (splits, sums) == (1, ())
                each = (launch._plan_fwd(p, q, False, True, False), dkdv, backward_launch._plan_dq(p, q, q))
                plans.add(str([compiled(plan) for plan in each]))
            assert len(plans) == 1, (dtype, width, left, plans)
            found += plans
        for dtype in (torch.bfloat16, torch.float32):
            rows_of = (1, 17, 64, 5000)
            plans = {
                str(compiled(_plan((64, 1), (8, 64, 128), (8192, 128, 1), n, dtype, device, True))) for n in rows_of
            }
            assert len(plans) == 1, (dtype, plans)
    finally:
        record_for(None)
    assert len(found) == 12
