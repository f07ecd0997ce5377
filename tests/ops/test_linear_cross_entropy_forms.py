"""linear_cross_entropy in Triton, all rows at once and in blocks of classes ("tiles"): what the table of cases cannot
say of them. What they multiply and allocate is in `test_linear_cross_entropy_products.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow import rest_slow
from torch import Tensor

from foundry_kernels import _triton, tuning
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy

if not _triton.INTERPRET:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from foundry_kernels.ops._linear_loss import operators, sizes
from foundry_kernels.ops._linear_loss.problem import ALL, TILES, Needs
from foundry_kernels.ops._linear_loss.triton import _plan_scale, scale
from foundry_kernels.ops.linear_cross_entropy.options import LinearCrossEntropyOptions
from foundry_kernels.ops.linear_cross_entropy.triton import launchers

TOKENS, WIDTH, CLASSES = 40, 8, 70


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g, dtype=torch.float64)
    weight = torch.randn(CLASSES, WIDTH, generator=g, dtype=torch.float64) / math.sqrt(WIDTH)
    target = torch.randint(CLASSES, (TOKENS,), generator=g)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


#: What asks for each form: as many tokens at a time as there are, or blocks of classes, of which there are three here.
FORMS = pytest.mark.parametrize("form", [TOKENS, "tiles"], ids=["rows", "tiles"])


def loss_of(form: Any, *args: Any, **options: Any) -> Any:
    return linear_cross_entropy(*args, chunk_size=form, backend="triton", **options)


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


LOGITS = 4 * TOKENS * CLASSES


@pytest.mark.parametrize(
    ("asked", "memory", "given", "operators"),
    [
        (None, 32 * LOGITS, ALL, 1),
        (None, 32 * LOGITS - 1, TILES, 2),
        ("tiles", 32 * LOGITS, TILES, 2),
        (TOKENS, 0, ALL, 1),
        (TOKENS - 1, 0, TOKENS - 1, 1),
    ],
)
def test_who_takes_which_form(
    asked: Any, memory: int, given: int, operators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for; or all rows at once where the logits take a 32nd of the device's memory at most. Tiles have an
    operator for the backward pass."""
    monkeypatch.setattr(sizes, "total_memory", lambda device: memory)
    hidden, weight, target = draw()
    with Operators() as seen:
        linear_cross_entropy(hidden, weight, target, backend="triton", chunk_size=asked).backward()
    names = [argument.name for argument in seen.calls[0][0]._schema.arguments]
    assert seen.calls[0][1][names.index("chunk_size")] == given
    assert len(seen.calls) == operators


def chosen(
    tokens: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, needs: tuple[bool, ...] = (True, True),
    batch_invariant: bool = False, reduction: str = "mean", **loss: int,
) -> int:  # fmt: skip
    hidden, weight = (torch.empty(s, dtype=dtype, device="meta") for s in ((tokens, shape[1]), shape))
    options = LinearCrossEntropyOptions(-100, reduction, 0.0, 0.0, None, 1.0, None, False, batch_invariant)
    return sizes.on_gpu(hidden, weight, options, Needs(*needs, False), **loss)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_rule_on_80_gb(reduction: str) -> None:
    llama = (128256, 4096)
    assert chosen(8192, llama, reduction=reduction) == ALL  # 2.1 GB
    assert chosen(10464, llama, reduction=reduction) == ALL
    assert chosen(10466, llama, reduction=reduction) == TILES  # a token more is more than a 32nd of 80 GiB
    assert chosen(8192, llama, torch.float32) == TILES
    assert chosen(8192, llama, torch.float16) == TILES  # whose gradient of the weight takes 2.1 GB more
    assert chosen(8192, llama, torch.float16, (True, False)) == ALL
    assert chosen(131072, (32000, 4096)) == TILES
    assert chosen(65536, llama, batch_invariant=True) == 10368  # the largest chunk of rows within it
    assert chosen(8192, llama, reduction=reduction, logits=2, tiles=False) == 5120  # two chunks
    assert chosen(64, (1 << 30, 8), logits=2, tiles=False) == 128


@FORMS
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_loss_that_is_not_the_root_and_walked_twice(form: Any, reduction: str) -> None:
    """Scaled, added to another loss of the same weight, and squared; and .grad is added to."""
    hidden, weight, target = draw()

    def total(loss: Any) -> Tensor:
        one, other = loss(hidden, weight, target), loss(hidden.flip(0), weight, target)
        return (0.25 * one**2 + other).sum() + weight.square().mean()

    ours = total(lambda *args: loss_of(form, *args, reduction=reduction))
    ours.backward(retain_graph=True)
    once = hidden.grad.clone(), weight.grad.clone()  # type: ignore[union-attr]
    near(once, torch.autograd.grad(total(lambda *args: expected(*args, reduction=reduction)), (hidden, weight)))
    ours.backward()
    assert torch.equal(hidden.grad, 2 * once[0])
    assert torch.equal(weight.grad, 2 * once[1])


@FORMS
@pytest.mark.parametrize("at", [3, 45], ids=["first-block", "last-block"])
def test_a_confident_token_keeps_its_digits(form: Any, at: int) -> None:
    """A loss of 1e-9 in float32, and a gradient as small, in whichever block the target is."""
    hidden, weight = torch.zeros(2, 4), torch.zeros(50, 4)
    hidden[:, 0], weight[at, 0] = torch.tensor([5.0, 6.0]), 5.0
    hidden.requires_grad_()
    target = torch.tensor([at, at])
    loss = loss_of(form, hidden, weight, target, reduction="none")
    wide = hidden.detach().double().requires_grad_()
    exact = torch.log1p(49 * torch.exp(-5.0 * wide[:, 0]))
    assert exact.max() < 1e-9
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0.0)
    found, wanted = torch.autograd.grad(loss.sum(), hidden), torch.autograd.grad(exact.sum(), wide)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=0.0)


