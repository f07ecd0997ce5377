"""Compiles the Triton kernels for GPUs that are not present, and reports their cost.

To record the launches of an operation, this calls it on its benchmark shapes and parity cases with a replacement for
Triton's launch. The launchers' choices (kernel, tile, warps, specialisation) are then compiled, so a new operation is
covered as soon as it is registered. After a recording, the whole process accepts CPU tensors, so only commands record.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundry_kernels import _triton
from foundry_kernels._triton import devices, operators, tuning
from foundry_kernels._triton.devices import Device, device_of
from foundry_kernels.core.registry import OPS, BackendUnavailable, OpSpec, override, short_dtype
from foundry_kernels.testing import Arg, Case
from foundry_kernels.tools.inspect.sass import Loop, inner_loops, loaded_ahead

#: The targets: one capability for each class of tiles.
GPUS = {arch: device_of(arch) for arch in (80, 89, 90, 100, 120)}
DTYPES = (torch.bfloat16, torch.float32)
#: float32 is multiplied exactly, without matrix instructions.
DOT_IN_16_BITS = r"tt\.dot .*: tensor<\w+x(bf16|f16)>"
_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
}


#: An argument, or an element of one that is a tuple.
Name = str | tuple[str, int]


@dataclass(frozen=True)
class Launch:
    """A kernel and its specialisation."""

    kernel: Any
    signature: tuple[tuple[str, Any], ...]  # a tuple of types for a tuple of values
    constants: tuple[tuple[Name, Any], ...]
    divisible: tuple[Name, ...]
    options: tuple[tuple[str, int], ...]
    case: str = field(compare=False)
    small: tuple[str, ...] = field(compare=False, default=())  # pointers to tensors below 2 GB

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def gluon(self) -> bool:
        return type(self.kernel).__name__ == "GluonJITFunction"

    @property
    def settings(self) -> str:
        """The constants that are numbers and flags; they distinguish configs."""
        given = (*self.constants, *self.options)
        shown = [f"{k}={v}" for k, v in given if isinstance(v, int) and isinstance(k, str) and k.isupper()]
        return " ".join([*shown, *(f"{k}={v}" for k, v in self.options)])


@dataclass(frozen=True)
class Cost:
    """The resources of a compiled launch. `stack` > 0 means that registers are spilled to memory."""

    registers: int
    stack: int
    shared: int
    warps: int
    access_bytes: tuple[int, ...]  # widths of the global loads and stores, widest first
    matrix: str  # the instruction of dots, "missing", or "" without dots
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    loaded_ahead: int = 0  # bytes that a thread loads before it uses any; 0 with matmuls

    def resident(self, gpu: Device) -> int:
        """Programs that fit on a multiprocessor at once."""
        registers_a_warp = -(-self.registers * 32 // 256) * 256
        by_registers = 65536 // (registers_a_warp * self.warps)
        by_shared = gpu.sm_shared // (self.shared + 1024) if self.shared else 32
        return min(by_registers, by_shared, 32, gpu.warps // self.warps)

    def occupancy(self, gpu: Device) -> float:
        """Estimated fraction of a multiprocessor's warps that can be resident at once."""
        return self.resident(gpu) * self.warps / gpu.warps

    def copied_ahead(self, gpu: Device) -> int:
        """Bytes that asynchronous copies can have in flight to a multiprocessor's shared memory. For a pipelined loop
        this is nearly all the shared memory of its programs. 0 without such copies."""
        return self.shared * self.resident(gpu) if "cp.async" in self.ptx else 0

    def in_flight(self, gpu: Device) -> int:
        """Bytes that a fully occupied multiprocessor loads from memory before it waits: the larger of copies to shared
        memory and loads to registers."""
        return max(self.copied_ahead(gpu), self.loaded_ahead * 32 * self.warps * self.resident(gpu))

    def describe(self, gpu: Device) -> str:
        ahead, in_flight = self.copied_ahead(gpu), 0 if self.matrix else self.in_flight(gpu)
        return (
            f"{self.registers:>3} registers  {self.stack} spilled  {self.shared:>6} B shared  {self.warps:>2} warps  "
            f"{self.occupancy(gpu):>4.0%} occupancy  {'/'.join(map(str, self.access_bytes))} B an access"
            f"{'  ' + self.matrix if self.matrix else ''}{f'  {ahead >> 10} KB copied ahead' if ahead else ''}"
            f"{f'  {in_flight >> 10} KB in flight' if in_flight else ''}"
        )

    def loops(self) -> list[Loop]:
        """The innermost loops with a 16-bit dot."""
        return inner_loops(run_on_cubin([tool("nvdisasm"), "-c"], self.cubin)) if self.matrix else []

    def assembly(self) -> str:
        return self.ptx

    def machine_code(self) -> str:
        return run_on_cubin([tool("cuobjdump"), "--dump-sass"], self.cubin)

    def problems(self, gpu: Device) -> list[str]:
        """The kernel's problems on this GPU."""
        found = []
        if self.stack:
            found.append(f"{self.stack} bytes of stack: registers are spilled")
        if self.shared > gpu.block_shared:
            found.append(f"{self.shared} bytes of shared memory, of {gpu.block_shared}")
        if self.registers * self.warps * 32 > 65536:
            found.append(f"{self.registers} registers x {self.warps} warps do not fit")
        if self.matrix == "missing":
            found.append(f"a dot did not become {gpu.matrix}")
        return found


