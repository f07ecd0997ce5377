"""The options of an operation as one object. Operators list its fields one by one; autograd stores the object.

    class WindowOptions(Options, not_in_schema=("return_lse",)):
        scale: float
        window: int | None
        slopes: Tensor | None = None
        return_lse: bool = False

is a `NamedTuple` whose `SCHEMA` is ``float scale, SymInt? window, Tensor? slopes=None``. An operator with this text in
its schema is called with ``*options.operator_args()``, and its kernel gets the object back by ``options, flags =
WindowOptions.from_operator_args(args)``; `operators.define` does both.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, dataclass_transform, get_type_hints

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import constants
from foundry_kernels.core.registry import BackendUnavailable

#: The type in an operator's schema by a field's annotation.
SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    str: "str",
    tuple[int, ...] | None: "int[]?",
    tuple[Tensor, ...] | None: "Tensor[]?",
}


@dataclass_transform(frozen_default=True)
class _OptionsMeta(type):
    """Makes a class of options a NamedTuple: it is as quick to create as one, and torch.compile traces it as one."""

    def __new__(
        cls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        not_in_schema: Collection[str] = (),
        schema_types: dict[str, str] | None = None,
    ) -> Any:
        if bases == (tuple,):  # Options itself
            return super().__new__(cls, name, bases, namespace)
        made: Any = types.new_class(name, (NamedTuple,), {}, lambda body: body.update(namespace))
        in_schema = [field for field in made._fields if field not in not_in_schema]
        if made._fields[: len(in_schema)] != tuple(in_schema):
            raise TypeError(f"{name}: fields that are not in the schema must come last")
        known = {field: SCHEMA_TYPES.get(kind, "") for field, kind in get_type_hints(made).items()}
        kinds = {field: (known | (schema_types or {}))[field] for field in in_schema}
        if not all(kinds.values()):
            raise TypeError(f"{name}: its fields must have the types of SCHEMA_TYPES; got {made.__annotations__}")
        made.SCHEMA = ", ".join(f"{kind} {field}{_default(made, field)}" for field, kind in kinds.items())
        made._n_in_schema = len(in_schema)
        made._tensors_at = tuple(i for i, kind in enumerate(kinds.values()) if kind in ("Tensor", "Tensor?"))
        made._lists_at = tuple(i for i, kind in enumerate(kinds.values()) if kind == "Tensor[]?")
        if len(made._lists_at) > 1:
            raise TypeError(f"{name}: at most one field may be a list of tensors")
        for method, function in vars(Options).items():
            if not method.startswith("__") and method not in namespace:
                setattr(made, method, function)
        return made


def _default(made: Any, field: str) -> str:
    return f"={made._field_defaults[field]!r}" if field in made._field_defaults else ""


class Options(tuple[Any, ...], metaclass=_OptionsMeta):
    """The base of every class of options; like that of a NamedTuple, it is no base class of what is made.

    not_in_schema: the last fields, with defaults, which operators do not take because each operator has its own
    results. schema_types: schema types of fields for which they do not follow from the annotation.
    """

    SCHEMA: ClassVar[str]  #: The fields as an operator's schema lists them.
    _n_in_schema: ClassVar[int]
    _tensors_at: ClassVar[tuple[int, ...]]
    _lists_at: ClassVar[tuple[int, ...]]  # of a field that is a tuple of tensors; at most one

    if TYPE_CHECKING:  # of NamedTuple
        _fields: ClassVar[tuple[str, ...]]

        @classmethod
        def _make(cls, values: Iterable[Any]) -> Self: ...
        def _replace(self, **changes: Any) -> Self: ...

    def operator_args(self) -> tuple[Any, ...]:
        """The values for `SCHEMA`, in its order."""
        values = self[: self._n_in_schema]
        return constants(*values) if is_dynamo_compiling() else values

    @classmethod
    def from_operator_args(cls, args: Sequence[Any]) -> tuple[Self, tuple[Any, ...]]:
        """The options that an operator's arguments begin with, and the arguments that follow."""
        own = [tuple(x) if isinstance(x, list) else x for x in args[: cls._n_in_schema]]
        return cls(*own), tuple(args[cls._n_in_schema :])

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that autograd has to save with `save_for_backward`."""
        return (*[self[i] for i in self._tensors_at], *[x for i in self._lists_at for x in self[i] or ()])

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Self:
        """The options with these in place of their tensors, in the order of `tensors`."""
        values = list(self)
        single = len(self._tensors_at)
        for at, tensor in zip(self._tensors_at, tensors[:single], strict=True):
            values[at] = tensor
        for at in self._lists_at:
            values[at] = tuple(tensors[single:]) or None
        return self._make(values)

    def without_tensors(self) -> Self:
        """The options with None in place of their tensors, for autograd to keep beside the saved tensors."""
        if not self.has_tensors():
            return self
        return self.with_tensors([None] * len(self._tensors_at))

    def has_tensors(self) -> bool:
        """Whether any of its tensors is given; most calls of an operation give none."""
        for at in self._tensors_at:
            if self[at] is not None:
                return True
        for at in self._lists_at:  # noqa: SIM110  (a generator takes twice as long)
            if self[at]:
                return True
        return False

    def refuse_others(self, supported: tuple[str, ...], op: str, backend: str) -> None:
        """Refuses a call that sets an option which the backend does not support.

        Raises:
            BackendUnavailable: the message names the option.
        """
        if self._fields == supported:
            return
        for name, value in zip(self._fields, self, strict=True):
            if name not in supported and value is not None and value is not False:
                raise BackendUnavailable(f"{op}: backend {backend!r} does not support {name}; got {value!r}")
