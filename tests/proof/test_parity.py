"""Every kernel against its reference, over the whole registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slow import cover, options_of, representative
from table import Row, over_cases, over_dtypes, over_rows, rows, saved_tensors
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_kernels.testing import (
    Case,
    call,
    compare,
    make_cotangents,
    run,
    to_float64,
)
from foundry_kernels.testing.policy import Expected
from foundry_kernels.tools.check import numel


def test_some_kernel_is_tested() -> None:
    """An extension that failed to build must not leave a green suite with nothing in it."""
    assert {r.backend for r in rows()} == {"triton", "native"}


@over_cases
@pytest.mark.usefixtures("poisoned")
def test_parity(row: Row, dtype: torch.dtype, case: Case) -> None:
    """Outputs and gradients are as exact as the reference's and have its strides; inputs are not modified in place."""
    expected = Expected.of(row.op, case, dtype, row.device)
    outputs = expected.check(row.backend).outputs
    for i, (a, e) in enumerate(zip(outputs, expected.reference.outputs, strict=True)):
        assert a.stride() == e.stride() or a.numel() == 0, f"output {i} has strides {a.stride()}, expected {e.stride()}"


@over_dtypes(gradients=True)
@pytest.mark.parametrize("part", ["few", "small", "others"])
def test_two_backwards_through_one_graph_are_bit_equal(row: Row, dtype: torch.dtype, part: str) -> None:
    """A few of the small cases, one for each set of options and layouts; the others of these; and all others. Of these
    two, emulated kernels, whose code is the same for all dtypes, have a selection in all dtypes but one."""
    small = {case.id for case in row.small_cases}
    number = 2 if row.backend == "triton" else 4
    few = {case.id for case in sorted(row.small_cases, key=numel)[:: max(1, len(small) // number)]}
    for case in row.cases:
        if part != ("few" if case.id in few else "small" if case.id in small else "others"):
            continue
        if part != "few" and not representative(row, dtype, case):
            continue
        args = case.make(dtype, row.device)
        wanted = [t for t in args.values() if t is not None and t.requires_grad]
        if not wanted:  # of what is for inference
            continue
        outputs = [o for o in call(row.op, args, case.options, backend=row.backend) if o.requires_grad]
        cotangents = make_cotangents(tuple(outputs), case.cotangent)
        kept = [c.clone() for c in cotangents]
        first = torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
        for a, b in zip(first, second, strict=True):
            assert (a is None and b is None) or torch.equal(a, b), case.id
        assert all(map(torch.equal, cotangents, kept)), f"{case.id}: an incoming gradient was modified in place"


class _Recorder(TorchDispatchMode):
    """Keeps the calls of this package's operators: what opcheck should try, and what was allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], tuple[Tensor, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "foundry_kernels":
            self.calls.append((func, args, () if out is None else out if isinstance(out, tuple) else (out,)))
        return out


class _EntryRecorder(TorchFunctionMode):
    """Keeps the calls of this package's operators that autograd sees, with the tensors that require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = isinstance(func, torch._ops.OpOverload) and func.namespace == "foundry_kernels"
        if ours and torch.is_grad_enabled():
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@over_dtypes()
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize(
    "cases", [slice(0, 1), pytest.param(slice(1, 8), marks=pytest.mark.slow)], ids=["one", "seven"]
)
def test_opcheck(row: Row, dtype: torch.dtype, requires_grad: bool, cases: slice) -> None:
    """Schema, fakes, autograd registration and ahead-of-time dispatch of every operator that a call reaches."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for case in row.small_cases[cases]:
        args = case.make(dtype, row.device)
        with _EntryRecorder() as entries, _Recorder() as inner:
            if requires_grad:
                cotangents = make_cotangents(call(row.op, args, case.options, backend=row.backend), case.cotangent)
                run(row.op, args, case.options, cotangents, backend=row.backend)
            else:
                with torch.no_grad():
                    call(row.op, args, case.options, backend=row.backend)
        calls += [(f, tuple(a.detach() if isinstance(a, Tensor) else a for a in given)) for f, given, _ in inner.calls]
        calls += entries.calls
    assert calls or not row.small_cases[cases]
    thorough: set[Any] = set()
    seen: set[Any] = set()
    for func, given in calls:
        key = (func, str([(a.requires_grad, a.is_contiguous()) if isinstance(a, Tensor) else a for a in given]))
        if key not in seen:
            light = ("test_schema", "test_faketensor", "test_autograd_registration")
            torch.library.opcheck(
                func, given, test_utils=light if func in thorough else (*light, "test_aot_dispatch_dynamic")
            )
            thorough.add(func)
            seen.add(key)


@over_rows()
def test_nothing_is_kept_without_gradients(row: Row) -> None:
    """Under no_grad an operator returns what the caller gets and nothing more: no rstd, no log-sum-exp."""
    for case in row.few_cases:
        args = case.make(row.dtypes[0], row.device)
        with torch.no_grad(), saved_tensors() as saved, _Recorder() as recorder:
            outputs = call(row.op, args, case.options, backend=row.backend)
        returned = sum(t.numel() for _, _, out in recorder.calls for t in out)
        assert not saved
        wanted = sum(t.numel() for t in outputs)
        if case.options.get("token_scaling"):  # made of each token's loss, z-loss and log-sum-exp
            wanted = max(wanted, *(3 * t.numel() for t in args.values() if t is not None and t.dtype == torch.int64))
        if row.op.name == "kl_div" and (logits := args["logits"]) is not None:  # PyTorch sums the losses of the tokens
            wanted = max(wanted, logits.numel() // logits.shape[-1])
        if row.op.name == "lora_linear":  # composed of operators: x A^T, r wide, is a result of the first
            wanted += row.op.cases.SAVED[row.op.name].more(args, case.options)  # type: ignore[misc]
        assert returned <= wanted, case.id


@over_rows(gradients=True)
def test_a_second_derivative_is_refused(row: Row) -> None:
    """A backward pass of our own cannot be differentiated; create_graph=True must not be answered with silence."""
    case = row.small_cases[0]
    args = case.make(torch.float32, row.device)
    outputs = call(row.op, args, case.options, backend=row.backend)
    wanted = [t for t in args.values() if t is not None and t.requires_grad]
    with pytest.raises(RuntimeError, match=r"no second derivative.*create_graph=True"):
        torch.autograd.grad(outputs, wanted, make_cotangents(outputs, "contiguous"), create_graph=True)


@over_rows()
def test_autocast(row: Row) -> None:
    """Inputs that bfloat16 can hold, in float32, under autocast: dtypes as the reference's, values as exact."""
    for case in row.few_cases:
        low = case.make(torch.bfloat16, row.device)
        args = {
            k: None if t is None else (t.detach().float() if t.dtype == torch.bfloat16 else t) for k, t in low.items()
        }
        oracle = call(row.op, to_float64(args), case.options, backend="reference")
        with torch.autocast(row.device, dtype=torch.bfloat16):
            reference = call(row.op, args, case.options, backend="reference")
            actual = call(row.op, args, case.options, backend=row.backend)
        for i, (a, r, o) in enumerate(zip(actual, reference, oracle, strict=True)):
            compare(f"{case.id} output {i}", a, r, o, 0.0)


@over_rows("reference", "triton", "native", gradients=True)
def test_gradcheck(row: Row) -> None:
    """Gradients against finite differences, in float64: the reference with each option, and Triton's kernels in the
    interpreter."""
    if torch.float64 not in row.dtypes:
        pytest.skip(f"{row.backend} has no float64")
    interpreted = row.backend == "triton"
    cases = [c for c in row.cases if any(a is not None and a.grad for a in c.args.values())]
    small = {c.id: c for c in cases if 0 < numel(c) <= (60 if interpreted else 400)}
    assert small
    chosen = [*small][:1] if interpreted else cover([*small.values()], options_of)
    for case in map(small.__getitem__, chosen):
        args = {
            k: t if t is None or not t.requires_grad else t.detach().double().requires_grad_()
            for k, t in case.make(torch.float64, row.device).items()
        }
        wanted = [k for k, t in args.items() if t is not None and t.requires_grad]

        def function(
            *tensors: Tensor, args: dict = args, wanted: list = wanted, case: Case = case
        ) -> tuple[Tensor, ...]:
            replaced = args | dict(zip(wanted, tensors, strict=True))
            return call(row.op, replaced, case.options, backend=row.backend)

        if not all(y.isfinite().all() for y in function(*(args[k] for k in wanted))):
            continue  # a log-sum-exp of no keys
        assert torch.autograd.gradcheck(
            function, [args[k] for k in wanted], fast_mode=interpreted or numel(case) > 60
        ), case.id


def _written(row: Row, args: dict[str, Tensor | None]) -> list[Tensor | None]:
    """The arguments that a call overwrites, in `call`'s order."""
    return [args[name] for name in row.op.cases.MUTATED.get(row.op.name, ())]


@over_rows("reference", "native", slow=("reference", "native"), twins=False)
def test_compile_with_inductor(row: Row) -> None:
    """The default compiler, which generates and builds code around the operator. Quickly it compiles a module:
    test_compile.py."""
    case = row.small_cases[0]
    args = case.make(torch.float32, row.device)

    def scaled(**kwargs: Any) -> Any:
        out = row.op.public(**kwargs, **case.options, backend=row.backend)
        return tuple(o * 2 for o in out) if isinstance(out, tuple) else out * 2

    compiled = torch.compile(scaled, fullgraph=True)(**args)
    outputs = compiled if isinstance(compiled, tuple) else (compiled,)
    again = case.make(torch.float32, row.device)
    expected = call(row.op, again, case.options, backend=row.backend)
    for a, e in zip((*outputs, *(2 * t for t in _written(row, args))), expected, strict=True):
        torch.testing.assert_close(a, e * 2)


@over_rows()
def test_gradient_of_each_output_alone(row: Row) -> None:
    """The other outputs have no gradient then: none, and not a tensor of zeros."""
    for case in row.few_cases[::2]:
        args = case.make(torch.float32, row.device)
        wanted = [t for t in args.values() if t is not None and t.requires_grad]
        outputs = [call(row.op, args, case.options, backend=b) for b in (row.backend, "reference")]
        for index, (actual, expected) in enumerate(zip(*outputs, strict=True)):
            if len(outputs[0]) == 1 or not expected.requires_grad:
                continue
            cotangent = make_cotangents((expected.detach(),), "contiguous")
            found = [
                torch.autograd.grad(output, wanted, cotangent, allow_unused=True, retain_graph=True)
                for output in (actual, expected)
            ]
            for a, e, t in zip(*found, wanted, strict=True):
                a, e = (torch.zeros_like(t) if x is None else x for x in (a, e))
                torch.testing.assert_close(a, e, msg=lambda text, at=(case.id, index): f"{at}: {text}")
