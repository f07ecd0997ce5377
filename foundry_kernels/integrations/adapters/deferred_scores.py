"""Scores of attention that are not computed: what a product of queries and keys returns in attention of a class's own.

The class's own forward runs. It changes its scores (a scale, a bias, a mask), takes the softmax over the keys, drops
weights and multiplies by the values. `Scores` records what `flash_attention` computes too, and the last product calls
that. Any other use computes the scores: by the product itself, then the recorded changes in their order; from then on
the forward goes on with tensors. So every forward has the values and gradients that it has without a patch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.integrations.adapters.deferred_tensor import Deferred, computed, is_number
from foundry_kernels.ops.flash_attention import flash_attention
from foundry_kernels.ops.flash_attention.checks import MAX_HEAD_DIM

running = threading.local()  # its `run`

#: How many scores are deferred at least, by the type of the device: fewer are computed sooner than deferred. Measured
#: on a CPU, where forwards of 2^14 scores take 1.2 times their time and of 2^22 scores 0.6 times; estimated elsewhere.
FEWEST = {"cpu": 1 << 16, "": 1 << 20}
#: A score that is set to this or less has no weight beside others, whatever they are.
HIDDEN = -1e4


class Run:
    """A call of attention whose scores are deferred. attended: how often an operation of this package was called.
    weighed: how often weights were computed, for a use of their own. fewest: how many scores are deferred at least;
    None for `FEWEST`."""

    def __init__(self, backend: str, fewest: int | None = None) -> None:
        self.backend, self.fewest, self.attended, self.weighed = backend, fewest, 0, 0
        self.members: list[Scores] = []

    def release(self) -> None:
        members, self.members = self.members, []
        for member in members:
            member.tensor()


def current() -> Run | None:
    """Returns the innermost call of such attention in this thread, or None."""
    return getattr(running, "run", None)


@contextmanager
def within(run: Run | None) -> Iterator[None]:
    """In this block, products are deferred for `run`; for None they are computed."""
    outer, running.run = current(), run
    try:
        yield
    finally:
        running.run = outer
        if run is not None:
            run.members = []  # which refer to the run in turn: they are freed without the garbage collector


class Scores(Deferred):
    """``scale * q k^T + bias``, or with `soft` its softmax over the keys, with `drop` of the weights dropped.

    q, k, bias: ``[B, H, T, D]``, ``[B, H, S, D]``, and what broadcasts to ``[B, H, T, S]``. shape: of the scores as the
    forward has them, where B and H may be one dimension, or more than two. parent, replay: from which scores, by which
    function, these are computed. used: whether others come from them. alias: whether they share memory with `parent`.
    filled: the largest number that scores were set to.
    """

    def __init__(self, call: Run, q: Tensor, k: Tensor, replay: Callable[[Any], Tensor], dtype: torch.dtype) -> None:
        lead = q.shape[:-2]
        self.call, self.dtype, self.device = call, dtype, q.device
        self.shape = torch.Size((*lead, q.shape[-2], k.shape[-2]))
        batch = (lead.numel(), 1) if len(lead) == 1 else (lead[:-1].numel(), lead[-1])
        self.q, self.k = (x if x.dim() == 4 else x.reshape(*batch, *x.shape[-2:]) for x in (q, k))
        self.versions = [(x, x._version) for x in (q, k) if not x.is_inference()]
        self.grad, self.low = torch.is_grad_enabled(), autocast_dtype(q)
        self.scale, self.bias, self.soft, self.drop, self.filled = 1.0, None, False, 0.0, -math.inf
        self.made: Tensor | None = None
        self.parent: Scores | None = None
        self.replay, self.used, self.alias = replay, False, False
        call.members.append(self)

    bias: Tensor | None

    def then(self, alias: bool = False, **changes: Any) -> Scores:
        found = object.__new__(Scores)
        vars(found).update(vars(self))
        vars(found).update(used=False, alias=alias, parent=self, **changes)
        self.used = True
        self.call.members.append(found)
        return found

    @property
    def requires_grad(self) -> bool:
        given = (self.q, self.k, self.bias)
        return self.grad and any(x.requires_grad for x in given if x is not None)

    def tensor(self) -> Tensor:
        if self.made is None:
            self.check()
            self.call.weighed += self.soft
            device, same = self.device.type, autocast_dtype(self.q) == self.low
            cast: Any = nullcontext() if same else torch.autocast(device, dtype=self.low, enabled=self.low is not None)
            with within(None), torch.set_grad_enabled(self.grad), cast:
                self.made = self.replay(None if self.parent is None else self.parent.tensor())
            self.parent = None
        return self.made

    def check(self) -> None:
        if any(x._version != version for x, version in self.versions):
            raise RuntimeError("an input of attention was changed in place before its scores were used")

    # Uses ---------------------------------------------------------------------------------------------------------

    def use(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], replay: Callable[[Any], Any]) -> Any:
        """Returns what the use of this name gives. replay: it, of the scores as a tensor."""
        in_place = name in IN_PLACE
        known = KNOWN.get(IN_PLACE.get(name, name))
        same = self.made is None and torch.is_grad_enabled() == self.grad and autocast_dtype(self.q) == self.low
        if known is None or not same or (in_place and (self.used or self.alias)):
            return replay(self.computed())
        try:
            found = known(self, *args, **kwargs)
        except TypeError:  # other arguments than are known
            found = None
        if found is None:
            return replay(self.computed())
        if not isinstance(found, Scores):
            return found
        found.replay = replay
        if not in_place:
            return found
        before = object.__new__(Scores)
        vars(before).update(vars(self))
        self.call.members.pop()
        if found.dtype != self.dtype:
            return replay(self.computed())
        before.replay, found.parent = self.replay, before
        vars(self).update(vars(found))
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: computed(value) for key, value in (kwargs or {}).items()}
        at = next((i for i, x in enumerate(args) if isinstance(x, Scores)), None)
        if at == 1 and func in LIKE:
            return func(args[0], torch.empty(1, dtype=args[1].dtype, device=args[1].device).expand(args[1].shape))
        name = NAMES.get(func)
        if at is None or name is None:
            return func(*computed(args), **kwargs)
        rest = [computed(x) if i != at else x for i, x in enumerate(args)]

        def replay(x: Tensor) -> Any:
            return func(*rest[:at], x, *rest[at + 1 :], **kwargs)

        if name == "where":
            given = (*rest, at)
        elif at == 0 or (at == 1 and name in EITHER):
            given = (*rest[:at], *rest[at + 1 :])
        else:
            return replay(args[at].computed())
        return args[at].use(name, given, kwargs, replay)

    def __getattr__(self, name: str) -> Any:
        if IN_PLACE.get(name, name) not in KNOWN:
            return super().__getattr__(name)

        def method(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = args if name == "type_as" else computed(args), computed(kwargs)
            return self.use(name, args, kwargs, lambda x: getattr(x, name)(*args, **kwargs))

        return method


def constant(value: Any) -> float | None:
    """Returns the number that a value is known to be, without waiting for a device."""
    if is_number(value):
        return float(value)
    if not isinstance(value, Tensor) or value.dim() or value.requires_grad or value.is_complex():
        return None
    return float(value) if value.is_cpu and type(value) is Tensor else filling(value)


def filling(x: Tensor) -> float | None:
    """Returns the number that a tensor was filled with in this forward, if it is known and has not been changed."""
    known: tuple[float, int] | None = getattr(x, "_foundry_filling", None)
    return None if known is None or known[1] != x._version else known[0]


# What is known of scores: functions of them and of the arguments. They return None for others than they know.


def _mul(s: Scores, other: Any) -> Scores | None:
    factor = constant(other)
    if s.soft or factor is None:
        return None
    return s.then(scale=s.scale * factor, bias=None if s.bias is None else s.bias * factor, filled=s.filled * factor)


def _div(s: Scores, other: Any) -> Scores | None:
    factor = constant(other)
    return _mul(s, 1.0 / factor) if factor else None


def _add(s: Scores, other: Any) -> Scores | None:
    if s.soft or not isinstance(other, Tensor) or other.device != s.device:
        return None
    bias = _spread(s, other)
    if bias is None or other.is_complex():
        return None
    bias = bias if bias.is_floating_point() else bias.to(s.dtype)
    wide = torch.promote_types(s.dtype, other.dtype) if other.dim() else s.dtype
    if wide == torch.float64 != s.q.dtype:
        return None
    return s.then(
        bias=bias if s.bias is None else s.bias + bias,
        dtype=wide,
        versions=s.versions if other.is_inference() else [*s.versions, (other, other._version)],
    )


def _sub(s: Scores, other: Any) -> Scores | None:
    return _add(s, -other) if isinstance(other, Tensor) and other.is_floating_point() else None


def _masked_fill(s: Scores, mask: Any, value: Any) -> Scores | None:
    """Scores that are set to a low number: as a bias, beside which a score has no weight."""
    low = constant(value)
    if s.soft or low is None or not low <= HIDDEN or not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return None
    hidden = _spread(s, mask)
    if hidden is None or mask.device != s.device:
        return None
    kind = torch.float64 if s.q.dtype == torch.float64 else torch.float32
    least = torch.full((), low if low == -math.inf else torch.finfo(kind).min, dtype=kind, device=s.device)
    bias = torch.where(hidden, least, 0.0 if s.bias is None else s.bias.to(kind))
    return s.then(bias=bias, filled=max(s.filled, low))


def _where(s: Scores, mask: Any, first: Any, second: Any, at: int) -> Scores | None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or at == 0:
        return None
    other = second if at == 1 else first
    if isinstance(other, Tensor) and (other.dim() or other.dtype != s.dtype):
        return None
    return _masked_fill(s, ~mask if at == 1 else mask, other)


def _maximum(s: Scores, other: Any) -> Scores | None:
    """A lower bound below which no score lies, except for a mask."""
    least = constant(other)
    if s.soft or least is None or not least <= torch.finfo(s.dtype).min:
        return None
    return s.then(bias=None if s.bias is None else s.bias.clamp(min=torch.finfo(s.bias.dtype).min))


def _clamp(s: Scores, min: Any = None, max: Any = None) -> Scores | None:
    return _maximum(s, min) if max is None and is_number(min) else None


def _softmax(s: Scores, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Scores | None:
    if s.soft or dim not in (-1, s.dim() - 1) or s.filled > HIDDEN / 8 or not (dtype or s.dtype).is_floating_point:
        return None
    return s.then(soft=True, dtype=dtype or (s.dtype if s.low is None else torch.float32))


def _dropout(s: Scores, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Scores | None:
    if not training or p == 0:
        return s.then(alias=True)
    return s.then(drop=float(p)) if s.soft and not s.drop and not inplace and 0 < p < 1 else None


def _cast(s: Scores, dtype: torch.dtype) -> Scores | None:
    return s.then(alias=True, dtype=dtype) if dtype.is_floating_point else None


def _to(s: Scores, *args: Any, dtype: Any = None, device: Any = None) -> Scores | None:
    for value in args:
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (Tensor, Scores)):
            dtype, device = value.dtype, value.device
        elif isinstance(value, (str, torch.device)):
            device = value
        else:
            return None
    device = s.device if device is None else torch.device(device)
    if device.type != s.device.type or device.index not in (None, s.device.index):
        return None
    return _cast(s, s.dtype if dtype is None else dtype)


def _float(s: Scores) -> Scores | None:
    return _cast(s, torch.float32)


def _type(s: Scores, dtype: Any) -> Scores | None:
    return _cast(s, dtype) if isinstance(dtype, torch.dtype) else None


def _contiguous(s: Scores) -> Scores | None:
    return s.then(alias=True)


def _view(s: Scores, *shape: Any) -> Scores | None:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if len(sizes) < 3 or not all(map(is_number, sizes)) or tuple(sizes[-2:]) != tuple(s.shape[-2:]):
        return None
    rows, known = s.shape[:-2].numel(), abs(math.prod(sizes[:-2]))
    sizes = tuple(rows // known if n == -1 and known else n for n in sizes)
    if math.prod(sizes[:-2]) != rows:
        return None
    found = s.then(alias=True, shape=torch.Size(sizes))
    if len(sizes) == 4 and sizes[:2] != tuple(s.q.shape[:2]):
        found.q, found.k = (x.reshape(*sizes[:2], *x.shape[2:]) for x in (s.q, s.k))
        if s.bias is not None and s.bias.shape[:2] != (1, 1):
            whole = s.bias.expand(*s.q.shape[:2], -1, -1)
            found.bias = whole.reshape(*sizes[:2], *whole.shape[2:])
    return found


def _spread(s: Scores, x: Tensor) -> Tensor | None:
    """Returns what broadcasts to the scores as what broadcasts to ``[B, H, T, S]``; None where it is larger."""
    n = s.dim()
    if x.dim() > n or any(a not in (1, b) for a, b in zip(x.shape[::-1], s.shape[::-1], strict=False)):
        return None
    x = x.reshape((1,) * (n - x.dim()) + tuple(x.shape))
    lead, last = x.shape[:-2], x.shape[-2:]
    if all(size == 1 for size in lead):
        return x.reshape(1, 1, *last)
    if s.shape[:-2] == s.q.shape[:2]:
        return x
    return x.expand(*s.shape[:-2], *last).reshape(*s.q.shape[:2], *last)


def _matmul(s: Scores, v: Any) -> Tensor | None:
    """The weighted sum of the values."""
    if not s.soft or type(v) is not Tensor or v.dim() != s.dim() or v.device != s.device:
        return None
    if v.shape[:-2] != s.shape[:-2] or v.shape[-2] != s.shape[-1] or 0 in (*s.shape, v.shape[-1]):
        return None
    if max(s.q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM or not (0 < s.scale < math.inf):
        return None
    if s.low is None and v.dtype != s.dtype:
        return None
    s.check()
    kind = torch.promote_types(s.q.dtype, v.dtype)
    if s.bias is not None and s.bias.dtype == torch.float64 != kind:
        return None
    q, k, values = (x.to(kind) for x in (s.q, s.k, v.reshape(*s.q.shape[:2], *v.shape[-2:])))
    call = s.call
    with within(None):
        out = flash_attention(q, k, values, attn_mask=s.bias, scale=s.scale, dropout_p=s.drop, backend=call.backend)
    call.attended += 1
    return out.reshape(*s.shape[:-1], v.shape[-1]).to(s.low or s.dtype)


#: The uses of scores that are recorded, by the names of methods and functions of PyTorch.
KNOWN: dict[str, Callable[..., Any]] = {
    "mul": _mul, "multiply": _mul, "div": _div, "divide": _div, "true_divide": _div, "add": _add, "sub": _sub,
    "masked_fill": _masked_fill, "where": _where, "max": _maximum, "maximum": _maximum, "clamp": _clamp,
    "softmax": _softmax, "dropout": _dropout, "to": _to, "float": _float, "type": _type, "type_as": _to,
    "contiguous": _contiguous, "view": _view, "reshape": _view, "matmul": _matmul, "bmm": _matmul,
}  # fmt: skip
#: Of what writes to the scores, what it writes.
IN_PLACE = {f"{name}_": name for name in ("mul", "div", "add", "sub", "masked_fill")}
OPERATORS = {"mul": "mul", "rmul": "mul", "truediv": "div", "add": "add", "radd": "add", "sub": "sub",
             "matmul": "matmul", "imul": "mul_", "itruediv": "div_", "iadd": "add_", "isub": "sub_"}  # fmt: skip
#: Those whose order of arguments does not count.
EITHER = ("add", "mul", "multiply", "max", "maximum")
#: Methods of a tensor that ask another one for its shape or its dtype.
LIKE = (Tensor.reshape_as, Tensor.view_as, Tensor.expand_as, Tensor.type_as)
#: Functions of PyTorch, and which use of scores they are.
NAMES: dict[Any, str] = (
    {getattr(home, name): name for name in KNOWN for home in (torch, nn.functional) if hasattr(home, name)}
    | {getattr(Tensor, f"__r{name}__"): name for name in ("add", "mul")}
    | {Tensor.add: "add", Tensor.mul: "mul"}
)


def _operator(name: str, of: str) -> Callable[..., Any]:
    def method(self: Scores, other: Any) -> Any:
        given = computed(other)
        return self.use(of, (given,), {}, lambda x: getattr(x, name)(given))

    return method


for _name, _of in OPERATORS.items():
    setattr(Scores, f"__{_name}__", _operator(f"__{_name}__", _of))
