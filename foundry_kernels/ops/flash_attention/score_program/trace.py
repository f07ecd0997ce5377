"""Runs a score function once on stand-ins that record what is done with them.

Nothing here reads a tensor's values, and all of it is Python that torch.compile traces as well: a compiled call gets
the program as constants and the captured tensors as inputs of its graph.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from foundry_kernels.core.checks import constants
from foundry_kernels.ops.flash_attention.score_program.program import INPUTS, KINDS, Builder, Program, Slot

ScoreFunction = Callable[..., Any]

#: The functions of torch that a score function may use, by name; `functions` fills it.
FUNCTIONS: dict[str, Callable[..., Any]] = {}

#: The operators that have a reflected form and one in place.
_REFLECTED = (
    "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip


def trace(fn: ScoreFunction, dtype: torch.dtype, device: torch.device) -> tuple[Program, tuple[Tensor, ...]]:
    """The program of ``fn(score, b, h, q_idx, kv_idx)`` and the captured tensors, one for each of its slots.

    dtype, device: what the stand-ins say of themselves; captured tensors must be on that device.

    Raises:
        TypeError: `fn` is not callable, has control flow that depends on its arguments, does something that is not in
            the language, or returns something else than one number.
        ValueError: a captured tensor is on another device.
        The message has the line of the function's source.
    """
    if not callable(fn):
        raise TypeError(f"score_mod must be a function of (score, b, h, q_idx, kv_idx); got {type(fn).__name__}")
    made = Recorder(dtype, device)
    inputs = [Scalar(made, made.builder.input(name)) for name in INPUTS]
    if is_dynamo_compiling():
        # In a checkpointed part the compiler lets nothing outside it be changed, and the first mode that is entered
        # counts as a change of the list of modes. This one is left again, so the list is as it was: allowed here alone.
        torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(_enter_and_leave, _Mode(made))
    with _Mode(made):
        result = fn(*inputs)
    if not isinstance(result, (Scalar, Row, Tensor, int, float)):
        made.fail(f"must return one number; it returned {type(result).__name__}", False)
    at = made.lift(result, "returned")
    if made.builder.kind(at) == "bool":
        made.fail("must return a score; it returned a bool (a mask belongs into attn_mask or torch.where)", False)
    program, used = made.builder.program(made.cast(at, "float")).with_used_slots()
    return program, tuple([made.tensors[i] for i in used])


class Recorder:
    """The program in the making."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.builder = Builder()
        self.tensors: list[Tensor] = []

    def fail(self, what: str, of_line: bool = True) -> NoReturn:
        """Raises TypeError for what the function does."""
        raise TypeError(f"score_mod {what}{_source_line() if of_line else ''}")

    def new(self, at: int) -> Scalar:
        return Scalar(self, at)

    def slot(self, x: Tensor) -> int:
        """The number of a captured tensor."""
        for i, known in enumerate(self.tensors):
            if known is x:
                return i
        if x.device != self.device:
            raise ValueError(
                f"score_mod uses a tensor on {x.device}; its tensors must be on q's device {self.device}"
                f"{_source_line()}"
            )
        if x.is_complex() or x.is_quantized:
            self.fail(f"uses a tensor of {x.dtype}; its tensors must be floating, integer or bool")
        self.tensors.append(x)
        self.builder.slots.append(Slot(kind_of(x.dtype), x.dim()))
        return len(self.tensors) - 1

    def lift(self, x: Any, role: str = "used") -> int:
        """The number of the instruction of an operand."""
        if isinstance(x, Scalar):
            return x.at
        if isinstance(x, Row):
            shape = tuple(x.tensor.shape[len(x.indices) :])
            self.fail(f"must work on single numbers; a tensor of shape {shape} was {role}", role != "returned")
        if isinstance(x, Tensor):
            if x.dim() > 0:
                self.fail(
                    f"must work on single numbers; a tensor of shape {tuple(x.shape)} was {role} (index it by b, h, "
                    "q_idx and kv_idx)",
                    role != "returned",
                )
            return self.builder.load(self.slot(x), ())
        if isinstance(x, bool):
            return self.builder.const(x, "bool")
        if is_dynamo_compiling() and isinstance(x, (int, float)):
            x = _constant(x)
        if isinstance(x, int):
            if not -(2**31) <= x < 2**31:
                self.fail(f"uses the integer {x}; integers have 32 bits")
            return self.builder.const(x, "int")
        if isinstance(x, float):
            return self.builder.const(x, "float")
        self.fail(f"uses {type(x).__name__} as a number")

    def cast(self, at: int, kind: str) -> int:
        """The value as `kind`; a constant stays one."""
        own, value = self.builder.kind(at), self.builder.value(at)
        if own == kind:
            return at
        if value is not None and (kind == "float" or own == "bool"):
            return self.builder.const(value, kind)
        if kind == "bool":
            return self.builder.emit("not", "bool", self.emit_eq(at, self.builder.const(0, own)))
        if kind == "float" and own == "bool":
            at = self.cast(at, "int")
        return self.builder.emit(kind, kind, at)

    def emit_eq(self, a: int, b: int) -> int:
        return self.builder.emit("eq", "bool", a, b)

    def promoted(self, *operands: int, least: str = "bool") -> tuple[str, list[int]]:
        """The operands in one kind, of at least `least`."""
        ranks = [KINDS.index(self.builder.kind(at)) for at in operands]
        kind = KINDS[max(KINDS.index(least), *ranks)]
        return kind, [self.cast(at, kind) for at in operands]

    def index(self, tensor: Tensor, indices: tuple[int, ...]) -> Scalar | Row:
        """A captured tensor with indices for its first dimensions."""
        if len(indices) < tensor.dim():
            return Row(self, tensor, indices)
        return self.new(self.builder.load(self.slot(tensor), indices))


