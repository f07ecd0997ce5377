"""linear_cross_entropy in tiles: what the table of cases cannot say of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table import saved_tensors
from torch import Tensor

from foundry_kernels import _triton
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy

if not _triton.INTERPRET:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from foundry_kernels.ops.linear_cross_entropy import triton as ways
from foundry_kernels.ops.linear_cross_entropy.calls import Inputs, Needs
from foundry_kernels.ops.linear_cross_entropy.options import TILES, LinearLossOptions
from foundry_kernels.ops.linear_cross_entropy.triton import tiles

TOKENS, WIDTH, CLASSES = 40, 8, 70
OPS = torch.ops.foundry_kernels


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g, dtype=torch.float64)
    weight = torch.randn(CLASSES, WIDTH, generator=g, dtype=torch.float64) / math.sqrt(WIDTH)
    target = torch.randint(CLASSES, (TOKENS,), generator=g)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


def tiled(*args: Any, **options: Any) -> Any:
    return linear_cross_entropy(*args, chunk_size="tiles", backend="triton", **options)


def expected(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), target, **options)


def near(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for a, e in zip(found, exact, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    """Calls of the operation's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "linear_cross_entropy" in func._schema.name:
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("asked", "limit", "given", "operators"),
    [("tiles", 1 << 30, 0, 2), (None, 0, 0, 2), (None, 1 << 30, None, 1), (7, 0, 7, 1)],
)
def test_who_takes_which_strategy(
    asked: Any, limit: int, given: int | None, operators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for; or by what chunks would take. Tiles have an operator for the backward pass."""
    monkeypatch.setattr(ways, "CHUNKS_MAY_TAKE", limit)
    hidden, weight, target = draw()
    with Operators() as seen:
        linear_cross_entropy(hidden, weight, target, backend="triton", chunk_size=asked).backward()
    names = [argument.name for argument in seen.calls[0][0]._schema.arguments]
    assert seen.calls[0][1][names.index("chunk_size")] == given
    assert len(seen.calls) == operators


@pytest.mark.parametrize(
    ("tokens", "shape", "learns", "takes"),
    [
        (8192, (128256, 4096), True, True),  # Llama 3 8B: 2 GB of float32 for the weight
        (1, (128256, 4096), True, True),
        (8192, (128256, 4096), False, False),
        (131072, (128256, 4096), False, True),  # 4 GB of logits, and as much again
        (8192, (50257, 768), True, False),  # GPT-2
        (8192, (32000, 4096), True, False),  # Llama 2
    ],
)
def test_what_chunks_take_in_16_bits(tokens: int, shape: tuple[int, int], learns: bool, takes: bool) -> None:
    assert (ways.chunks_take(tokens, shape, torch.bfloat16, learns) > ways.CHUNKS_MAY_TAKE) == takes


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_loss_that_is_not_the_root_and_walked_twice(reduction: str) -> None:
    """Scaled, added to another loss of the same weight, and squared; and .grad is added to."""
    hidden, weight, target = draw()

    def total(loss: Any) -> Tensor:
        one, other = loss(hidden, weight, target), loss(hidden.flip(0), weight, target)
        return (0.25 * one**2 + other).sum() + weight.square().mean()

    ours = total(lambda *args: tiled(*args, reduction=reduction))
    ours.backward(retain_graph=True)
    once = hidden.grad.clone(), weight.grad.clone()  # type: ignore[union-attr]
    near(once, torch.autograd.grad(total(lambda *args: expected(*args, reduction=reduction)), (hidden, weight)))
    ours.backward()
    assert torch.equal(hidden.grad, 2 * once[0])
    assert torch.equal(weight.grad, 2 * once[1])


def test_ignored_tokens_count_nothing_whatever_they_hold() -> None:
    hidden, weight, target = draw()
    ignored = torch.zeros(TOKENS, dtype=torch.bool)
    ignored[[0, 4]] = ignored[32:] = True  # a whole tile among them
    with torch.no_grad():
        hidden[4], hidden[35] = math.nan, math.inf
    loss = tiled(hidden, weight, target.masked_fill(ignored, -100))
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    exact = expected(hidden[~ignored], weight, target[~ignored])
    torch.testing.assert_close(loss, exact)
    near((dweight,), torch.autograd.grad(exact, weight))
    assert not dhidden[ignored].any()


def test_a_confident_token_keeps_its_digits() -> None:
    """A loss of 1e-9 in float32, and a gradient as small."""
    hidden, weight = torch.zeros(2, 4), torch.zeros(50, 4)
    hidden[:, 0], weight[3, 0] = torch.tensor([5.0, 6.0]), 5.0
    hidden.requires_grad_()
    target = torch.tensor([3, 3])
    loss = tiled(hidden, weight, target, reduction="none")
    wide = hidden.detach().double().requires_grad_()
    exact = expected(wide, weight.double(), target, reduction="none")
    assert exact.max() < 1e-9
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0.0)
    found, wanted = torch.autograd.grad(loss.sum(), hidden), torch.autograd.grad(exact.sum(), wide)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=0.0)


def test_a_target_that_is_no_class_is_nan_and_reads_nothing_wild() -> None:
    hidden, weight, target = draw()
    target[3], target[7] = CLASSES, 1 << 40
    loss = tiled(hidden, weight, target, reduction="none")
    (dhidden,) = torch.autograd.grad(loss.sum(), hidden)
    bad = (target >= CLASSES).unsqueeze(1)
    assert torch.equal(loss.isnan(), bad.squeeze(1))
    assert torch.equal(dhidden.isnan(), bad.expand_as(dhidden))


def test_infinite_logits_are_as_in_chunks() -> None:
    hidden, weight, target = draw()
    bias = torch.zeros(CLASSES)
    bias[5], bias[50] = -math.inf, -math.inf
    target[0] = 5
    several = [
        linear_cross_entropy(
            hidden, weight, target, bias=bias, reduction="none", return_lse=True, chunk_size=path, backend="triton"
        )
        for path in ("tiles", 16)
    ]
    assert several[0][0][0].isinf()
    near(*several)


def test_small_gradients_are_in_float16s_range() -> None:
    """The mean over many tokens and a loss that is scaled late: before the products both would be lost."""
    hidden, weight, target = draw(torch.float16)
    (1e5 * tiled(hidden, weight, target, reduction="mean") / 1e5).backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    found = torch.autograd.grad(expected(*wide, target), wide)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), found[0], rtol=2**-9, atol=1e-6)


def test_nothing_of_the_logits_size_is_kept_or_made() -> None:
    """No operation of torch makes it, inside the operators too, which are called directly: 8 is the width, and 32
    classes' gradients exist at a time."""
    hidden, weight, target = draw()
    many = [x.detach().repeat(12, 1).requires_grad_() for x in (hidden, weight)]
    made: list[int] = []

    class Largest(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend(t.numel() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor))
            return result

    target = target.repeat(12)
    logits = target.numel() * many[1].shape[0]
    with saved_tensors() as saved, Largest():
        loss = tiled(*many, target)
    assert max(t.numel() for t in saved) == max(x.numel() for x in many)
    *inputs, lse, lse_low = loss.grad_fn.saved_tensors
    options = LinearLossOptions(-100, "mean", 0.0, 0.0, None, 1.0, TILES, False, False)
    with Largest():
        tiles.backward(torch.ones(()), Inputs(*inputs), lse, lse_low, options, Needs(True, True, False))
    assert len(made) > 20
    assert max(made) <= 32 * target.numel() < logits / 20


def test_targets_and_incoming_gradients_of_any_stride() -> None:
    hidden, weight, target = draw()
    apart, dloss = torch.stack([target, target - 1], 1)[:, 0], torch.randn(TOKENS, 2)[:, 0]
    found = torch.autograd.grad(tiled(hidden, weight, apart, reduction="none"), (hidden, weight), dloss)
    near(found, torch.autograd.grad(expected(hidden, weight, target, reduction="none"), (hidden, weight), dloss))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    hidden, weight, target = draw(dtype)
    with Operators() as seen:
        tiled(hidden[:12], weight, target[:12], z_loss=0.1, return_z_loss=True)[0].backward()
        tiled(hidden[:12], weight, target[:12], reduction="none").sum().backward()
    assert len(seen.calls) == 4
    for func, args in seen.calls:
        given = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        torch.library.opcheck(func, given)


def test_compile_fullgraph_with_dynamic_shapes() -> None:
    compiled = torch.compile(tiled, fullgraph=True, dynamic=True, backend="aot_eager")
    hidden, weight, target = draw()
    for n in (40, 23):
        x = hidden.detach()[:n].requires_grad_()
        found = compiled(x, weight, target[:n])
        exact = expected(x, weight, target[:n])
        torch.testing.assert_close(found, exact)
        near(torch.autograd.grad(found, (x, weight)), torch.autograd.grad(exact, (x, weight)))
