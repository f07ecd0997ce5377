"""What is timed, against what, and what it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Peers, Tensors, Work
from foundry_kernels.testing import Arg, Case


def _bench(op: str, rows: int, width: int, name: str) -> Case:
    args: dict[str, Arg | None] = {"x": Arg((rows, width))}
    if op.startswith("add_"):
        args["residual"] = Arg((rows, width))
    args["weight"] = Arg((width,))
    if op.endswith("layer_norm"):
        return Case(f"{rows}x{width}-{name}", args | {"bias": Arg((width,))})
    return Case(f"{rows}x{width}-{name}", args, {"eps": 1e-6, "round_before_weight": True})


#: Shapes to time, by device: the width of a model and rows that fit in the cache or do not.
_BENCH_SHAPES = {
    "cpu": ((512, 2048, "cached"), (4096, 4096, "large"), (8192, 128, "heads"), (1, 4096, "decode")),
    "cuda": (
        (16384, 1024, "qwen3-0.6b"),
        (16384, 4096, "llama-8b"),
        (16384, 8192, "llama-70b"),
        (16384, 32768, "wide"),
        (131072, 128, "heads"),
        (1, 4096, "decode"),
    ),
}


#: Of the sums with dropout.
_DROPOUT_SHAPES = {
    "cpu": ((512, 2048, "dropout-cached"), (4096, 4096, "dropout")),
    "cuda": ((16384, 4096, "llama-8b-dropout"),),
}


BENCH_QUICK = ("cached", "large", "llama-8b", "llama-8b-dropout", "decode")


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    plain = tuple(_bench(op, *shape) for shape in _BENCH_SHAPES[device])
    if not op.startswith("add_"):
        return plain
    dropped = (_bench(op, *shape) for shape in _DROPOUT_SHAPES[device])
    return (*plain, *(replace(c, options={**c.options, "dropout_p": 0.1, "dropout_seed": 0}) for c in dropped))


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes, by the size that grows: N is the width, T the rows."""
    rows, width, top = (1024, 2048, 13) if device == "cpu" else (16384, 4096, 15)
    return {
        "N": tuple((2**i, _bench(op, rows, 2**i, "width")) for i in range(7, top + 1, 2)),
        "T": tuple((2**i, _bench(op, 2**i, width, "rows")) for i in range(6, top + 2, 2)),
    }


def bytes_moved(args: Tensors) -> Work:
    """The least that must be read and written. Forward: each input once, each output once (weight and rstd, which are
    small, are left out). Backward: x (or the sum h), dy and, for the sum, dh are read and one dx is written (the second
    one of dropout is not counted)."""
    once = args["x"].numel() * args["x"].element_size()
    return (2 * once, 3 * once) if "residual" not in args else (4 * once, 4 * once)


def _eager(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Computes it as models in Hugging Face's transformers do."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _eager_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return _eager(h, weight), h


def _torch_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return torch.nn.functional.rms_norm(h, weight.shape, weight, 1e-6), h


def _torch(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's own kernel; models use it, and torch.compile decomposes it."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, 1e-5)


def _add_layer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return _layer(h, weight, bias), h


_PEERS: dict[str, dict[str, Callable[..., Any]]] = {
    "rms_norm": {"eager": _eager, "F.rms_norm": _torch},
    "add_rms_norm": {"eager": _eager_add, "F.rms_norm": _torch_add},
    "layer_norm": {"eager": _layer},
    "add_layer_norm": {"eager": _add_layer},
}


def peers(op: str, case: Case, device: str) -> Peers:
    p = case.options.get("dropout_p", 0.0)
    if not p:
        return {**_PEERS[op]}

    def after_dropout(peer: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, **others: peer(torch.nn.functional.dropout(x, p), **others)

    return {name: after_dropout(peer) for name, peer in _PEERS[op].items()}
