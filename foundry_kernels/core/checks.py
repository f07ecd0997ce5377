"""Argument checks that at least two operations share. Each names the argument, what it was and what it must be."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.registry import FLOATS


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")


def check_float(name: str, x: Tensor) -> None:
    """`x` is a tensor of a floating-point dtype that arithmetic is defined for."""
    if not isinstance(x, Tensor):
        check_tensor(name, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {x.dtype}")


EPS_FLOAT32, EPS_FLOAT64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


def default_eps(name: str, x: Tensor) -> float:
    """What an RMSNorm's eps of None is, as in PyTorch: the machine epsilon of the arithmetic, not of `x`."""
    check_float(name, x)
    return EPS_FLOAT64 if x.dtype == torch.float64 else EPS_FLOAT32


def device_or_default(device: Any) -> torch.device:
    """`device`, or torch's default device for None, in a way that torch.compile can trace."""
    return torch.empty(0).device if device is None else torch.device(device)


def check_integer(name: str, x: Tensor, rank: int | None = None, layout: str = "") -> None:
    """`x` is an int32 or int64 tensor and, if a rank is given, of that rank, which `layout` shows."""
    check_tensor(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64; got {x.dtype}")
    if rank is not None:
        check_rank(name, x, rank, layout)


def check_rank(name: str, x: Tensor, rank: int, layout: str) -> None:
    if x.dim() != rank:
        raise ValueError(f"{name} must be {layout}; got shape {tuple(x.shape)}")


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if not (x.is_cpu and other.is_cpu) and x.device != other.device:  # comparing two devices takes twice as long
        raise ValueError(f"{name} must be on {other_name}'s device {other.device}; got {x.device}")


def check_dtype(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.dtype != other.dtype:
        raise ValueError(f"{name} must have {other_name}'s dtype {other.dtype}; got {x.dtype}")


def check_shape(name: str, x: Tensor, shape: tuple[int, ...], why: str) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)} ({why}); got {tuple(x.shape)}")


def check_documents(cu_seqlens: Tensor, other_name: str, other: Tensor, tokens: int) -> int:
    """Checks the bounds of documents that are packed in one row; returns their number. The values are only read on a
    CPU: a GPU would have to be waited for, and a compiler has none."""
    check_integer("cu_seqlens", cu_seqlens, 1, "[N + 1]")
    check_device("cu_seqlens", cu_seqlens, other_name, other)
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens must be [N + 1], starting with 0; got shape (0,)")
    if cu_seqlens.is_cpu and type(cu_seqlens) is Tensor and not torch.compiler.is_compiling():
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != tokens or any(after < before for before, after in pairwise(ends)):
            raise ValueError(f"cu_seqlens must start at 0, never decrease and end at T = {tokens}; got {ends}")
    return cu_seqlens.shape[0] - 1


def check_int(name: str, value: object, minimum: int | None = None) -> None:
    """`value` is an int, or a symbolic int while torch.compile traces."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be >= {minimum}; got {value}")


def check_bool(name: str, value: object) -> None:
    """A bool, or what stands for one while torch.compile traces."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(f"{name} must be a bool; got {type(value).__name__}")


#: Options are used in float32. Within these bounds float32 has its full precision for the number and for log2(e) times
#: it.
SMALLEST, LARGEST = 2.0**-126, 2.0**127


def constants(*values: Any) -> tuple[Any, ...]:
    """The values, with numbers in place of the symbols for floats that torch.compile has with dynamic shapes.

    An operator takes no such symbol, so the graph is compiled for one number anyway. And one that the compiler makes
    while it traces a checkpointed part, of a parameter's default for example, cannot be used in the next part. The same
    is true of a float in a global variable, so traced code has none.
    """
    if is_dynamo_compiling():
        number = torch.fx.experimental.symbolic_shapes.guard_scalar
        return tuple([number(x) if isinstance(x, (float, torch.SymFloat)) else x for x in values])
    return values


def check_positive(name: str, value: Any) -> None:
    """A float above 0, within the bounds."""
    _check_real(name, value)
    if not 2.0**-126 <= value <= 2.0**127:  # also false for NaN
        raise ValueError(_outside(name, value, "finite and > 0", value > 0.0, "in"))


def check_not_negative(name: str, value: Any) -> None:
    """A float that is 0 or as for :func:`check_positive`."""
    if type(value) is not float:
        _check_real(name, value)
    if value != 0.0 and not 2.0**-126 <= value <= 2.0**127:
        raise ValueError(_outside(name, value, "finite and >= 0", value > 0.0, "0 or in"))


def check_number(name: str, value: Any) -> None:
    """A float of any sign that is 0 or of a size within the bounds."""
    if type(value) is not float:
        _check_real(name, value)
    if value != 0.0 and not 2.0**-126 <= abs(value) <= 2.0**127:
        raise ValueError(_outside(name, value, "finite", True, "0 or of a size in"))


def _check_real(name: str, value: object) -> None:
    if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a float; got {type(value).__name__}")


def _outside(name: str, value: Any, kind: str, is_of_kind: bool, bounds: str) -> str:
    if not (is_of_kind and abs(value) < math.inf):
        return f"{name} must be {kind}; got {value}"
    return f"{name} must be {bounds} 2^-126 .. 2^127, where float32 has its full precision; got {value}"
