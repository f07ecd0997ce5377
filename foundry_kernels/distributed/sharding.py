"""DTensor rules: how the operators of the kernels run on tensors that are sharded over devices.

The `sharding` module of an operation names the dimensions of its tensors by letters, and the letters along which the
work may be sharded. Each such letter gives a rule: a tensor with the letter is sharded along it, an input without it is
replicated, and a gradient that lacks it is a partial sum. So an activation that is sharded along such a dimension is
never gathered, and a weight's gradient stays a partial sum until it is read.

The rules are registered when this module is imported: by the first call with a tensor that may be a DTensor
(`foundry_kernels.core.registry.resolve`), since torch.distributed.tensor takes half a second to import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from foundry_kernels.core.contract import Dims, Options
from foundry_kernels.core.registry import OPS

#: `sharding(args)` of an operation's `sharding` module, for the arguments of one call by name.
Rule = Callable[[Options], Dims]

#: One strategy of running an operator on one dimension of a mesh: the placements of its outputs and of its arguments
#: (None for an argument that is no tensor).
Strategy = tuple[list[Placement], list[Placement | None]]


def expand(dims: str, rank: int) -> tuple[str, ...]:
    """Returns the letters of a tensor's dimensions; "..." stands for all that are not named: "...n", 3 -> ("0", "1",
    "n")."""
    before, dots, after = dims.partition("...")
    named = len(before) + len(after)
    if rank < named or (rank > named and not dots):
        raise ValueError(f"a tensor of dimensions {dims!r} cannot have rank {rank}")
    return (*before, *map(str, range(rank - named)), *after)


def letters(dims: Mapping[str, str], name: str, rank: int) -> tuple[str, ...]:
    """Returns the letters of the tensor `name`; a gradient "dx" has those of "x"."""
    known = dims.get(name) or dims.get(name.removeprefix("d"))
    if known is None:
        raise KeyError(f"no dimensions are known of {name!r}")
    return expand(known, rank)


def strategies(op: torch._ops.OpOverload, rule: Rule, given: Sequence[Any]) -> list[Strategy]:
    """Returns all strategies for running `op` on arguments whose tensors are DTensor specs: replicated or sharded.

    A tensor of shape ``[0]`` represents an absent one, and is always replicated.
    """
    names = [argument.name for argument in op._schema.arguments]
    given = [*given, *(argument.default_value for argument in op._schema.arguments[len(given) :])]
    args = dict(zip(names, given, strict=True))
    tensors = {name: value for name, value in args.items() if _is_spec(value)}
    dims, over = rule(args)
    inputs = {n: letters(dims, n, t.ndim) if tuple(t.shape) != (0,) else () for n, t in tensors.items()}
    outputs = _outputs(op, dims, given)
    longest = max((len(found) for found in inputs.values()), default=0)
    divisible = [*over.replace("...", ""), *(map(str, range(longest)) if "..." in over else ())]

    def place(found: tuple[str, ...] | None, letter: str, otherwise: Placement) -> Placement:
        if found is None or not letter:
            return Replicate()
        return Shard(found.index(letter)) if letter in found else otherwise

    found: list[Strategy] = []
    for letter in ("", *divisible):
        if letter and not (_splits(letter, tensors, inputs) and _sums(letter, op, outputs)):
            continue
        found.append(
            (
                [place(found, letter, Partial()) for found in outputs],
                [
                    place(inputs[n], letter, Replicate()) if n in inputs else one
                    for n in names
                    for one in ([Replicate()] * len(args[n]) if _are_specs(args[n]) else [None])
                ],
            )
        )
    return found


def _is_spec(value: Any) -> bool:
    return hasattr(value, "placements") and hasattr(value, "tensor_meta")


def _are_specs(value: Any) -> bool:
    """Whether the value is a list of tensors, which are the same on all devices."""
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(_is_spec(x) for x in value)


def _fake(value: Any) -> Any:
    if _are_specs(value):
        return [_fake(x) for x in value]
    return torch.empty(value.shape, dtype=value.tensor_meta.dtype, device="meta") if _is_spec(value) else value


def _outputs(op: torch._ops.OpOverload, dims: Mapping[str, str], given: Sequence[Any]) -> list[tuple[str, ...] | None]:
    """Returns the letters of each output; None for an output that was not asked for, which is an empty tensor."""
    fakes = op(*map(_fake, given))
    fakes = fakes if isinstance(fakes, tuple) else (fakes,)
    found: list[tuple[str, ...] | None] = []
    for fake, output in zip(fakes, op._schema.returns, strict=True):
        found.append(None if tuple(fake.shape) == (0,) else letters(dims, output.name or "y", fake.dim()))
    return found


def _splits(letter: str, tensors: Mapping[str, Any], inputs: Mapping[str, tuple[str, ...]]) -> bool:
    """Returns whether the shards along `letter` match on each device. If sizes differ (several query heads per
    key-value head), they match only if every size is divisible."""
    sizes, split_by = set(), set()
    for name, spec in tensors.items():
        if letter in inputs[name]:
            axis = inputs[name].index(letter)
            sizes.add(spec.shape[axis])
            split_by |= {i for i, placement in enumerate(spec.placements) if placement.is_shard(axis)}
            mesh = spec.mesh
    if not sizes:
        return False
    devices = math.prod(mesh.size(i) for i in split_by)
    return len(sizes) == 1 or all(size % devices == 0 for size in sizes)


def _sums(letter: str, op: torch._ops.OpOverload, outputs: Sequence[tuple[str, ...] | None]) -> bool:
    """Returns whether every output that lacks `letter` is a sum over it, as a gradient is and nothing else."""
    named = zip(op._schema.returns, outputs, strict=True)
    return all(found is None or letter in found or (out.name or "y").startswith("d") for out, found in named)


def _register(op: torch._ops.OpOverload, rule: Rule) -> None:
    register_sharding(op)(lambda *given: strategies(op, rule, given))
    # Other arguments than tensors matter too: which tensors are absent, and which outputs are requested.
    # `register_sharding` caches by integers only, and would return an earlier call's outputs for a later call.
    lists = any("List" in str(argument.type) for argument in op._schema.arguments)
    info = RuntimeSchemaInfo(0, needs_pytree=lists)  # without which DTensor sees no tensors in lists
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = info


def composed(name: str) -> bool:
    """Returns whether the operator of this package called `name` is composed of other operators."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"foundry_kernels::{name}", key))


def operators() -> dict[torch._ops.OpOverload, Rule]:
    """Returns every operator of a kernel that exists in this process, with the rule of its operation; an operation
    without a `sharding` module has none."""
    found: dict[torch._ops.OpOverload, Rule] = {}
    for spec in OPS.values():
        if (module := spec.sharding) is None:
            continue
        for name in module.OPERATORS:
            for prefix in ("", "triton_", "reference_"):
                # An operator that is composed of others is taken apart before DTensor sees it.
                if hasattr(torch.ops.foundry_kernels, prefix + name) and not composed(prefix + name):
                    found[getattr(torch.ops.foundry_kernels, prefix + name).default] = module.sharding
    return found


for _op, _rule in operators().items():
    _register(_op, _rule)
