"""Rotations of queries and keys by functions that a model's own file has: recognised by what they compute.

`rotation_of` runs such a function on small random tensors in float64, forward and backward, and compares it with each
form that `rope` has. What is equal is a `Rotation`, which says where the queries, the keys and the tables are in the
function's arguments, for which numbers of dimensions it was tried, and what it needs of the tables. Numbers prove that
the form holds, and the code excludes the rest: a function that uses more than reshaping and arithmetic, that decides by
values or that writes anywhere is not run at all.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.integrations.adapters.base import split_names
from foundry_kernels.ops.rope import rope

#: What a rotation's code may call or read, besides functions of its own file that keep to it too.
WORDS = split_names(
    "torch unsqueeze squeeze shape size ndim cat concat stack flatten reshape view unbind chunk split transpose "
    "permute repeat_interleave to float double type_as dtype device float32 expand contiguous unflatten "
    "view_as_complex view_as_real len list tuple range"
)
#: Instructions that decide by values, or write to what is not the function's own.
FORBIDDEN = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE", "COMPARE_OP", "CONTAINS_OP", "YIELD", "RAISE",
             "IMPORT", "LOAD_DEREF", "STORE_NAME", "STORE_SLICE", "SETUP", "BEFORE_WITH")  # fmt: skip

#: Where the numbers of the pair i are in the rotated dimensions of the input and of the result.
LAYOUTS = ("halves", "pairs", "from_pairs_to_halves")


@dataclass(frozen=True)
class Rotation:
    """What a function computes: ``y_a = x_a cos - x_b sin, y_b = x_b cos + x_a sin`` for the pairs (a, b).

    names: the function's parameters. q, k, cos, sin: which of them are what; k is "" where one tensor is rotated, sin
    is "" where `cos` is complex. layout: of `LAYOUTS`. sign: -1 where the angle is negative. tables: "first" (the
    second half of a row is not read), "half" (it does not exist), "halves" (it must equal the first), "pairs" (entries
    2i and 2i + 1 must be equal) or "complex". partial: dimensions beyond the tables' are copied. casts: the result has
    the dtype of the queries where tables have a larger one. places: by the numbers of dimensions of queries and tables,
    and the argument `unsqueeze_dim` (None where it is not given), which dimension of the queries is their heads.
    """

    names: tuple[str, ...]
    q: str
    k: str
    cos: str
    sin: str
    layout: str
    sign: int
    tables: str
    partial: bool = False
    casts: bool = False
    places: tuple[tuple[tuple[int, int, int | None], int], ...] = ()

    @property
    def needs(self) -> str | None:
        """What the tables must be like: "halves", "pairs" or None for any."""
        return self.tables if self.tables in ("halves", "pairs") else None

    def serving(self, original: Callable[..., Any], backend: str) -> Callable[..., Any]:
        """Returns a function that does what `original` does, by `rope` where it can."""

        def rotated(*args: Any, **kwargs: Any) -> Any:
            found = self.rotate(backend, args, kwargs)
            return original(*args, **kwargs) if found is None else found

        return rotated

    def rotate(self, backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the function's result, or None for a call that `rope` does not support."""
        given = dict(zip(self.names, args, strict=False))
        given.update(kwargs)
        for name, value in given.items():
            if name not in (self.q, self.k, self.cos, self.sin, UNSQUEEZE) and value is not None:
                return None
        q, k = given.get(self.q), given.get(self.k) if self.k else None
        cos, sin = given.get(self.cos), given.get(self.sin) if self.sin else None
        if not isinstance(q, Tensor) or not isinstance(cos, Tensor):
            return None
        if (self.k and not isinstance(k, Tensor)) or (self.sin and not isinstance(sin, Tensor)):
            return None
        wanted = (q.dim(), cos.dim(), given.get(UNSQUEEZE))
        heads = -1
        for place, axis in self.places:
            if place == wanted:
                heads = axis
        if heads < 0 or not q.is_floating_point():
            return None
        if self.tables == "complex":
            if not cos.is_complex():
                return None
            parts = torch.view_as_real(cos)
            cos, sin = parts[..., 0], parts[..., 1]
            width = 2 * cos.shape[-1]
        else:
            assert sin is not None
            width = cos.shape[-1] * (2 if self.tables == "half" else 1)
            if sin.shape != cos.shape or sin.dtype != cos.dtype:
                return None
            if self.tables == "pairs":
                cos, sin = cos[..., ::2], sin[..., ::2]
            elif self.tables != "half":
                cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        if not self._fits(q, cos, sin, heads, width):
            return None
        if k is not None:
            if k.dim() != q.dim() or k.dtype != q.dtype or k.device != q.device:
                return None
            for axis in range(q.dim()):
                if axis != heads and k.shape[axis] != q.shape[axis]:
                    return None
        first = self._heads_first(q, heads)
        second = first[:, :0] if k is None else self._heads_first(k, heads)
        if self.sign < 0:
            sin = -sin
        pairs = self.layout != "halves"
        first, second = rope(first, second, cos, sin, interleaved=pairs, backend=backend)
        first = self._as_it_was(first, q.dim(), heads)
        return first if k is None else (first, self._as_it_was(second, k.dim(), heads))

    def _fits(self, q: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int) -> bool:
        """Returns whether `rope` takes these halves of tables, and has the result's dtype."""
        if width < 2 or width % 2 or (q.shape[-1] < width if self.partial else q.shape[-1] != width):
            return False
        tokens = (1 if heads == 0 else 0) if q.dim() == 3 else 3 - heads
        if cos.shape[-2] != q.shape[tokens] or cos.device != q.device:
            return False
        if cos.dim() == 3 and cos.shape[0] != 1 and (q.dim() == 3 or cos.shape[0] != q.shape[0]):
            return False
        if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
            return False
        if self.tables == "complex" or torch.promote_types(cos.dtype, q.dtype) == q.dtype:
            return cos.dtype != torch.float64 or q.dtype == torch.float64
        # Under autocast attention would round the larger result to this dtype.
        return cos.dtype != torch.float64 and (self.casts or autocast_dtype(q) == q.dtype)

    def _heads_first(self, x: Tensor, heads: int) -> Tensor:
        if x.dim() == 3:
            x, heads = x[None], heads + 1
        return x.transpose(1, 2) if heads == 2 else x

    def _as_it_was(self, y: Tensor, dims: int, heads: int) -> Tensor:
        if self.layout == "from_pairs_to_halves":
            y = y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        if heads + 4 - dims == 2:
            y = y.transpose(1, 2)
        return y[0] if dims == 3 else y


