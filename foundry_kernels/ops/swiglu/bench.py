"""What is timed, against what, and what it moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Peers
from foundry_kernels.testing import Arg, Case

#: Shapes to time, by operation and device: rows, width of the feed-forward layer, name. GEGLU is Gemma's, with tanh.
_BENCH_SHAPES = {
    ("swiglu", "cpu"): ((512, 2048, "cached"), (4096, 4096, "large"), (256, 14336, "llama-8b"), (1, 14336, "decode")),
    ("geglu", "cpu"): ((512, 2048, "cached"), (4096, 4096, "large"), (256, 16384, "gemma-2b")),
    ("glu", "cpu"): ((512, 2048, "cached"), (4096, 4096, "large")),
    ("reglu", "cpu"): ((512, 2048, "cached"), (4096, 4096, "large")),
    ("swiglu", "cuda"): (
        (16384, 3072, "qwen3-0.6b"),
        (16384, 12288, "qwen3-8b"),
        (16384, 14336, "llama-8b"),
        (8192, 28672, "llama-70b"),
        (1, 14336, "decode"),
    ),
    ("geglu", "cuda"): ((16384, 6912, "gemma3-1b"), (16384, 16384, "gemma-2b"), (1, 16384, "decode")),
    ("glu", "cuda"): ((16384, 4096, "large"), (1, 14336, "decode")),
    ("reglu", "cuda"): ((16384, 4096, "large"), (1, 14336, "decode")),
}
#: Of these, the ones that are timed packed too.
_BENCH_PACKED = ("cached", "llama-8b")

#: The one with dropout inside, by device.
_DROPOUT_SHAPE = {"cpu": (512, 2048, "dropout-cached"), "cuda": (16384, 4096, "dropout-large")}


BENCH_QUICK = ("cached", "large", "16384x14336-llama-8b", "16384x16384-gemma-2b", "decode")


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    options: dict[str, Any] = {"approximate": "tanh"} if op == "geglu" else {}
    cases = []
    for rows, width, name in _BENCH_SHAPES[op, device]:
        separate = {"gate": Arg((rows, width)), "up": Arg((rows, width))}
        cases.append(Case(f"{rows}x{width}-{name}", separate, options))
        if name in _BENCH_PACKED and op == "swiglu":
            packed = {"gate": Arg((rows, 2 * width)), "up": None}
            cases.append(Case(f"{rows}x{width}-{name}-packed", packed, options))
    rows, width, name = _DROPOUT_SHAPE[device]
    dropped = options | {"dropout_p": 0.1, "dropout_seed": 0}
    return (*cases, Case(f"{rows}x{width}-{name}", {"gate": Arg((rows, width)), "up": Arg((rows, width))}, dropped))


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: N is the width, T the rows."""
    rows, top = (512, 13) if device == "cpu" else (16384, 15)
    options = {"approximate": "tanh"} if op == "geglu" else {}

    def of(rows: int, width: int, name: str) -> Case:
        return Case(f"{rows}x{width}-{name}", {"gate": Arg((rows, width)), "up": Arg((rows, width))}, options)

    return {
        "N": tuple((2**i, of(rows, 2**i, "width")) for i in range(7, top + 1, 2)),
        "T": tuple((2**i, of(2**i, 2048, "rows")) for i in range(6, 15, 2)),
    }


def _eager(gate: Tensor, up: Tensor | None) -> Tensor:
    """Computes it as models in Hugging Face's transformers do."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _eager_gelu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def _eager_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    return torch.sigmoid(gate) * up


def _eager_relu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.relu(gate) * up


_PEERS: dict[str, dict[str, Callable[..., Any]]] = {
    "swiglu": {"eager": _eager},
    "geglu": {"eager": _eager_gelu},
    "glu": {"eager": _eager_sigmoid},
    "reglu": {"eager": _eager_relu},
}


def peers(op: str, case: Case, device: str) -> Peers:
    if not (p := case.options.get("dropout_p", 0.0)):
        return dict(_PEERS[op])

    def before_dropout(peer: Callable[..., Any]) -> Callable[..., Any]:
        return lambda gate, up: torch.nn.functional.dropout(peer(gate, up), p)

    return {name: before_dropout(peer) for name, peer in _PEERS[op].items()}
