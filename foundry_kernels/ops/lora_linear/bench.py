"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear

from foundry_kernels.core.contract import Options, Peers, Tensors, Work
from foundry_kernels.ops.lora_linear.cases import make_case
from foundry_kernels.testing import Case

#: Shapes to time, by device: rows, K, M, rank, name. Layers of Llama 3.2 1B (on a CPU also smaller ones) and 3.1 8B.
_BENCH_SHAPES = {
    "cpu": ((512, 512, 1408, 16, "cached"), (2048, 2048, 2048, 16, "large"), (1, 2048, 2048, 16, "decode")),
    "cuda": (
        (16384, 2048, 2048, 16, "q-1b"),
        (16384, 2048, 8192, 16, "up-1b"),
        (8192, 4096, 14336, 64, "up-8b"),
        (1, 4096, 4096, 16, "decode"),
    ),
}

BENCH_QUICK = ("cached", "q-1b", "up-8b", "decode", "dropout")

#: The frozen layer alone. It shows the adapter's cost, and is not a peer.
UNCHECKED = ("without the option",)


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    """The adapters are float32, as PEFT keeps them."""
    n, k, m, r, name = _BENCH_SHAPES[device][0]
    plain = [make_case((n,), k, m, r, name, scale=2.0) for n, k, m, r, name in _BENCH_SHAPES[device]]
    return (*plain, make_case((n,), k, m, r, f"{name}-dropout", scale=2.0, dropout_p=0.1, dropout_seed=0))


def workspace_bytes(case: Case) -> int:
    """The reference keeps x and y in float64, and the weight."""
    x, a, b = case.given("x", "lora_a", "lora_b")
    rows, k, m = math.prod(x.shape[:-1]), a.shape[1], b.shape[0]
    return 8 * (rows * (k + m) + k * m)


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: T is the rows, D the rank."""
    rows, width = (512, 1024) if device == "cpu" else (8192, 4096)
    return {
        "T": tuple((2**i, make_case((2**i,), width, width, 16, "rows", scale=2.0)) for i in range(0, 13, 3)),
        "D": tuple((r, make_case((rows,), width, width, r, "rank", scale=2.0)) for r in (4, 16, 64, 256)),
    }


def bytes_moved(args: Tensors) -> Work:
    """The least that must be read and written. Forward: x, the weight and y. Backward: dy, x, the weight and dx. The
    adapter is small and left out."""
    x, weight, b = args["x"], args["weight"], args["lora_b"]
    y, size = x.numel() // x.shape[-1] * b.shape[0], x.element_size()
    return (x.numel() + weight.numel() + y) * size, (2 * x.numel() + weight.numel() + y) * size


def flops(args: Tensors, options: Options) -> Work:
    """Counts one matmul with the weight in each direction, one with each adapter matrix forward and two backward."""
    x, a, b = args["x"], args["lora_a"], args["lora_b"]
    rows, thin = x.numel() // x.shape[-1], a.numel() + b.numel()
    frozen = x.shape[-1] * b.shape[0]
    return 2 * rows * (frozen + thin), 2 * rows * (frozen + 2 * thin)


def _peft(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, p: float) -> Tensor:
    """PEFT's forward pass."""
    result = linear(x, weight)
    wide = dropout(x.to(lora_a.dtype), p)
    return (result + linear(linear(wide, lora_a), lora_b) * scale).to(result.dtype)


def peers(op: str, case: Case, device: str) -> Peers:
    """What else computes this, by name; "eager", which is PEFT's forward pass, is also what torch.compile is given."""
    scale, p = case.options["scale"], case.options.get("dropout_p", 0.0)

    def eager(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, **_: None) -> Tensor:
        return _peft(x, weight, lora_a, lora_b, scale, p)

    def frozen(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, **_: None) -> Tensor:
        return linear(x, weight) if not torch.is_grad_enabled() else _with_zeros(linear(x, weight), lora_a, lora_b)

    return {"eager": eager, UNCHECKED[0]: frozen}


class _WithZeros(torch.autograd.Function):
    """Gives the adapter gradients without a pass over anything large."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.like = a, b
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, *map(torch.zeros_like, ctx.like)


def _with_zeros(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = _WithZeros.apply(y, a, b)
    return found
