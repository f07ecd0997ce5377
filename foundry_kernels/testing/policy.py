"""The tolerance policy, and the parity check of an operation against its reference.

The oracle is the reference in float64 on the same (already rounded) inputs. For an output or gradient `a` of an
implementation, and `r` that of the reference in the same low precision,

    max|a - oracle| <= 2   * max|r - oracle| + tiny
    rms(a - oracle) <= 1.1 * rms(r - oracle) + tiny

so that a kernel is as accurate as plain PyTorch. `tiny` makes the check robust where a result is small or cancels; see
`tiny`. There is no per-test tolerance.

The one exception: gradients that a kernel makes from its 16-bit output (`FROM_OUTPUT` of an operation's `cases`) carry
that output's rounding. Where a test asks for it (`of_its_output`), their oracle may be the gradient in float64 that
belongs to the output as the kernel rounded it, to which the same two lines apply; see docs/dev/proof.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.case import Case, generator_of, lay_out, storage
from foundry_kernels.core.registry import OpSpec, is_subclass, short_dtype

MAX_FACTOR, RMS_FACTOR = 2.0, 1.1
#: The error of the arithmetic (float32, or float64 for float64 inputs), relative to the summed terms.
ARITHMETIC = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6, torch.float64: 1e-12}


def tiny(dtype: torch.dtype, scale: float, numel: int) -> float:
    """The allowed absolute error at `scale`, the size of the summed terms.

    Besides the error of the arithmetic, a result with few elements is allowed a few roundings to its dtype, because the
    rounding of few values is random; it averages out as 1/sqrt(numel), where `numel` counts the nonzero elements.
    """
    rounding = 0.0 if dtype == torch.float64 else torch.finfo(dtype).eps / math.sqrt(max(numel, 1))
    return scale * (ARITHMETIC[dtype] + rounding) + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


@dataclass
class Result:
    """The outputs of a call and the gradients of the arguments that require them."""

    outputs: tuple[Tensor, ...]
    grads: dict[str, Tensor]

    def items(self) -> dict[str, Tensor]:
        named = {f"output {i}": t for i, t in enumerate(self.outputs)}
        return named | {f"gradient of {k}": v for k, v in self.grads.items()}


def options_on(device: torch.device | str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a case, with those that hold tensors (an `AttentionMask`) on the device."""
    return {name: x.to(device) if hasattr(x, "to") else x for name, x in options.items()}


def call(
    op: OpSpec, args: Mapping[str, Tensor | None], options: Mapping[str, Any], *, backend: str
) -> tuple[Tensor, ...]:
    """The op's public function, its result always a tuple. Arguments that it overwrites are copied before, and are
    further results."""
    written = {name: copy_of(args[name]) for name in op.cases.MUTATED.get(op.name, ())}
    result = op.public(**{**args, **written}, **options_on(device_of(args), options), backend=backend)
    return (*(result if isinstance(result, tuple) else (result,)), *written.values())


def copy_of(x: Tensor | None) -> Tensor:
    """A copy with x's strides, in memory of its own; of a DTensor, one that is laid out as it likes."""
    assert x is not None
    if is_subclass(x):
        return x.detach().clone()
    return storage(x).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def device_of(args: Mapping[str, Tensor | None]) -> torch.device:
    """The device of the arguments, which all are on one."""
    return next((x.device for x in args.values() if x is not None), torch.device("cpu"))


def run(
    op: OpSpec,
    args: Mapping[str, Tensor | None],
    options: Mapping[str, Any],
    cotangents: tuple[Tensor, ...] | None = None,
    *,
    backend: str,
    retain_graph: bool = False,
) -> Result:
    """Forward, and backward from `cotangents` where they are given."""
    outputs = call(op, args, options, backend=backend)
    return Result(outputs, {} if cotangents is None else _gradients(outputs, args, cotangents, retain_graph))


def _gradients(
    outputs: tuple[Tensor, ...],
    args: Mapping[str, Tensor | None],
    cotangents: tuple[Tensor, ...],
    retain_graph: bool = False,
) -> dict[str, Tensor]:
    """The gradients of the arguments that require them and on which the outputs depend."""
    wanted = {k: v for k, v in args.items() if v is not None and v.requires_grad}
    if not wanted:
        return {}
    paired = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    grads = torch.autograd.grad(
        [o for o, _ in paired],
        list(wanted.values()),
        [c for _, c in paired],
        retain_graph=retain_graph,
        allow_unused=True,
    )
    return {k: g for k, g in zip(wanted, grads, strict=True) if g is not None}


