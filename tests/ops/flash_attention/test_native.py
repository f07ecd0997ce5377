"""What the table of cases cannot say of attention on the CPU: instruction sets, threads, tasks that share a row's keys
or a head's rows, the exponential, memory, what is computed and kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_errors import assert_errors_of_the_reference
from attention_inputs import plain_options
from built import needs_native
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN
from foundry_kernels.ops.flash_attention.case_makers import (
    DROPOUT,
    bias_arg,
    bias_with_gaps,
    blocks,
    dense_case,
    mask_arg,
    packed_case,
)
from foundry_kernels.testing import Case, assert_parity, normal

pytestmark = needs_native

ISAS = extension.build_info().get("usable_instruction_sets", [])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

#: Long enough for several tasks to share a row's keys, or a head's rows.
SPLIT = (
    dense_case(1, (4, 2), (1, 2100), 64, "decode", causal=True, return_lse=True),
    dense_case(2, (8, 1), (1, 1500), 40, "decode-sinks", sinks=normal(), return_stats=True, window=(1200, None)),
    dense_case(
        1, (3, 1), (2, 1300), 59, "decode-uneven", alibi_slopes=(3,), causal=True, head_dim_v=72, return_stats=True
    ),
    dense_case(1, (2, 2), (1, 1100), 128, "decode-one-row", softcap=5.0, v_layout="swapped", return_lse=True),
    dense_case(1, (2, 1), (40, 1100), 32, "chunk", causal=True, sinks=normal(), return_lse=True, return_stats=True),
    dense_case(1, (2, 1), (20, 1100), 32, "parts-without-keys", window=(100, 0), return_lse=True),
    dense_case(1, (2, 1), (20, 1100), 32, "top-left", causal=True, align="top_left", return_lse=True),
    dense_case(1, (4, 1), (300, 300), 32, "rows", causal=True, return_lse=True),
    dense_case(1, (4, 1), (700, 90), 40, "rows-without-keys", causal=True, window=(50, None), head_dim_v=24),
    dense_case(1, (1, 1), (1100, 1100), 16, "rows-top-left", align="top_left", window=(30, 30), frozen="q"),
)
#: The same of masks, biases and dropout; and what shares an element of a bias in one task, or in several.
MASKED = (
    dense_case(1, (4, 2), (1, 2100), 64, "decode-bias", attn_mask=bias_arg(1, 1, 1, 2100), return_lse=True),
    dense_case(1, (4, 2), (2, 2100), 32, "decode-bool", attn_mask=mask_arg(2, 2100), return_stats=True, **DROPOUT),
    dense_case(2, (3, 1), (2, 1300), 32, "decode-gaps", attn_mask=bias_arg(2, 1, 2, 1300, values=bias_with_gaps)),
    dense_case(1, (2, 1), (20, 1100), 32, "parts-bool", attn_mask=mask_arg(20, 1100, values=blocks), return_lse=True),
    dense_case(1, (4, 1), (700, 300), 32, "rows-bias", attn_mask=bias_arg(4, 700, 300), causal=True, **DROPOUT),
    dense_case(1, (2, 2), (1100, 1100), 16, "rows-bool", attn_mask=mask_arg(1100, 1100, values=blocks), **DROPOUT),
    dense_case(2, (3, 1), (150, 300), 24, "bias-of-all-heads", attn_mask=bias_arg(150, 300), window=(200, 40)),
    dense_case(2, (6, 2), (150, 300), 24, "bias-of-all-queries", attn_mask=bias_arg(6, 1, 300), softcap=4.0),
    dense_case(2, (6, 2), (90, 70), 24, "bias-of-keys", attn_mask=bias_arg(2, 1, 1, 70), sinks=normal()),
    dense_case(2, (4, 4), (90, 300), 24, "bias-of-a-batch", attn_mask=bias_arg(2, 4, 90, 300, layout="swapped")),
    dense_case(1, (24, 1), (9, 70), 16, "bias-of-a-large-group", attn_mask=bias_arg(24, 1, 70), **DROPOUT),
)
PACKED = (
    packed_case((1, 3, 1), (1100, 5, 2048), (4, 2), 32, "decode", causal=True, return_lse=True, return_stats=True),
    packed_case((1, 3, 70), (1100, 2048, 70), (3, 1), 32, "dropout", causal=True, return_lse=True, **DROPOUT),
    packed_case((900, 0, 7), (900, 40, 3), (2, 1), 32, "rows", causal=True, sinks=normal(), return_lse=True),
)


def inputs(
    shape: tuple[int, int, int, int] = (1, 4, 70, 32), hk: int = 2, s: int | None = None, dtype: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    b, h, t, d = shape
    g = torch.Generator().manual_seed(0)
    shapes = ((b, h, t, d), (b, hk, s or t, d), (b, hk, s or t, d))
    q, k, v = (torch.randn(x, generator=g).to(dtype or torch.float32).requires_grad_() for x in shapes)
    return q, k, v


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", [n for n in ISAS if n.endswith("bf16")])
def test_bfloat16_that_is_widened_has_the_bits_of_fewer_instructions(
    instruction_set: Callable[[str], None], bfloat16_choice: Callable[..., None], name: str, batch_invariant: bool
) -> None:
    """Where dot products of pairs are slow: forward, backward and the gradient of a bias that heads share."""
    less = {"avx512_bf16": "avx512", "amx_bf16": "avx512", "neon_bf16": "neon"}[name]
    if less not in ISAS:
        pytest.skip(f"not compiled for {less}")
    q, k, v = inputs((2, 4, 150, 72), dtype=torch.bfloat16)
    bias = torch.randn(150, 150, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    dout = torch.randn_like(q.detach())

    def results(isa: str, *choice: bool) -> list[Tensor]:
        instruction_set(isa)
        bfloat16_choice(*choice)
        with fk.batch_invariant() if batch_invariant else nullcontext():
            plain = fk.flash_attention(q, k, v, causal=True, backend="native")
            masked = fk.flash_attention(q, k, v, attn_mask=bias, backend="native")
        wanted = (q, k, v, bias)
        return [plain, masked, *torch.autograd.grad(plain, (q, k, v), dout), *torch.autograd.grad(masked, wanted, dout)]

    widened, fewer = results(name, False, False, False), results(less, True, True, True)
    for found, wanted in zip(widened, fewer, strict=True):
        assert torch.equal(found, wanted)
    assert not torch.equal(results(name, True, True, True)[0], widened[0])  # which products of pairs are not


def test_tiles_are_used_where_linux_shows_them(instruction_set: Callable[[str], None]) -> None:
    """Their products of bfloat16 are added in another order than those of AVX-512; nothing else differs."""
    cpuinfo = Path("/proc/cpuinfo")
    if "amx_bf16" not in extension.build_info()["instruction_sets"] or not cpuinfo.exists():
        pytest.skip("not compiled for AMX, or not on Linux")
    if not {"amx_tile", "amx_bf16", "avx512_bf16"} <= set(cpuinfo.read_text().split()):
        pytest.skip("the processor has no AMX")
    assert ISAS[-1] == "amx_bf16"
    for dtype in DTYPES:
        q, k, v = inputs((1, 8, 400, 96), dtype=dtype)
        results = []
        for name in ISAS[-2:]:
            instruction_set(name)
            results.append(fk.flash_attention(q, k, v, causal=True, backend="native"))
        assert torch.equal(*results) == (dtype != torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*SPLIT, *MASKED, *PACKED], ids=lambda c: c.id)
@pytest.mark.usefixtures("poisoned")
def test_tasks_that_share_keys_or_rows(case: Case, dtype: torch.dtype) -> None:
    op = FLASH_ATTENTION_VARLEN if case in PACKED else FLASH_ATTENTION
    assert_parity(op, case, backend="native", dtype=dtype)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "case", [*SPLIT, *MASKED, dense_case(3, (6, 3), (130, 131), 40, "plain", causal=True)], ids=lambda c: c.id
)
def test_the_number_of_threads_does_not_change_a_bit(case: Case) -> None:
    results = []
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        args = case.make(torch.float32)
        out = fk.flash_attention(**args, **case.options, backend="native")
        out = out if isinstance(out, tuple) else (out,)
        wanted = [t for t in args.values() if t is not None and t.requires_grad]
        taken = [o for o in out if o.requires_grad]
        results.append((*out, *torch.autograd.grad(taken, wanted, [torch.ones_like(o) for o in taken])))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("name", ISAS)
def test_error_of_the_exponential(instruction_set: Callable[[str], None], name: str) -> None:
    """Two keys with the logits 0 and x <= 0 and the values 0 and 1: the output is e^x / (1 + e^x), and the gradient of
    the second value too. The error is some roundings, and that of x itself as a product with log2(e)."""
    instruction_set(name)
    x = -torch.linspace(0, 87, 4096, dtype=torch.float64).float()
    for rows in (1, 64):  # the kernel for a few rows, and that for tiles
        q = x.reshape(-1, 1, rows, 1)
        k = torch.tensor([0.0, 1.0])[:, None].expand(len(q), 1, 2, 1)
        v = k.clone().requires_grad_()
        out = fk.flash_attention(q, k, v, scale=1.0, backend="native")
        expected = x.double().sigmoid()
        allowed = (4 - 2 * x.double()) * 2.0**-23 * expected
        assert ((out.flatten() - expected).abs() <= allowed).all()
        (dv,) = torch.autograd.grad(out.sum(), v)
        expected, allowed = (y.reshape(-1, rows).sum(1) for y in (expected, allowed))
        assert ((dv[:, 0, 1, 0] - expected).abs() <= allowed).all()
        assert torch.equal(out[0, 0, 0, 0], torch.tensor(0.5))  # e^0 is 1 exactly


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize(
    ("shape", "s", "spread"),
    [((8, 4, 128, 32), 128, 0), ((8, 4, 128, 64), 128, 0), ((8, 4, 128, 128), 128, 0), ((1000, 1, 3, 8), 6, 9)],
    ids=["D=32", "D=64", "D=128", "sharp"],
)
def test_errors_are_those_of_the_reference(
    instruction_set: Callable[[str], None], name: str, shape: tuple[int, int, int, int], s: int, spread: float
) -> None:
    instruction_set(name)
    assert_errors_of_the_reference("native", shape, s, spread)


@pytest.mark.parametrize("name", ISAS)
def test_soft_cap_is_tanh(instruction_set: Callable[[str], None], name: str) -> None:
    """lse of a single key is its logit: cap * tanh(x / cap), to a few units in the last place at every size."""
    instruction_set(name)
    for rows in (1, 64):
        size = 10.0 ** torch.linspace(-6, 3, 4096, dtype=torch.float64)
        x = (size * (-1.0) ** torch.arange(4096)).float().reshape(-1, rows)[:, None, :, None]
        one = torch.ones(len(x), 1, 1, 1)
        _, lse = fk.flash_attention(x, one, one, scale=1.0, softcap=2.0, return_lse=True, backend="native")
        expected = 2.0 * (x[..., 0].double() / 2.0).tanh()
        error = ((lse.double() - expected) / expected).abs().max()
        assert error < 6e-7, float(error)


def test_gradients_lie_in_memory_as_their_tensors() -> None:
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs())
    grads = torch.autograd.grad(fk.flash_attention(q, k, v, backend="native").sum(), (q, k, v))
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.stride() == x.stride()


def test_memory_grows_with_the_tokens_only() -> None:
    """Neither pass allocates anything like the T x S matrix of scores."""
    q, k, v = inputs((1, 2, 3000, 16), hk=1)
    with torch.profiler.profile(profile_memory=True) as profile:
        out = fk.flash_attention(q, k, v, causal=True, backend="native")
        torch.autograd.grad(out.sum(), (q, k, v))
    largest = max(e.cpu_memory_usage for e in profile.events())
    assert 0 < largest < 8 << 20  # the scores of one head are 36 MB where T = S


@pytest.mark.parametrize("t", [2, 70])
def test_a_row_that_is_not_finite_stays_by_itself(t: int) -> None:
    q, k, v = (x.detach() for x in inputs((1, 2, t, 16), hk=1))
    clean = fk.flash_attention(q, k, v, causal=True, backend="native")
    q[0, 0, 1, 3] = math.nan
    options = {"causal": True, "return_lse": True, "return_stats": True}
    out, lse, _, max_logit = fk.flash_attention(q, k, v, **options, backend="native")
    assert out[0, 0, 1].isnan().all()
    assert lse[0, 0, 1].isnan()
    assert max_logit[0, 0, 1].isnan()
    out[0, 0, 1] = clean[0, 0, 1]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("t", [2, 130])
def test_keys_that_nobody_sees_are_not_read(t: int) -> None:
    """Whole tiles of them: as with a window, what is in them changes nothing."""
    q, k, v = inputs((1, 2, t, 32), hk=1, s=300)
    seen = torch.ones(1, 1, t, 300, dtype=torch.bool)
    seen[..., 64:192] = False
    results = []
    for hidden in (0.0, math.nan):
        keys, values = (x.detach().clone() for x in (k, v))
        keys[:, :, 64:192], values[:, :, 64:192] = hidden, hidden
        keys.requires_grad_(), values.requires_grad_()
        for mask in (seen, fk.AttentionMask(seen)):
            out = fk.flash_attention(q, keys, values, attn_mask=mask, backend="native")
            results.append((out, *torch.autograd.grad(out.sum(), (q, keys, values))))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_the_bare_operator_checks_too() -> None:
    """torch.ops.foundry_kernels.flash_attention is reachable without the public function."""
    q, k, v = (x.detach() for x in inputs())
    plain = plain_options(70, 70)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        torch.ops.foundry_kernels.flash_attention(q, k, v, *plain._replace(**options))

    tiles, bits = torch.full((1, 1, 2, 2), 2, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int64)
    three = {name: x[:, :1].expand(1, 3, 70, 32) for name, x in (("k", k), ("v", v))}
    wrong: dict[str, dict[str, Any]] = {
        "k must have q's head dimension": {"k": k[..., :5]},
        "v must have k's heads and tokens": {"v": v[:, :1]},
        "multiple of k's 3 heads": three,
        "k must have q's dtype": {"k": k.half()},
        "unsupported dtype": {"q": q.double(), "k": k.double(), "v": v.double()},
        r"sinks must be \[H\]": {"sinks": torch.zeros(3)},
        r"alibi_slopes must be \[H\] or \[B, H\]": {"alibi_slopes": torch.zeros(3)},
        "attn_mask must broadcast to": {"attn_mask": torch.zeros(1, 4, 70, 69)},
        "attn_mask must be bool or floating": {"attn_mask": torch.ones(1, 1, 1, 1).int()},
        "mask_tiles and mask_bits must be given together": {"mask_bits": bits},
        "mask_tiles must be rows of mask_bits, of which there are 2": {"mask_tiles": tiles, "mask_bits": bits},
        "mask_tiles must broadcast to": {"mask_tiles": tiles[..., :1, :].expand(1, 1, 3, 2), "mask_bits": bits},
        "dropout_seed must be one int64 number": {"dropout_p": 0.5},
    }
    for message, changes in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            attend(**{"q": q, "k": k, "v": v} | changes)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_k must be given together"):
        attend(*packed, cu_seqlens_q=torch.tensor([0, 70]))
    for bad in ([0, 50, 40, 70], [0, 71], [1, 70], [0, -5, 70]):
        good = torch.tensor([0] + [70] * (len(bad) - 1))
        with pytest.raises(ValueError, match="cu_seqlens_k must start at 0, never decrease and end at the 70"):
            attend(*packed, cu_seqlens_q=good, cu_seqlens_k=torch.tensor(bad))