UNSQUEEZE = "unsqueeze_dim"


def own_bases(cls: type) -> list[type]:
    """The classes that a class of modules is made of, except for those of torch and of every model of transformers."""
    return [
        base
        for base in cls.__mro__
        if base.__module__.partition(".")[0] not in ("torch", "builtins", "foundry_kernels")
        and base.__module__ != "transformers.modeling_utils"
    ]


# What the code may do -----------------------------------------------------------------------------------------------


def beyond_words(function: Any, seen: frozenset[Any] = frozenset()) -> str | None:
    """Returns what a function, or one that it calls, uses beyond reshaping and arithmetic; None for nothing."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return type(function).__name__
    if function.__closure__:
        return "variables of another function"
    if function in seen:
        return None
    return _beyond(function.__code__, function.__globals__, seen | {function})


def _beyond(code: CodeType, home: dict[str, Any], seen: frozenset[Any]) -> str | None:
    for step in dis.get_instructions(code):
        name = step.opname
        if name.startswith(FORBIDDEN) or (name.startswith("POP_JUMP") and not name.endswith("NONE")):
            return "control flow on values" if "JUMP" in name or "COMPARE" in name else name.lower()
        if name.startswith("LOAD_GLOBAL") and step.argval not in WORDS:
            called = home.get(step.argval)
            if not callable(called) or isinstance(called, type):
                return str(step.argval)
            if (reason := beyond_words(called, seen)) is not None:
                return reason
        if name.startswith(("LOAD_ATTR", "LOAD_METHOD")) and step.argval not in WORDS:
            return str(step.argval)
    parts = (_beyond(part, home, seen) for part in code.co_consts if isinstance(part, CodeType))
    return next((reason for reason in parts if reason is not None), None)


# What it computes ---------------------------------------------------------------------------------------------------


@functools.cache
def rotation_of(function: Any) -> Rotation | None:
    """Returns the form that a function of a model's file computes; None if it computes another one."""
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType) or beyond_words(plain) is not None:
        return None
    names = tuple(inspect.signature(plain).parameters)
    kinds = {p.kind for p in inspect.signature(plain).parameters.values()}
    if kinds != {inspect.Parameter.POSITIONAL_OR_KEYWORD} or len(names) < 3:
        return None
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _without_autocast():
        for form in _forms(names):
            if (found := _match(function, form)) is not None:
                return found
    return None


