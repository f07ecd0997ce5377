"""Models of transformers with random weights, and comparisons with this package's models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

#: Sizes that most configurations of transformers have.
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def randomise(model: nn.Module) -> nn.Module:
    """Sets random weights, including biases and norms, because 0 and 1 would hide errors."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            shift = 1.0 if parameter.dim() == 1 and parameter.mean() > 0.5 else 0.0
            parameter.copy_(shift + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.float().eval()


def draw(batch: int = 2, length: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def near(actual: Tensor, expected: Tensor, error: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= error * expected.abs().max()


def gradients_are_equal(ours: nn.Module, theirs: nn.Module, read: Callable[[nn.Module], nn.Module]) -> None:
    """Checks that gradients are equal: `read` converts their gradients like weights."""
    gradients = copy.deepcopy(theirs)
    for parameter, of in zip(gradients.parameters(), theirs.parameters(), strict=True):
        parameter.data = torch.zeros_like(of) if of.grad is None else of.grad
    expected = dict(read(gradients).named_parameters())
    for key, parameter in ours.named_parameters():
        if not key.endswith("wk.bias"):  # it shifts all scores of a query equally, so it is 0 up to rounding
            near(parameter.grad, expected[key].detach(), 1e-4)
