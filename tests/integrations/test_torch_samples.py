"""PyTorch's own samples of these modules (`module_db`, by which its suite tests them), patched and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from slow import rest_slow
from torch import Tensor, nn

import foundry_kernels as fk

CLASSES = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.Transformer,
    nn.LayerNorm,
    nn.RMSNorm,
)


def samples(cls: type[nn.Module], training: bool) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Modules, without dropout, and what they are called with."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_modules import module_db

    [info] = (info for info in module_db if info.module_cls is cls)
    dtype = torch.float32
    for made in info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training):
        given = made.constructor_input
        torch.manual_seed(0)
        module = cls(*given.args, **given.kwargs).train(training)
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        yield module, made.forward_input.args, made.forward_input.kwargs


def tensors(made: Any) -> list[Tensor]:
    return [x for x in (made if isinstance(made, tuple) else (made,)) if isinstance(x, Tensor)]


def results(module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """What a call without gradients and one with them give, and the gradients of the parameters."""
    with torch.no_grad():
        found = tensors(module(*args, **kwargs))
    outputs = tensors(module(*args, **kwargs))
    module.zero_grad()
    sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs).backward()  # type: ignore[union-attr]
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [x.detach() for x in (*found, *outputs, *grads)]


@pytest.mark.parametrize("training", rest_slow([True, False]), ids=["training", "evaluation"])
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.filterwarnings("ignore")  # deprecated masks are among them
def test_samples(cls: type[nn.Module], training: bool) -> None:
    count = 0
    for module, args, kwargs in samples(cls, training):
        expected = results(module, args, kwargs)
        with fk.patch(module) as handle:
            assert handle.report().replaced
            assert not handle.report().left
            found = results(module, args, kwargs)
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-4)
        count += 1
    assert count >= (64 if issubclass(cls, nn.MultiheadAttention) else 6)
