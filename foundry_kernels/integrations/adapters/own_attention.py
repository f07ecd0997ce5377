"""Attention of classes that ask for no attention function: their own forward runs, and its scores are not computed.

The methods are made again from their own code (`rotating.py`), in which PyTorch's products of matrices are functions
that return `Scores`; so what else they call is not touched. A product by an operator or a method of tensors has no name
to replace: where a class needs it, its forward runs in a mode that sees every function of PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.integrations.adapters.attention import Attention
from foundry_kernels.integrations.adapters.deferred_scores import FEWEST, Run, Scores, current, filling, within
from foundry_kernels.integrations.adapters.rotating import (
    Rotating,
    by_backend,
    globals_of,
    remade,
    renamed,
    rotating_members,
)

#: The arguments by which a caller may ask for the weights.
ASKING = re.compile(r"weights|attentions|return_att")


@dataclass(frozen=True)
class OwnAttention(Rotating):
    """A class whose own forward computes attention.

    by_mode: whether its products are operators or methods. weights: the places in its result where it returns the
    weights unasked; they are None there, as with any attention function of transformers that has none.
    """

    by_mode: bool = False
    weights: tuple[int, ...] | None = ()

    home = Attention.home
    may_be_sdpa = Attention.may_be_sdpa

    def why_not_attend(self, module: Any) -> str | None:
        named = hasattr(getattr(module, "config", None), "_attn_implementation")
        return Attention.why_not_attend(self, module) if named else None  # type: ignore[arg-type]

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return (*super().ops(module), "flash_attention")

    def members(self, original: Any) -> dict[str, Any]:
        members = rotating_members(original, self.rotations)
        for name, versions in remade(original, self.rotations, deferring, replaceable):
            computing = members.get(name) or inspect.getattr_static(original, name)
            members[name] = _within_run(computing, by_backend(versions))
        computing = members.get("forward", original.forward)
        return members | {"forward": _forward(computing, self), "_foundry_computing": staticmethod(computing)}


def _within_run(computing: Any, deferring: Any) -> Any:
    @functools.wraps(computing)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (computing if current() is None else deferring)(self, *args, **kwargs)

    return method


def _forward(computing: Any, row: OwnAttention) -> Any:
    names = tuple(inspect.signature(computing).parameters)[1:]

    @functools.wraps(computing)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend = self._foundry.backends.get("flash_attention")
        few = row.by_mode and _tokens(args, kwargs) ** 2 < FEWEST["cpu"]  # of which the mode takes longer than they do
        if backend is None or few or is_compiling() or _asks(self, dict(zip(names, args, strict=False)) | kwargs):
            if current() is None:
                return computing(self, *args, **kwargs)
            with within(None):
                return computing(self, *args, **kwargs)
        return deferred(self, computing, row, Run(backend), args, kwargs)

    return forward


def deferred(self: Any, computing: Any, row: OwnAttention, run: Run, args: Any, kwargs: Any) -> Any:
    """Returns what the forward `computing` returns where its scores are deferred."""
    with within(run), _Products() if row.by_mode else nullcontext():
        return finished(computing(self, *args, **kwargs), row.weights)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns how many rows the first tensor of a call has."""
    x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim()), None)
    return 0 if x is None else x.shape[:-1].numel()


def _asks(module: nn.Module, given: dict[str, Any]) -> bool:
    """Returns whether a call asks for the weights."""
    if any(ASKING.search(name) and value for name, value in given.items() if not isinstance(value, Tensor)):
        return True
    ours = sys.modules.get("foundry_kernels.integrations.attention.functions")
    return ours is not None and ours.wants_weights(module, given)


def finished(out: Any, weights: tuple[int, ...] | None = ()) -> Any:
    """Returns what a forward has returned, with tensors in place of scores, and None where it returns weights; as it
    is, for None."""
    if weights is None:
        return out
    if isinstance(out, Scores):
        return out.computed()
    if type(out) in (tuple, list):
        return type(out)(None if i in weights and isinstance(x, Scores) else finished(x) for i, x in enumerate(out))
    return {key: finished(value) for key, value in out.items()} if type(out) is dict else out


# Products -------------------------------------------------------------------------------------------------------------


