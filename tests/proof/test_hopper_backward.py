"""The backward kernels of csrc/cuda/hopper under the checker, against gradients in double."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field

import pytest
import torch
from cuda_on_cpu.build import ROOT, as_one, load_plain
from torch import Tensor

HOPPER = ROOT / "csrc" / "cuda" / "hopper"
SOURCES = [HOPPER / f"{name}.cu" for name in ("attention_backward", "backward_rows")]
SOURCES += [HOPPER / f"attention_backward_{width}.cu" for width in (64, 128, 256)]
FAR = 1 << 30

DRIVER = """
#include <stdexcept>
#include <string>

namespace {
using namespace foundry::cuda;

struct Call {
  const void* inputs[5];  // q, k, v, out, dout
  void* outputs[3];       // dq, dk, dv
  int64_t strides[8][3];
  const double* lse;
  const float* dlse;
  float* delta;
  const int32_t *starts_q, *starts_k;
  const float* slopes;
  float* floats;
  int32_t* integers;
  int64_t bf16, sequences, heads, queries, keys, total_q, total_k, group, head_dim, head_dim_v, slopes_stride;
  int64_t left, right, bottom_right, deterministic, multiprocessors;
  double scale, softcap;
  int64_t row_strides[3];
};

AttentionBackward arguments(const Call& c) {
  AttentionBackward a{};
  const auto strides = [&](int i) { return foundry::HeadStrides{c.strides[i][0], c.strides[i][1], c.strides[i][2]}; };
  a.q = c.inputs[0], a.k = c.inputs[1], a.v = c.inputs[2], a.out = c.inputs[3], a.dout = c.inputs[4];
  a.q_strides = strides(0), a.k_strides = strides(1), a.v_strides = strides(2);
  a.out_strides = strides(3), a.dout_strides = strides(4);
  a.dq = c.outputs[0], a.dk = c.outputs[1], a.dv = c.outputs[2];
  a.dq_strides = strides(5), a.dk_strides = strides(6), a.dv_strides = strides(7);
  a.lse = c.lse, a.dlse = c.dlse, a.delta = c.delta;
  a.type = c.bf16 ? foundry::Dtype::bf16 : foundry::Dtype::f16;
  a.starts_q = c.starts_q, a.starts_k = c.starts_k;
  a.n_sequences = c.sequences, a.n_heads = c.heads, a.n_queries = c.queries, a.n_keys = c.keys;
  a.total_q = c.total_q, a.total_k = c.total_k, a.group = c.group;
  a.head_dim = int(c.head_dim), a.head_dim_v = int(c.head_dim_v);
  a.scale = float(c.scale), a.softcap = float(c.softcap);
  a.alibi_slopes = c.slopes, a.alibi_slopes_batch_stride = c.slopes_stride;
  a.window_left = c.left, a.window_right = c.right, a.bottom_right = c.bottom_right != 0;
  a.row_strides = {c.row_strides[0], c.row_strides[1], c.row_strides[2]};
  return a;
}
}  // namespace

