"""One call of an operation: its tensors, by shape, memory layout and values, and its options."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Values = Callable[[torch.Generator, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class _Normal:  # not a lambda: the repr of a failing case shows how its values were made
    std: float
    mean: float

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).mul_(self.std).add_(self.mean)


def normal(std: float = 1.0, mean: float = 0.0) -> Values:
    """Independent normal values."""
    return _Normal(std, mean)


@dataclass(frozen=True)
class _Uniform:
    bound: float

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return (torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1) * self.bound


def uniform(bound: float) -> Values:
    """Independent values between -bound and bound."""
    return _Uniform(bound)


@dataclass(frozen=True)
class _Alike:
    dim: int

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        one = (*shape[: self.dim], min(shape[self.dim], 1), *shape[self.dim + 1 :])
        return torch.randn(one, generator=g, dtype=torch.float64).expand(shape)


def alike(dim: int) -> Values:
    """Normal values that are the same at all indices of dimension `dim`."""
    return _Alike(dim)


_NORMAL = normal()


@dataclass(frozen=True)
class Arg:
    """A tensor argument of a case.

    layout: how the shape lies in memory.
        "contiguous"; "swapped": dimensions 1 and 2 are exchanged in storage (a [B, H, T, D] view of [B, T, H, D]);
        "sliced": every row is part of a wider one; "offset": starts one element into its storage, so nothing is
        aligned; "expanded": one copy for dimension 0 (stride 0); "strided": the last dimension has stride 2;
        "random-N": the order of dimensions, the gaps in each and the start are drawn from the seed N.
    values: makes the values in float64 from a generator and the shape. Finite values beyond the dtype's largest number
        become that number.
    dtype: a fixed dtype; None takes the case's.
    wide: float32, float64 in a case of float64.
    grad: whether a gradient is taken (floating-point arguments only).
    """

    shape: tuple[int, ...]
    layout: str = "contiguous"
    values: Values = _NORMAL
    dtype: torch.dtype | None = None
    grad: bool = True
    wide: bool = False

    def dtype_in(self, dtype: torch.dtype) -> torch.dtype:
        """Its dtype in a case of `dtype`."""
        return torch.promote_types(dtype, torch.float32) if self.wide else self.dtype or dtype

    def make(self, generator: torch.Generator, dtype: torch.dtype, device: str, drawn_on: str = "cpu") -> Tensor:
        """drawn_on: see `Case.make`; the generator is of that device."""
        with torch.device(drawn_on):
            values, dtype = self.values(generator, self.shape), self.dtype_in(dtype)
        made = values.to(dtype)
        if not made.is_meta and made.isinf().any():
            beyond = made.isinf() & values.isfinite()
            made[beyond] = values[beyond].sign().to(dtype) * torch.finfo(dtype).max
        return lay_out(made.to(device), self.layout)


def generator_of(device: str | torch.device, seed: int) -> torch.Generator:
    """Returns a generator of random numbers for tensors on the device; the meta device, which has no numbers, takes the
    CPU's."""
    meta = torch.device(device).type == "meta"
    return torch.Generator("cpu" if meta else device).manual_seed(seed)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """x's values in a tensor of the given memory layout (see `Arg`).

    Its storage ends with its last element, so that a memory checker detects accesses beyond it.
    """
    return _trimmed(_lay_out(x, layout))


def _trimmed(x: Tensor) -> Tensor:
    """`x` in a storage of just the elements up to its last one; what lies between them is kept."""
    end = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    if x.numel() == 0 or end == storage(x).numel():
        return x
    return storage(x)[:end].clone().as_strided(x.shape, x.stride(), x.storage_offset())


def storage(x: Tensor) -> Tensor:
    """All elements of x's storage, as a vector."""
    return x.detach().new_empty(0).set_(x.untyped_storage())


def _lay_out(x: Tensor, layout: str) -> Tensor:
    if layout == "contiguous":
        return x.contiguous()
    if layout == "swapped":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 7), 77)
        wide[..., 3 : 3 + x.shape[-1]] = x
        return wide[..., 3 : 3 + x.shape[-1]]
    if layout == "offset":
        flat = x.new_full((x.numel() + 1,), 77)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    if layout == "expanded":
        return x[:1].contiguous().expand(x.shape)
    if layout == "strided":
        double = x.new_full((*x.shape[:-1], x.shape[-1] * 2), 77)
        double[..., ::2] = x
        return double[..., ::2]
    if layout.startswith("random-"):
        rng = random.Random(int(layout.removeprefix("random-")))
        order = rng.sample(range(x.dim()), x.dim())
        steps = [rng.choice((1, 1, 2, 3)) for _ in order]
        starts = [rng.choice((0, 0, 1, 5)) for _ in order]
        wide = x.new_full([a + x.shape[d] * s for d, s, a in zip(order, steps, starts, strict=True)], 77)
        for i, d in enumerate(order):
            wide = wide.narrow(i, starts[i], x.shape[d] * steps[i])
        found = wide[tuple(slice(None, None, s) for s in steps)].permute([order.index(d) for d in range(x.dim())])
        return found.copy_(x)
    raise ValueError(f"unknown layout {layout!r}")


@dataclass(frozen=True)
class Case:
    """One call of an operation: what `cases.py` lists, the parity suite runs and a benchmark may time.

    id: reads as the shapes and options. args: by the public function's parameter names; None is passed on. options:
    its other keyword arguments. cotangent: layout of the gradients that flow in. interpreted: False keeps a large
    case out of Triton's interpreter, which takes milliseconds a program.
    """

    id: str
    args: Mapping[str, Arg | None]
    options: Mapping[str, Any] = field(default_factory=dict)
    cotangent: str = "contiguous"
    interpreted: bool = True

    def given(self, *names: str) -> list[Arg]:
        """These arguments, which the case must have."""
        return [arg for name in names if (arg := self.args[name]) is not None]

    def make(
        self, dtype: torch.dtype, device: str = "cpu", seed: int = 0, drawn_on: str = "cpu"
    ) -> dict[str, Tensor | None]:
        """Fresh arguments; those that take a gradient require it.

        drawn_on: the device that draws the values. Values drawn on the CPU are the same for any `device`, but a CPU
        takes seconds to draw enough to fill a GPU.
        """
        generator = generator_of(drawn_on, seed)
        made: dict[str, Tensor | None] = {}
        for name, arg in self.args.items():
            made[name] = None if arg is None else arg.make(generator, dtype, device, drawn_on)
            if arg is not None and arg.grad:
                made[name].requires_grad_()  # type: ignore[union-attr]
        return made
