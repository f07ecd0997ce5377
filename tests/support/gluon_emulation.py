"""Runs Gluon kernels for Hopper on the CPU: their own Python functions, with this module's replacements for Gluon's
primitives. The primitives act on the objects of `gluon_world`."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from gluon_world import Barrier, Copy, Fault, Memory, Product, View, World

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# --- values -----------------------------------------------------------------------------------------------------------


class Int(int):
    """An integer of 32 or 64 bits. `//` and `%` truncate on a GPU but floor here, so negative operands are refused."""

    bits: int

    def __new__(cls, value: int, bits: int = 32) -> Int:
        if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
            raise Fault(f"{int(value)} does not fit {bits} bits")
        made = super().__new__(cls, value)
        made.bits = bits
        return made

    def to(self, dtype: Any) -> Int:
        return Int(self, dtype.primitive_bitwidth)


def _arithmetic(name: str) -> Callable[[Int, Any], Any]:
    own = getattr(int, name)

    def operate(self: Int, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        if ("div" in name or "mod" in name) and (int(self) < 0 or int(other) < 0):
            raise Fault(f"{int(self)} and {int(other)}: quotients of negatives differ from Python's")
        return Int(own(self, other), max(self.bits, getattr(other, "bits", 32)))

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod", "xor"):
    setattr(Int, f"__r{_name}__", _arithmetic(f"__r{_name}__"))
for _name in ("add", "sub", "mul", "floordiv", "mod", "xor", "and"):
    setattr(Int, f"__{_name}__", _arithmetic(f"__{_name}__"))


class Value:
    """A block of registers. Its numbers are rounded to `dtype` and stored as float32."""

    def __init__(self, data: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self.data, self.dtype = data, dtype or data.dtype
        self.shape, self.type = tuple(data.shape), SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Value:
        rounded = DTYPES[dtype.name]
        return Value(self.data.to(rounded).float(), rounded)


def _data(x: Any) -> Any:
    if isinstance(x, Product):
        raise Fault("the result of a product is used before the wait for it")
    return x.data if isinstance(x, Value) else x


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda *args: Value(function(*map(_data, args)))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "lt", "eq", "ge"):
    setattr(Value, f"__{_name}__", _elementwise(getattr(torch.Tensor, f"__{_name}__")))


class Pointer:
    """Points to elements of a tensor in global memory. `written` counts the stores to each element."""

    def __init__(self, tensor: torch.Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.at + _data(offset))


# --- what stands in for Gluon's modules -------------------------------------------------------------------------------


def _wait(barrier: Barrier, phase: int) -> None:
    if phase not in (0, 1):
        raise Fault(f"a phase of {phase}")
    agent = World.now.step("wait", lambda: barrier.phase & 1 != phase, f"phase {phase} of {barrier}")
    agent.known |= barrier.told


def _arrive(barrier: Barrier, count: int = 1) -> None:
    agent = World.now.step("arrive")
    barrier.arrive(count, agent.known, agent.name)


def _expect(barrier: Barrier, size: int) -> None:
    agent = World.now.step("expect")
    barrier.bytes += size
    barrier.arrive(1, agent.known, agent.name)


def _init(barrier: Barrier, count: int) -> None:
    World.now.step("init")
    barrier.count = barrier.pending = count
    barrier.fenced = False


def _box(descriptor: Any, at: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Element numbers of a block [rows, width] in the tensor's memory, and which of them are inside of its shape."""
    index, inside = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool)
    for dim, (start, size) in enumerate(zip(at, descriptor.block_shape, strict=True)):
        along = int(start) + torch.arange(size)
        if dim < 2 and not 0 <= int(start) < descriptor.shape[dim]:
            raise Fault(f"coordinate {int(start)} of {descriptor.shape[dim]} in dimension {dim}")
        index = index.unsqueeze(-1) + along * descriptor.strides[dim]
        inside = inside.unsqueeze(-1) & (along >= 0) & (along < descriptor.shape[dim])
    width = descriptor.block_shape[-1]
    return index.reshape(-1, width), inside.reshape(-1, width)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """All elements from a tensor's first one to the end of its memory."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((size,), (1,))


def _load(descriptor: Any, at: list[int], barrier: Barrier, result: View) -> None:
    world = World.now
    agent = world.step("copy")
    if tuple(descriptor.block_shape) != result.slot.shape:
        raise Fault(f"a block of {descriptor.block_shape} is copied to {result.slot.shape}")
    if not barrier.fenced:
        raise Fault(f"a copy is to arrive at {barrier.name}, which has had no fence since it was initialized")
    index, inside = _box(descriptor, at)
    values = torch.zeros(index.shape)
    values[inside] = _elements(descriptor.base)[index[inside]].float()
    size = index.numel() * descriptor.base.element_size()
    pieces = world.random.choice((1, 2, 4))
    rows, events = len(index) // pieces, [world.event() for _ in range(pieces)]
    result.slot.write(agent.known, sum(events), f"a copy of {agent.name}")
    for piece, event in enumerate(events):
        part = slice(piece * rows, (piece + 1) * rows)
        world.copies.append(Copy(result.slot, part, values, barrier, agent.known | event, size // pieces))


def _save(descriptor: Any, at: list[int], source: View) -> None:
    world = World.now
    agent = world.step("save")
    agent.stores.append(source.slot.read(world, agent.known, f"a copy of {agent.name}"))
    index, inside = _box(descriptor, at)
    descriptor.written.view(-1)[index[inside]] += 1
    _elements(descriptor.base)[index[inside]] = source.values().reshape(index.shape)[inside].to(descriptor.base.dtype)


def _store_wait(pending: int) -> None:
    agent = World.now.step("store_wait")
    while len(agent.stores) > pending:
        agent.known |= agent.stores.pop(0)


def _fence() -> None:
    agent = World.now.step("fence")
    for slot in World.now.slots():
        slot.unfenced.discard(agent.name)
    for barrier in World.now.barriers:
        barrier.fenced = True


def _multiply(a: Any, b: View, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    world = World.now
    agent = world.step("multiply")
    if isinstance(a, Value) and a.dtype not in (torch.bfloat16, torch.float16):
        raise Fault(f"a product of {a.dtype}")
    event = 0
    for side in (a, b):
        if isinstance(side, View):
            event |= side.slot.read(world, agent.known, f"a product of {agent.name}")

    def run() -> torch.Tensor:
        left = a.values() if isinstance(a, View) else _data(a)
        begun = acc.result if isinstance(acc, Product) else _data(acc)
        return left @ b.values() + begun if use_acc else left @ b.values()

    made = Product(run, event)
    agent.products.append(made)
    return made if is_async else _products_wait(0, deps=[made])


def _products_wait(pending: int, deps: list[Any]) -> Any:
    agent = World.now.step("products_wait")
    while len(agent.products) > pending:  # in order; operands are read only now
        done = agent.products.pop(0)
        done.result = done.run()
        agent.known |= done.event
    for dep in deps:
        if isinstance(dep, Product) and dep.result is None:
            raise Fault("a wait returns the result of a product that is still under way")
    found = tuple(Value(dep.result) if isinstance(dep, Product) else dep for dep in deps)
    return found[0] if len(found) == 1 else found


def _save_values(pointer: Pointer, value: Value, mask: Value) -> None:
    World.now.step("store to memory")
    at = pointer.at[_data(mask)]
    elements = pointer.tensor.view(-1)
    if len(at) and not (int(at.min()) >= 0 and int(at.max()) < elements.numel()):
        raise Fault(f"a store to elements {int(at.min())} .. {int(at.max())} of {elements.numel()}")
    elements[at] = _data(value)[_data(mask)].to(elements.dtype)
    pointer.tensor.written.view(-1)[at] += 1


def _least(function: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    def least(x: Any, y: Any) -> Any:
        if not isinstance(x, (Value, Product)) and not isinstance(y, (Value, Product)):
            return of_numbers(x, y)
        return Value(function(*(torch.as_tensor(_data(z)) for z in (x, y))))

    return least


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Memory:
    return Memory(dtype, shape, World.now)


def _no_layout(*_: Any, **__: Any) -> None:
    return None


def language(real: Any) -> SimpleNamespace:
    """The replacement for `gl`, with the dtypes of `real`."""
    return SimpleNamespace(
        **{name: getattr(real, name) for name in ("float32", "bfloat16", "float16", "int32", "int64", "constexpr")},
        **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"), _no_layout),
        program_id=lambda axis: Int(World.now.position),
        num_programs=lambda axis: Int(World.now.count),
        allocate_shared_memory=_allocate,
        warp_specialize=lambda *args: World.now.specialize(*args),
        static_range=range,
        arange=lambda begin, end, layout=None: Value(torch.arange(begin, end)),
        full=lambda shape, value, dtype, layout=None: Value(torch.full(tuple(shape), value, dtype=DTYPES[dtype.name])),
        expand_dims=lambda x, axis: Value(_data(x).unsqueeze(axis)),
        convert_layout=lambda x, layout: x,
        where=lambda m, x, y: Value(torch.where(_data(m), _data(x), _data(y))),
        max=lambda x, axis: Value(_data(x).amax(axis)),
        sum=lambda x, axis: Value(_data(x).sum(axis)),
        exp2=lambda x: Value(_data(x).exp2()),
        log2=lambda x: Value(_data(x).log2()),
        maximum=_least(torch.maximum, max),
        minimum=_least(torch.minimum, min),
        cdiv=lambda x, y: (x + y - 1) // y,
        store=lambda pointer, value, mask: _save_values(pointer, value, mask),
    )


def stand_ins(real: Any) -> dict[str, Any]:
    """Returns the replacements, by the names under which kernels import them."""
    return {
        "gl": language(real),
        "tl": language(real),
        "mbarrier": SimpleNamespace(wait=_wait, arrive=_arrive, expect=_expect, init=_init, MBarrierLayout=_no_layout),
        "tma": SimpleNamespace(store_wait=_store_wait),
        "copy_in": _load,
        "copy_out": _save,
        "hopper": SimpleNamespace(
            warpgroup_mma=_multiply, warpgroup_mma_wait=_products_wait, fence_async_shared=_fence
        ),
    }


def emulated(kernel: Any, stands: dict[str, Any]) -> Any:
    """A kernel's Python function, with the functions that it calls and the replacements as globals."""
    source: FunctionType = kernel.fn if hasattr(kernel, "fn") else kernel
    scope: dict[str, Any] = {"__builtins__": __builtins__}
    for name in source.__code__.co_names:
        if name in stands:
            scope[name] = stands[name]
        elif name in source.__globals__:
            found = source.__globals__[name]
            scope[name] = emulated(found, stands) if hasattr(found, "fn") else getattr(found, "value", found)
    return FunctionType(source.__code__, scope, source.__name__, source.__defaults__)


def launch(function: Any, grid: int, args: dict[str, Any], seed: int, programs: list[int] | None = None) -> list[World]:
    """Runs the programs of a grid, one after the other, each in its own interleaving."""
    made = []
    for position in programs if programs is not None else range(grid):
        World.now = World(seed * 1000 + position, position, grid)
        function(**{name: Int(x) if type(x) is int else x for name, x in args.items()})
        made.append(World.now)
    return made