extern "C" int takes_backward(const Call* c) { return hopper::takes(arguments(*c)); }
extern "C" void space_of_backward(const Call* c, int64_t* space) {
  const auto s = hopper::backward_space(arguments(*c), c->deterministic != 0, int(c->multiprocessors));
  space[0] = s.floats, space[1] = s.integers;
}
extern "C" const char* run_backward(const Call* c, int seed) {
  static std::string report;
  cuda_on_cpu_schedule(unsigned(seed), int(c->multiprocessors));
  report.clear();
  try {
    const cudaError_t error = hopper::attention_backward(arguments(*c), c->deterministic != 0, int(c->multiprocessors),
                                                         c->floats, c->integers, nullptr);
    if (error != cudaSuccess) report = "error " + std::to_string(int(error));
  } catch (const std::runtime_error& e) {
    report = e.what();
  }
  return report.c_str();
}
"""


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
            )
        ),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("row_strides", ctypes.c_int64 * 3),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    loaded = load_plain(HOPPER / "attention_backward.cu", as_one(SOURCES) + DRIVER)
    loaded.run_backward.restype = ctypes.c_char_p
    return loaded


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


@dataclass
class Problem:
    """Tensors of a case, by sequences [H, T, D], and what the gradients are in double."""

    case: Case
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)
    dout: list[Tensor] = field(default_factory=list)
    lse: list[Tensor] = field(default_factory=list)
    dlse: list[Tensor] = field(default_factory=list)
    slopes: list[Tensor] = field(default_factory=list)
    gradients: list[tuple[Tensor, ...]] = field(default_factory=list)


def make(case: Case, seed: int = 0) -> Problem:
    g = torch.Generator().manual_seed(seed)
    p = Problem(case)
    dim_v = case.dim_v or case.dim
    lengths = list(zip(case.lengths_q, case.lengths_k, strict=True)) or [(case.queries, case.keys)] * case.batch
    for t, s in lengths:
        def normal(heads: int, n: int, dim: int) -> Tensor:
            return torch.randn(heads, n, dim, generator=g, dtype=torch.float64).to(case.dtype)

        q, k, v = normal(case.heads, t, case.dim), normal(case.heads // case.group, s, case.dim), None
        v = normal(case.heads // case.group, s, dim_v)
        dout = normal(case.heads, t, dim_v)
        slopes = torch.rand(case.heads, generator=g) if case.alibi else torch.zeros(case.heads)
        dlse = torch.randn(case.heads, t, generator=g) if case.dlse else torch.zeros(case.heads, t)
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(case.group, 0) for x in leaves[1:])
        scores = leaves[0] @ keys.transpose(1, 2) * case.dim**-0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        i, j = torch.arange(t)[:, None], torch.arange(s)[None]
        distance = i + (s - t if case.bottom_right else 0) - j
        scores = scores - slopes[:, None, None].double() * distance.abs()
        seen = (distance <= case.left) & (distance >= -case.right)
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = torch.logsumexp(scores, -1) if s else torch.full((case.heads, t), -torch.inf, dtype=torch.float64)
        weights = torch.where(seen, torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]), 0.0)
        out = weights @ values
        row = seen.any(-1) if s else torch.zeros(t, dtype=torch.bool)
        loss = (out * dout.double()).sum() + (torch.where(row, lse, 0) * dlse.double()).sum()
        grads = torch.autograd.grad(loss, leaves)
        for name, value in (
            *(("q", q), ("k", k), ("v", v), ("dout", dout), ("lse", lse.detach()), ("dlse", dlse)),
            *(("out", out.detach().to(case.dtype)), ("slopes", slopes)),
        ):
            getattr(p, name).append(value)
        p.gradients.append(tuple(x.detach() for x in grads))
    return p


def laid_out(case: Case, parts: list[Tensor], fill: float = 0.0) -> tuple[Tensor, list[int]]:
    """The tensor of all sequences and its (batch, head, token) strides; packed: with `fill` in rows behind the end."""
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
    gradients: list[list[Tensor]]  # of each sequence dq, dk and dv
    raw: list[Tensor]
    delta: Tensor
    took: bool


def run(p: Problem, deterministic: bool = True, seed: int = 1, poisoned: bool = False) -> Result:
    case = p.case
    dim_v = case.dim_v or case.dim
    parts = [p.q, p.k, p.v, p.out, p.dout]
    tensors = [laid_out(case, x) for x in parts]
    empty = [[torch.full_like(x, torch.nan) for x in y] for y in (p.q, p.k, p.v)]
    outputs = [laid_out(case, x) for x in empty]
    c = Call()
    for i, (x, strides) in enumerate(tensors):
        c.inputs[i] = x.data_ptr()
        c.strides[i][:] = strides
    for i, (x, strides) in enumerate(outputs):
        c.outputs[i] = x.data_ptr()
        c.strides[5 + i][:] = strides
    packed = bool(case.lengths_q)
    rows = torch.cat(p.lse, 1) if packed else torch.stack(p.lse)
    rows = rows.contiguous()
    dlse = (torch.cat(p.dlse, 1) if packed else torch.stack(p.dlse)).contiguous()
    delta = torch.full_like(dlse, torch.nan)
    slopes = torch.stack(p.slopes).contiguous()
    starts = [torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32) if packed else None
              for x in (case.lengths_q, case.lengths_k)]
    c.lse, c.delta = rows.data_ptr(), delta.data_ptr()
    if case.dlse:
        c.dlse = dlse.data_ptr()
    if case.alibi:
        c.slopes, c.slopes_stride = slopes.data_ptr(), case.heads
    if packed:
        c.starts_q, c.starts_k = (x.data_ptr() for x in starts)
        c.row_strides[:] = [0, rows.stride(0), 1]
        c.total_q, c.total_k = sum(case.lengths_q), sum(case.lengths_k)
        c.queries, c.keys = max(case.lengths_q), max(case.lengths_k)
    else:
        c.row_strides[:] = list(rows.stride())
        c.queries, c.keys = case.queries, case.keys
    c.bf16 = case.dtype == torch.bfloat16
    c.sequences, c.heads, c.group = len(p.q), case.heads, case.group
    c.head_dim, c.head_dim_v, c.scale, c.softcap = case.dim, dim_v, case.dim**-0.5, case.softcap
    c.left, c.right, c.bottom_right = case.left, case.right, case.bottom_right
    c.deterministic, c.multiprocessors = deterministic, case.multiprocessors
    space = (ctypes.c_int64 * 2)()
    library().space_of_backward(ctypes.byref(c), space)
    floats = torch.full((space[0],), torch.nan)
    integers = torch.zeros(space[1], dtype=torch.int32)
    c.floats, c.integers = floats.data_ptr(), integers.data_ptr()
    took = bool(library().takes_backward(ctypes.byref(c)))
    report = library().run_backward(ctypes.byref(c), seed).decode()
    raw = [x for x, _ in outputs]
    gradients: list[list[Tensor]] = []
    for n in range(len(p.q)):
        if packed:
            spans = [(int(s[n]), int(s[n + 1])) for s in starts]
            gradients.append([x[slice(*spans[0 if i == 0 else 1])].transpose(0, 1) for i, x in enumerate(raw)])
        else:
            gradients.append([x[n] for x in raw])
    return Result(report, gradients, raw, delta, took)


def worst(p: Problem, r: Result) -> float:
    """The largest root of mean squared errors, by that of the gradient."""
    errors = [0.0]
    for found, expected in zip(r.gradients, p.gradients, strict=True):
        for x, y in zip(found, expected, strict=True):
            if y.numel() == 0:
                continue
            error, size = (x.double() - y).square().mean().sqrt(), y.square().mean().sqrt()
            errors.append(float(error / size) if size > 0 else float(error))
    return max(errors, key=lambda e: float("inf") if e != e else e)
