"""Measures the work of a computation from shapes: with tensors on the meta device, nothing is computed, but each
operator's reads, writes and multiplications are counted. A requested floating-point number is 0, a comparison of
tensors is true, and a mask selects everything."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class Meter(TorchDispatchMode):
    """operations: those of matmuls, by dtype. moved: bytes read and written by operators that allocate memory or write
    to it. launches: the number of these operators. on_cpu: elements of tensors created on the CPU. peak: the maximum
    bytes of new tensors at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[torch.dtype, int] = {}
        self.moved = self.launches = self.on_cpu = self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        found = self._instead(func, args) if any(x.is_meta for x in given) else None
        made = func(*args, **(kwargs or {})) if found is None else found
        outputs = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.on_cpu += sum(x.numel() for x in outputs if x.device.type == "cpu")
        if func.is_view or not any(x.is_meta for x in given + outputs):
            return made
        self.launches += 1
        self.moved += sum(x.untyped_storage().nbytes() if 0 in x.stride() else x.nbytes for x in given + outputs)
        if func in _PRODUCTS:
            a, b = given[-2:]
            dtype, rows = a.dtype, math.prod(a.shape)
            self.operations[dtype] = self.operations.get(dtype, 0) + 2 * rows * b.shape[-1]
        self._count(outputs)
        return made

    def _instead(self, func: Any, args: Any) -> Any:
        """Returns a result for operators that depend on values, and None for others."""
        if func is aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 1
        if func in (aten.equal.default, aten.is_nonzero.default):
            return True
        if func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            return args[0].reshape(-1).clone()
        return None

    def _count(self, outputs: list[Tensor]) -> None:
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        for x in outputs:
            if x.is_meta:
                storage = x.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))


_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