def make_cotangents(
    outputs: tuple[Tensor, ...], layout: str, seed: int = 1, drawn_on: str = "cpu"
) -> tuple[Tensor, ...]:
    """Random normal gradients for `outputs`, in their dtypes; drawn_on: see `Case.make`."""
    generator = generator_of(drawn_on, seed)
    drawn = [torch.randn(o.shape, generator=generator, dtype=torch.float64, device=drawn_on) for o in outputs]
    return tuple(lay_out(d.to(o.dtype).to(o.device), layout) for d, o in zip(drawn, outputs, strict=True))


def to_float64(args: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Arguments of the oracle: floating-point tensors in float64, detached, with the same `requires_grad`."""

    def convert(t: Tensor | None) -> Tensor | None:
        if t is None or not t.is_floating_point():
            return t
        return t.detach().double().requires_grad_(t.requires_grad)

    return {k: convert(t) for k, t in args.items()}


def detached(args: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The arguments that `scales` of an operation takes."""
    return {name: x if x is None else x.detach() for name, x in args.items()}


def compare(
    name: str,
    actual: Tensor,
    reference: Tensor,
    oracle: Tensor,
    scale: float,
    roundings: tuple[torch.dtype, int] | None = None,
    of_its_output: Tensor | None = None,
) -> None:
    """Asserts the policy for one tensor; the error says by how much it fails. Infinities must agree exactly.

    roundings: the dtype and number of those that decide how exact the tensor is, if not its own.
    of_its_output: a second oracle; the nearer one is that of `actual`.
    """
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}"
    assert actual.dtype == reference.dtype, f"{name}: dtype {actual.dtype}, expected {reference.dtype}"
    if actual.numel() == 0:
        return
    if not actual.is_floating_point():  # indices, of which there is no nearly
        assert torch.equal(actual, oracle), f"{name}: {int((actual != oracle).sum())} values differ"
        return
    a, r, o = (t.detach().double() for t in (actual, reference, oracle))
    finite = o.isfinite() & r.isfinite()
    if not finite.all():  # choosing elements takes more memory than they do
        assert torch.equal(a[~finite].nan_to_num(nan=7e77), r[~finite].nan_to_num(nan=7e77)), (
            f"{name}: differs where infinite"
        )
        a, r, o = a[finite], r[finite], o[finite]
        of_its_output = of_its_output if of_its_output is None else of_its_output[finite]
    del finite
    assert a.isfinite().all(), f"{name}: {int((~a.isfinite()).sum())} values are not finite"
    if o.numel() == 0:
        return
    # Elements that are 0 by construction (the gradient of a query that sees no key) do not count as samples.
    low, count = roundings or (actual.dtype, actual.numel())
    allowed = tiny(low, max(scale, _largest(o)), min(count, int((o != 0).sum())))
    error, base = a - o, r - o
    if of_its_output is not None:
        error = min(error, a - of_its_output, key=lambda e: float(e.norm()))
    figures = (
        ("max", _largest(error), MAX_FACTOR, _largest(base)),
        ("rms", float(error.square().mean().sqrt()), RMS_FACTOR, float(base.square().mean().sqrt())),
    )
    for kind, got, factor, of_reference in figures:
        assert got <= factor * of_reference + allowed, (
            f"{name} ({short_dtype(actual.dtype)}): {kind} error {got:.3e} exceeds "
            f"{factor} x the reference's {of_reference:.3e} + {allowed:.3e}"
        )


def _largest(x: Tensor) -> float:
    """Returns the largest absolute value, without a tensor of all."""
    return float(torch.linalg.vector_norm(x, math.inf))


