"""Runs the backward kernels of csrc/cuda/hopper under the checker, and computes the gradients in double."""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from cuda_on_cpu.build import HERE, ROOT, as_one, load_plain
from torch import Tensor

HOPPER = ROOT / "csrc" / "cuda" / "hopper"
SOURCES = [HOPPER / f"{name}.cu" for name in ("attention_backward", "backward_rows")]
SOURCES += [HOPPER / f"attention_backward_{width}.cu" for width in (64, 128, 192, 256)]
HEADER = r'#include "((?:attention_)?backward\w*\.cuh)"\n'
FAR = 1 << 30


def text() -> str:
    return as_one([*SOURCES, HERE / "hopper_backward.cu"])


def broken(old: str, new: str, width: int = 128) -> str:
    """The source with `new` in place of `old`, which is in it or in its own headers, and with only one head width."""

    def inlined(match: re.Match[str]) -> str:
        header = HOPPER / match[1]
        if header in seen:
            return ""
        seen.add(header)
        return re.sub(HEADER, inlined, header.read_text().replace("#pragma once", ""))

    seen: set[Path] = set()
    kept = HOPPER / f"attention_backward_{width}.cu"
    source = re.sub(HEADER, inlined, as_one([SOURCES[0], SOURCES[1], kept, HERE / "hopper_backward.cu"]))
    assert source.count(old) == 1, old
    return re.sub(r"launch_backward_of_width<\d+>", f"launch_backward_of_width<{width}>", source.replace(old, new))


def load(source: str) -> ctypes.CDLL:
    loaded = load_plain(HOPPER / "attention_backward.cu", source)
    loaded.run_backward.restype = ctypes.c_char_p
    return loaded


class Call(ctypes.Structure):
    _fields_ = [
        ("inputs", ctypes.c_void_p * 5),
        ("outputs", ctypes.c_void_p * 3),
        ("strides", (ctypes.c_int64 * 3) * 8),
        *((name, ctypes.c_void_p) for name in ("lse", "dlse", "delta", "starts_q", "starts_k", "slopes")),
        *((name, ctypes.c_void_p) for name in ("floats", "integers")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("bf16", "sequences", "heads", "queries", "keys", "total_q", "total_k", "group", "head_dim"),
                *("head_dim_v", "slopes_stride", "left", "right", "bottom_right", "deterministic", "multiprocessors"),
                "batch_invariant",
            )
        ),
        ("splits", ctypes.c_int64 * 2),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("row_strides", ctypes.c_int64 * 3),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    return load(text())


@dataclass(frozen=True)
class Case:
    queries: int = 256
    keys: int = 256
    heads: int = 2
    group: int = 1
    batch: int = 1
    dim: int = 128
    dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    left: int = FAR
    right: int = FAR
    bottom_right: bool = True
    softcap: float = 0.0
    alibi: bool = False
    lengths_q: tuple[int, ...] = ()  # packed
    lengths_k: tuple[int, ...] = ()
    dlse: bool = False
    token_first: bool = False  # [B, T, H, D]
    multiprocessors: int = 4
    batch_invariant: bool = False
    splits: tuple[int, int] = (0, 0)  # of a group's heads and of their rows; (0, 0): as the shape decides

    @property
    def width(self) -> int:
        """Of the kernel."""
        dim_v = self.dim_v or self.dim
        width = max(self.dim, dim_v)
        return 64 if width <= 64 else 128 if width <= 128 else 192 if self.dim <= 192 and dim_v <= 128 else 256

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return list(zip(self.lengths_q, self.lengths_k, strict=True)) or [(self.queries, self.keys)] * self.batch


