"""TRL's functions of logits, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from foundry_kernels.compat import entropy_from_logits, selective_log_softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [(), (1,), (3,)])
def test_selective_log_softmax(dtype: torch.dtype, more: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=g).to(dtype).requires_grad_()
    index = torch.randint(11, (2, 5, *more), generator=g)
    found = selective_log_softmax(logits, index)
    assert (found.shape, found.dtype) == (index.shape, dtype)
    wide = logits.detach().double().requires_grad_()
    expected = wide.log_softmax(-1).gather(-1, index if more else index.unsqueeze(-1)).view(index.shape)
    torch.testing.assert_close(found, expected.to(dtype))
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(
        logits.grad, wide.grad.to(dtype), **({} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05})
    )


@pytest.mark.parametrize("more", [(), (3,)])
@pytest.mark.parametrize(("dtype", "backend"), [(torch.int64, "auto"), (torch.int32, "reference")])
def test_temperature_and_mask(more: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    """A masked row has the value 0, whatever its logits, and gives them no gradient."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=g)
    index = torch.randint(11, (2, 5, *more), generator=g).to(dtype)
    mask = torch.ones(2, 5, *more)
    mask[0, 2:] = 0
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    with torch.no_grad():
        leaves[0][0, 2], leaves[0][0, 3] = torch.nan, torch.inf
    found = selective_log_softmax(leaves[0], index, 0.6, mask, backend=backend)
    log_p = (leaves[1] / 0.6).log_softmax(-1)
    expected = log_p.gather(-1, (index if more else index.unsqueeze(-1)).long()).view(index.shape) * mask
    torch.testing.assert_close(found, expected)
    assert not found[0, 2:].any()
    for result in (found, expected):
        result.square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    assert not leaves[0].grad[0, 2:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_from_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    found = entropy_from_logits(logits, 2)
    assert (found.shape, found.dtype) == ((2, 5), dtype)
    wide = logits.detach().double().requires_grad_()
    expected = torch.distributions.Categorical(logits=wide).entropy()
    torch.testing.assert_close(found, expected.to(dtype))
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(logits.grad, wide.grad.to(dtype))
