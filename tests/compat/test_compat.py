"""The signatures of PyTorch and flash-attn for training: against plain loops over sequences and heads, and torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_loops import BACKENDS, EXACT, close, draw, of_sequence, over_backends, over_options, plain
from slow import rest_slow
from table import Allocations
from torch import Tensor

from foundry_kernels.compat import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)


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
        expected, expected_lse = plain(q[n], k[n], v[n], **of_sequence(options, n))
        close(out[n], expected, tolerance)
        close(lse[n], expected_lse, tolerance)


@over_backends
@over_options
def test_flash_attn_varlen_func(backend: str, options: dict[str, Any]) -> None:
    dtype, tolerance = EXACT[backend]
    cu_q, cu_k = [0, 5, 5, 9], [0, 7, 10, 12]
    q, k, v = draw(9, 4, 8, dtype=dtype), draw(12, 2, 8, seed=1, dtype=dtype), draw(12, 2, 5, seed=2, dtype=dtype)
    cu = (torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32))
    out = flash_attn_varlen_func(q, k, v, *cu, 5, 7, **options, backend=backend)
    again, lse, none = flash_attn_varlen_func(q, k, v, *cu, 5, 7, **options, return_attn_probs=True, backend=backend)
    assert torch.equal(out, again)
    assert none is None
    for n in range(3):
        tq, tk = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        expected, expected_lse = plain(q[tq], k[tk], v[tk], **of_sequence(options, n))
        close(out[tq], expected, tolerance)
        close(lse[:, tq], expected_lse, tolerance)


@over_backends
@pytest.mark.parametrize("tokens", [(7, 9), (9, 7)], ids=str)
@pytest.mark.parametrize(
    ("q", "k", "v", "options"),
    [
        ((2, 4), (2, 4), (2, 4), {}),
        ((2, 4), (2, 4), (2, 4), {"is_causal": True, "scale": 0.3}),
        ((2, 4), (2, 4), (2, 4), {"scale": -0.3, "is_causal": True}),
        ((2, 4), (2, 4), (2, 4), {"scale": 0.0}),
        ((2, 4), (2, 4), (2, 4), {"scale": 0.0, "is_causal": True}),
        ((2, 3, 2), (2, 3, 2), (2, 3, 2), {"is_causal": True}),
        ((3,), (3,), (3,), {"is_causal": True}),
        ((), (), (), {}),
        ((2, 4), (1, 4), (1, 4), {}),
        ((1, 4), (2, 4), (2, 4), {"is_causal": True}),
        ((1, 4), (1, 4), (2, 4), {}),
        ((4,), (2, 4), (2, 4), {}),
        ((2, 4), (4,), (4,), {}),
        ((), (2, 4), (4,), {}),
        ((3, 1, 4), (1, 2, 4), (2, 4), {"is_causal": True}),
        ((2, 4), (2, 1), (2, 1), {}),
        ((2, 4), (2, 4), (2, 1), {}),
        ((2, 1), (2, 4), (1, 1), {}),
        ((2, 12), (2, 4), (2, 6), {"is_causal": True, "enable_gqa": True}),
        ((2, 4), (2, 1), (2, 4), {"enable_gqa": True}),
        ((2, 4), (1, 2), (2, 1), {"enable_gqa": True}),
        ((2, 3, 4), (3, 2), (1, 1, 2), {"enable_gqa": True}),
        ((4,), (2,), (2,), {"enable_gqa": True}),
    ],
    ids=str,
)
def test_sdpa_broadcasts_as_torch_does(
    backend: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    options: dict[str, Any],
    tokens: tuple[int, int],
) -> None:
    """Output and gradients, against torch's in float64. Other dtypes: `test_use_sdpa.py`."""
    t, s = tokens
    given = [draw(*x, seed=i).float() for i, x in enumerate(((*q, t, 16), (*k, s, 16), (*v, s, 8)))]
    results = []
    for function, cast in (
        (lambda *a, **o: scaled_dot_product_attention(*a, **o, backend=backend), torch.float32),
        (F.scaled_dot_product_attention, torch.float64),
    ):
        inputs = [x.to(cast).requires_grad_() for x in given]
        out = function(*inputs, **options)
        results.append((out, *torch.autograd.grad(out, inputs, draw(*out.shape, seed=3).to(cast))))
    for a, e in zip(*results, strict=True):
        assert a.dtype == torch.float32
        assert a.shape == e.shape
        close(a, e, 1e-5)


