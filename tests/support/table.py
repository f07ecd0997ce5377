"""The table of the parity suite: every registered op, backend, device, dtype and case. A new operation is covered as
soon as it is registered, because this module names none except in `HOPPER`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import slow
import torch
from cuda_on_cpu.build import LIBRARY, load_operators
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.core import extension
from foundry_kernels.core.case import Arg, lay_out
from foundry_kernels.core.registry import FLOATS, OpSpec, override, short_dtype
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN, hopper
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.testing import Case, call
from foundry_kernels.tools.check import numel, small_cases

#: The operations with kernels only for compute capability 9.0.
HOPPER = (FLASH_ATTENTION, FLASH_ATTENTION_VARLEN)
#: One operation of each kind: with row statistics, a rotation, a loss, and with tiles.
SAMPLE = ("rms_norm", "rope", "cross_entropy", "flash_attention")
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@dataclass(frozen=True)
class Row:
    op: OpSpec
    backend: str
    device: str
    #: The native row's CUDA kernels, run on the CPU under the checker of tests/support/cuda_on_cpu.
    cuda_on_cpu: bool = False
    #: Only its kernels for compute capability 9.0, under the checker or on such a GPU, with the cases that they accept
    #: within `batch_invariant`, which includes few queries.
    hopper: bool = False

    @property
    def id(self) -> str:
        # Both kinds under the checker have "cuda_on_cpu" in their name: `-k` selects or leaves out both.
        device = "cuda_on_cpu" if self.cuda_on_cpu else self.device
        return f"{self.op.name}-{self.backend}-{'hopper_' * self.hopper}{device}"

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context of a test of this row. A checker's row calls the checker's library of operators."""
        with ExitStack() as undo:
            if self.hopper:
                undo.enter_context(on_hopper(self.device))
                undo.enter_context(fk.batch_invariant())
            if self.cuda_on_cpu:
                undo.enter_context(self._checked())
            yield

    @contextmanager
    def _checked(self) -> Iterator[None]:
        load_operators()
        impl = self.op.impl("native")
        assert impl is not None
        library = getattr(torch.ops, LIBRARY)

        def checked(operator: Any) -> Any:
            return getattr(library, operator._schema.name.split("::")[1]).default

        library.guard(True)
        try:
            with ExitStack() as undo:
                if isinstance(impl.fn, OpOverload):
                    undo.enter_context(override(self.op, "native", fn=checked(impl.fn), devices=("cpu",)))
                else:  # a function around operators, which its module names
                    undo.enter_context(override(self.op, "native", devices=("cpu",)))
                    module = sys.modules[impl.fn.__module__]
                    for name, operator in list(vars(module).items()):
                        if isinstance(operator, OpOverload):
                            undo.callback(setattr, module, name, operator)
                            setattr(module, name, checked(operator))
                yield
        finally:
            library.guard(False)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        impl = self.op.impl(self.backend)
        assert impl is not None
        return tuple(d for d in FLOATS if d in impl.dtypes and not (self.hopper and d == torch.float32))

    @property
    def has_gradients(self) -> bool:
        return any(a is not None and a.grad for case in self.op.cases.CASES[self.op.name] for a in case.args.values())

    @property
    def cases(self) -> tuple[Case, ...]:
        interpreted = self.backend == "triton" and _triton.INTERPRET
        device, cases = "cuda" if self.cuda_on_cpu else self.device, self.op.cases
        made = (c for c in cases.CASES[self.op.name] if c.interpreted or not interpreted)
        able = tuple(c for c in made if cases.why_not(c, self.backend, device) is None)
        return tuple(c for c in able if c.id in taken_by_hopper(self.op)) if self.hopper else able

    @property
    def small_cases(self) -> tuple[Case, ...]:
        return small_cases(self.cases)

    @property
    def few_cases(self) -> tuple[Case, ...]:
        """The small cases; of emulated kernels a few of them."""
        emulated = self.cuda_on_cpu or (self.backend == "triton" and self.device == "cpu")
        return tuple(sorted(self.small_cases, key=numel)[:3]) if emulated else self.small_cases


@contextmanager
def pretended_hopper() -> Iterator[None]:
    """In this block, the checker's operators run as on compute capability 9.0."""
    load_operators()
    library = getattr(torch.ops, LIBRARY)
    was = library.pretend_hopper(True)
    try:
        yield
    finally:
        library.pretend_hopper(was)


@contextmanager
def on_hopper(device: str) -> Iterator[None]:
    """In this block the kernels for compute capability 9.0, of the checker or of a GPU, must run a forward pass."""
    before = hopper_passes(device)
    with pretended_hopper() if device == "cpu" else nullcontext():
        yield
    assert hopper_passes(device)[0] > before[0], "no forward pass went to the kernels of csrc/cuda/hopper"


def hopper_passes(device: str = "cpu") -> tuple[int, int]:
    """The number of forward and backward passes of the kernels of csrc/cuda/hopper, of the checker or on GPUs."""
    if device == "cpu":
        load_operators()
    library = torch.ops.foundry_kernels if device == "cuda" else getattr(torch.ops, LIBRARY)
    return tuple(library.flash_attention_hopper_passes())


