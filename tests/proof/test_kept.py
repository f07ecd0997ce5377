"""What a forward pass keeps for the backward pass, and what that computes, over the registry: no more than the
operation says in its cases (`SAVED`), and nothing for an argument that takes no gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from table import Row, over_rows, saved_tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_kernels.core.contract import Saved
from foundry_kernels.testing import Case, call, make_cotangents
from foundry_kernels.tools.check import numel


def cases_of(row: Row, most: int) -> list[Case]:
    """Those with gradients; in emulation few of them."""
    cases = [c for c in row.small_cases if any(a is not None and a.grad for a in c.args.values())]
    return cases if row.backend == "native" else sorted(cases, key=numel)[:most]


def place(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage().data_ptr(), x.storage_offset()


@over_rows(gradients=True)
def test_what_is_saved(row: Row) -> None:
    """In bfloat16, of which a kernel could keep copies in float32."""
    said = row.op.cases.SAVED.get(row.op.name, Saved())
    for case in cases_of(row, 2):
        args = case.make(torch.bfloat16, row.device)
        with saved_tensors() as saved:
            outputs = call(row.op, args, case.options, backend=row.backend)
        given = {name: x for name, x in args.items() if x is not None and x.numel()}
        names = {place(x): name for name, x in given.items()}
        names |= {place(x): f"output {i}" for i, x in enumerate(outputs) if x.numel()}
        assert len(names) == len(given) + sum(x.numel() > 0 for x in outputs), f"{case.id}: a result is an argument"
        found = {place(t): t for t in saved if t.numel()}
        kept = {names[at] for at in found if at in names}
        assert kept <= {*given, *(f"output {i}" for i in said.outputs)} - {*said.never}, f"{case.id}: {sorted(kept)}"
        others = [t for at, t in found.items() if at not in names]
        if any(tuple(t.shape) == tuple(given[n].shape) for t in others for n in said.gradients if n in given):
            allowed = sum(given[n].numel() for n in said.gradients if n in given)  # in place of all else
            assert not kept & {*said.gradients} or case.options.get("return_lse"), f"{case.id}: {sorted(kept)}"
        else:
            allowed = 0
        allowed += 0 if said.more is None else said.more(args, case.options)
        allowed += sum(n * math.prod(case.args[name].shape[:-1]) for name, n in said.per_row.items())  # type: ignore[union-attr]
        assert sum(t.numel() for t in others) <= allowed + 2, f"{case.id}: {[tuple(t.shape) for t in others]}"


class Made(TorchDispatchMode):
    """Counts the numbers in what operators of this package return."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "foundry_kernels":
            self.numbers += sum(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor))
        return out


@over_rows(gradients=True)
def test_one_gradient_alone(row: Row) -> None:
    """A backward pass makes no other gradient than what is wanted, and that is the one that it makes beside others."""
    said = row.op.cases.SAVED.get(row.op.name, Saved())
    for case in cases_of(row, 1)[:4]:
        args = case.make(torch.float32, row.device)
        wanted = [name for name, x in args.items() if x is not None and x.requires_grad]
        outputs = [o for o in call(row.op, args, case.options, backend=row.backend) if o.requires_grad]
        cotangents = make_cotangents(tuple(outputs), case.cotangent)
        leaves = [args[name] for name in wanted]
        whole = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        for name, expected in zip(wanted, whole, strict=True):
            if expected is None or (row.backend == "triton" and name not in (wanted[0], wanted[-1])):
                continue
            own = {k: x.detach().requires_grad_(k == name) if k in wanted else x for k, x in args.items()}  # type: ignore[union-attr]
            results = call(row.op, own, case.options, backend=row.backend)
            pairs = [(o, c) for o, c in zip([o for o in results if o.is_floating_point()], cotangents, strict=False)]
            pairs = [(o, c) for o, c in pairs if o.requires_grad and o.shape == c.shape]
            with Made() as made:
                (found,) = torch.autograd.grad([o for o, _ in pairs], [own[name]], [c for _, c in pairs])  # type: ignore[list-item]
            if len(pairs) == len(cotangents):
                torch.testing.assert_close(found, expected)
            on_the_way = 0 if said.made is None else said.made(args, case.options)
            assert made.numbers <= found.numel() + on_the_way + 2, (
                f"{case.id}: {made.numbers} numbers for the gradient of {name}"
            )
