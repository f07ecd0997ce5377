"""What the Triton kernels of several operations share. Without Triton it still imports, and says why Triton is missing.

Triton's own variable TRITON_INTERPRET=1, set before this package is imported, makes every kernel run on the CPU in
Triton's interpreter: slow, and how the kernels are tested without a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch

from foundry_kernels._launch import Plan, forget_plans, launch, planned
from foundry_kernels._layout import is_contiguous
from foundry_kernels.core.options import Options
from foundry_kernels.registry import Impl

try:
    import triton
    import triton.language as tl

    #: By which some launches are chosen: the compilers allot registers differently.
    VERSION: tuple[int, ...] = tuple(map(int, triton.__version__.split(".")[:2]))
    MISSING = f"Triton {triton.__version__} is older than 3.6; `pip install -U triton`" if VERSION < (3, 6) else None
    INTERPRET = MISSING is None and bool(triton.knobs.runtime.interpret)
except ImportError as error:
    MISSING = f"Triton does not import ({error}); `pip install triton`"
    INTERPRET = False
    VERSION = (0, 0)

#: float64 is for `gradcheck` in the interpreter; on a GPU the reference serves it.
DTYPES = (torch.float32, torch.bfloat16, torch.float16) + ((torch.float64,) if INTERPRET else ())


def impl(package: str, function: str) -> Impl:
    """The Triton backend of an operation: `function` of its `triton` module, or the reason why there is none."""
    if MISSING is not None:
        return Impl("triton", _absent, ("cuda",), DTYPES, missing=MISSING)
    module = importlib.import_module(package + ".triton")
    if INTERPRET:
        return Impl("triton", getattr(module, function), ("cpu",), DTYPES)
    hint = "; set TRITON_INTERPRET=1 before the import to interpret it on the CPU"
    return Impl("triton", getattr(module, function), ("cuda",), DTYPES, hint=hint)


def _absent(*_: Any) -> Any:
    raise AssertionError("a missing backend was called")  # resolve() never hands it out


if MISSING is None:
    _INTERPRET = tl.constexpr(INTERPRET)

    @triton.jit
    def round_to(x, dtype: tl.constexpr):
        """x rounded to dtype, to nearest even. The interpreter alone truncates float32 to bfloat16: there the bits are
        rounded first, so that what it shows is what a GPU computes."""
        if _INTERPRET and dtype == tl.bfloat16 and x.dtype == tl.float32:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = tl.where(x == x, rounded, 0x7FC00000).to(tl.uint32).to(tl.float32, bitcast=True)
        return x.to(dtype)

    @triton.jit
    def dot(a, b, acc=None):
        """acc + a @ b with exact products and wide sums.

        The interpreter multiplies the bits of bfloat16 as if they were integers, so there both sides are widened first.
        """
        if a.dtype == tl.float64:
            return tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.float64)
        elif _INTERPRET:
            return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
        else:
            return tl.dot(a, b, acc, input_precision="ieee")

    @triton.jit
    def row_offset(row, n1, n2, s0, s1, s2, RANK: tl.constexpr):
        """Element offset of row number `row` (int64), rows being numbered over dimensions (n0, n1, n2) of strides
        (s0, s1, s2); a lower RANK uses the last ones only."""
        if RANK == 1:
            return row * s2
        elif RANK == 2:
            return (row // n2) * s1 + (row % n2) * s2
        else:
            return (row // n2 // n1) * s0 + (row // n2 % n1) * s1 + (row % n2) * s2

    @triton.jit
    def tanh(x):
        """Accurate to float32 relative to the result. Where the quotient of exponentials would cancel, a polynomial
        takes over: the least-squares fit of tanh(x) / x over |x| < 0.62, within 5e-9."""
        size = tl.abs(x)
        far = 1.0 - 2.0 / (tl.exp2(size * 2.8853900817779268) + 1.0)  # 2 log2(e)
        far = tl.where(x < 0, -far, far)
        if x.dtype == tl.float64:
            return far
        else:
            x2 = x * x
            series = -0.33333282 + x2 * (0.13331443 + x2 * (-0.053740111 + x2 * (0.020641122 - x2 * 0.0057078402)))
            return tl.where(size < 0.6, x + x * (x2 * series), far)

    @triton.jit
    def reciprocal_rms(sum_of_squares, n_cols, eps):
        """1 / sqrt(mean square + eps) of rows of n_cols values."""
        mean = sum_of_squares / n_cols
        if mean.dtype == tl.float32:  # correctly rounded: one value a row costs nothing
            return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        return 1.0 / tl.sqrt(mean + eps)

    @triton.jit
    def normalized(b_x, rstd, x_dtype: tl.constexpr, ROUND_FIRST: tl.constexpr, COMPUTE: tl.constexpr):
        """x * rstd as a forward pass multiplies it by the weight."""
        b_n = b_x * rstd
        if ROUND_FIRST:
            b_n = round_to(b_n, x_dtype).to(COMPUTE)
        return b_n

    @triton.jit
    def dropout_factors(seed_ptr, row, start, threshold, scale, shape: tl.constexpr, BLOCK_COLS: tl.constexpr):
        """What dropout (see `_dropout`) multiplies a block of this shape by, whose columns are BLOCK_COLS (at least 4)
        from `start`, a multiple of 4, on. `row` (int64) is a number, or [R, 1] of them for a block [R, BLOCK_COLS].

        A counter's four words are joined in one thread, in the order of their columns."""
        group = start // 4 + tl.arange(0, BLOCK_COLS // 4)
        if len(shape) == 2:
            group = group[None, :]
        least, row = tl.cast(threshold, tl.uint32), tl.cast(row, tl.int64)
        w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), group, row.to(tl.uint32), (row >> 32).to(tl.uint32), 0)
        pairs = tl.join(tl.join(w0 >= least, w2 >= least), tl.join(w1 >= least, w3 >= least))
        return tl.where(tl.reshape(pairs, shape), scale, 0.0)

    @triton.jit
    def sum_partials_kernel(
        part_ptr, out_ptr, n_parts, n_cols,
        COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    ):  # fmt: skip
        """out[c] = sum over p of part[p, c], rounded."""
        cols = (tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
        b_sum = tl.zeros([BLOCK_ROWS, BLOCK_COLS], COMPUTE)
        for start in range(0, n_parts, BLOCK_ROWS):
            rows = start + tl.arange(0, BLOCK_ROWS)[:, None]
            mask = (rows < n_parts) & (cols < n_cols)
            b_sum += tl.load(part_ptr + rows.to(tl.int64) * n_cols + cols, mask=mask, other=0.0)
        tl.store(out_ptr + cols, round_to(tl.sum(b_sum, 0)[None, :], out_ptr.dtype.element_ty), mask=cols < n_cols)


def compute_dtype(dtype: torch.dtype) -> Any:
    """The dtype of a kernel's arithmetic."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def row_strides(
    shape: tuple[int, ...], *strides: tuple[int, ...] | None
) -> tuple[int, int, int, list[tuple[int, int, int]]] | None:
    """At most three strides that reach the rows (all dimensions but the last) of tensors of one shape, from theirs.

    Returns `(rank, n1, n2, strides)` for `row_offset`, `strides` holding one triple a tensor (zeros for None), or None
    where the tensors need more than three dimensions or have a last stride other than 1.
    """
    present = [s for s in strides if s is not None]
    width = shape[-1]
    if all(is_contiguous(shape, s) for s in present):
        return 1, 1, 1, [(0, 0, 0) if s is None else (0, 0, width) for s in strides]
    if any(s[-1] != 1 and width > 1 for s in present):
        return None
    dims: list[tuple[int, list[int]]] = []  # (size, strides of the tensors present), outermost first
    for axis in range(len(shape) - 1):
        size, along = shape[axis], [s[axis] for s in present]
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1], along, strict=True)):
            dims[-1] = (dims[-1][0] * size, along)
        else:
            dims.append((size, along))
    if len(dims) > 3:
        return None
    rank = max(1, len(dims))
    dims = [(1, [0] * len(present))] * (3 - len(dims)) + dims
    each = iter(zip(*(along for _, along in dims), strict=True))
    return rank, dims[1][0], dims[2][0], [(0, 0, 0) if s is None else next(each) for s in strides]


def strides_of(x: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else x.stride()


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """Contiguous memory of x's shape and dtype; the quickest way to it."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def programs(device: torch.device) -> int:
    """Number of programs of a persistent grid: two for each multiprocessor."""
    if _RECORDED_MULTIPROCESSORS is not None:
        return 2 * _RECORDED_MULTIPROCESSORS
    if device.type != "cuda":
        return 4  # the interpreter: few, but more than one, so that sums over programs are exercised
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


@planned
def _plan_sum(parts: int, width: int, dtype: torch.dtype) -> Plan:
    # A line of memory of each part, on many multiprocessors: 3 dependent steps for the programs of an H100.
    constants = {"COMPUTE": compute_dtype(dtype), "BLOCK_ROWS": 128, "BLOCK_COLS": 32, "num_warps": 8}
    return Plan((triton.cdiv(width, 32),), (parts, width), constants)


def sum_partials(partial: torch.Tensor, out: torch.Tensor) -> None:
    """out [N] = the sum over p of partial [p, N], rounded: the partial sums of a grid's programs."""
    launch(sum_partials_kernel, _plan_sum(*partial.shape, partial.dtype), partial, out)


def capability(device: torch.device) -> int:
    """Compute capability of `device`, 90 for 9.0, by which launches are chosen; 0 in the interpreter."""
    if _RECORDED is not None:
        return _RECORDED
    return 0 if device.type != "cuda" else _capability(device)


@lru_cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def most_warps(capability: int) -> int:
    """Of a program: 1024 threads, which AMD's GPUs (942 and 950, see `_aot_amd`) have in warps of 64."""
    return 16 if capability >= 900 else 32


_RECORDED: int | None = None
_RECORDED_MULTIPROCESSORS: int | None = None


def record_for(arch: int | None, multiprocessors: int | None = None) -> None:
    """From now on choose launches as on a device of this compute capability (see `_aot`), with as many multiprocessors
    if that is given; None: as on the one at hand."""
    global _RECORDED, _RECORDED_MULTIPROCESSORS
    _RECORDED, _RECORDED_MULTIPROCESSORS = arch, multiprocessors
    forget_plans()


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a call of these tensors has to be recorded for a backward pass."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def refuse_second_derivative(op: str) -> None:
    """Raise if the backward pass of an operation without a second derivative is itself to be differentiated."""
    # torch.compile traces the backward pass with gradients enabled, so that create_graph cannot be seen there.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{op} has no second derivative: backward was called with create_graph=True")


def on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher, called while the device of its tensors is the current one: Triton launches on the current device,
    whatever its arguments are, and an operator defined in Python has no guard of its own."""

    @wraps(kernel)
    def launcher(*args: Any) -> Any:
        first = args[0]  # of most operators; where it may be None, another tensor
        device = first.device if first is not None else next(x.device for x in args if isinstance(x, torch.Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return kernel(*args)
        with torch.cuda.device(device):
            return kernel(*args)

    return launcher


_LIBRARY = torch.library.Library("foundry_kernels", "FRAGMENT")
LAUNCHERS: dict[str, Callable[..., Any]] = {}  # by the operator's name
_SERVE_CPU: set[str] = set()


def define(
    schema: str, launcher: Callable[..., Any], fake: Callable[..., Any], *options: type[Options]
) -> Callable[..., Any]:
    """Register `foundry_kernels::<schema>` with a launcher and a fake; returns what is to be called.

    Kernels are launched by operators so that torch.compile does not trace into the launch, and so that selective
    checkpointing, DTensor and profilers know them by name. Where the dispatcher would do nothing but call the launcher
    (no mode is active; tensors are just memory: no subclass, no lazy negation, no wrapper), it is called directly: that
    costs the host less. `launcher` and `fake` return None in place of a result that is not wanted; the operator, whose
    results are all tensors, an empty one.

    The operator takes the fields of `options`, classes whose `SCHEMA` is in the schema, one by one; the launcher, the
    fake and what is returned take an object of each.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.foundry_kernels, name).default
    types = {a.name: str(a.type) for a in operator._schema.arguments}
    inner = {field for kind in options for field in kind._fields[1:]}
    by_first_field = {kind._fields[0]: kind for kind in options}
    taken = [argument for argument in types if argument not in inner]
    layout = [by_first_field.get(argument) for argument in taken]
    direct = on_its_device(launcher)
    LAUNCHERS[name] = _filled(_with_objects(direct, layout))
    _LIBRARY.impl(name, LAUNCHERS[name], "CPU" if INTERPRET else "CUDA")
    if INTERPRET:
        _SERVE_CPU.add(name)
    torch.library.register_fake(f"foundry_kernels::{name}", _filled(_with_objects(fake, layout)), lib=_LIBRARY)
    tensors: list[tuple[int, int | None]] = []  # which argument, and which field of one that is an object
    for i, kind in enumerate(layout):
        if kind is not None:
            tensors += [(i, at) for at in kind._tensors_at]
        elif "Tensor" in types[taken[i]]:
            tensors.append((i, None))

    def flat(args: tuple[Any, ...]) -> list[Any]:
        return [x for i, arg in enumerate(args) for x in (arg.operator_args() if layout[i] else (arg,))]

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _watched():
            return operator(*flat(args))
        for i, at in tensors:
            x = args[i] if at is None else args[i][at]
            if x is not None and (type(x) not in _PLAIN_TYPES or _keys(x).raw_repr() & _FOREIGN):
                return operator(*flat(args))
        return direct(*args)

    return call