def _without_autocast() -> Any:
    return torch.autocast("cpu", enabled=False)


def _forms(names: tuple[str, ...]) -> Iterator[Rotation]:
    """The roles that the arguments may have, with what the tables may be like."""
    a, b, c, *rest = (n for n in names if n != UNSQUEEZE)
    roles = [(a, "", b, c), (a, "", c, b)]
    if rest:
        roles = [(a, b, c, rest[0]), (a, b, rest[0], c), *roles]
    for role, tables in itertools.product(roles, ("first", "half", "halves", "pairs")):
        yield Rotation(names, *role, layout="", sign=1, tables=tables)
    yield Rotation(names, a, b, c, "", layout="", sign=1, tables="complex")


#: Queries [batch, heads, tokens, width] that no two sizes of are alike, by their dimensions and that of heads.
SIZES = {(4, 1): (2, 3, 5, 8), (4, 2): (2, 5, 3, 8), (3, 0): (3, 5, 8), (3, 1): (5, 3, 8)}


def _match(function: Any, form: Rotation) -> Rotation | None:
    places: dict[tuple[int, int, int | None], int] = {}
    found: tuple[str, int] | None = None
    dims: tuple[int | None, ...] = (None, 0, 1, 2, -2, -3) if UNSQUEEZE in form.names else (None,)
    for (rank, heads), table, dim in itertools.product(SIZES, (3, 2), dims):
        if table == 3 and rank == 3:
            continue
        trial = Trial(form, rank, heads, table, dim)
        states, tables = trial.leaves()
        outs = trial.call(function, states, tables)
        if outs is None:
            continue
        same = trial.layouts(outs, states, tables)
        if not same or (found is not None and found not in same.items()):
            return None
        found = next(iter(same.items()))
        if places.setdefault((rank, table, dim), heads) != heads:
            return None
    if found is None:
        return None
    made = Rotation(**(vars(form) | {"layout": found[0], "sign": found[1], "places": tuple(sorted(
        places.items(), key=repr
    ))}))  # fmt: skip
    rank, table, dim = next(iter(places))
    trial = Trial(made, rank, places[rank, table, dim], table, dim)
    if not trial.equal_in_bfloat16(function):
        return None
    states, tables = trial.leaves(extra=4)
    wide = trial.call(function, states, tables)
    partial = wide is not None
    if wide is not None and made.layout not in trial.layouts(wide, states, tables):
        return None
    casts = trial.keeps_dtype(function)
    return Rotation(**(vars(made) | {"partial": partial, "casts": casts}))


