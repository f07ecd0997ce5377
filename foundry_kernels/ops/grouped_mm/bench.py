"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from foundry_kernels.core.contract import Options, Peers, Tensors, Work
from foundry_kernels.testing import Arg, Case, normal

#: Shapes to time, by device: rows (tokens times experts of each), matrices, K, N, name. The first layers of experts.
_BENCH_SHAPES = {
    "cpu": ((256, 8, 256, 512, "cached"), (2048, 8, 1024, 2048, "large"), (16, 8, 1024, 2048, "decode")),
    "cuda": (
        (16384, 8, 4096, 14336, "mixtral-8x7b"),
        (65536, 128, 2048, 768, "qwen3-30b-a3b"),
        (32768, 32, 2880, 5760, "gpt-oss-20b"),
        (2048, 32, 2880, 5760, "gpt-oss-20b-few"),
        (64, 128, 2048, 768, "decode"),
    ),
}

BENCH_QUICK = ("cached", "large", "mixtral-8x7b", "qwen3-30b-a3b", "decode")


@dataclass(frozen=True)
class _Uneven:
    """The ends of groups as a router makes them: rows drawn with probabilities that differ by a few times."""

    rows: int

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        share = (0.5 * torch.randn(shape, generator=g, dtype=torch.float64)).exp()
        return (share.cumsum(0) / share.sum() * self.rows).round()


def _bench(m: int, n_groups: int, k: int, n: int, name: str) -> Case:
    """The matrices lie as layers keep them, ``[E, N, K]``."""
    args = {
        "x": Arg((m, k)),
        "weight": Arg((n_groups, k, n), "swapped", values=normal(k**-0.5)),
        "offs": Arg((n_groups,), values=_Uneven(m), dtype=torch.int32, grad=False),
    }
    return Case(f"M={m} E={n_groups} K={k} N={n}-{name}", args)


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(_bench(*shape) for shape in _BENCH_SHAPES[device])


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: T is the rows."""
    rows, shape = (range(5, 12), (8, 512, 1024)) if device == "cpu" else (range(7, 17, 2), (32, 2880, 5760))
    return {"T": tuple((2**i, _bench(2**i, *shape, "rows")) for i in rows)}


def parity_case(case: Case) -> Case:
    """Returns the case with fewer rows, for the comparison with the reference in float64."""
    x, offs = case.given("x", "offs")
    rows = min(x.shape[0], 4096)
    fewer = {"x": replace(x, shape=(rows, x.shape[1])), "offs": replace(offs, values=_Uneven(rows))}
    return replace(case, args=dict(case.args) | fewer)


def flops(args: Tensors, options: Options) -> Work:
    """Counts one matmul forward and two backward."""
    products = args["x"].numel() * args["weight"].shape[2]
    return 2 * products, 4 * products


def _eager(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """One matmul per expert, as in Hugging Face's transformers; it waits for the sizes."""
    ends = offs.tolist()
    return torch.cat([x[a:b] @ w for a, b, w in zip([0, *ends], ends, weight.unbind(0), strict=False)])


def peers(op: str, case: Case, device: str) -> Peers:
    return {"eager": _eager, "torch grouped_mm": _torch_grouped_mm}


def _torch_grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    found: Tensor = functional.grouped_mm(x, weight, offs=offs)
    return found