@functools.cache
def taken_by_hopper(op: OpSpec) -> frozenset[str]:
    """The names of attention's 16-bit cases that `hopper.takes` accepts within `batch_invariant`. Only sizes and
    strides of tensors are created."""
    answers: list[bool] = []

    def ask(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        answers.append(hopper.takes(q, k, v, options))
        return q

    def metadata(a: Arg | None) -> Tensor | None:
        dtype = torch.bfloat16 if a is None or a.dtype is None else a.dtype
        return None if a is None else lay_out(torch.empty(a.shape, dtype=dtype, device="meta"), a.layout)

    cases = [c for c in op.cases.CASES[op.name] if op.cases.why_not(c, "native", "cuda") is None]
    with override(op, "native", fn=ask, devices=("meta",)), fk.batch_invariant():
        for case in cases:
            call(op, {name: metadata(a) for name, a in case.args.items()}, case.options, backend="native")
    return frozenset(case.id for case, taken in zip(cases, answers, strict=True) if taken)


def rows(*backends: str) -> tuple[Row, ...]:
    """The usable rows of these backends (default: those compared with the reference)."""
    wanted = backends or ("triton", "native")
    return tuple(
        Row(op, b, d) for op in fk.OPS.values() for d in DEVICES for b in op.backends(d) if b in wanted
    )  # fmt: skip


def checked_rows() -> tuple[Row, ...]:
    """All of `rows()`, and a row for each operation with CUDA kernels, also without CPU kernels."""
    impls = ((op, op.impl("native")) for op in fk.OPS.values())
    return rows() + tuple(
        Row(op, "native", "cpu", cuda_on_cpu=True)
        for op, impl in impls
        if impl is not None and impl.missing is None and "cuda" in impl.sources
    )


def hopper_rows() -> tuple[Row, ...]:
    """For each operation of `HOPPER` a row on a GPU of compute capability 9.0, if there is one, and one under the
    checker."""
    usable = [op for op in HOPPER if (impl := op.impl("native")) is not None and impl.missing is None]
    on_gpu = [op for op in usable if "cuda" in DEVICES and hopper.supports("cuda", torch.bfloat16)]
    return (
        *(Row(op, "native", "cuda", hopper=True) for op in on_gpu),
        *(Row(op, "native", "cpu", cuda_on_cpu=True, hopper=True) for op in usable),
    )


def is_twin(op: OpSpec) -> bool:
    """Whether it uses the kernels of another operation in the same folder, with other flags."""
    return op is not next(each for each in fk.OPS.values() if each.package == op.package)


def over_rows(
    *backends: str,
    slow: tuple[str, ...] = (),
    sampled: tuple[str, ...] = (),
    twins: bool = True,
    gradients: bool = False,
) -> pytest.MarkDecorator:
    """Parametrizes a test with the rows. Rows of the backends in `slow` are slow tests; those of the backends in
    `sampled` too, except the operations in SAMPLE; and without `twins` those of such operations. `gradients`: only
    operations with gradients."""
    chosen = [r for r in rows(*backends) if r.has_gradients or not gradients]
    left = {
        r.id
        for r in chosen
        if r.backend in slow or (r.backend in sampled and r.op.name not in SAMPLE) or (is_twin(r.op) and not twins)
    }
    params = [pytest.param(r, id=r.id, marks=pytest.mark.slow if r.id in left else ()) for r in chosen]
    return pytest.mark.parametrize("row", params)


def over_dtypes(*backends: str, gradients: bool = False) -> pytest.MarkDecorator:
    chosen = [r for r in rows(*backends) if r.has_gradients or not gradients]
    params = [pytest.param(r, d, id=f"{r.id}-{short_dtype(d)}") for r in chosen for d in r.dtypes]
    return pytest.mark.parametrize(("row", "dtype"), params)


@contextmanager
def cpu_setting(instruction_set: str, threads: int) -> Iterator[None]:
    """In this block, native CPU kernels use `instruction_set`, and torch uses `threads` threads."""
    chosen, before = extension.build_info()["instruction_set"], torch.get_num_threads()
    extension._C.force_instruction_set(instruction_set)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        extension._C.force_instruction_set(chosen)
        torch.set_num_threads(before)


def _every_case() -> Iterator[object]:
    """Without the cases that only repeat emulated code. Those on compute capability 9.0 come first."""
    for row in (*hopper_rows(), *checked_rows()):
        for dtype in row.dtypes:
            for case in (c for c in row.cases if slow.representative(row, dtype, c)):
                if row.op.cases.why_not(case, row.backend, row.device, dtype) is not None:
                    continue
                yield pytest.param(row, dtype, case, id=f"{row.id}-{short_dtype(dtype)}-{case.id}")


over_cases = pytest.mark.parametrize(("row", "dtype", "case"), list(_every_case()))


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that autograd saves for a backward pass."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield saved


class Allocations(TorchDispatchMode):
    """Watches operators: `largest` is the number of elements of the largest new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given]
        self.largest = max([self.largest, *(t.numel() for t in made)])
        return out