def _with_objects(function: Callable[..., Any], layout: list[type[Options] | None]) -> Callable[..., Any]:
    """The function of an operator's arguments, of which the fields of each class in `layout` become an object."""
    if not any(layout):
        return function

    @wraps(function)
    def of_arguments(*args: Any) -> Any:
        given: list[Any] = []
        for kind in layout:
            if kind is not None:
                made, args = kind.from_operator_args(args)
                given.append(made)
            elif args:  # the dispatcher leaves out what is at its default at the end
                given.append(args[0])
                args = args[1:]
        return function(*given)

    return of_arguments


def _filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with empty tensors in place of results that are None."""

    @wraps(function)
    def filled(*args: Any) -> Any:
        results = function(*args)
        if not isinstance(results, tuple):
            return results
        like = next(x for x in args if isinstance(x, torch.Tensor))
        return tuple(like.new_empty(0) if r is None else r for r in results)

    return filled


def _plain_keys() -> int:
    """The bits of the dispatch keys of tensors that are just memory on a device."""
    key, bits = torch._C.DispatchKey, 0
    for each in ("CPU", "CUDA"):
        for kind in ("", "Autograd", "Autocast"):
            bits |= torch._C.DispatchKeySet(getattr(key, kind + each)).raw_repr()
    return bits | torch._C.DispatchKeySet(key.ADInplaceOrView).raw_repr()


_FOREIGN = ~_plain_keys()
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


_keys = torch._C._dispatch_keys


def _watched() -> bool:
    """Whether a mode, a profiler, a tracer or a transform is active, for which the dispatcher is needed."""
    c = torch._C
    return bool(
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or c._autograd._profiler_enabled()
        or c._is_tracing()
        or c._functorch.peek_interpreter_stack() is not None
    )


def serve_cpu_tensors() -> None:
    """Register the launchers for CPU tensors too, so that what they would launch can be recorded (see `_aot`)."""
    for name, launcher in LAUNCHERS.items():
        if name not in _SERVE_CPU:
            _SERVE_CPU.add(name)
            _LIBRARY.impl(name, launcher, "CPU")