def record(op: OpSpec, capability: int, everything: bool = True, timed_alone: bool = False) -> list[Launch]:
    """The distinct launches, forward and backward, of the op's benchmark shapes and parity cases on a device of this
    compute capability (80, 90, ...). Without `everything`, only those of the op's `compiled_cases`, if it has any; if
    it has none, `timed_alone` leaves out the parity cases."""
    _triton.load()
    if _triton.MISSING is not None:
        raise RuntimeError(_triton.MISSING)
    if _triton.INTERPRET:
        raise RuntimeError("kernels that are interpreted cannot be compiled: unset TRITON_INTERPRET")
    from triton.runtime.jit import JITFunction

    launches: dict[Launch, None] = {}
    case_id = ""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        launches.setdefault(_launch(kernel, args, kwargs, case_id))

    unfilled = None if everything else op.cases.compiled_cases(op.name)
    made: tuple[Case, ...] = ()
    if unfilled is None:
        timed = op.bench.bench_cases(op.name, "cuda") if op.bench is not None else ()
        unfilled = tuple((case, dtype) for dtype in DTYPES for case in timed)
        if everything or not (timed_alone and timed):
            made = op.cases.CASES[op.name]
    with ExitStack() as undo:
        for each in OPS.values():  # a function may call another operation
            if each.impl("triton") is not None:
                undo.enter_context(override(each, "triton", devices=("cpu", "cuda")))
        undo.callback(setattr, JITFunction, "run", JITFunction.run)
        JITFunction.run = run
        operators.serve_cpu_tensors()
        devices.record_for(capability)
        asked = undo.enter_context(tuning.watched())
        for forced in (False, True):
            if forced:
                chosen = [choice for choice in asked.values() if tuning.ANOTHER in choice.config]
                for choice in chosen:
                    row = next(row for row in choice.configs if tuning.ANOTHER not in row)
                    undo.enter_context(tuning.forced(choice.kernel, choice.key, row))
                if not chosen:
                    break
            for case, dtype in unfilled:
                case_id = f"{case.id} {short_dtype(dtype)}"
                _call(op, case, _unfilled(case, dtype))
            for case in made:
                case_id = case.id
                _call(op, case, case.make(DTYPES[0]))
    return list(launches)


