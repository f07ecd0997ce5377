"""What is timed, against what, and what it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Peers, Sample, Tensors, Work, sample_rows
from foundry_kernels.ops.rope.cases import _case, _normed
from foundry_kernels.testing import Case

#: Shapes to time, by device: batch, heads of q and of k, tokens and width of models' attention; q and k are the
#: [B, H, T, D] views of [B, T, H, D] memory that their projections give.
_BENCH_SHAPES = {
    "cpu": (
        (1, 16, 8, 512, 128, "qwen3-0.6b-cached"),
        (1, 8, 4, 512, 256, "gemma-cached"),
        (1, 32, 8, 4096, 128, "llama-8b-large"),
        (4, 32, 8, 1, 128, "decode"),
    ),
    "cuda": (
        (1, 16, 8, 16384, 128, "qwen3-0.6b"),
        (1, 8, 4, 16384, 256, "gemma"),
        (1, 32, 8, 16384, 128, "llama-8b"),
        (1, 64, 8, 16384, 128, "llama-70b"),
        (64, 32, 8, 1, 128, "decode"),
    ),
}


def _bench(op: str, b: int, h: int, kv_heads: int, t: int, d: int, name: str) -> Case:
    table = (b, 1) if name == "decode" else (t,)
    case = _case((b, h, t, d), kv_heads, table=table, layout="swapped")
    case = replace(case, id=f"B={b} H={h} Hk={kv_heads} T={t} D={d}-{name}")
    return _normed(case, round_before_weight=True) if op == "qk_norm_rope" else case


BENCH_QUICK = ("qwen3-0.6b-cached", "large", "llama-8b", "decode")


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(_bench(op, *shape) for shape in _BENCH_SHAPES[device])


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: T is the tokens."""
    tokens = range(6, 15) if device == "cpu" else range(9, 16)
    return {"T": tuple((2**i, _bench(op, 1, 32, 8, 2**i, 128, "tokens")) for i in tokens)}


def sample(case: Case) -> Sample | None:
    """Tokens, with their row of the tables."""
    return sample_rows(case, {"q": 2, "k": 2, "cos": 0, "sin": 0})


def bytes_moved(args: Tensors) -> Work:
    """The least that must be read and written (tables, weights and 1 / rms, which are small, are left out): each of q
    and k is read and its result written; backward a gradient is read and one written, and with norms q and k too."""
    once = sum(args[n].numel() * args[n].element_size() for n in "qk")
    return 2 * once, (3 if "q_weight" in args else 2) * once


def _eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Computes it as models in Hugging Face's transformers do, with tables as wide as a head and in q's dtype. Models
    widen them once for all layers; here it is a small part, T rows beside T rows for each head."""
    cos, sin = (torch.cat([table, table], -1).to(q.dtype).unsqueeze(-3) for table in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat((-two, one), -1) * sin

    return rotated(q), rotated(k)


def _eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _eager_qk_norm(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor
) -> tuple[Tensor, Tensor]:
    return _eager(_eager_norm(q, q_weight), _eager_norm(k, k_weight), cos, sin)


def _torch_qk_norm(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor
) -> tuple[Tensor, Tensor]:
    q, k = (torch.nn.functional.rms_norm(x, w.shape, w, 1e-6) for x, w in ((q, q_weight), (k, k_weight)))
    return _eager(q, k, cos, sin)


_PEERS: dict[str, dict[str, Callable[..., Any]]] = {
    "rope": {"eager": _eager},
    "qk_norm_rope": {"eager": _eager_qk_norm, "F.rms_norm": _torch_qk_norm},
}


def peers(op: str, case: Case, device: str) -> Peers:
    return dict(_PEERS[op])