@FORMS
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_target_that_is_no_class_is_nan_and_reads_nothing_wild(form: Any, reduction: str) -> None:
    hidden, weight, target = draw()
    target[3], target[7], target[8] = CLASSES, 1 << 40, -7
    loss = loss_of(form, hidden, weight, target, reduction=reduction)
    (dhidden,) = torch.autograd.grad(loss.sum(), hidden)
    bad = ((target >= CLASSES) | (target < 0)).unsqueeze(1)
    assert torch.equal(loss.isnan(), bad.squeeze(1) if reduction == "none" else torch.tensor(True))
    assert torch.equal(dhidden.isnan(), bad.expand_as(dhidden))


@FORMS
def test_infinite_logits_are_as_in_chunks(form: Any) -> None:
    """A whole block of -inf among them, before and behind the target's, and label smoothing beside the others."""
    hidden, weight, target = draw()
    bias = torch.zeros(CLASSES)
    bias[:32], bias[50] = -math.inf, -math.inf
    target[0] = 5
    for options in ({}, {"softcap": 4.0, "label_smoothing": 0.1}):
        several = [
            linear_cross_entropy(
                hidden, weight, target, bias=bias, reduction="none", return_lse=True, chunk_size=path,
                backend="triton", **options,
            )
            for path in (form, 16)
        ]  # fmt: skip
        assert several[0][0][0].isinf() == (not options)
        near(*several)


@FORMS
def test_small_gradients_are_in_float16s_range(form: Any) -> None:
    """The mean over many tokens and a loss that is scaled late: before the products both would be lost; and sums over
    tokens before they are divided by their number."""
    hidden, weight, target = draw(torch.float16)
    (1e5 * loss_of(form, hidden, weight, target, reduction="mean") / 1e5).backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    found = torch.autograd.grad(expected(*wide, target), wide)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), found[0], rtol=2**-9, atol=1e-5)  # logits are rounded
    with torch.no_grad():
        hidden.fill_(6e4)
        weight.zero_()
    loss_of(form, hidden, weight, target.fill_(3)).backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("float32", "bfloat16")], ids="-".join)
def test_a_gradient_is_scaled_and_rounded_by_one_kernel(
    dtypes: tuple[str, str], retained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a number on the device; in place unless the graph is retained. The number of programs is bounded."""
    monkeypatch.setattr(operators, "_graph_is_retained", lambda: retained)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(Tensor, "item", lambda x: pytest.fail("the device is waited for"))
    dtype, rounded = (getattr(torch, name) for name in dtypes)
    x = torch.randn(30, 4100).to(dtype)
    for factor in (1.0, 0.3, math.nan, 0.0):
        own, launched = x.clone(), []

        def counted(*args: Any, launched: list[Any] = launched) -> None:
            launched.append(args)
            scale(*args)

        found = operators.times_own_gradient(own, torch.tensor(factor), rounded, counted)
        assert len(launched) == 1
        assert (found is own) == (dtype == rounded and not retained)
        torch.testing.assert_close(found, (x.float() * factor).to(rounded), rtol=0.0, atol=0.0, equal_nan=True)
    assert [_plan_scale(n, rounded, x.device, True).grid for n in (1, 1 << 40)] == [(1,), (16,)]


def test_the_wide_program_of_the_kernel_in_place() -> None:
    """A candidate of `tune`: it makes the same loss and gradients."""
    hidden, weight = torch.randn(2, 4, requires_grad=True), torch.randn(20000, 4, requires_grad=True)

    def run() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(hidden, weight, torch.tensor([3, 19999]), backend="triton")
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    with tuning.watched() as seen:
        built_in = run()
    (choice,) = seen.values()
    assert launchers.WIDE in choice.configs[1:]
    with tuning.forced(choice.kernel, choice.key, launchers.WIDE):
        near(run(), built_in)


@FORMS
@pytest.mark.parametrize("dtype", rest_slow([torch.float32, torch.bfloat16, torch.float16]), ids=str)
def test_opcheck(form: Any, dtype: torch.dtype) -> None:
    hidden, weight, target = draw(dtype)
    with Operators() as seen:
        loss_of(form, hidden[:12], weight, target[:12], z_loss=0.1, return_z_loss=True)[0].backward()
        loss_of(form, hidden[:12], weight, target[:12], reduction="none").sum().backward()
    assert len(seen.calls) == (4 if form == "tiles" else 3)
    for func, args in seen.calls:
        given = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        torch.library.opcheck(func, given)


@pytest.mark.parametrize("form", rest_slow(["tiles", None, 7]), ids=str)
def test_compile_with_as_many_tokens_as_the_data_says(form: Any) -> None:
    """Which no form depends on: what cannot be told is taken for more than fits."""

    def function(hidden: Tensor, weight: Tensor, target: Tensor, kept: Tensor) -> Any:
        return loss_of(form, hidden[kept], weight, target[kept])

    args = (*draw(), torch.arange(TOKENS) % 3 > 0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*args), function(*args))
