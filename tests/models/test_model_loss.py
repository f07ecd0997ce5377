"""The model's loss: which tokens count, and what is kept, made and differentiated without the logits."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from table import Allocations, saved_tensors
from tiny_model import TINY, draw, make
from torch import Tensor

from foundry_kernels import OPS
from foundry_kernels.models import Transformer
from foundry_kernels.testing import compare


def test_loss_is_the_mean_over_the_targets_that_count():
    model, tokens, targets = make(), draw(), draw(seed=1)
    logits, loss = model(tokens, targets, return_logits=True)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    kept = F.cross_entropy(logits[:, :2].flatten(0, 1), targets[:, :2].flatten())
    targets[:, 2:] = -100
    torch.testing.assert_close(model(tokens, targets)[1], kept)
    targets[:, 2:] = -1
    torch.testing.assert_close(model(tokens, targets.int(), ignore_index=-1)[1], kept)
    with pytest.raises(ValueError, match=r"targets must be in 0 \.\. 10; got -1"):
        model(tokens, targets)


def test_loss_over_no_targets_is_zero():
    model, tokens = make(), draw()
    loss = model(tokens, torch.full_like(tokens, -100))[1]
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.skipif("native" not in OPS["cross_entropy"].backends("cpu"), reason="the C++ extension is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_keeps_the_logits_and_nothing_else_of_their_size(dtype):
    model = Transformer(dataclasses.replace(TINY, vocab_size=1009), dtype=dtype)
    tokens = draw()
    with saved_tensors() as saved:
        logits, _ = model(tokens, tokens, return_logits=True)
    large = {t.untyped_storage().data_ptr() for t in saved if t.numel() >= logits.numel()}
    assert large == {logits.untyped_storage().data_ptr()}


@pytest.mark.skipif("native" not in OPS["cross_entropy"].backends("cpu"), reason="the C++ extension is not built")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_no_logits_are_made_for_the_loss(tied):
    config = dataclasses.replace(TINY, vocab_size=1009, tie_embeddings=tied)
    tokens, largest = draw(12, 24), []
    for return_logits in (False, True):
        model = make(config, "auto")
        with Allocations() as made:
            logits, loss = model(tokens, tokens, return_logits=return_logits)
            loss.backward()
        assert (logits is None) is not return_logits
        largest.append(made.largest)
    assert largest[0] < tokens.numel() * 1009 / 2
    assert largest[1] == tokens.numel() * 1009


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [(torch.float32, True), (torch.float64, False), (torch.bfloat16, True), ("autocast", False)],
    ids=str,
)
def test_loss_and_gradients_without_logits_are_those_with_them(dtype, tied):
    """Compares the kernels' memory with the reference's, which keeps all logits; tokens that do not count included.

    In 16 bits rounding inside the layers decides: of one draw either may be twice as far off as the other, so the root
    mean square of many is judged.
    """
    config, autocast = dataclasses.replace(TINY, tie_embeddings=tied), dtype == "autocast"
    low = autocast or dtype == torch.bfloat16
    dtype = torch.float32 if autocast else dtype

    def results(seed, backend, dtype, autocast=False, **options):
        model = make(config, backend).to(dtype)
        targets = draw(seed=seed + 1)
        targets[1, 2:] = -100
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(draw(seed=seed), targets, **options)[1]
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}

    squares: dict[str, Tensor] = collections.defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    for seed in range(24 if low else 1):
        actual = results(seed, "auto", dtype, autocast)
        reference = results(seed, "reference", dtype, autocast, return_logits=True)
        exact = results(seed, "reference", torch.float64, return_logits=True)
        assert actual["loss"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        for name, tensor in actual.items():
            assert tensor.dtype == reference[name].dtype
            if low:
                errors = tensor.double() - exact[name], reference[name].double() - exact[name], exact[name]
                squares[name] += torch.stack([x.square().sum() for x in errors])
            else:
                compare(name, tensor, reference[name], exact[name], 0.0)
    for name, (error, limit, size) in squares.items():
        assert error.sqrt() <= 1.5 * limit.sqrt() + 1e-3 * size.sqrt(), name


def test_a_head_that_is_no_plain_layer_is_called():
    """A hook, LoRA's layer, a forward of its own: what they do to the logits is in the loss."""
    tokens, expected = draw(), make()(draw(), draw())[1]

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2.0 * super().forward(x)

    def by_hook(model):
        model.output.register_forward_hook(lambda module, inputs, logits: 2.0 * logits)

    def by_class(model):
        model.output.__class__ = Doubled

    def by_instance(model):
        plain = model.output.forward
        model.output.forward = lambda x: 2.0 * plain(x)

    losses = []
    for change in (by_hook, by_class, by_instance):
        model = make()
        change(model)
        logits, loss = model(tokens, tokens)
        assert logits is None
        losses.append(loss)
        torch.testing.assert_close(loss, F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    assert losses[0] == losses[1] == losses[2] != expected
    biased = make()
    biased.output.bias = torch.nn.Parameter(torch.arange(11.0))
    torch.testing.assert_close(
        biased(tokens, tokens)[1], F.cross_entropy(biased(tokens).flatten(0, 1), tokens.flatten())
    )
