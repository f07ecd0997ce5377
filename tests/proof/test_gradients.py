"""Gradients belong to whoever asked for them: what is written into one reaches no other tensor and no later pass."""

from __future__ import annotations

from functools import partial

import torch
from table import Row, over_rows, saved_tensors
from torch import Tensor

from foundry_kernels.testing import call, make_cotangents


def place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@over_rows("reference", "triton", "native", gradients=True, sampled=("triton",))
def test_gradients_share_no_memory(row: Row) -> None:
    """Not with inputs, outputs, what was saved or what flows in; so a second pass through the graph gives the same.

    In float32, in which nothing has to be copied to be rounded.
    """
    cases = [c for c in row.few_cases if any(a is not None and a.grad for a in c.args.values())]
    for case in cases:
        args = case.make(torch.float32, row.device)
        wanted = {k: t for k, t in args.items() if t is not None and t.requires_grad}
        with saved_tensors() as saved:
            outputs = [o for o in call(row.op, args, case.options, backend=row.backend) if o.requires_grad]
        leaves = list(wanted.values())
        # Ones: by which nothing has to be multiplied.
        for cotangents in (make_cotangents(tuple(outputs), case.cotangent), tuple(map(torch.ones_like, outputs))):
            backward = partial(torch.autograd.grad, outputs, leaves, cotangents, retain_graph=True, allow_unused=True)
            first = backward()
            kept = [None if g is None else g.clone() for g in first]
            others = {place(t) for t in (*args.values(), *outputs, *saved, *cotangents) if t is not None and t.numel()}
            for name, gradient in zip(wanted, first, strict=True):
                passed_on = (row.op.name, name) == ("lora_linear", "base")  # what flows in, as in an addition
                if gradient is not None and gradient.numel() and not passed_on:
                    assert place(gradient) not in others, f"{case.id}: the gradient of {name}"
                    gradient.fill_(torch.nan)
            for again, before in zip(backward(), kept, strict=True):
                assert (again is None) == (before is None), case.id
                assert again is None or before is None or torch.equal(again, before), case.id