@contextmanager
def untouched(tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Asserts that the block modifies neither `tensors` nor the memory between their elements."""
    before = {k: (t, t._version, storage(t).clone()) for k, t in tensors.items() if t is not None}
    yield
    for name, (tensor, version, kept) in before.items():
        now = storage(tensor).view(torch.uint8)  # bytes: NaN equals NaN
        assert tensor._version == version, f"{name} was modified in place"
        assert torch.equal(now, kept.view(torch.uint8)), f"{name} was modified in place"


@dataclass
class Expected:
    """The arguments of a case, and the reference's results for them in their dtype and in float64, computed once for
    all kernels that are compared with it."""

    op: OpSpec
    case: Case
    dtype: torch.dtype
    args: dict[str, Tensor | None]
    cotangents: tuple[Tensor, ...]
    reference: Result
    oracle: Result
    scales: Mapping[str, float]

    @classmethod
    def of(
        cls,
        op: OpSpec,
        case: Case,
        dtype: torch.dtype,
        device: str = "cpu",
        args: dict[str, Tensor | None] | None = None,
        drawn_on: str = "cpu",
    ) -> Expected:
        """Computes, on the arguments' device, what is expected of the case's arguments, or of `args` with the case's
        options; drawn_on, of the gradients that flow in: see `Case.make`."""
        args = case.make(dtype, device) if args is None else args
        outputs = call(op, args, case.options, backend="reference")
        cotangents = make_cotangents(outputs, case.cotangent, drawn_on=drawn_on)
        reference = Result(outputs, _gradients(outputs, args, cotangents))
        args64 = to_float64(args)
        cotangents64 = tuple(c.double() for c in cotangents)
        oracle = run(op, args64, case.options, cotangents64, backend="reference")
        scales = op.cases.scales(detached(args64), options_on(device_of(args), case.options), cotangents64)
        return cls(op, case, dtype, args, cotangents, reference, oracle, scales)

    def _of_output(self, out: Tensor) -> dict[str, Tensor]:
        """Returns, in float64, the gradients that belong to `out` in place of the oracle's output, of `FROM_OUTPUT`."""
        cases, error = self.op.cases, out.detach().double() - self.oracle.outputs[0].detach()
        cotangents = tuple(c.double() for c in self.cotangents)
        call = cases.of_output(self.case.options, cotangents, error)
        grads = run(self.op, to_float64(self.args), *call, backend="reference").grads
        return {name: g for name, g in grads.items() if name in cases.FROM_OUTPUT}

    def check(self, backend: str, of_its_output: bool = False) -> Result:
        """Assert the policy for a backend's outputs and gradients, and that it modifies no input in place.

        of_its_output: gradients may be right for the output as the backend rounded it to 16 bits instead."""
        incoming = {f"incoming gradient {i}": c for i, c in enumerate(self.cotangents)}
        with untouched(self.args | incoming):
            actual = run(self.op, self.args, self.case.options, self.cotangents, backend=backend)
        self.hold(actual, of_its_output)
        return actual

    def hold(self, actual: Result, of_its_output: bool = False) -> None:
        """Assert the policy for outputs and gradients; of_its_output: see `check`."""
        for a, r in zip(actual.outputs, self.reference.outputs, strict=True):
            assert a.requires_grad == r.requires_grad, f"an output has requires_grad={a.requires_grad}"
        assert actual.grads.keys() == self.reference.grads.keys(), (
            f"gradients of {set(actual.grads)}, expected {set(self.reference.grads)}"
        )
        reference, oracle = self.reference.items(), self.oracle.items()
        roundings = (self.dtype, int((self.oracle.outputs[0] != 0).any(-1).sum()))
        low = of_its_output and self.op.cases.FROM_OUTPUT and self.dtype in (torch.bfloat16, torch.float16)
        second = self._of_output(actual.outputs[0]) if low else {}
        for name, tensor in actual.items().items():
            key = name.removeprefix("gradient of ")
            of_rows = roundings if key in self.op.cases.FROM_OUTPUT else None
            scale = float(self.scales.get(key, 0.0))
            compare(name, tensor, reference[name], oracle[name], scale, of_rows, second.get(key))


def assert_parity(
    op: OpSpec, case: Case, *, backend: str, dtype: torch.dtype, device: str = "cpu", of_its_output: bool = False
) -> Result:
    """Assert that `backend` is as exact as the reference on `case`, outputs and gradients, and modifies none of its
    inputs in place; returns its result. of_its_output: see `Expected.check`."""
    return Expected.of(op, case, dtype, device).check(backend, of_its_output)