def _unfilled(case: Case, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Arguments in uninitialised memory; large ones are never touched."""
    args: dict[str, Tensor | None] = {}
    for name, arg in case.args.items():
        if arg is None or arg.dtype is not None or arg.wide:  # small, and the values are checked
            args[name] = made = None if arg is None else arg.make(torch.Generator(), dtype, "cpu")
            if made is not None and arg is not None and made.is_floating_point():
                made.requires_grad_(arg.grad)
        else:
            args[name] = _empty(arg, dtype).requires_grad_(arg.grad)
    return args


def _empty(arg: Arg, dtype: torch.dtype) -> Tensor:
    if arg.layout == "swapped":
        b, h, t, *rest = arg.shape
        return torch.empty((b, t, h, *rest), dtype=dtype).transpose(1, 2)
    assert arg.layout == "contiguous", f"a benchmark of layout {arg.layout!r}"
    return torch.empty(arg.shape, dtype=dtype)


def _call(op: OpSpec, case: Case, args: dict[str, Tensor | None]) -> None:
    """Calls the op without gradients, then with gradients and backward. Skips what does not fit the GPU's memory."""
    try:
        with torch.no_grad():
            op.public(**args, **case.options, backend="triton")
        out = op.public(**args, **case.options, backend="triton")
    except BackendUnavailable:
        return
    outputs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    wanted = [t for t in args.values() if t is not None and t.requires_grad]
    if wanted:
        torch.autograd.grad(outputs, wanted, [torch.empty_like(o) for o in outputs], allow_unused=True)


def _launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], case: str) -> Launch:
    """Triton's specialisation: types, constants, and arguments that are multiples of 16."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    signature, constants, divisible, small = [], [], [], []

    def type_of(name: Any, value: Any, constant: bool, specialized: bool) -> Any:
        if constant or value is None or (isinstance(value, int) and value == 1 and specialized):
            constants.append((name, value))
            return "constexpr"
        if isinstance(value, tuple):
            types = [type_of((name, i), each, False, specialized) for i, each in enumerate(value)]
            return type(value)(*types) if hasattr(value, "_fields") else tuple(types)  # a NamedTuple is one of types
        if hasattr(value, "block_shape"):  # a tensor descriptor
            return f"tensordesc<{_NAMES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        if isinstance(value, Tensor):
            divisible.append(name)  # PyTorch's allocator aligns to more than 16 bytes
            if value.untyped_storage().size() < 2**31:
                small.append(name)
            return "*" + _NAMES[value.dtype]
        if isinstance(value, int):
            if value % 16 == 0 and specialized:
                divisible.append(name)
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    for p in kernel.params:
        signature.append((p.name, type_of(p.name, given[p.name], p.is_constexpr, not p.do_not_specialize)))
    options = tuple((k, kwargs[k]) for k in ("num_warps", "num_stages", "maxnreg") if k in kwargs)
    return Launch(kernel, tuple(signature), tuple(constants), tuple(divisible), options, case, tuple(small))


def source_of(launch: Launch, more: dict[Name, list[list[Any]]] = {}) -> Any:  # noqa: B006
    """Triton's compiler input: the kernel, its specialisation, and `more` attributes by argument."""
    if launch.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    else:
        from triton.compiler import ASTSource
    names = [name for name, _ in launch.signature]

    def path(name: Name) -> tuple[int, ...]:
        return (names.index(name),) if isinstance(name, str) else (names.index(name[0]), name[1])

    attributes: dict[Name, list[list[Any]]] = {name: [["tt.divisibility", 16]] for name in launch.divisible}
    for name, each in more.items():
        attributes[name] = attributes.get(name, []) + each
    return ASTSource(
        launch.kernel,
        dict(launch.signature),
        constexprs={path(name): value for name, value in launch.constants},
        attrs={path(name): each for name, each in attributes.items()},
    )


def why_not() -> str | None:
    """Why nothing can be compiled here, and what to do."""
    if _triton.MISSING or _triton.INTERPRET:
        return _triton.MISSING or "interpreted kernels cannot be compiled: unset TRITON_INTERPRET"
    from triton import knobs

    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"Triton cannot keep what it compiles ({error}): set TRITON_CACHE_DIR to a folder that can be written"


def compile_for(launch: Launch, arch: int, brief: bool = False) -> Cost:
    """Compiles for compute capability `arch` (80, 90, ...), with Triton's own cache on disk. `brief` does not analyse
    the machine code, which takes longer than the rest if the kernel is cached."""
    import triton
    from triton.backends.compiler import GPUTarget

    from foundry_kernels._triton.launch import compiler_options

    compiled = triton.compile(
        source_of(launch), target=GPUTarget("cuda", arch, 32), options=compiler_options() | dict(launch.options)
    )
    cubin, ptx, matrix = compiled.asm["cubin"], compiled.asm["ptx"], ""
    if launch.gluon or re.search(DOT_IN_16_BITS, compiled.asm["ttir"]):
        # Wide heads need tiles that are too small for the newest instruction; these use mma.sync.
        matrix = next((name for name in (GPUS[arch].matrix, "mma.sync") if name in ptx), "missing")
    registers, stack = _resources(cubin)
    return Cost(
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        access_bytes=_access_bytes(ptx),
        matrix=matrix,
        ptx=ptx,
        cubin=cubin,
        loaded_ahead=0 if matrix or brief else loaded_ahead(run_on_cubin([tool("nvdisasm"), "-c", "-ndf"], cubin)),
    )


def tool(name: str) -> str:
    """The path of a binary tool in Triton's package."""
    import triton

    return os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)


def run_on_cubin(command: Iterable[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack."""
    usage = run_on_cubin([tool("cuobjdump"), "--dump-resource-usage"], cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def _access_bytes(ptx: str) -> tuple[int, ...]:
    """Bytes for each thread of each kind of global access in the code."""
    widths = set()
    for vector, bits in re.findall(r"(?:ld|st)\.global(?:\.[a-z_:0-9]+?)*?(?:\.v(\d))?\.[bfu](\d+)", ptx):
        widths.add(int(vector or 1) * int(bits) // 8)
    for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (?:0x)?([0-9a-f]+)", ptx):
        widths.add(int(size, 16) if size == "10" else int(size))
    return tuple(sorted(widths, reverse=True))
