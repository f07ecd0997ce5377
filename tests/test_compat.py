"""The signatures of PyTorch and flash-attn for training: against plain loops over sequences and heads, and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_loops import BACKENDS, EXACT, attend, close, draw, for_loop, over_backends, over_options
from table import Allocations
from torch import Tensor

from foundry_kernels.compat import flash_attn_func, flash_attn_varlen_func, scaled_dot_product_attention


@over_backends
@over_options
@pytest.mark.parametrize("tokens", [(6, 6), (3, 9), (9, 4), (1, 7)], ids=str)
def test_flash_attn_func(backend: str, options: dict[str, Any], tokens: tuple[int, int]) -> None:
    dtype, tolerance = EXACT[backend]
    q, k, v = (draw(3, n, h, w, seed=i, dtype=dtype) for i, (n, h, w) in enumerate(
        ((tokens[0], 4, 8), (tokens[1], 2, 8), (tokens[1], 2, 5))
    ))  # fmt: skip
    out = flash_attn_func(q, k, v, **options, backend=backend)
    assert isinstance(out, Tensor)
    again, lse, none = flash_attn_func(q, k, v, **options, deterministic=True, return_attn_probs=True, backend=backend)
    assert torch.equal(out, again)
    assert none is None
    assert out.is_contiguous()
    for n in range(3):
        expected, expected_lse = attend(q[n], k[n], v[n], **for_loop(options, n))
        close(out[n], expected, tolerance)
        close(lse[n], expected_lse, tolerance)


@over_backends
@over_options
def test_flash_attn_varlen_func(backend: str, options: dict[str, Any]) -> None:
    dtype, tolerance = EXACT[backend]
    starts_q, starts_k = [0, 5, 5, 9], [0, 7, 10, 12]
    q, k, v = draw(9, 4, 8, dtype=dtype), draw(12, 2, 8, seed=1, dtype=dtype), draw(12, 2, 5, seed=2, dtype=dtype)
    cu = (torch.tensor(starts_q, dtype=torch.int32), torch.tensor(starts_k, dtype=torch.int32))
    out = flash_attn_varlen_func(q, k, v, *cu, 5, 7, **options, backend=backend)
    again, lse, none = flash_attn_varlen_func(q, k, v, *cu, 5, 7, **options, return_attn_probs=True, backend=backend)
    assert torch.equal(out, again)
    assert none is None
    for n in range(3):
        tq, tk = slice(starts_q[n], starts_q[n + 1]), slice(starts_k[n], starts_k[n + 1])
        expected, expected_lse = attend(q[tq], k[tk], v[tk], **for_loop(options, n))
        close(out[tq], expected, tolerance)
        close(lse[:, tq], expected_lse, tolerance)


def test_gradients_flow_in_flash_attn_layout() -> None:
    q, k, v = (draw(2, 5, h, 8, seed=h).requires_grad_() for h in (4, 2, 2))
    assert torch.autograd.gradcheck(lambda *a: flash_attn_func(*a, causal=True, window_size=(3, -1)), (q, k, v))


q, k = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 2, 8)
packed = torch.ones(6, 2, 8)
starts = torch.tensor([0, 6])

BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "dropout": (lambda: flash_attn_func(q, k, k, 0.1), ValueError, r"dropout_p must be 0.*got 0.1"),
    "rank": (lambda: flash_attn_func(q[0], k, k), ValueError, r"q must be \[B, tokens, heads, head_dim\]"),
    "no tensor": (lambda: flash_attn_func([1], k, k), TypeError, r"q must be a torch.Tensor"),  # type: ignore[arg-type]
    "scale": (lambda: flash_attn_func(q, k, k, softmax_scale=-1.0), ValueError, r"softmax_scale must be finite"),
    "softcap": (lambda: flash_attn_func(q, k, k, softcap=-1.0), ValueError, r"softcap must be finite and > 0"),
    "window": (lambda: flash_attn_func(q, k, k, window_size=(-2, 0)), ValueError, r"window_size must hold ints >= 0"),
    "window pair": (lambda: flash_attn_func(q, k, k, window_size=3), TypeError, r"window_size must be a pair"),  # type: ignore[arg-type]
    "varlen pages": (
        lambda: flash_attn_varlen_func(packed, packed, packed, starts, starts, 6, 6, block_table=starts),
        ValueError,
        r"block_table must be None: paged",
    ),
    "varlen dropout": (
        lambda: flash_attn_varlen_func(packed, packed, packed, starts, starts, 6, 6, 0.5),
        ValueError,
        r"dropout_p must be 0",
    ),
    "mask": (
        lambda: scaled_dot_product_attention(q, q, q, torch.ones(4, 4, dtype=torch.bool)),
        ValueError,
        r"attn_mask must be None.*is_causal=True.*flash_attention_varlen.*Got torch.bool \(4, 4\)",
    ),
    "sdpa dropout": (lambda: scaled_dot_product_attention(q, q, q, dropout_p=0.1), ValueError, r"dropout_p must be 0"),
    "sdpa heads": (
        lambda: scaled_dot_product_attention(torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8)),
        ValueError,
        r"key must have query's 4 heads unless enable_gqa=True",
    ),
    "sdpa batch": (
        lambda: scaled_dot_product_attention(q, q[:1], q[:1]),
        ValueError,
        r"key must have query's batch \(2,\)",
    ),
    "sdpa rank": (
        lambda: scaled_dot_product_attention(q, q[0], q[0]),
        ValueError,
        r"key must be .* as many dimensions",
    ),
    "sdpa vector": (lambda: scaled_dot_product_attention(*[torch.ones(8)] * 3), ValueError, r"query must be"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    function, error, message = BAD[what]
    with pytest.raises(error, match=message):
        function()


@over_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "kv_shape", "options"),
    [
        ((2, 4, 7, 16), (2, 4, 9, 16), {}),
        ((2, 4, 7, 16), (2, 4, 9, 16), {"is_causal": True}),
        ((2, 4, 9, 16), (2, 4, 7, 16), {"is_causal": True, "scale": 0.3}),
        ((2, 4, 7, 16), (2, 2, 7, 16), {"is_causal": True, "enable_gqa": True}),
        ((2, 3, 2, 7, 16), (2, 3, 2, 9, 16), {"is_causal": True}),
        ((3, 7, 16), (3, 9, 16), {"is_causal": True}),
        ((7, 16), (9, 16), {}),
    ],
    ids=str,
)
def test_sdpa_is_torchs(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], kv_shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    given = [draw(*s, seed=i).to(dtype) for i, s in enumerate((shape, kv_shape, (*kv_shape[:-1], 8)))]
    cotangent = draw(*shape[:-1], 8, seed=3).to(dtype)
    results = []
    for function, cast in (
        (lambda *a, **o: scaled_dot_product_attention(*a, **o, backend=backend), dtype),
        (F.scaled_dot_product_attention, torch.float64),
    ):
        inputs = [x.to(cast).requires_grad_() for x in given]
        out = function(*inputs, **options)
        results.append((out, *torch.autograd.grad(out, inputs, cotangent.to(cast))))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for a, e in zip(*results, strict=True):
        assert a.dtype == dtype
        assert a.shape == e.shape
        close(a, e, tolerance)


def test_layouts_are_views() -> None:
    """A transposition is no copy: attention sees the caller's memory, and the output is laid out like the query."""
    q, k = torch.randn(2, 300, 4, 16), torch.randn(2, 300, 2, 16)
    with torch.no_grad(), Allocations() as made:
        out = flash_attn_func(q, k, k, backend=BACKENDS[-1])
    assert out.is_contiguous()
    if BACKENDS[-1] == "native":  # the reference makes the scores
        assert made.largest <= out.numel()
    heads_first = scaled_dot_product_attention(q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2))
    assert heads_first.transpose(1, 2).is_contiguous()


@over_backends
def test_flash_attn_func_compiles(backend: str) -> None:
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(q, k, k, causal=True, backend=backend), flash_attn_func(q, k, k, causal=True, backend=backend)
    )
    sdpa = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    args = (q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2))
    torch.testing.assert_close(
        sdpa(*args, enable_gqa=True, backend=backend),
        scaled_dot_product_attention(*args, enable_gqa=True, backend=backend),
    )