class Trial:
    """A call of a function on random tensors of some dimensions."""

    def __init__(self, form: Rotation, rank: int, heads: int, table: int, dim: int | None) -> None:
        self.form, self.heads, self.table, self.dim = form, heads, table, dim
        self.shape = SIZES[rank, heads]
        self.tokens = (1 if heads == 0 else 0) if rank == 3 else 3 - heads

    def tensors(self, extra: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Returns queries and keys, and the tables as the function wants them."""
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:  # of so few bits that float32 is exact too
            return torch.randint(-255, 256, shape, generator=draw, device="cpu").double() / 64

        wide: list[int] = [*self.shape[:-1], self.shape[-1] + extra]
        states = [random(*wide)]
        if self.form.k:
            wide[self.heads] -= 1
            states.append(random(*wide))
        rows = (2, 5) if self.table == 3 else (5,)
        half = self.shape[-1] // 2
        tables = [random(*rows, half), random(*rows, half)]
        kind = self.form.tables
        if kind == "complex":
            tables = [torch.complex(*tables)]
        elif kind == "first":
            tables = [torch.cat((t, random(*rows, half)), -1) for t in tables]
        elif kind == "halves":
            tables = [torch.cat((t, t), -1) for t in tables]
        elif kind == "pairs":
            tables = [t.repeat_interleave(2, -1) for t in tables]
        if kind == "complex":  # whatever the dtype of the queries
            return [x.to(dtype) for x in states], [tables[0].to(torch.complex64)]
        return [x.to(dtype) for x in states], [t.to(dtype) for t in tables]

    def call(self, function: Any, states: list[Tensor], tables: list[Tensor]) -> list[Tensor] | None:
        form = self.form
        given: dict[str, Any] = dict(zip((form.q, form.k) if form.k else (form.q,), states, strict=True))
        given |= dict(zip((form.cos, form.sin) if form.sin else (form.cos,), tables, strict=True))
        if self.dim is not None:
            given[UNSQUEEZE] = self.dim
        try:
            out = function(**given)
        except Exception:  # whatever a function makes of tensors that it was not made for
            return None
        outs = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, (tuple, list)) else []
        fits = len(outs) == len(states) and isinstance(out, Tensor) == (not form.k)
        fits = fits and all(isinstance(y, Tensor) and y.shape == x.shape for x, y in zip(states, outs, strict=True))
        return outs if fits else None

    def halves(self, tables: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns half of each table with a dimension of 1 for the heads."""
        if self.form.tables == "complex":
            cos, sin = tables[0].real, tables[0].imag
        else:
            half = self.shape[-1] // 2
            step = 2 if self.form.tables == "pairs" else 1
            cos, sin = (t[..., ::step][..., :half] for t in tables)
        at = self.heads if self.table == 3 or len(self.shape) == 3 else self.heads - 1
        return cos.unsqueeze(at), sin.unsqueeze(at)

    def leaves(self, extra: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Returns float64 tensors of which the queries and keys take gradients. extra: how much wider than the tables
        the heads are."""
        states, tables = self.tensors(extra, torch.float64)
        return [x.requires_grad_() for x in states], tables

    def layouts(self, outs: list[Tensor], states: list[Tensor], tables: list[Tensor]) -> dict[str, int]:
        """Returns the layouts, with their signs, in which the results equal the form, gradients included."""
        if any(y.dtype != torch.float64 or not y.requires_grad for y in outs):
            return {}
        cos, sin = self.halves(tables)
        found: dict[str, int] = {}
        for layout, sign in itertools.product(LAYOUTS, (1, -1)):
            wanted = [formula(x, cos, sign * sin, layout) for x in states]
            if not all(_close(y, w, 1e-12) for y, w in zip(outs, wanted, strict=True)):
                continue
            weights = [(torch.arange(w.numel(), dtype=w.dtype, device="cpu") % 13 - 5).view_as(w) for w in wanted]
            theirs = torch.autograd.grad(outs, states, weights, retain_graph=True)
            ours = torch.autograd.grad(wanted, states, weights, retain_graph=True)
            if all(_close(a, b, 1e-12) for a, b in zip(theirs, ours, strict=True)):
                found[layout] = sign
        return found

    def equal_in_bfloat16(self, function: Any) -> bool:
        """Returns whether ours is no further from float64 in bfloat16 than the function is."""
        states, tables = self.tensors(0, torch.bfloat16)
        theirs = self.call(function, states, tables)
        if theirs is None or any(y.dtype != torch.bfloat16 for y in theirs):
            return False
        ours = self.call(self.form.serving(lambda *_, **__: None, "reference"), states, tables)
        if ours is None:
            return False
        cos, sin = self.halves(tables)
        for x, a, b in zip(states, theirs, ours, strict=True):
            wide = torch.float64
            exact = formula(x.to(wide), cos.to(wide), self.form.sign * sin.to(wide), self.form.layout)
            if not _close(a.to(wide), exact, 0.05) or (b - exact).abs().max() > (a - exact).abs().max():
                return False
        return True

    def keeps_dtype(self, function: Any) -> bool:
        """Returns whether the result has the queries' dtype where the tables are of float32."""
        states, _ = self.tensors(0, torch.bfloat16)
        outs = self.call(function, states, self.tensors(0, torch.float32)[1])
        return outs is not None and all(y.dtype == torch.bfloat16 for y in outs)


def formula(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """The rotation of x by halves of tables that broadcast to it."""
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    a, b = turned.chunk(2, -1) if layout == "halves" else (turned[..., ::2], turned[..., 1::2])
    parts = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack(parts, -1).flatten(-2) if layout == "pairs" else torch.cat(parts, -1)
    return torch.cat((joined, rest), -1)


def _close(y: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool(((y - wanted).abs() <= tolerance * (1 + wanted.abs())).all())
