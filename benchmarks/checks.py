"""Checks that a row computes the same as the reference, with the row's own shape and inputs: all rows of the result or
a sample, outputs and, if gradients are timed, gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.calls import copied
from benchmarks.suite import DEVICE, LIMITS, OURS, Group
from foundry_kernels.testing import Expected, Result

#: The largest RMS error of a peer, relative to the result. Peers need not be as exact as this package.
_SAME = {torch.float32: 1e-3}
_SAME_LOW = 0.05


#: The last group's expected results: the next group has the same inputs if it is another direction or state of memory.
_latest: dict[tuple[object, ...], Expected] = {}


class Check:
    """The reference's results for a group's arguments, or for a sample of their rows, in their dtype and in float64.

    Both are computed on the device of the arguments. A contender computes all rows. With a sample, the other rows'
    gradients are 0, or these rows are not part of the loss.
    """

    def __init__(self, group: Group, args: dict[str, Tensor | None]) -> None:
        self.group, self.args, self.sample = group, args, group.bench.sample(group.case)
        given = {n: copied(t) for n, t in args.items()}
        if self.sample is not None:
            whole = {n: t for n, t in args.items() if t is not None and n in self.sample.dims}
            self.rows = self.sample.rows.to(next(iter(whole.values())).device)
            for name, t in whole.items():
                chosen = t.detach().index_select(self.sample.dims[name], self.rows)
                given[name] = chosen.requires_grad_(t.requires_grad)
                if (ignored := self.sample.ignored.get(name)) is not None:
                    rest = torch.full_like(t, ignored)
                    self.args = {**self.args, name: rest.index_copy_(self.sample.dims[name], self.rows, chosen)}
        key = (group.op.name, group.case.id, group.dtype)
        case = group.case
        if self.sample is not None:
            case = replace(case, options={**case.options, **self.sample.options})
        made = _latest.get(key) or Expected.of(group.op, case, group.dtype, args=given, drawn_on=DEVICE)
        _latest.clear()
        _latest[key] = self.expected = made
        if group.direction == "forward":
            reference, oracle = (
                Result(tuple(o.detach() for o in r.outputs), {}) for r in (made.reference, made.oracle)
            )
            self.expected = replace(made, reference=reference, oracle=oracle)

    def wrong(self, name: str) -> str | None:
        """Returns how a row's result differs from the reference, or None. This package's rows must pass the parity
        policy. A peer must compute the same, unless it draws other elements for dropout."""
        if name in (*LIMITS, "reference", *self.group.bench.UNCHECKED) or (
            name not in OURS and self.group.case.options.get("dropout_p")
        ):
            return None
        try:
            actual = self._result(name)
            if name in OURS:
                self.expected.hold(actual)
            else:
                self._hold_peer(actual)
        except AssertionError as error:
            return str(error)
        return None

    def _result(self, name: str) -> Result:
        args = {n: copied(t) for n, t in self.args.items()}  # a peer may overwrite its arguments
        if self.group.direction == "forward":  # FlexAttention on a CPU does not support tensors that require gradients
            args = {n: t if t is None else t.detach() for n, t in args.items()}
        with torch.set_grad_enabled(self.group.direction != "forward"):
            made = self.group.function(name)(**args)
        written = tuple(args[n] for n in self.group.op.cases.MUTATED.get(self.group.op.name, ()))
        outputs = (*(made if isinstance(made, tuple) else (made,)), *(t for t in written if t is not None))
        expected = self.expected.reference.outputs
        assert len(outputs) == len(expected), f"{len(outputs)} outputs, expected {len(expected)}"
        found = Result(tuple(self._of_sample(o) for o in outputs), {})
        if self.group.direction == "forward":
            return found
        incoming = [self._into_whole(c, o) for c, o in zip(self.expected.cotangents, outputs, strict=True)]
        wanted = {n: t for n, t in args.items() if t is not None and t.requires_grad}
        learning = [(o, c) for o, c in zip(outputs, incoming, strict=True) if o.requires_grad]
        grads = torch.autograd.grad([o for o, _ in learning], list(wanted.values()), [c for _, c in learning])
        for n, grad in zip(wanted, grads, strict=True):
            if self.sample is not None and n in self.sample.dims:
                dim = self.sample.dims[n]
                found.grads[n] = grad.index_select(dim, self.rows)
                rest = int(grad.count_nonzero()) - int(found.grads[n].count_nonzero())
                assert rest == 0, f"gradient of {n}: {rest} values are not 0 in rows that no gradient flows into"
            else:
                found.grads[n] = grad
        return found

    def _of_sample(self, output: Tensor) -> Tensor:
        dim = self._dim(output)
        return output if dim is None else output.index_select(dim, self.rows)

    def _into_whole(self, cotangent: Tensor, output: Tensor) -> Tensor:
        dim = self._dim(output)
        return cotangent if dim is None else torch.zeros_like(output).index_copy_(dim, self.rows, cotangent)

    def _dim(self, output: Tensor) -> int | None:
        """Returns the dimension of an output's rows; None for a sum."""
        if self.sample is None:
            return None
        name, dim = next(iter(self.sample.dims.items()))
        like = self.args[name]
        assert like is not None
        return dim if output.dim() == like.dim() else None

    def _hold_peer(self, actual: Result) -> None:
        oracle, limit = self.expected.oracle.items(), _SAME.get(self.group.dtype, _SAME_LOW)
        for name, a in actual.items().items():
            o = oracle[name]
            assert a.shape == o.shape, f"{name}: shape {tuple(a.shape)}, expected {tuple(o.shape)}"
            error, size = (float(t.detach().square().mean().sqrt()) for t in (a.double() - o, o))
            assert error <= limit * size, (
                f"{name} is not the reference's: root mean square error {error:.2e} of {size:.2e}"
            )