@dataclass
class Sequence:
    """The inputs [H, T, D] of a pass, and the expected results in double."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor
    lse: Tensor
    dlse: Tensor
    slopes: Tensor
    gradients: tuple[Tensor, ...]
    delta: Tensor


def make(case: Case, seed: int = 0) -> list[Sequence]:
    g = torch.Generator().manual_seed(seed)
    return [_make(case, t, s, g) for t, s in case.lengths]


def _make(case: Case, t: int, s: int, g: torch.Generator) -> Sequence:
    def normal(heads: int, n: int, dim: int) -> Tensor:
        return torch.randn(heads, n, dim, generator=g, dtype=torch.float64).to(case.dtype)

    dim_v = case.dim_v or case.dim
    q, k, v, dout = (
        normal(*shape)
        for shape in (
            *((case.heads, t, case.dim), (case.heads // case.group, s, case.dim)),
            *((case.heads // case.group, s, dim_v), (case.heads, t, dim_v)),
        )
    )
    slopes = torch.rand(case.heads, generator=g) * case.alibi
    dlse = torch.randn(case.heads, t, generator=g) * case.dlse
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(case.group, 0) for x in leaves[1:])
    scores = leaves[0] @ keys.transpose(1, 2) * case.dim**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    distance = torch.arange(t)[:, None] + (s - t if case.bottom_right else 0) - torch.arange(s)
    seen = (distance <= case.left) & (distance >= -case.right)
    scores = (scores - slopes[:, None, None].double() * distance.abs()).masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1) if s else torch.full((case.heads, t), -torch.inf, dtype=torch.float64)
    is_row = lse > -torch.inf
    weights = torch.where(seen, torch.exp(scores - torch.where(is_row, lse, 0)[..., None]), 0.0)
    out = weights @ values
    loss = (out * dout.double()).sum() + (torch.where(is_row, lse, 0) * dlse.double()).sum()
    gradients = tuple(x.detach() for x in torch.autograd.grad(loss, leaves))
    rounded = out.detach().to(case.dtype)
    delta = torch.where(is_row, (dout.double() * rounded.double()).sum(-1) - dlse, 0.0).detach()
    return Sequence(q, k, v, rounded, dout, lse.detach(), dlse, slopes, gradients, delta)


def laid_out(case: Case, parts: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The tensor of all sequences and its (batch, head, token) strides."""
    if case.lengths_q:
        joined = torch.cat([x.transpose(0, 1) for x in parts]).contiguous()  # [tokens, heads, ...]
        return joined, [0, joined.stride(1), joined.stride(0)]
    stacked = torch.stack(parts)
    if case.token_first:
        stacked = stacked.transpose(1, 2).contiguous().transpose(1, 2)
    return stacked, list(stacked.stride()[:3])


@dataclass
class Result:
    report: str
    gradients: list[list[Tensor]]  # (dq, dk, dv) of each sequence
    delta: list[Tensor]
    done: Tensor  # [shares, sequences]: the number of finished writers of dq
    places: list[list[int]]  # sequence and tile of each tile of keys of packed sequences, in their order

    def bits(self, n: int) -> list[Tensor]:
        return [x.contiguous().view(torch.int16) for x in self.gradients[n]]


class Plan(NamedTuple):
    pairs: int
    head_splits: int
    row_splits: int
    blocks: int
    floats: int
    integers: int


