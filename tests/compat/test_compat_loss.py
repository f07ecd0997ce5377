"""The loss under PyTorch's signature: the same calls give what torch.nn.functional.cross_entropy gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels.compat import cross_entropy, linear_cross_entropy
from foundry_kernels.compat import loss as compat_loss


def draw(shape: tuple[int, ...], tokens: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=g).to(dtype), torch.randint(7, tokens, generator=g)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize(("size_average", "reduce"), [(True, None), (False, None), (None, False), (True, False)])
def test_deprecated_arguments(size_average: bool | None, reduce: bool | None) -> None:
    x, target = draw((5, 7), (5,))
    options: dict[str, Any] = {"size_average": size_average, "reduce": reduce}
    torch.testing.assert_close(cross_entropy(x, target, **options), F.cross_entropy(x, target, **options))


def test_numbers_of_other_libraries() -> None:
    x, target = draw((5, 7), (5,))
    found = cross_entropy(x, target, ignore_index=np.int64(target[0]), label_smoothing=torch.tensor(0.25))
    torch.testing.assert_close(found, F.cross_entropy(x, target, ignore_index=int(target[0]), label_smoothing=0.25))


def test_a_mean_over_nothing_is_0() -> None:
    x, target = draw((5, 7), (5,))
    assert F.cross_entropy(x, torch.full_like(target, -100)).isnan()
    assert cross_entropy(x, torch.full_like(target, -100)) == 0


def test_a_linear_weight_that_does_not_fit_is_refused() -> None:
    x, target = torch.ones(5, 6), torch.zeros(5, dtype=torch.int64)
    for bad, weight, classes in (
        (x[0], torch.ones(7, 2, 6), target),
        (x, torch.ones(6), target),
        (x[None], torch.ones(7, 2, 6), target),
        (x[None], torch.ones(7, 6), torch.ones(1, 5, 7)),
        (x[0, 0], torch.ones(7, 6), target),
    ):
        with pytest.raises(ValueError, match=r"input and linear_weight must be \[in_features\] or .*; got shapes \("):
            linear_cross_entropy(bad, weight, classes)
    loss = linear_cross_entropy(x[None], torch.ones(7, 6), target[None])
    torch.testing.assert_close(loss, linear_cross_entropy(x, torch.ones(7, 6), target))
    for shape, classes, bias, message in (
        ((7, 2, 5), target, None, r"linear_weight must have shape \(7, 2, 6\) .*got \(7, 2, 5\)"),
        ((7, 2, 6), target, torch.ones(7), r"linear_bias must have shape \(7, 2\) .*got \(7,\)"),
        ((7, 2, 6), target, None, r"target must have shape \(5, 2\) .*got \(5,\)"),
        ((7, 0, 6), target.new_zeros(5, 0), None, r"at least one output; got shape \(7, 0, 6\)"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(x, torch.ones(shape), classes, linear_bias=bias)
    with pytest.raises(ValueError, match="ignore_index must be None where target holds probabilities; got -100"):
        linear_cross_entropy(x, torch.ones(7, 6), torch.ones(5, 7), ignore_index=-100)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_heads_of_a_linear_weight(reduction: str) -> None:
    """Positions of a weight of more dimensions: options, ignored targets, all ignored, and a bias."""
    x, target = draw((5, 6), (5, 2, 3))
    leaves = [t.requires_grad_() for t in (x, draw((7, 2, 3, 6), ())[0], torch.linspace(-1.0, 1.0, 42).view(7, 2, 3))]
    options: dict[str, Any] = {
        "reduction": reduction, "weight": torch.linspace(0.5, 2.0, 7), "ignore_index": 3, "label_smoothing": 0.1,
    }  # fmt: skip
    ours = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], **options)
    logits = F.linear(leaves[0], leaves[1].flatten(0, -2), leaves[2].flatten()).view(5, 7, 2, 3)
    loss = F.cross_entropy(logits, target, **options)
    torch.testing.assert_close(ours, loss)
    for a, e in zip(*(torch.autograd.grad(y, leaves, torch.ones_like(y)) for y in (ours, loss)), strict=True):
        torch.testing.assert_close(a, e)
    if reduction == "mean":
        assert linear_cross_entropy(*leaves[:2], torch.full_like(target, -100), linear_bias=leaves[2]) == 0


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch.nn.functional has none yet")
def test_torchs_options_are_taken_or_refused() -> None:
    x, target = draw((5, 6), (5,))
    weight = draw((7, 6), ())[0]
    kind = nn.LinearCrossEntropyOptions

    def loss(options: Any) -> Tensor:
        return linear_cross_entropy(x, weight, target, options=options)

    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        own = compat_loss.fk_linear_cross_entropy
        patched.setattr(
            compat_loss,
            "fk_linear_cross_entropy",
            lambda *args, chunk_size, **rest: seen.append(chunk_size) or own(*args, chunk_size=chunk_size, **rest),
        )
        for options in (None, kind(), kind(acc_policy="accurate", allow_retain_graph=True, acc_dtype=torch.float32)):
            torch.testing.assert_close(loss(options), loss(None))
        loss(kind(batch_chunk_size=3, chunking_method=None))
    assert seen == [None] * 6 + [3]
    with pytest.raises(ValueError, match=r"options must have acc_dtype=None or torch\.float32; got torch\.bfloat16"):
        loss(kind(acc_dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="options must be a LinearCrossEntropyOptions or None; got dict"):
        loss({"batch_chunk_size": 3})
    newer = dataclasses.make_dataclass("Newer", [("made_up", float, 1.0)], bases=(kind,), frozen=True)
    loss(newer())
    with pytest.raises(ValueError, match=r"options must have made_up=1\.0, the rest is not known; got 2\.0"):
        loss(newer(made_up=2.0))