@over_backends
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_sdpa_of_a_scale_that_is_not_finite(backend: str, scale: float) -> None:
    q, k, v = draw(2, 3, 4, 8), draw(2, 3, 5, 8), draw(2, 3, 5, 6)
    assert F.scaled_dot_product_attention(q, k, v, scale=scale).isnan().all()
    q, k, v = q.float(), k.float(), v.float()
    assert scaled_dot_product_attention(q, k, v, scale=scale, backend=backend).isnan().all()


def test_sdpa_broadcasts_without_a_copy() -> None:
    q, k = torch.randn(4, 8, 1, 16), torch.randn(1, 8, 600, 16)
    with torch.no_grad(), Allocations() as made:
        out = scaled_dot_product_attention(q, k, k, backend=BACKENDS[-1])
    assert out.shape == q.shape
    if BACKENDS[-1] == "native":  # the reference makes the scores
        assert made.largest < k.numel()


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: np.asarray(x)[()],
    "numpy32": lambda x: np.asarray(x, dtype=np.float32 if isinstance(x, float) else np.int32)[()],
    "tensor": torch.tensor,
}


@pytest.mark.parametrize("form", NUMBERS)
def test_numbers_of_other_kinds(form: str) -> None:
    """What flash-attn's own tests pass: NumPy's numbers, tensors of one element, and a window as a list or tensor."""
    number = NUMBERS[form]
    q, k = draw(1, 6, 2, 8), draw(1, 6, 2, 8, seed=1)
    window: Any
    for window in ((number(3), number(1)), [number(3), number(1)], torch.tensor([3, 1]), np.array([3, 1])):
        out = flash_attn_func(q, k, k, number(0.0), number(0.25), np.bool_(True), window, number(2.0))
        assert torch.equal(out, flash_attn_func(q, k, k, 0.0, 0.25, True, (3, 1), 2.0))
    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    args = (q[0], k[0], k[0], cu_seqlens, cu_seqlens)
    out = flash_attn_varlen_func(*args, number(4), number(4), window_size=[number(-1), number(0)])
    assert torch.equal(out, flash_attn_varlen_func(*args, 4, 4, window_size=(-1, 0)))
    out = scaled_dot_product_attention(q, k, k, dropout_p=number(0.0), scale=number(0.25))
    assert torch.equal(out, scaled_dot_product_attention(q, k, k, scale=0.25))
    with torch.no_grad():
        cached = flash_attn_with_kvcache(q, k, k, cache_seqlens=number(5), num_splits=number(2))
        assert torch.equal(cached, flash_attn_with_kvcache(q, k, k, cache_seqlens=5))


def test_layouts_are_views() -> None:
    """A transposition is no copy: attention sees the caller's memory, and the output is laid out like the query."""
    q, k = torch.randn(2, 300, 4, 16), torch.randn(2, 300, 2, 16)
    qkv = torch.randn(2, 300, 3, 4, 16)
    with torch.no_grad(), Allocations() as made:
        out = flash_attn_func(q, k, k, backend=BACKENDS[-1])
        packed = flash_attn_qkvpacked_func(qkv, backend=BACKENDS[-1])
    assert out.is_contiguous()
    assert packed.shape == out.shape
    if BACKENDS[-1] == "native":  # the reference makes the scores
        assert made.largest <= out.numel()
    heads_first = scaled_dot_product_attention(q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2))
    assert heads_first.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("backend", rest_slow([*reversed(BACKENDS)]))
def test_lengths_stay_symbolic_under_compile(backend: str) -> None:
    """One more graph covers every number of tokens, and of the longest sequence."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend=count)
    for n in (4, 6, 9):
        x = torch.randn(2 * n, 2, 8)
        args = (x, x, x, torch.tensor([0, n, 2 * n]), torch.tensor([0, n, 2 * n]), n, n)
        options: dict[str, Any] = {"causal": True, "window_size": (n - 1, -1), "backend": backend}
        torch.testing.assert_close(compiled(*args, **options), flash_attn_varlen_func(*args, **options))
    assert len(graphs) == 2
