"""The same bits from the CPU's kernels, over the registry: on any number of threads, from small calls and from ones
whose results are larger than the caches, and beside parts of a batch that are not numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same
from parts import batch_dims, options_for, part_of
from slow import MOST_ELEMENTS, SWEPT_DTYPES, rest_slow
from table import Row, checked_rows, cpu_setting, is_twin, rows
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.core.registry import short_dtype
from foundry_kernels.testing import Case, call, make_cotangents, run
from foundry_kernels.tools.check import numel

SETS = extension.build_info().get("usable_instruction_sets", [])
NATIVE = [r for r in rows("native") if r.device == "cpu"]
#: Larger results are written past the caches (`csrc/cpu/vec.h`).
STREAMED = 17 << 20


def is_variant(row: Row) -> bool:
    return is_twin(row.op) and row.op.name.startswith(("bias", "g", "reglu"))


def over_native(chosen: Sequence[Row]) -> pytest.MarkDecorator:
    """Rows in float32 and bfloat16; of operations with the kernels of another, bfloat16 is slow, and all of those that
    only differ in a function."""
    params = [
        pytest.param(
            r,
            d,
            id=f"{r.id}-{short_dtype(d)}",
            marks=pytest.mark.slow if (i and is_twin(r.op)) or is_variant(r) else (),
        )
        for r in chosen
        for i, d in enumerate(SWEPT_DTYPES)
        if d in r.dtypes
    ]
    return pytest.mark.parametrize(("row", "dtype"), params)


def results(row: Row, args: dict[str, Tensor | None], options: dict[str, Any], cotangents: Any) -> dict[str, Tensor]:
    return run(row.op, args, options, cotangents, backend=row.backend).items()


# --- threads ----------------------------------------------------------------------------------------------------------


def many_rows(row: Row, case: Case, elements: int) -> Case | None:
    """The case with so many parts in its batch that its arguments have this many elements."""
    if (dims := batch_dims(row, case, dict(case.options))) is None:
        return None
    size = next(case.args[name].shape[at] for name, at in dims.items())  # type: ignore[union-attr]
    n = size * max(1, elements // max(numel(case), 1))
    args = dict(case.args)
    for name, at in dims.items():
        arg = args[name]
        assert arg is not None
        args[name] = replace(arg, shape=(*arg.shape[:at], n, *arg.shape[at + 1 :]))
    return replace(case, args=args)


def shared_among_threads(row: Row) -> list[Case]:
    """For each option, and each argument that is left out, the largest case that has it; the one with most rows, and
    one whose rows are many."""
    largest: dict[object, Case] = {}
    for case in sorted((c for c in row.cases if numel(c) <= MOST_ELEMENTS), key=numel):
        first = next(arg for arg in case.args.values() if arg is not None)
        points = [f"{name}={value}" for name, value in case.options.items()]
        for point in (None, *points, *(name for name, arg in case.args.items() if arg is None)):
            largest[point] = case
        if math.prod(first.shape[:-1]) >= math.prod(next(iter(largest.get("rows", case).args.values())).shape[:-1]):  # type: ignore[union-attr]
            largest["rows"] = case
    found = list({case.id: case for case in largest.values()}.values())
    many = next((made for c in row.small_cases if (made := many_rows(row, c, MOST_ELEMENTS)) is not None), None)
    return [*found, many] if many is not None else found


@over_native(NATIVE)
def test_any_number_of_threads(row: Row, dtype: torch.dtype) -> None:
    """Outputs and gradients, also of another call with as many."""
    for case in shared_among_threads(row):
        if case.options.get("chunk_size") == "tiles":  # of PyTorch's products, whose bits depend on threads
            continue
        args, options = case.make(dtype), dict(case.options)
        if "batch_invariant" in options_for(row, case):  # else products are PyTorch's, which depends on threads
            options["batch_invariant"] = True
        cotangents = make_cotangents(call(row.op, args, options, backend="native"), case.cotangent)
        expected = None
        for threads in (1, 2, 5, 2):
            own = fk.batch_invariant() if row.op.name == "lora_linear" else nullcontext()  # products, as above
            with cpu_setting(extension.build_info()["instruction_set"], threads), own:
                found = results(row, args, options, cotangents)
            for name, value in found.items():
                assert expected is None or same(value, expected[name]), f"{case.id}: {name} on {threads} threads"
            expected = expected or found


# --- larger than the caches -------------------------------------------------------------------------------------------

#: Operations whose results are written past the caches where they are large.
STREAMING = [r for r in NATIVE if r.op.package.rpartition(".")[2] in ("rms_norm", "swiglu", "bias_gelu", "rope")]
STREAMING += [r for r in NATIVE if r.op.name == "cross_entropy"]


def large(row: Row, dtype: torch.dtype) -> list[tuple[Case, dict[str, int]]]:
    """Cases of dense tensors, one for each set of arguments and options, with as many rows as make a large result."""
    found: dict[str, tuple[Case, dict[str, int]]] = {}
    for case in sorted(
        row.cases, key=lambda c: -max(a.shape[-1] for a in c.args.values() if a is not None and a.shape)
    ):
        options = options_for(row, case)
        dims = batch_dims(row, case, options)
        dense = all(arg is None or arg.layout == "contiguous" for arg in case.args.values())
        flags = [(k, v) for k, v in case.options.items() if isinstance(v, str | bool)]
        kind = str((flags, [name for name, arg in case.args.items() if arg is None], "limit" in case.options))
        if dims is None or not dense or kind in found:
            continue
        if case.args.get("weight") is not None and case.options.get("label_smoothing"):
            continue  # where a row begins between two registers, its first numbers are off by a unit in the last place
        name, at = next(iter(dims.items()))
        arg = case.args[name]
        assert arg is not None
        if arg.shape[-1] < 64:
            continue
        n = (
            STREAMED
            * 2 ** (case.args.get("up", arg) is None)
            // (math.prod(arg.shape) // arg.shape[at] * dtype.itemsize)
            + 1
        )
        args = {
            k: replace(a, shape=(*a.shape[: dims[k]], n, *a.shape[dims[k] + 1 :])) if a and k in dims else a
            for k, a in case.args.items()
        }
        found[kind] = replace(case, args=args), dims
    return list(found.values())


@over_native(STREAMING)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("part", rest_slow(["first", "others"]))
def test_results_larger_than_the_caches(row: Row, dtype: torch.dtype, name: str, part: str) -> None:
    """Rows have the bits that they have in small calls, whose results are not written past the caches."""
    found = large(row, dtype)
    assert found
    for case, dims in found[:1] if part == "first" else found[1:]:
        args, options = case.make(dtype), options_for(row, case)
        with cpu_setting(name, 2):
            outputs = call(row.op, args, options, backend="native")
            cotangents = make_cotangents(outputs, "contiguous")
            whole = results(row, args, options, cotangents)
            assert max(x.nbytes for x in whole.values()) > 16 << 20
            for index in torch.arange(len(outputs[0])).chunk(5):
                given = part_of(args, dims, index)
                own = results(row, given, options, tuple(c.index_select(0, index) for c in cotangents))
                for what, x in own.items():
                    at = dims.get(what.removeprefix("gradient of ")) if what.startswith("gradient") else 0
                    assert at is None or same(x, whole[what].index_select(at, index)), f"{case.id}: {what}"


# --- far apart, and not a number --------------------------------------------------------------------------------------


def in_parts(row: Row, layout: str | None = None) -> Iterator[tuple[Case, dict[str, Any], dict[str, int]]]:
    """Small cases whose batch falls into parts, with the dimensions."""
    emulated = row.backend == "triton" or row.cuda_on_cpu
    for case in sorted(row.small_cases, key=numel):
        args = [arg for arg in case.args.values() if arg is not None]
        options = options_for(row, case)
        dims = batch_dims(row, case, options)
        if dims is None or not all(arg.layout != "expanded" and layout in (None, arg.layout) for arg in args):
            continue
        yield case, options, dims
        if emulated:
            return


@pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in rows() if not is_twin(r.op)])
def test_offsets_beyond_32_bits(row: Row) -> None:
    """Parts of each argument lie 2^31 elements apart. The memory between them is reserved and never touched."""
    case, options, dims = next(in_parts(row, "contiguous"), (None, {}, {}))
    for name in dims:
        assert case is not None
        args = part_of(case.make(row.dtypes[0], row.device), dims, torch.tensor([0, 1], device=row.device))
        x = args[name]
        assert x is not None
        strides = [2**31 if at == dims[name] else x.stride(at) for at in range(x.dim())]
        far = torch.empty(2**31 + x.numel(), dtype=x.dtype, device=row.device).as_strided(x.shape, strides)
        far.copy_(x.detach())
        cotangents = make_cotangents(call(row.op, args, options, backend=row.backend), "contiguous")
        expected = results(row, args, options, cotangents)
        found = results(row, args | {name: far.requires_grad_(x.requires_grad)}, options, cotangents)
        for what, value in expected.items():
            assert same(value, found[what]), f"{case.id}, {name}: {what}"


VALUES = [
    pytest.param(r, value, id=f"{r.id}-{value}", marks=pytest.mark.slow if emulated and value == math.inf else ())
    for r in (*checked_rows(), *rows("reference"))
    for emulated in (r.backend == "triton" or r.cuda_on_cpu,)
    for value in (math.nan, math.inf)
]


@pytest.mark.parametrize(("row", "value"), VALUES)
def test_what_is_not_a_number_stays_in_its_part(row: Row, value: float) -> None:
    """Other parts of the batch keep their bits and those of their gradients; its own results are not numbers either."""
    for case, options, dims in in_parts(row):
        args = case.make(row.dtypes[0], row.device)
        outputs = call(row.op, args, options, backend=row.backend)
        cotangents = make_cotangents(outputs, case.cotangent)
        expected, size = results(row, args, options, cotangents), len(outputs[0])
        with torch.no_grad():
            for name, at in dims.items():
                if args[name].is_floating_point():  # type: ignore[union-attr]
                    args[name].select(at, size // 2).fill_(value)  # type: ignore[union-attr]
        others = torch.tensor([i for i in range(size) if i != size // 2], device=row.device)
        for what, found in results(row, args, options, cotangents).items():
            at = dims.get(what.removeprefix("gradient of ")) if what.startswith("gradient") else 0
            if at is not None:
                kept = (x.index_select(at, others) for x in (found, expected[what]))
                assert same(*kept), f"{case.id}: {what}"
            if math.isnan(value) and what == "output 0" and next(iter(args)) in dims:
                own = found.select(0, size // 2)
                assert own.isnan().any() or not own.any(), f"{case.id}: {what}"
