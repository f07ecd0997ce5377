"""Dropout whose mask is a function of a seed and the same on every backend: argument checks, and the generator in plain
PyTorch.

A seed is 64 bits, the key of Philox4x32-10. The counter (c // 4, row % 2^32, row // 2^32, 0) gives four 32-bit words,
and word c % 4 decides about column c of that row, rows being numbered as if x were contiguous. An element is kept where
its word is at least ``floor(p * 2^32)``: with a probability of exactly ``1 - floor(p * 2^32) / 2^32``. Kept elements
are multiplied by ``1 / (1 - p)``, rounded to float32. Dropped elements are multiplied by 0, so that infinities and NaN
become NaN as in `torch.nn.functional.dropout`.

The generator has no state. So the mask does not depend on the launch, the number of threads or the instruction set, and
the backward pass recomputes it from the seed instead of reading it.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import check_device, check_int, constants
from foundry_kernels.core.options import Options
from foundry_kernels.core.registry import is_dtensor, wide_dtype

_LOW = 0xFFFFFFFF
_SEEDS = 2**63 - 1  # the range of torch.randint; an int64 tensor can hold one more value


class DropoutOptions(Options):
    """The dropout arguments of operators; without a seed nothing is dropped."""

    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None


NO_DROPOUT = DropoutOptions()


def draw_seed(x: Tensor, name: str = "x") -> Tensor:
    """A seed in a tensor on x's device, drawn from the default generator of the device. `name` is the name of x in
    errors."""
    if is_dtensor(x):
        raise ValueError(f"dropout_seed must be given where {name} is a DTensor: each device would draw its own")
    return torch.randint(_SEEDS, (), device=x.device)


def arguments(
    x: Tensor, dropout_p: float, dropout_seed: Tensor | int | None, name: str = "x"
) -> tuple[()] | tuple[float, Tensor]:
    """The checked dropout arguments of a kernel: empty if nothing is dropped, otherwise the probability and a seed in a
    tensor on x's device. A CUDA graph can redraw a seed on the device, and the host does not wait for it. `name` is the
    name of x in errors."""
    if is_dynamo_compiling():
        (dropout_p,) = constants(dropout_p)
    if not isinstance(dropout_p, (float, int)) or isinstance(dropout_p, bool):
        raise TypeError(f"dropout_p must be a float; got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p < 1.0:  # also false for NaN
        raise ValueError(f"dropout_p must be in [0, 1); got {dropout_p}")
    if isinstance(dropout_seed, Tensor):
        if dropout_seed.dtype != torch.int64:
            raise TypeError(f"dropout_seed must be int64, where it is a tensor; got {dropout_seed.dtype}")
        if dropout_seed.numel() != 1:
            raise ValueError(f"dropout_seed must hold one number; got shape {tuple(dropout_seed.shape)}")
        check_device("dropout_seed", dropout_seed, name, x)
    elif dropout_seed is not None:
        check_int("dropout_seed", dropout_seed, 0)
        if dropout_seed > _SEEDS:
            raise ValueError(f"dropout_seed must be below 2^63; got {dropout_seed}")
    if not dropout_p:
        return ()
    if dropout_seed is None:
        dropout_seed = draw_seed(x, name)
    elif not isinstance(dropout_seed, Tensor):
        dropout_seed = torch.full((), dropout_seed, dtype=torch.int64, device=x.device)
    return float(dropout_p), dropout_seed


def threshold(dropout_p: float) -> int:
    """The smallest word that keeps its element."""
    return int(dropout_p * 2**32)


def kernel_numbers(dropout_p: float | None) -> tuple[int | None, float | None]:
    """The threshold as a signed 32-bit number, and the scale of kept elements, for a Triton kernel; (None, None) for
    None."""
    if dropout_p is None:
        return None, None
    least = threshold(dropout_p)
    return least - (least >> 31 << 32), 1.0 / (1.0 - dropout_p)


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four words of Philox4x32-10. All are int64 tensors of numbers below 2^32, and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # what wraps around has the right bits
        c0, c1, c2, c3 = (p1 >> 32 & _LOW) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32 & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return torch.broadcast_tensors(c0, c1, c2, c3)


def keep_mask(shape: tuple[int, ...], dropout_p: float, seed: Tensor) -> Tensor:
    """Which elements of a tensor of this shape are kept, as a bool tensor."""
    n_rows, n_cols = math.prod(shape[:-1]), shape[-1]
    seed = seed.reshape(())
    row = torch.arange(n_rows, device=seed.device)[:, None]
    group = torch.arange((n_cols + 3) // 4, device=seed.device)
    counter = (group, row & _LOW, row >> 32, torch.zeros_like(seed))
    words = torch.stack(philox4x32(counter, (seed & _LOW, seed >> 32 & _LOW)), -1)
    return (words.flatten(-2)[:, :n_cols] >= threshold(dropout_p)).view(shape)


def dropout(x: Tensor, dropout_p: float, seed: Tensor) -> Tensor:
    """``x`` after dropout, in the dtype of its arithmetic."""
    compute = wide_dtype(x.dtype)
    scale = torch.full((), 1.0 / (1.0 - dropout_p), dtype=torch.float32, device=x.device).to(compute)
    return x.to(compute) * torch.where(keep_mask(x.shape, dropout_p, seed), scale, 0.0)
