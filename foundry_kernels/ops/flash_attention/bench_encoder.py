"""What is timed of encoders and of attention to one: none of it causal, with padding and without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foundry_kernels.core.contract import Peers
from foundry_kernels.ops.flash_attention import bench_masked
from foundry_kernels.testing import Arg, Case

#: Heads of Whisper's base and tiny models, whose decoder sees the 1500 positions of its encoder.
_WHISPER_HEADS = (8, 6)
_TOKENS, _POSITIONS = 512, 1500
#: (H, T, D) of BERT-base, and sequences at a time, by device.
_BERT = (12, 512, 64)
_BATCH = {"cpu": (1, 4), "cuda": (16, 32)}
#: How much of each sequence in turn is no padding, in quarters.
_FILLED = (4, 3, 2, 1)
QUICK = ("H=8 T=512 S=1500 D=64-cross", "-padded")


def _lengths(batch: int, tokens: int) -> list[int]:
    return [tokens * _FILLED[n % len(_FILLED)] // 4 for n in range(batch)]


@dataclass(frozen=True)
class Seen:
    """A mask ``[B, 1, 1, T]`` of what is no padding."""

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        lengths = torch.tensor(_lengths(shape[0], shape[-1]))
        return (torch.arange(shape[-1]) < lengths[:, None, None, None]).double()


def cases(device: str) -> tuple[Case, ...]:
    cross_batch, batch = _BATCH[device]
    found = []
    for h in _WHISPER_HEADS:
        q, kv = Arg((cross_batch, h, _TOKENS, 64)), Arg((cross_batch, h, _POSITIONS, 64))
        name = f"B={cross_batch} H={h} T={_TOKENS} S={_POSITIONS} D=64-cross"
        found.append(Case(name, {"q": q, "k": kv, "v": kv}, {"causal": False}))
    h, t, d = _BERT
    qkv = Arg((batch, h, t, d))
    seen = Arg((batch, 1, 1, t), values=Seen(), dtype=torch.bool, grad=False)
    args: dict[str, Arg | None] = {"q": qkv, "k": qkv, "v": qkv, "attn_mask": seen}
    return (*found, Case(f"B={batch} H={h} T={t} D={d}-padded", args, {"causal": False}))


def is_padded(args: Mapping[str, Arg | Tensor | None]) -> bool:
    mask = args.get("attn_mask")
    return mask is not None and mask.dtype == torch.bool


def pairs(q: Tensor) -> int:
    """How many keys the queries of the padded case see, all together."""
    batch, heads, tokens, _ = q.shape
    return heads * tokens * sum(_lengths(batch, tokens))


def peers(case: Case, device: str) -> Peers:
    """Returns the peers of the padded case."""
    return {**bench_masked.peers(case, device), "FlexAttention": "makes a mask of blocks from the values of each batch"}