def product(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what a product of two tensors gives, or scores that are not computed."""
    run, kind = current(), PRODUCTS[func]
    if run is None:
        return func(*args, **kwargs)
    if kind == "einsum":
        found = _einsum(run, *args) if len(args) == 3 and not kwargs else None
    elif kind == "baddbmm":
        found = _baddbmm(run, *args, **kwargs) if len(args) == 3 else None
    else:
        found = _scores(run, *args, lambda _: func(*args)) if len(args) == 2 and not kwargs else None
    return func(*args, **kwargs) if found is None else found


def _scores(run: Run, a: Any, b: Any, replay: Callable[[Any], Tensor], transposed: bool = False) -> Scores | None:
    """Returns ``a @ b``, or of a transposed `b`."""
    if type(a) is not Tensor or type(b) is not Tensor or a.dim() != b.dim() or a.dim() < 3:
        return None
    k = b if transposed else b.transpose(-1, -2)
    if a.shape[:-2] != k.shape[:-2] or a.shape[-1] != k.shape[-1] or a.device != b.device or 0 in (*a.shape, *b.shape):
        return None
    fewest = FEWEST.get(a.device.type, FEWEST[""]) if run.fewest is None else run.fewest
    if a.shape[:-1].numel() * k.shape[-2] < fewest:
        return None
    low = autocast_dtype(a)
    if not a.is_floating_point() or (a.dtype != b.dtype and (low is None or torch.float64 in (a.dtype, b.dtype))):
        return None
    return Scores(run, a, k, replay, low or a.dtype)


def _baddbmm(run: Run, bias: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    found = _scores(run, a, b, lambda _: torch.baddbmm(bias, a, b, beta=beta, alpha=alpha))
    if found is None or not isinstance(bias, Tensor) or bias.dtype != found.dtype:
        return None
    replay, found = found.replay, found * alpha
    if beta and filling(bias) != 0:
        found = found + bias * beta
    if isinstance(found, Scores):
        found.parent, found.replay = None, replay
    return found


def _einsum(run: Run, equation: Any, a: Any, b: Any) -> Any:
    """Scores, or the weighted sum of the values, by the letters of an equation."""
    terms = re.fullmatch(r"([.\w]+),([.\w]+)->([.\w]+)", equation.replace(" ", "")) if type(equation) is str else None
    if terms is None or not isinstance(b, Tensor) or not isinstance(a, (Tensor, Scores)):
        return None
    first, second, third = (_letters(term, x.dim()) for term, x in zip(terms.groups(), (a, b, a), strict=True))
    if any(len({*term}) != len(term) for term in (first, second, third)):
        return None
    if isinstance(a, Scores):
        *batch, query, key = [*first]
        width = [letter for letter in second if letter not in first]
        if {*second} != {*batch, key, *width} or len(width) != 1 or {*third} != {*batch, query, *width}:
            return None
        out = torch.matmul(a, b.permute([second.index(letter) for letter in (*batch, key, *width)]))  # type: ignore[arg-type]
        return out.permute([(*batch, query, *width).index(letter) for letter in third])
    *batch, query, key = [*third]
    width = [letter for letter in first if letter not in third]
    if {*first} != {*batch, query, *width} or {*second} != {*batch, key, *width} or len(width) != 1:
        return None
    q = a.permute([first.index(letter) for letter in (*batch, query, *width)])
    k = b.permute([second.index(letter) for letter in (*batch, key, *width)])
    return _scores(run, q, k, lambda _: torch.einsum(equation, a, b), transposed=True)


def _letters(term: str, dims: int) -> str:
    """Returns the letters of all dimensions; digits stand for those of an ellipsis."""
    return term.replace("...", "0123456789"[: max(dims - len(term) + 3, 0)]) if "..." in term else term


def _filled(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A tensor of one number, which is known then without waiting for a device."""
    made = func(*args, **kwargs)
    given = (0,) if func is torch.zeros else args[1:] if func is torch.full else args
    if given and isinstance(given[0], (int, float)) and type(made) is Tensor and not made.is_inference():
        number = float(torch.tensor(given[0], dtype=made.dtype))
        made._foundry_filling = (number, made._version)  # type: ignore[attr-defined]
    return made


#: The products, and what their names are; then the functions that make a tensor of one number.
PRODUCTS: dict[Any, str] = {
    torch.matmul: "matmul", torch.bmm: "bmm", torch.baddbmm: "baddbmm", torch.einsum: "einsum",
    Tensor.matmul: "matmul", Tensor.__matmul__: "matmul", Tensor.bmm: "bmm", Tensor.baddbmm: "baddbmm",
}  # fmt: skip
REPLACED: dict[Any, Any] = {
    torch.matmul: product, torch.bmm: product, torch.baddbmm: product, torch.einsum: product, torch.zeros: _filled,
    torch.tensor: _filled, torch.scalar_tensor: _filled, torch.full: _filled,
}  # fmt: skip


class _Torch:
    """Stands for the module torch in methods that are made again."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _serving(found) if name in _REPLACED_NAMES else found


_REPLACED_NAMES = frozenset(function.__name__ for function in REPLACED)
TORCH = _Torch()


@functools.cache
def _serving(function: Any) -> Any:
    return functools.partial(REPLACED[function], function) if function in REPLACED else function


def replaceable(function: FunctionType) -> bool:
    """Returns whether a method uses one of the names that `deferring` replaces."""
    home = function.__globals__
    return any(home.get(name) is torch or _is_replaced(home.get(name)) for name in globals_of(function.__code__))


def _is_replaced(value: Any) -> bool:
    return callable(value) and getattr(value, "__name__", "") in _REPLACED_NAMES and value in REPLACED


def deferring(code: CodeType, home: dict[str, Any]) -> CodeType:
    """Returns a method's code with products that are deferred."""
    for name in globals_of(code):
        value = home.get(name)
        if value is torch or _is_replaced(value):
            ours = f"_foundry_{name}"
            home[ours] = TORCH if value is torch else _serving(value)
            code = renamed(code, name, ours)
    return code


class _Products(TorchFunctionMode):
    """Defers every product of the block, those by operators and methods too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        run = current()
        if run is None:
            return func(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention:
            from foundry_kernels.compat.sdpa import scaled_dot_product_attention

            run.attended += 1
            with within(None):
                return scaled_dot_product_attention(*args, **kwargs, backend=run.backend)
        return product(func, *args, **kwargs) if func in PRODUCTS else func(*args, **kwargs)
