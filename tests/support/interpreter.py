"""Makes Triton's interpreter quicker, without a change of what it computes.

While a kernel runs, the interpreter replaces the functions of `triton.language`. It looks for them among all members at
each launch, and again at each call of a device function, where they are replaced already. It creates types, shapes and
tables of dtypes for each value, of which there are few. And it computes for each sum whether it overflows, in ten more
steps whose result it does not use.
"""

from __future__ import annotations

import os
from typing import Any


def hasten() -> None:
    """Replaces the interpreter's private functions, if it is in use and they are those of Triton 3.6 to 3.9."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton.language import core, semantic
        from triton.runtime import interpreter
    except ImportError:
        return
    if all(hasattr(interpreter, name) for name in ("_LangPatchScope", "_patch_builtin", "_patch_lang")):
        _keep_replacements(interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _kept_on_the_type("_foundry_np", interpreter._get_np_dtype)
    _intern_blocks(core)
    _keep_shapes(core)
    _leave_out(core, semantic.TritonSemantic)


def _keep_replacements(interpreter: Any) -> None:
    tl, replace = interpreter.tl, interpreter._patch_lang
    #: The modules that are replaced while the running kernel runs.
    replaced: set[int] = set()
    builtins: dict[int, list[str]] = {}
    modules_of: dict[int, tuple[Any, set[int]]] = {}

    class Scope(interpreter._LangPatchScope):  # type: ignore[name-defined, misc]
        def restore(self) -> None:
            replaced.clear()
            super().restore()

    def patch_lang(fn: Any) -> Any:
        if id(fn) not in modules_of:  # with the function, so that no other one gets its id
            modules_of[id(fn)] = fn, {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        modules = modules_of[id(fn)][1]
        if modules and modules <= replaced:
            return Scope()
        scope = Scope()
        scope._changes = replace(fn)._changes
        replaced.update(modules)
        return scope

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in builtins:
            members = interpreter.inspect.getmembers(package)
            builtins[id(package)] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in builtins[id(package)]:
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_lang, interpreter._patch_builtin = patch_lang, patch_builtin


def _kept_on_the_type(name: str, function: Any) -> Any:
    """`function` of a type, which keeps its result."""

    def kept(of: Any) -> Any:
        found = of.__dict__.get(name)
        if found is None:
            found = of.__dict__[name] = function(of)
        return found

    return kept


def _intern_blocks(core: Any) -> None:
    """One object for each type of blocks."""
    block_type, constexpr = core.block_type, core.constexpr
    create = block_type.__init__
    known: dict[Any, Any] = {}

    def key_of(element: Any, shape: Any) -> Any:
        sizes = tuple([n.value if isinstance(n, constexpr) else n for n in shape])
        return element.name, getattr(element, "address_space", None), sizes

    def new(cls: Any, element_ty: Any = None, shape: Any = (), *rest: Any, **options: Any) -> Any:
        found = known.get(key_of(element_ty, shape)) if cls is block_type and element_ty is not None else None
        return object.__new__(cls) if found is None else found

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if type(self) is not block_type:
            create(self, element_ty, shape)
        elif "numel" not in self.__dict__:
            create(self, element_ty, shape)
            known[key_of(element_ty, shape)] = self

    convert = block_type.with_element_ty

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        kept = self.__dict__.setdefault("_foundry_converted", {})
        if id(scalar_ty) not in kept:  # with the type, so that no other one gets its id
            kept[id(scalar_ty)] = scalar_ty, convert(self, scalar_ty)
        return kept[id(scalar_ty)][1]

    block_type.__new__, block_type.__init__, block_type.with_element_ty = new, init, with_element_ty


def _keep_shapes(core: Any) -> None:
    """The shape and the like of a tensor, which its type determines, are created once a type."""
    create = core.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        if (kept := type.__dict__.get("_foundry_tensor")) is None:
            create(self, handle, type)
            type.__dict__["_foundry_tensor"] = {k: v for k, v in self.__dict__.items() if k != "handle"}
        else:
            self.__dict__.update(kept)
            self.handle = handle

    core.tensor.__init__ = init


def _leave_out(core: Any, semantic: Any) -> None:
    """Steps without a result: of a check that nothing reads, and of tensors that have the wanted types already."""
    check, cast, broadcast = (
        semantic.binary_op_sanitize_overflow_impl,
        semantic.cast,
        semantic.broadcast_impl_value,
    )
    of_operands = semantic.binary_op_type_checking_impl
    #: Operations of two tensors with one of these types have this type.
    plain = {id(t) for t in (core.int1, core.int32, core.int64, core.float32, core.float64)}

    def check_overflow(self: Any, lhs: Any, rhs: Any, operator: Any) -> None:
        if self.builder.options.debug:  # without it, nothing is asserted
            check(self, lhs, rhs, operator)

    def cast_unless_equal(self: Any, value: Any, to: Any, *rounding: Any, **options: Any) -> Any:
        return value if value.dtype is to else cast(self, value, to, *rounding, **options)

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.type is rhs.type else broadcast(self, lhs, rhs)

    def of_unequal_operands(self: Any, lhs: Any, rhs: Any, *rest: Any, **options: Any) -> Any:
        kind = getattr(lhs, "type", None)
        if kind is not None and kind is getattr(rhs, "type", None) and id(lhs.dtype) in plain:
            return lhs, rhs
        return of_operands(self, lhs, rhs, *rest, **options)

    semantic.binary_op_sanitize_overflow_impl = check_overflow
    semantic.cast, semantic.broadcast_impl_value = cast_unless_equal, broadcast_unless_equal
    semantic.binary_op_type_checking_impl = of_unequal_operands