class Pass:
    """A backward pass of a case's sequences. `call` may be changed before it runs."""

    def __init__(self, case: Case, sequences: list[Sequence], deterministic: bool = True) -> None:
        self.case, self.sequences, self.deterministic = case, sequences, deterministic
        self.call = c = Call()
        inputs = [laid_out(case, [getattr(s, name) for s in sequences]) for name in ("q", "k", "v", "out", "dout")]
        outputs = [
            laid_out(case, [torch.full_like(getattr(s, name), torch.nan) for s in sequences])
            for name in ("q", "k", "v")
        ]
        for i, (x, strides) in enumerate([*inputs, *outputs]):
            if i < 5:
                c.inputs[i] = x.data_ptr()
            else:
                c.outputs[i - 5] = x.data_ptr()
            c.strides[i][:] = strides
        packed = bool(case.lengths_q)
        join = (lambda x: torch.cat(x, 1)) if packed else torch.stack
        lse, dlse = (join([getattr(s, name) for s in sequences]).contiguous() for name in ("lse", "dlse"))
        self.delta, slopes = torch.full_like(dlse, torch.nan), torch.stack([s.slopes for s in sequences])
        self.starts = [
            torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32)
            for x in (case.lengths_q, case.lengths_k)
        ]
        c.lse, c.delta = lse.data_ptr(), self.delta.data_ptr()
        c.row_strides[:] = [0, *lse.stride()] if packed else list(lse.stride())
        if case.dlse:
            c.dlse = dlse.data_ptr()
        if case.alibi:
            c.slopes, c.slopes_stride = slopes.data_ptr(), case.heads
        if packed:
            c.starts_q, c.starts_k = (x.data_ptr() for x in self.starts)
            c.total_q, c.total_k = sum(case.lengths_q), sum(case.lengths_k)
        c.queries, c.keys = (max(x) for x in zip(*case.lengths, strict=True))
        c.bf16, c.deterministic = case.dtype == torch.bfloat16, deterministic
        c.sequences, c.heads, c.group = len(sequences), case.heads, case.group
        c.head_dim, c.head_dim_v, c.scale, c.softcap = case.dim, case.dim_v or case.dim, case.dim**-0.5, case.softcap
        c.left, c.right, c.bottom_right = case.left, case.right, case.bottom_right
        c.multiprocessors, c.batch_invariant = case.multiprocessors, case.batch_invariant
        c.splits[:] = case.splits
        self.outputs = [x for x, _ in outputs]
        self.alive = [inputs, lse, dlse, slopes]

    @property
    def taken(self) -> bool:
        return bool(library().takes_backward(ctypes.byref(self.call)))

    def plan(self) -> Plan:
        numbers = (ctypes.c_int64 * 6)()
        library().plan_of_backward(ctypes.byref(self.call), numbers)
        return Plan(*numbers)

    def run(self, seed: int = 1, of: ctypes.CDLL | None = None) -> Result:
        c, plan = self.call, self.plan()
        behind = 7777  # a guard after both; both begin as anything
        floats, integers = (
            torch.full((plan.floats + 32,), torch.nan),
            torch.full((plan.integers + 32,), -5, dtype=torch.int32),
        )
        floats[plan.floats :] = integers[plan.integers :] = behind
        c.floats, c.integers = floats.data_ptr(), integers.data_ptr()
        report = (of or library()).run_backward(ctypes.byref(c), seed).decode()
        assert (floats[plan.floats :] == behind).all()
        assert (integers[plan.integers :] == behind).all()
        n, shares = len(self.sequences), self.case.heads // self.case.group * plan.head_splits * plan.row_splits
        done = integers[: shares * n].view(-1, n).clone()
        tiles = sum(self.case.lengths_k) // 128 + n if self.case.lengths_q else 0
        places = integers[plan.integers - 2 * tiles : plan.integers].view(-1, 2).tolist()
        return Result(report, [self._of(i) for i in range(n)], [self._delta(i) for i in range(n)], done, places)

    def _span(self, n: int, of_keys: bool) -> slice:
        return slice(*self.starts[of_keys][n : n + 2].tolist())

    def _of(self, n: int) -> list[Tensor]:
        if not self.case.lengths_q:
            return [x[n].clone() for x in self.outputs]
        return [x[self._span(n, i > 0)].transpose(0, 1).clone() for i, x in enumerate(self.outputs)]

    def _delta(self, n: int) -> Tensor:
        return self.delta[:, self._span(n, False)] if self.case.lengths_q else self.delta[n]


def error(found: Tensor, expected: Tensor) -> float:
    """The RMS error relative to the RMS of the expected values."""
    if expected.numel() == 0:
        return 0.0
    off, size = (found.double() - expected).square().mean().sqrt(), expected.square().mean().sqrt()
    return float(off / size) if size > 0 else float(off)


def is_right(case: Case, sequences: list[Sequence], r: Result) -> bool:
    """Whether gradients have the precision of rounded weights, or of rounded weights and rounded P."""
    limit = 4e-3 if case.dtype == torch.bfloat16 else 5e-4
    pairs = [(f, e) for n, s in enumerate(sequences) for f, e in zip(r.gradients[n], s.gradients, strict=True)]
    return r.report == "" and all(error(f, e) < limit for f, e in pairs)
