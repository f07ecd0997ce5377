"""lora_linear beyond the cases: layers that share their input, the same bits in any batch, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from table import saved_tensors
from torch import Tensor

import foundry_kernels as fk

BACKENDS = fk.OPS["lora_linear"].backends("cpu", torch.bfloat16)
SIZES = ((16, 4), (8, 2), (24, 5))  # M and r of each layer


def layers(width: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    weights = [drawn(m, width).to(dtype) for m, _ in SIZES]
    return (
        weights,
        [drawn(r, width).requires_grad_() for _, r in SIZES],
        [drawn(m, r).requires_grad_() for m, r in SIZES],
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.25, "dropout_seed": 3}], ids=["whole", "dropped"])
def test_layers_that_share_x(backend: str, dropout: dict[str, Any]) -> None:
    """Outputs and the gradients of adapters are those of each layer by itself, and x has the sum of their gradients;
    x and x A^T are saved once."""
    weights, a, b = layers(40, torch.float32)
    x = torch.randn(2, 9, 40, requires_grad=True)
    scales = [0.5, 1.0, 2.0]
    with saved_tensors() as saved:
        together = fk.lora_linears(x, weights, a, b, scales=scales, **dropout, backend=backend)
    own = [
        fk.lora_linear(x, *layer, scale=s, **dropout, backend=backend)
        for *layer, s in zip(weights, a, b, scales, strict=True)
    ]
    cotangents = [torch.randn_like(y) for y in own]
    found = torch.autograd.grad(together, [x, *a, *b], cotangents)
    expected = torch.autograd.grad(own, [x, *a, *b], cotangents)
    torch.testing.assert_close((*together, *found), (*own, *expected))
    if backend != "reference":
        given = {t.data_ptr() for t in (*weights, *a, *b)}
        kept = {t.data_ptr(): t.numel() for t in saved if t.data_ptr() not in given}
        assert sum(kept.values()) <= x.numel() + 18 * sum(r for _, r in SIZES) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    weights, a, b = layers(300, dtype)
    x = torch.randn(37, 300).to(dtype)
    with fk.batch_invariant():
        whole = fk.lora_linears(x, weights, a, b)
        for rows in (slice(0, 1), slice(20, 23), slice(5, 37)):
            for part, y in zip(fk.lora_linears(x[rows], weights, a, b), whole, strict=True):
                assert torch.equal(part, y[rows])


def test_bad_layers() -> None:
    (w, *_), (a, *_), (b, *_) = layers(40, torch.float32)
    x = torch.randn(3, 40)
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("weight must be floating-point; got torch.int8: give the layer's output as base", (x, w.char(), a, b), {}),
        ("lora_b must have shape .* r the rank of lora_a", (x, w, a[:2], b), {}),
        ("lora_a must be .* rank r of at least 1", (x, w, a[:0], b[:, :0]), {}),
        ("lora_a must be on x's device cpu; got meta", (x, w, a.to("meta"), b), {}),
        ("scale must be finite; got nan", (x, w, a, b), {"scale": float("nan")}),
        ("one of weight and base must be given; got neither", (x, None, a, b), {}),
        ("one of weight and base must be given; got both", (x, w, a, b), {"base": torch.ones(3, 16)}),
        ("bias must be None where base", (x, None, a, b, torch.ones(16)), {"base": torch.ones(3, 16)}),
    ]
    for message, args, options in refused:
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            fk.lora_linear(*args, **options)
    with pytest.raises(ValueError, match=r"^lora_bs\[1\] must have shape"):
        fk.lora_linears(x, [w, w], [a, a], [b, b[:, :1]])
    with pytest.raises(ValueError, match=r"^scales must have one entry for each of the 2 of lora_as; got 1"):
        fk.lora_linears(x, [w, w], [a, a], [b, b], scales=[1.0])
    with pytest.raises(ValueError, match=r"^lora_as must have an adapter of at least one layer"):
        fk.lora_linears(x, [], [], [])
