"""Tokens whose target is ignored, of every registered loss: whatever their logits or hidden states hold, and the
gradients of their results, they change no bit of another result or gradient, and their own are 0."""

from __future__ import annotations

import inspect
import math
from itertools import product

import pytest
import torch
from table import Row, checked_rows, rows
from torch import Tensor

from foundry_kernels.testing import Case
from foundry_kernels.testing.policy import call, make_cotangents
from foundry_kernels.tools.check import numel

ROWS = [r for r in (*rows("reference"), *checked_rows()) if "ignore_index" in inspect.signature(r.op.public).parameters]


def step(row: Row, case: Case, stride: int, value: float, gradient: float) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """All results and gradients; of these the ones by token; and which tokens are ignored: one in `stride` is, besides
    those of the case. Its arguments hold `value`, and the gradients of its results are `gradient`."""
    args, index = case.make(torch.float32, row.device), case.options.get("ignore_index", -100)
    shape = next(x for x in args.values() if x is not None).shape[:-1]
    target = args.get("target")
    target = torch.zeros(shape, dtype=torch.int64, device=row.device) if target is None else target.clone()
    target.view(-1)[::stride] = index
    args["target"], ignored = target, target == index
    by_token = [name for name, x in args.items() if x is not None and x.shape[:-1] == shape and "weight" not in name]
    for name in by_token:
        x = args[name]
        assert x is not None
        fill = value if x.is_floating_point() else -7  # which is no class
        args[name] = x.detach().masked_fill(ignored.unsqueeze(-1), fill).requires_grad_(x.requires_grad)
    results = call(row.op, args, case.options, backend=row.backend)
    leaves = {name: x for name, x in args.items() if x is not None and x.requires_grad}
    differentiable = tuple(x for x in results if x.requires_grad)
    made = make_cotangents(differentiable, "contiguous")
    cotangents = [each.masked_fill(ignored, gradient) if each.dim() else each for each in made]
    gradients = torch.autograd.grad(differentiable, list(leaves.values()), cotangents)
    of_tokens = [x for x in results if x.shape == shape]
    of_tokens += [x for name, x in zip(leaves, gradients, strict=True) if name in by_token]
    return [*results, *gradients], of_tokens, ignored


def cases_of(row: Row) -> list[Case]:
    """In emulation the smallest case of each reduction, and of each direction or kind of chunks."""
    if row.backend != "triton" and not row.cuda_on_cpu:
        return list(row.small_cases)
    found: dict[object, Case] = {}
    for case in sorted(row.small_cases, key=numel):
        chunks = type(case.options.get("chunk_size")) if "hidden" in case.args else case.options.get("direction")
        if next(iter(case.args.values())).shape[0] > 3:
            found.setdefault((case.options.get("reduction"), chunks), case)
    return list(found.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_ignored_tokens(row: Row) -> None:
    for case, stride in product(cases_of(row), (3, 1)):
        found, of_tokens, ignored = step(row, case, stride, math.nan, math.inf)
        expected = step(row, case, stride, 0.0, 0.0)[0]
        assert all(map(torch.equal, found, expected)), case.id
        for x in of_tokens:
            assert (x[ignored] == (0.0 if x.is_floating_point() else -1)).all(), case.id  # -1: no prediction
