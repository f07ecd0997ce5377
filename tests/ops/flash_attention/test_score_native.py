"""The C++ interpreter of score functions: each operation and kind of captured tensor, in every instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import needs_native
from score_functions import EXAMPLES, Sizes
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.ops.flash_attention.score_program.program import OPS
from foundry_kernels.ops.flash_attention.score_program.trace import trace

pytestmark = needs_native

ISAS = extension.build_info().get("usable_instruction_sets", [])
over_sets = pytest.mark.parametrize("name", ISAS)

#: By operation, for a score s of about 1; constants, inputs and `mul` are in most of them.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "score": lambda s, b, h, q, k: s,
    "b": lambda s, b, h, q, k: s + b,
    "h": lambda s, b, h, q, k: h * 0.5 - s,
    "q": lambda s, b, h, q, k: s * q,
    "k": lambda s, b, h, q, k: s * k,
    "const": lambda s, b, h, q, k: 3.5,
    "float": lambda s, b, h, q, k: (q * k).float(),
    "int": lambda s, b, h, q, k: (3 * s).int() + (s > 0).int() + (s / 0 * 1e-30).int() * 1e-9 + s,
    "detach": lambda s, b, h, q, k: s.detach() * s,
    "neg": lambda s, b, h, q, k: -s + (-q),
    "abs": lambda s, b, h, q, k: abs(s) + abs(q - k),
    "exp": lambda s, b, h, q, k: torch.exp(5 * s),
    "exp2": lambda s, b, h, q, k: torch.exp2(-9 * s),
    "log": lambda s, b, h, q, k: torch.log(s * s + 0.5) + torch.log(q + 1.0),
    "log2": lambda s, b, h, q, k: torch.log2(abs(s) + 0.5) + torch.log2(k + 1e-40),
    "sqrt": lambda s, b, h, q, k: torch.sqrt(abs(s) + 0.5),
    "rsqrt": lambda s, b, h, q, k: torch.rsqrt(0.1 + s * s),
    "tanh": lambda s, b, h, q, k: torch.tanh(s),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(9 * s),
    "sin": lambda s, b, h, q, k: torch.sin(5 * s),
    "cos": lambda s, b, h, q, k: torch.cos(5 * s),
    "floor": lambda s, b, h, q, k: torch.floor(7 * s) + s,
    "add": lambda s, b, h, q, k: s + (q + k),
    "sub": lambda s, b, h, q, k: s - (q - k),
    "mul": lambda s, b, h, q, k: s * s * (q * k),
    "div": lambda s, b, h, q, k: s / (k + 1) + 1 / (s + 40),
    "floordiv": lambda s, b, h, q, k: s + (q - 50) // (k % 9 - 4) + (k - 50) // 7,
    "mod": lambda s, b, h, q, k: s + (q - 50) % (k % 9 - 4) + (k - 50) % -7,
    "pow": lambda s, b, h, q, k: abs(s) ** 2.7 + 1.5**s,
    "min": lambda s, b, h, q, k: torch.minimum(s, -s * k) + torch.minimum(q, k),
    "max": lambda s, b, h, q, k: torch.maximum(s, -s * k) + torch.maximum(q, k),
    "lt": lambda s, b, h, q, k: torch.where((s < 0.3) | (q < k), s, 2 * s),
    "le": lambda s, b, h, q, k: torch.where((s <= 0.3) | (q <= k), s, 2 * s),
    "eq": lambda s, b, h, q, k: torch.where((s == 0.3) | (q == k), s, 2 * s),
    "and": lambda s, b, h, q, k: s * (q & k) + torch.where((s > 0) & (q > k), s, 1.0),
    "or": lambda s, b, h, q, k: s * (q | k),
    "xor": lambda s, b, h, q, k: s * (q ^ k),
    "not": lambda s, b, h, q, k: torch.where(~(s > q % 2), s, s + ~q),
    "where": lambda s, b, h, q, k: torch.where(q % 3 == 0, 0.5 - s, s),
    "load": lambda s, b, h, q, k: s + torch.arange(9.0)[q % 9],
}  # fmt: skip
SIZES = Sizes(2, 4, 70, 80)


def numbers(
    score_mod: Callable[..., Any], sizes: Sizes, dtype: torch.dtype, backend: str, heads_k: int, *captured: Tensor
) -> list[Tensor]:
    """The results for one key of each query, which are its lse; and their derivatives by the score and the tensors."""
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(sizes.batch, n, t, 8, generator=generator).bfloat16().to(dtype)
        for n, t in ((sizes.heads, sizes.queries), (heads_k, sizes.keys))
    )
    seen = torch.zeros(sizes.queries, sizes.keys, dtype=torch.bool)
    rows = torch.arange(sizes.queries)
    seen[rows, (rows * 7 + 3) % sizes.keys] = True
    q.requires_grad_()
    _, lse = fk.flash_attention(q, k, k, attn_mask=seen, score_mod=score_mod, return_lse=True, backend=backend)
    weight = torch.randn(lse.shape, generator=generator).to(lse.dtype)
    loss = (lse * weight).where(lse.detach().isfinite(), 0).sum()
    return [lse.detach(), *torch.autograd.grad(loss, [q, *captured], materialize_grads=True)]


def compare(found: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        size = float(y[y.isfinite()].abs().max()) if y.isfinite().any() else 1.0
        torch.testing.assert_close(x.double(), y.double(), rtol=3e-6, atol=1e-6 * size)


def test_there_is_a_function_of_each_operation() -> None:
    for op, fn in OPERATIONS.items():
        assert op in [x.op for x in trace(fn, torch.float32, torch.device("cpu"))[0].instructions] or op == "detach"
    assert set(OPERATIONS) == set(OPS)


@over_sets
@pytest.mark.parametrize("sizes", [SIZES, Sizes(2, 4, 2, 80)], ids=["", "decoding"])
def test_operations(instruction_set: Callable[[str], None], name: str, sizes: Sizes) -> None:
    instruction_set(name)
    for op, fn in OPERATIONS.items():
        found, wanted = (
            numbers(fn, sizes, *how) for how in ((torch.float32, "native", 2), (torch.float64, "reference", 2))
        )
        try:
            compare(found, wanted)
        except AssertionError as error:
            raise AssertionError(op) from error


#: Ways to read a tensor [9, 160, 160]; whether the last two leave it is not known before a kernel.
READS: dict[str, Callable[..., Any]] = {
    "rows": lambda t, b, h, q, k: t[b + h, q, k],
    "columns": lambda t, b, h, q, k: t[b + h, k, q],
    "diagonals": lambda t, b, h, q, k: t[h, 5, k - q + 69],
    "other diagonals": lambda t, b, h, q, k: t[0, q - k + 79, 3],
    "diagonals in steps": lambda t, b, h, q, k: t[0, 2, (q - k) * 1 + 10],
    "from the end": lambda t, b, h, q, k: t[-1 - b, q - 40, -k - 1],
    "anywhere": lambda t, b, h, q, k: t[(q + k) % 9, (q * 11 + k * 5) % 160, (q ^ k) % 160],
    "a row": lambda t, b, h, q, k: t[h, q, 3],
    "a column": lambda t, b, h, q, k: t[8, 7, k],
    "a number": lambda t, b, h, q, k: t[h, b, 2],
    "bounded": lambda t, b, h, q, k: t[h, 2, torch.clamp(k * 3, 0, 80)] * 2,
    "beyond the end": lambda t, b, h, q, k: t[h, q + 120 + (b & 0), k],
    "keys beyond the end": lambda t, b, h, q, k: t[h, q, k + 120 + (b & 0)],
}  # fmt: skip
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.int16,
    torch.bool,
]


@over_sets
def test_captured_tensors(instruction_set: Callable[[str], None], name: str) -> None:
    """Of all dtypes, with heads in one block or in several, and few queries; with gradients."""
    instruction_set(name)
    values = 3 * torch.randn(9, 160, 320, generator=torch.Generator().manual_seed(1))
    for i, (read, fn) in enumerate(READS.items()):
        for j, heads_k, sizes in ((0, 2, SIZES), (3, 4, SIZES), (5, 2, Sizes(2, 4, 2, 80))):
            dtype = DTYPES[(i + j) % len(DTYPES)]
            table = values.to(dtype)[:, :, ::2]
            table = (
                (table.transpose(1, 2) if i % 2 else table.contiguous())
                .detach()
                .requires_grad_(dtype.is_floating_point)
            )
            captured = [table] if table.requires_grad else []

            def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
                return s * 0.5 + fn(table, b, h, q, k) * s  # noqa: B023

            found = numbers(score_mod, sizes, torch.float32, "native", heads_k, *captured)
            wanted = numbers(score_mod, sizes, torch.float64, "reference", heads_k, *captured)
            if dtype in (torch.bfloat16, torch.float16):
                torch.testing.assert_close(found.pop(), wanted.pop(), rtol=2e-2, atol=1e-3)
            try:
                compare(found, wanted)
            except AssertionError as error:
                raise AssertionError(f"{read} of {dtype}, {heads_k} heads, {sizes}") from error


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    """Gradients that all tasks share, that sequences share, and that none share."""
    sizes = Sizes(2, 4, 300, 300)
    generator = torch.Generator().manual_seed(0)
    scalar, table, pairs = torch.tensor(0.5), torch.randn(4, 599, generator=generator), torch.randn(*sizes)
    leaves = [x.requires_grad_() for x in (scalar, table, pairs)]
    q, k, v = (torch.randn(2, n, 300, 16, generator=generator).requires_grad_() for n in (4, 2, 2))

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * scalar + table[h, i - j + 299] + pairs[b, h, i, j]

    found = []
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        out = fk.flash_attention(q, k, v, score_mod=score_mod, causal=True, backend="native")
        found.append((out, *torch.autograd.grad(out, [q, k, v, *leaves], torch.ones_like(out))))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_gradient_is_the_same_in_a_pass_of_its_own() -> None:
    """Of a tensor of which each pair has its own element, alone, beside others and with those of q, k and v."""
    table, gate = torch.randn(4, 150, 140, requires_grad=True), torch.ones(4, requires_grad=True)
    q, k, v = (torch.randn(1, n, t, 16).requires_grad_() for n, t in ((4, 150), (2, 140), (2, 140)))

    def attend(use_gate: bool) -> Tensor:
        return fk.flash_attention(
            q, k, v, causal=True, softcap=3.0, backend="native",
            score_mod=lambda s, b, h, i, j: table[h, i, j] * s * (gate[h] if use_gate else 1.0),
        )  # fmt: skip

    dout = torch.randn(1, 4, 150, 16)
    alone = torch.autograd.grad(attend(False), [table], dout)[0]
    for use_gate in (False, True):
        dq, dtable = torch.autograd.grad(attend(use_gate), [q, table], dout)
        torch.testing.assert_close(dtable, alone, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dq, torch.autograd.grad(attend(False), [q], dout)[0], rtol=1e-5, atol=1e-6)


@over_sets
def test_hidden_pairs_hide_what_a_function_returns(instruction_set: Callable[[str], None], name: str) -> None:
    """NaN and infinity at pairs that a mask or -inf hides reach nothing, forward and backward."""
    instruction_set(name)
    table = torch.zeros(70, 80).masked_fill(torch.ones(70, 80, dtype=torch.bool).triu(11), math.nan).requires_grad_()
    q, k, v = (torch.randn(1, 2, t, 16).requires_grad_() for t in (70, 80, 80))
    out = fk.flash_attention(
        q, k, v, causal=True, backend="native",
        score_mod=lambda s, b, h, i, j: torch.where((i + j) % 7 == 0, -math.inf, s * torch.exp(table[i, j])),
    )  # fmt: skip
    for x in (out, *torch.autograd.grad(out, [q, k, v, table], torch.ones_like(out))):
        assert x.isfinite().all()


def test_tiles_that_a_mask_skips_are_not_evaluated() -> None:
    """The time of a slow function, with a window of 1/8 of the keys."""
    import time

    q, k, v = (torch.randn(1, 1, 1024, 16) for _ in range(3))

    def seconds(**options: Any) -> float:
        spent = []
        for _ in range(3):
            begin = time.thread_time()
            fk.flash_attention(q, k, v, score_mod=OPERATIONS["pow"], backend="native", **options)
            spent.append(time.thread_time() - begin)
        return min(spent)

    assert seconds(window=(64, 64)) < 0.5 * seconds()


@pytest.mark.parametrize("example", ["alibi", "t5_bias", "relative_table"])
def test_bfloat16(example: str) -> None:
    """The products of pairs: against the reference in bfloat16."""
    tensors = EXAMPLES[example].captured(SIZES)
    fn = EXAMPLES[example].score_mod({n: x.detach() for n, x in tensors.items()})
    q, k, v = (torch.randn(2, n, t, 64) for n, t in ((4, 70), (2, 80), (2, 80)))
    exact = fk.flash_attention(*(x.bfloat16().double() for x in (q, k, v)), score_mod=fn, backend="reference")
    found, wanted = (
        fk.flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), score_mod=fn, backend=b) - exact
        for b in ("native", "reference")
    )
    assert found.abs().max() <= 2 * wanted.abs().max()
