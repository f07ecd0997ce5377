"""Attention's Triton kernels, beside the parity suite: what is launched, read and allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_inputs import plain_options
from slow import rest_slow
from torch import Tensor

from benchmarks.measure import peak_bytes
from foundry_kernels import _triton
from foundry_kernels.ops.flash_attention import (
    FLASH_ATTENTION,
    FLASH_ATTENTION_VARLEN,
    flash_attention,
    flash_attention_varlen,
)
from foundry_kernels.ops.flash_attention.case_makers import dense_case, packed_case
from foundry_kernels.ops.flash_attention.cases import field_cases
from foundry_kernels.testing import Case, assert_parity, normal

DEVICE = "cpu" if _triton.INTERPRET else "cuda"
pytestmark = pytest.mark.skipif(
    FLASH_ATTENTION.why_not("triton", DEVICE) is not None, reason=str(FLASH_ATTENTION.why_not("triton", DEVICE))
)
KERNELS = ("fwd", "preprocess", "dkdv", "dq")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def inputs(t: int, s: int, *, b: int = 1, heads: tuple[int, int] = (4, 2), d: int = 16) -> tuple[Tensor, ...]:
    return draw(b, heads[0], t, d), draw(b, heads[1], s, d, seed=1), draw(b, heads[1], s, d, seed=2)


class Launches:
    """Stands in for a kernel: notes its name and launches nothing."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **constants: self.seen.append(self.name)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that calls would launch."""
    from foundry_kernels.ops.flash_attention.triton import backward_launch, decode_launch, launch

    seen: list[str] = []
    for name in KERNELS:
        module = launch if name == "fwd" else backward_launch
        monkeypatch.setattr(module, f"flash_attention_{name}_kernel", Launches(name, seen))
    for name in ("decode", "combine"):
        monkeypatch.setattr(decode_launch, f"flash_attention_{name}_kernel", Launches(name, seen))
    return seen


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("q", ["fwd", "preprocess", "dq"]),
        ("k", ["fwd", "preprocess", "dkdv"]),
        ("v", ["fwd", "preprocess", "dkdv"]),
        ("s", ["fwd", "preprocess"]),
        ("qkvs", list(KERNELS)),
        ("", ["fwd"]),
    ],
    ids=["q", "k", "v", "sinks", "all", "none"],
)
def test_only_what_is_needed_is_launched(wanted: str, expected: list[str], launched: list[str]) -> None:
    tensors = dict(zip("qkvs", (*inputs(40, 40), draw(4)), strict=True))
    for name, x in tensors.items():
        x.requires_grad_(name in wanted)
    out = flash_attention(*(tensors[n] for n in "qkv"), sinks=tensors["s"], backend="triton")
    if wanted:
        torch.autograd.grad(out, [tensors[n] for n in wanted], torch.ones_like(out))
    assert launched == expected


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.usefixtures("launched")
def test_memory_grows_with_the_length_and_not_with_its_square(packed: bool) -> None:
    """Everything is allocated before a launch, so nothing need run. Output, three gradients and, a row, lse
    in float64, its two parts in float32 and delta: exactly."""
    heads, kv_heads, d = 4, 2, 16

    def step(t: int) -> Callable[[], Callable[[], object]]:
        q, k, v = inputs(t, t, heads=(heads, kv_heads), d=d)
        if packed:
            q, k, v = (x[0].detach().transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v))
        cu_seqlens = torch.tensor([0, t // 2, t], dtype=torch.int32, device=DEVICE)
        cotangent = torch.ones_like(q)

        def run() -> object:
            if packed:
                out = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, t, t, causal=True, backend="triton")
            else:
                out = flash_attention(q, k, v, causal=True, backend="triton")
            return out, torch.autograd.grad(out, (q, k, v), cotangent)

        return lambda: run

    for t in (256, 1024, 4096):
        rows, width = 5 * heads * t, (2 * heads + 2 * kv_heads) * t * d
        assert peak_bytes(step(t), DEVICE) == pytest.approx(4 * (rows + width), abs=2048)


def test_tiles_outside_of_the_window_are_not_read() -> None:
    """NaN where no query of a tile looks: had it been read, 0 * NaN would show."""
    q, k, v = inputs(160, 160, heads=(1, 1))
    expected = flash_attention(q, k, v, window=(16, 0), backend="triton")
    cotangent = torch.randn_like(expected)
    cotangent[:, :, :128] = 0.0
    grads = torch.autograd.grad(expected, (q, k, v), cotangent)
    with torch.no_grad():
        for x in (k, v):
            x[:, :, :96] = math.nan
    out = flash_attention(q, k, v, window=(16, 0), backend="triton")
    assert torch.equal(out[:, :, 128:], expected[:, :, 128:])
    (dq,) = torch.autograd.grad(out, q, cotangent)
    assert torch.equal(dq[:, :, 128:], grads[0][:, :, 128:])
    with torch.no_grad():
        q[:, :, :96] = math.nan
    _, dk, dv = torch.autograd.grad(flash_attention(q, k, v, window=(16, 0), backend="triton"), (q, k, v), cotangent)
    assert torch.equal(dk[:, :, 128:], grads[1][:, :, 128:])
    assert torch.equal(dv[:, :, 128:], grads[2][:, :, 128:])


def test_cu_seqlens_that_overrun_touch_nothing_outside() -> None:
    """They are not checked on a GPU, but clamped to the tensors. Beyond these lies NaN."""
    from foundry_kernels.ops.flash_attention import triton

    def view(x: Tensor) -> Tensor:
        around = torch.full((x.shape[0] + 96, *x.shape[1:]), math.nan, device=DEVICE)
        around[:40] = x.detach()
        return around[:40]

    q, k, v = (view(x[0].transpose(0, 1)) for x in inputs(40, 40))
    bad = torch.tensor([0, 33, 90], dtype=torch.int32, device=DEVICE)
    good = torch.tensor([0, 33, 40], dtype=torch.int32, device=DEVICE)
    options = plain_options(60, 60, 0.25, cu_seqlens_q=bad, cu_seqlens_k=bad, window_right=0)
    for x in (q, k, v):
        x.requires_grad_()
    results = []
    for cu_seqlens in (bad, good):
        out = triton.flash_attention_varlen(q, k, v, options._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens))
        results.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    assert all(torch.equal(a, e) and a.isfinite().all() for a, e in zip(*results, strict=True))


