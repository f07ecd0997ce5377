"""Logits that are not computed: what the head of a model returns while a call computes its loss.

A class's own forward calls its head, changes the logits (a scale, a soft cap, a shift by slicing, a cast to float32),
gives them to a loss and returns them. `DeferredLogits` stands for these logits. It records the changes that
`linear_cross_entropy` computes too, so that the loss needs no logits. Any other use computes the logits: by the head
itself, then the recorded changes in their order, and from then on the forward goes on with tensors. So every forward
has the values and gradients that it has without a patch, whatever it does with its logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.integrations.adapters.deferral import Deferral, HeadCall
from foundry_kernels.integrations.adapters.deferred_tensor import Deferred, computed, is_number
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy


def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a tensor that is recorded, where `method` knows how; it returns None where it does not."""
    name = method.__name__

    @wraps(method)
    def call(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        if self.made is None and torch.is_grad_enabled() == self.call.grad:
            found = method(self, *args, **kwargs)
            if found is not None:
                return found
        return getattr(self.computed(), name)(*args, **kwargs)

    return call


class DeferredLogits(Deferred):
    """Logits ``after * tanh(scale * (rows @ weight.T + bias))``, or without tanh, which are not computed.

    call: the call of the head. rows: the rows of its input of which these are the logits. made: the logits, once they
    are computed. parent and step: from which logits, and by which of their methods, they are computed.
    """

    def __init__(self, call: HeadCall, rows: Tensor, dtype: torch.dtype) -> None:
        self.call, self.rows, self._dtype = call, rows, dtype
        self.bias, self.scale, self.capped, self.after = call.bias, 1.0, False, 1.0
        self.made: Tensor | None = None
        self.parent: DeferredLogits | None = None
        self.step: tuple[Any, ...] = ()
        call.members.append(self)

    def _then(self, *step: Any, rows: Tensor | None = None, dtype: torch.dtype | None = None) -> DeferredLogits:
        """Returns the logits that come from these by a step: the name of a method, and its arguments."""
        found = DeferredLogits(self.call, self.rows if rows is None else rows, dtype or self._dtype)
        found.bias, found.scale, found.capped, found.after = self.bias, self.scale, self.capped, self.after
        found.parent, found.step = self, step
        return found

    # The logits ---------------------------------------------------------------------------------------------------

    def tensor(self) -> Tensor:
        """Returns the logits themselves."""
        if self.made is None:
            if self.call.grad and not is_compiling() and not torch.is_grad_enabled():
                _check_not_in_function()
            self.made = self.call.run(self._compute, grad=self.call.grad)
            self.parent, self.step = None, ()
        return self.made

    def _compute(self) -> Tensor:
        if self.parent is None:
            logits: Tensor = self.call.head(self.call.hidden)
            return logits
        name, *args = self.step
        made: Tensor = getattr(self.parent.tensor(), name)(*args)
        return made

    # The loss -----------------------------------------------------------------------------------------------------

    def inputs(self) -> dict[str, Any] | None:
        """Returns the arguments by which an operation computes these logits, and its backend; None if it cannot."""
        if self.made is not None or (self.capped and not self.after > 0):
            return None
        softcap = self.after if self.capped else None
        return {
            "hidden": self.rows,
            "weight": self.call.weight,
            "bias": self.bias,
            **self.call.pair(self.rows),
            "softcap": softcap,
            "logit_scale": self.scale * self.after if self.capped else self.scale,
            "backend": self.call.deferral.backend,
        }

    def loss(self, target: Tensor, **options: Any) -> Tensor | None:
        """Returns `linear_cross_entropy` of these logits, in float32 at least, or None if it cannot. target: flat."""
        inputs = self.inputs()
        if inputs is None:
            return None
        if self.call.deferral.asked:
            return torch.zeros((), device=self.device)
        if is_dtensor(self.call.weight):
            target = target.view(self.rows.shape[:-1])
        else:
            inputs |= {n: x.reshape(-1, x.shape[-1]) for n, x in inputs.items() if n in ("hidden", "low")}
        found: Tensor = self.call.run(linear_cross_entropy, target=target, **inputs, **options)
        if torch.is_grad_enabled() == self.call.grad:
            self.call.lost = True
        return found

    def cross_entropy(
        self,
        target: Any,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """Returns what `torch.nn.functional.cross_entropy` of these logits would; None if that must be asked."""
        if self.made is not None or is_dtensor(self.call.weight) or self.rows.dim() != 2:
            return None
        if size_average is not None or reduce is not None or not isinstance(target, Tensor):
            return None
        if target.dtype != torch.int64 or target.shape != self.rows.shape[:-1] or target.device != self.rows.device:
            return None
        if weight is not None and (weight.requires_grad or weight.device != self.rows.device):
            return None
        loss = self.loss(
            target,
            class_weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        # Autocast computes this loss in float32.
        return loss if loss is None or autocast_dtype(self.rows) is not None else loss.to(self._dtype)

    # As a tensor --------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredLogits):
            if func is nn.functional.cross_entropy:
                loss = first.cross_entropy(*args[1:], **kwargs)
                if loss is not None:
                    return loss
            for function, name in _FUNCTIONS:
                if func is function:
                    return getattr(first, name)(*args[1:], **kwargs)
        return func(*computed(args), **computed(kwargs))

    @property
    def shape(self) -> torch.Size:
        if self.made is not None:
            return self.made.shape
        return torch.Size((*self.rows.shape[:-1], self.call.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def requires_grad(self) -> bool:
        if self.made is not None:
            return self.made.requires_grad
        given = (self.rows, *self.call.parameters(), self.bias)
        return self.call.grad and any(x.requires_grad for x in given if x is not None)

    # Which rows ---------------------------------------------------------------------------------------------------

    def _of_rows(self, name: str, *args: Any, rows: Callable[[Tensor], Tensor]) -> DeferredLogits | None:
        return None if is_dtensor(self.rows) else self._then(name, *args, rows=rows(self.rows))

    @recorded
    def view(self, *shape: Any) -> Any:
        return self._reshaped("view", *shape)

    @recorded
    def reshape(self, *shape: Any) -> Any:
        return self._reshaped("reshape", *shape)

    def _reshaped(self, name: str, *shape: Any) -> DeferredLogits | None:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if not sizes or not all(isinstance(n, (int, torch.SymInt)) for n in sizes):
            return None
        lead, last = sizes[:-1], sizes[-1]
        count = 1
        for n in lead:
            count = count * n
        if last == self.shape[-1]:
            if -1 not in lead and count != self.rows.shape[:-1].numel():
                return None
        elif last != -1 or count != self.rows.shape[:-1].numel():
            return None
        return self._of_rows(name, *shape, rows=lambda rows: rows.reshape(*lead, rows.shape[-1]))

    @recorded
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = self.ndim - 1
        start, end = (n + self.ndim if n < 0 else n for n in (start_dim, end_dim))
        if not 0 <= start <= end < last:
            return None
        return self._of_rows("flatten", start, end, rows=lambda rows: rows.flatten(start, end))

    @recorded
    def __getitem__(self, at: Any) -> Any:
        if not _keeps_last(at, self.ndim):
            return None
        return self._of_rows("__getitem__", at, rows=lambda rows: rows[at])

    @recorded
    def contiguous(self) -> Any:
        return self._then("contiguous")

    @recorded
    def float(self) -> Any:
        return self._cast(torch.float32)

    @recorded
    def to(self, *args: Any, dtype: Any = None, device: Any = None, non_blocking: bool = False) -> Any:
        for value in args:
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, (str, torch.device)):
                device = value
            else:
                return None
        if device is not None and torch.device(device) != self.device:
            return None
        return self._cast(self._dtype if dtype is None else dtype)

    def _cast(self, dtype: torch.dtype) -> DeferredLogits | None:
        # Operations compute in float32, or in float64 of float64.
        low = (torch.float32, torch.bfloat16, torch.float16)
        known = dtype == self._dtype or (dtype == torch.float32 and self._dtype in low)
        return self._then("to", dtype, dtype=dtype) if known else None

    # Their values -------------------------------------------------------------------------------------------------

    @recorded
    def mul(self, other: Any) -> Any:
        return self._scaled("mul", other, other)

    @recorded
    def div(self, other: Any) -> Any:
        return self._scaled("div", other, 1.0 / other) if is_number(other) and other else None

    __mul__ = __rmul__ = mul
    __truediv__ = div

    def _scaled(self, name: str, given: Any, factor: Any) -> DeferredLogits | None:
        if not is_number(factor):
            return None
        found = self._then(name, given)
        if self.capped:
            found.after = self.after * factor
        else:
            found.scale = self.scale * factor
        return found

    @recorded
    def tanh(self) -> Any:
        if self.capped:
            return None
        found = self._then("tanh")
        found.capped = True
        return found

    @recorded
    def add(self, other: Any) -> Any:
        """Adds a bias, which has a value for each class."""
        if not isinstance(other, Tensor) or self.capped or self.scale != 1.0 or is_dtensor(self.call.weight):
            return None
        classes = self.call.weight.shape[0]
        if other.numel() != classes or other.shape[-1] != classes or other.dim() > self.ndim:
            return None
        if other.dtype != self._dtype or other.dtype != self.call.weight.dtype or other.device != self.device:
            return None
        found = self._then("add", other)
        own = other.reshape(classes)
        found.bias = own if self.bias is None else self.bias + own
        return found

    __add__ = __radd__ = add


#: Functions of torch that are methods too.
_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (torch.tanh, "tanh"), (torch.mul, "mul"), (torch.div, "div"), (torch.add, "add"), (torch.reshape, "reshape"),
    (torch.flatten, "flatten"), (Tensor.__rmul__, "mul"), (Tensor.__radd__, "add"),
)  # fmt: skip


def _keeps_last(at: Any, ndim: int) -> bool:
    """Returns whether an index of a tensor leaves its last dimension as it is, and the last."""
    items = at if isinstance(at, tuple) else (at,)
    used, ellipsis = 0, False
    for item in items:
        if item is Ellipsis:
            if ellipsis:
                return False
            ellipsis = True
        elif isinstance(item, Tensor):
            used += item.dim() if item.dtype == torch.bool else 1
        elif isinstance(item, slice) or is_number(item):
            used += 1
        elif item is not None:
            return False
    whole = isinstance(items[-1], slice) and items[-1] == slice(None)
    reaches = used >= ndim or (ellipsis and items[-1] is not Ellipsis)
    return whole if reaches else True


def _check_not_in_function() -> None:
    """Raises an error for a forward of `torch.autograd.Function` that was given deferred logits: it takes them for no
    tensor, so that they would have no gradient."""
    forwards = {getattr(cls.forward, "__code__", None) for cls in _subclasses(torch.autograd.Function)}
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not Deferral.run.__code__:
        if frame.f_code in forwards:
            raise RuntimeError(
                "a torch.autograd.Function got logits that are not computed; patch(model, return_logits=True) computes "
                "them"
            )
        frame = frame.f_back


def _subclasses(cls: Any) -> Iterator[Any]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)