def _constant(x: Any) -> Any:
    """The number that torch.compile has a symbol for."""
    if isinstance(x, float):
        return constants(x)[0]
    return torch.fx.experimental.symbolic_shapes.guard_scalar(x)


def kind_of(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


class Scalar:
    """Stands for the score, an index or what is computed of them; looks like a tensor without dimensions."""

    def __init__(self, recorder: Recorder, at: int) -> None:
        self.recorder, self.at = recorder, at

    shape = torch.Size([])
    ndim = 0
    requires_grad = False

    def dim(self) -> int:
        return 0

    def size(self, dim: int | None = None) -> torch.Size:
        return self.shape

    @property
    def device(self) -> torch.device:
        return self.recorder.device

    @property
    def dtype(self) -> torch.dtype:
        kind = self.recorder.builder.kind(self.at)
        return {"float": self.recorder.dtype, "int": torch.int32, "bool": torch.bool}[kind]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """The methods of a tensor, which do the same as the function of the name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return _Method(self, name)

    def __bool__(self) -> bool:
        self.recorder.fail("has control flow that depends on its arguments (use torch.where, & and |)")

    def __float__(self) -> float:
        self.recorder.fail("reads a value that is only known in the kernel (use the functions of torch)")

    __int__ = __index__ = __len__ = __iter__ = __float__
    __hash__ = object.__hash__


class Row:
    """A captured tensor that has been indexed in its first dimensions only, as in ``bias[b][h]``."""

    def __init__(self, recorder: Recorder, tensor: Tensor, indices: tuple[int, ...]) -> None:
        self.recorder, self.tensor, self.indices = recorder, tensor, indices

    def __getitem__(self, index: Any) -> Scalar | Row:
        return _indexed(self.recorder, self.tensor, self.indices, index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


class _Method:
    def __init__(self, scalar: Scalar, name: str) -> None:
        self.scalar, self.name = scalar, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.name == "where" and len(args) == 2:  # x.where(condition, other)
            return apply(self.scalar.recorder, "where", (args[0], self.scalar, args[1]), kwargs)
        return apply(self.scalar.recorder, self.name, (self.scalar, *args), kwargs)


class _Mode(TorchFunctionMode):
    """Sends each function of torch that gets a stand-in to `call`: an index alone would not."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and len(args) == 1 and isinstance(args[0], (int, float)):
            return apply(self.recorder, "tensor", args, kwargs or {})  # a number, on whatever device
        return call(func, args, kwargs or {})


def _enter_and_leave(mode: _Mode) -> None:
    with mode:
        pass


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recorder = _recorder_of(args)
    if recorder is None:
        recorder = _recorder_of(tuple(kwargs.values()))
    if recorder is None:
        return func(*args, **kwargs)
    return apply(recorder, _name_of(func), args, kwargs)


def _name_of(func: Any) -> str:
    name: str = func.__name__
    return name


# What torch.compiler.assume_constant_result sets, see `core.registry`.
_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _recorder_of(args: tuple[Any, ...]) -> Recorder | None:
    for x in args:
        if isinstance(x, (Scalar, Row)):
            return x.recorder
        if isinstance(x, (tuple, list)):
            found = _recorder_of(tuple(x))
            if found is not None:
                return found
    return None


def apply(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of torch of this name, or a method of a tensor, does."""
    plain = name.strip("_")
    if name.startswith("__r") and plain[1:] in _REFLECTED and len(args) == 2:
        plain, args = plain[1:], (args[1], args[0])
    own = name.startswith("__")
    if (own and name[2] == "i" and plain[1:] in _REFLECTED) or (name.endswith("_") and not own):
        recorder.fail(f"changes a value in place ({name})")
    if plain == "getitem":
        return _indexed(recorder, args[0], (), args[1])
    function = FUNCTIONS.get(plain)
    if function is None:
        recorder.fail(f"uses {plain}, which is not among the operations of a score function")
    try:
        return function(recorder, *args, **kwargs)
    except _Arguments as error:
        recorder.fail(f"uses {plain} with {error}")
    except TypeError as error:
        if "score_mod" in str(error):
            raise
        recorder.fail(f"uses {plain} with arguments that it does not support here: {error}")


class _Arguments(Exception):
    """An operation of the language with arguments that are not in it."""


def _indexed(recorder: Recorder, tensor: Any, before: tuple[int, ...], index: Any) -> Scalar | Row:
    if isinstance(tensor, Row):
        return tensor[index]
    if isinstance(tensor, Scalar):
        recorder.fail("indexes a number")
    given = index if isinstance(index, tuple) else (index,)
    indices = list(before)
    if len(given) > 0 and given[-1] is Ellipsis:
        given = given[:-1]
    for i, x in enumerate(given):
        if isinstance(x, slice):
            if all(isinstance(y, slice) and y == slice(None) for y in given[i:]):
                break  # of the dimensions that have no index yet
            recorder.fail("indexes a tensor by a slice before an index")
        if x is None or x is Ellipsis:
            recorder.fail("indexes a tensor by None or ...")
        at = recorder.lift(x, "an index")
        kind = recorder.builder.kind(at)
        if kind != "int":
            recorder.fail(f"indexes a tensor by a {kind}; an index is an integer")
        if len(indices) == tensor.dim():
            recorder.fail(f"has {len(given) + len(before)} indices for a tensor of shape {tuple(tensor.shape)}")
        value = recorder.builder.value(at)
        size = tensor.shape[len(indices)]
        if value is not None and not -size <= value < size:
            raise ValueError(
                f"score_mod: index {value} is out of range for dimension {len(indices)} of a tensor of shape "
                f"{tuple(tensor.shape)}{_source_line()}"
            )
        indices.append(at)
    return recorder.index(tensor, tuple(indices))


_FOREIGN = (os.path.dirname(__file__), os.path.dirname(torch.__file__))  # frames that are not the caller's


def _source_line() -> str:
    """Where in the function's source the current operation is, for an error's message."""
    if is_dynamo_compiling():
        return ""  # torch.compile shows the user's stack itself
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_FOREIGN):
            text = linecache.getline(path, frame.f_lineno).strip()
            return f", in {path}:{frame.f_lineno}" + (f": {text}" if text else "")
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _operator(name: str, reflected: bool = False) -> Callable[[Scalar, Any], Any]:
    def operate(self: Scalar, other: Any) -> Any:
        return apply(self.recorder, name, (other, self) if reflected else (self, other), {})

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(Scalar, f"__{_name}__", _operator(_name))
    setattr(Scalar, f"__r{_name}__", _operator(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Scalar, f"__{_name}__", _operator(_name))


def _unary(name: str) -> Callable[[Scalar], Any]:
    def operate(self: Scalar) -> Any:
        return apply(self.recorder, name, (self,), {})

    return operate


for _name, _function in {"neg": "neg", "pos": "positive", "abs": "abs", "invert": "bitwise_not"}.items():
    setattr(Scalar, f"__{_name}__", _unary(_function))