def test_gradients_lie_as_their_tensors_do() -> None:
    """A model's q is a view of [B, T, H, D] memory: its gradient is one too, and nothing is copied to transpose."""
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs(33, 33))
    out = flash_attention(q, k, v, backend="triton")
    for x, g in zip((q, k, v), torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), strict=True):
        assert g.stride() == x.stride()


#: Few queries with keys for several splits: of 64 keys in the interpreter, of 128 on a GPU. "many-rows" has too many
#: for one program to add the splits.
DECODE = (
    dense_case(1, (4, 2), (1, 300), 64, "decode", causal=True, return_lse=True),
    dense_case(2, (4, 1), (1, 290), 40, "sinks", sinks=normal(), return_stats=True, window=(270, None), frozen="kv"),
    dense_case(1, (3, 1), (2, 290), 59, "uneven", alibi_slopes=(3,), causal=True, head_dim_v=72, return_stats=True),
    dense_case(1, (4, 2), (5, 270), 32, "top-left", causal=True, align="top_left", sinks=normal(), return_lse=True),
    dense_case(1, (4, 2), (5, 270), 128, "many-rows", causal=True, sinks=normal(), return_stats=True, frozen="kv"),
    dense_case(
        1, (2, 1), (5, 270), 32, "top-left-left", align="top_left", window=(3, None), return_lse=True, frozen="kv"
    ),
    dense_case(1, (2, 2), (9, 300), 32, "window", window=(280, 20), softcap=5.0, return_lse=True, frozen="kv"),
    dense_case(1, (2, 1), (2, 290), 128, "logits-60", q_values=normal(60.0), v_layout="swapped", return_stats=True),
)
DECODE_PACKED = (
    packed_case((1, 3, 0, 1), (260, 5, 9, 0), (4, 2), 40, "all", alibi_slopes=(4, 4), sinks=normal(), causal=True,
            softcap=3.0, return_lse=True, return_stats=True),
    packed_case((1, 1, 1), (300, 1, 129), (2, 1), 32, "window", window=(290, 0), index=torch.int64, slack=2),
)  # fmt: skip


@pytest.mark.parametrize("case", [*rest_slow(DECODE, 5), *DECODE_PACKED], ids=lambda case: case.id)
@pytest.mark.usefixtures("poisoned")
def test_keys_split_over_programs(case: Case) -> None:
    op = FLASH_ATTENTION_VARLEN if case in DECODE_PACKED else FLASH_ATTENTION
    assert_parity(op, case, backend="triton", dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize(
    ("t", "s", "d", "expected"),
    [
        (1, 700, 16, ["decode"]),  # the last program of a head adds the splits
        (1, 60, 16, ["decode"]),
        (1, 700, 512, ["decode"]),
        (8, 700, 16, ["decode"]),
        (8, 700, 128, ["decode", "combine"]),  # of so many rows that one program would take long
        (40, 700, 16, ["fwd"]),
    ],
)
def test_few_queries_are_launched_with_keys_split(
    t: int, s: int, d: int, expected: list[str], launched: list[str]
) -> None:
    q, k, v = inputs(t, s, heads=(4, 2), d=d)
    flash_attention(q.detach(), k.detach(), v.detach(), backend="triton")
    assert launched == expected


def test_a_sequence_gets_the_same_bits_alone_in_a_batch_and_packed() -> None:
    """Keys are split by their number alone, and no program of another sequence writes to the same place."""
    lengths = (300, 70, 140)
    q, k, v = (x.detach() for x in inputs(1, sum(lengths), heads=(4, 2)))
    at, cu_seqlens_q = torch.tensor([0, 300, 370, 510], device=DEVICE), torch.arange(4, device=DEVICE)
    packed_k, packed_v = (x[0].transpose(0, 1) for x in (k, v))
    packed = flash_attention_varlen(
        q[0].transpose(0, 1).expand(3, -1, -1), packed_k, packed_v, cu_seqlens_q, at, 1, 300, backend="triton"
    )
    for n, length in enumerate(lengths):
        one = k[:, :, at[n] : at[n] + length], v[:, :, at[n] : at[n] + length]
        alone = flash_attention(q, *one, backend="triton")
        twice = flash_attention(*(x.expand(2, -1, -1, -1) for x in (q, *one)), backend="triton")
        assert torch.equal(packed[n], alone[0, :, 0])
        assert torch.equal(twice, alone.expand(2, -1, -1, -1))


def test_a_long_cache_is_read_by_many_programs() -> None:
    from foundry_kernels.ops.flash_attention.triton.decode_launch import split

    for rows, keys, kv_heads, programs in ((16, 16384, 8, 100), (16, 131072, 1, 64), (16, 4096, 8, 100)):
        split_keys, num_splits = split(rows, keys)
        assert num_splits * kv_heads >= programs
        assert (num_splits - 1) * split_keys < keys <= num_splits * split_keys


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_whole_field(dtype: torch.dtype) -> None:
    """Every length x heads x mask x cap x width."""
    for case in field_cases():
        assert_parity(FLASH_ATTENTION, case, backend="triton", dtype=dtype, device="cuda")
