"""Parts of a batch: the dimension along which the work of an operation falls into parts, and calls for some of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from table import Row
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.testing import Case


def options_for(row: Row, case: Case) -> dict[str, Any]:
    """The case's options, each row of the result by itself, and batch-invariant."""
    known = inspect.signature(row.op.public).parameters
    wanted = {"batch_invariant": True, "reduction": "none", "return_token_accuracy": False}
    return dict(case.options) | {name: value for name, value in wanted.items() if name in known}


def batch_dims(row: Row, case: Case, options: dict[str, Any]) -> dict[str, int] | None:
    """The dimension of each tensor along which the work falls into independent parts, where the case has one of at
    least 2; None where it has none, or where a part depends on its place, as with dropout and score functions."""
    from foundry_kernels.distributed.sharding import expand

    given = {name: arg for name, arg in case.args.items() if arg is not None}
    mask = options.get("attn_mask")
    by_place = options.get("dropout_p") or options.get("score_mod") or options.get("chunk_size") == "tiles"
    if row.op.sharding is None or by_place or (isinstance(mask, fk.AttentionMask) and mask.shape[0] > 1):
        return None
    made = {name: torch.empty(arg.shape, device="meta") for name, arg in given.items()}
    try:
        letters, over = row.op.sharding.sharding(made | options)
    except NotImplementedError:  # of an operation that takes plain tensors alone
        return None
    letter = next((x for x in ("b", "t") if x in over and x in "".join(letters.values())), "0" if "..." in over else "")
    found = {}
    for name, arg in given.items():
        if name not in letters or (len(arg.shape) != len(letters[name]) and "..." not in letters[name]):
            return None  # a weight of several dimensions
        dims = expand(letters[name], len(arg.shape))
        if letter and letter in dims:
            found[name] = dims.index(letter)
    sizes = {given[name].shape[at] for name, at in found.items()}
    return found if len(sizes) == 1 and min(sizes) > 1 and 0 not in next(iter(given.values())).shape else None


def part_of(args: dict[str, Tensor | None], dims: dict[str, int], index: Tensor) -> dict[str, Tensor | None]:
    """The arguments of these parts of the batch, in this order."""
    found: dict[str, Tensor | None] = {}
    for name, x in args.items():
        if x is not None and name in dims:
            found[name] = x.detach().index_select(dims[name], index).requires_grad_(x.requires_grad)
        else:
            found[name] = None if x is None else x.detach().clone().requires_grad_(x.requires_grad)
    return found
