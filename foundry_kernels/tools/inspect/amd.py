"""Compiles the Triton kernels for AMD GPUs with Triton's own backend, and reports their cost.

`python -m foundry_kernels inspect OP --arch gfx942` prints it. The kernels are only compiled: none has run on an AMD
GPU, and nothing here launches one. The launches are those of the tables for capability 942 or 950.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from foundry_kernels._triton.devices import Device, device_of
from foundry_kernels.tools.inspect.aot import DOT_IN_16_BITS, Launch, source_of
from foundry_kernels.tools.inspect.sass import Loop

#: The targets. A workgroup may use all of a compute unit's LDS (`block_shared`). A compute unit has 4 SIMDs, each with
#: 512 vector registers a lane for at most 8 waves. A workgroup has at most 16 waves of 64 lanes.
GPUS = {f"gfx{arch}": device_of(arch) for arch in (942, 950)}
_SIMDS, _REGISTERS, _WAVES, _MOST_WAVES, _LANES = 4, 512, 8, 16, 64

#: Options of NVIDIA's backend only. `maxnreg` limits the registers for ptxas. AMD's compiler derives the limit from the
#: waves of a workgroup, and Triton refuses the option there.
_FOR_NVIDIA = ("maxnreg",)


def capability(arch: str) -> int:
    """The architecture's number in the tables."""
    return int(arch.removeprefix("gfx"))


@dataclass(frozen=True)
class AmdCost:
    """The resources of a compiled launch. Registers are spilled to `scratch`, in bytes a lane; scalar registers are
    first spilled to lanes of vector registers."""

    vgprs: int  # with `agprs`
    agprs: int
    sgprs: int
    spilled: int
    sgprs_spilled: int
    scratch: int
    lds: int
    waves: int
    access_bytes: tuple[int, ...]  # widths of the global loads and stores, widest first
    matrix: str  # the instruction of dots, "missing", or "" without dots
    llir: str = field(repr=False)
    code: str = field(repr=False)

    def resident(self, gpu: Device) -> int:
        """Workgroups that fit on a compute unit at once."""
        by_registers = min(_WAVES, _REGISTERS // max(8, -(-self.vgprs // 8) * 8)) * _SIMDS // self.waves
        return min(by_registers, gpu.block_shared // self.lds if self.lds else by_registers)

    def occupancy(self, gpu: Device) -> float:
        """Estimated fraction of a compute unit's waves that can be resident at once."""
        return self.resident(gpu) * self.waves / (_SIMDS * _WAVES)

    def problems(self, gpu: Device) -> list[str]:
        """The kernel's problems on this GPU."""
        found = []
        if self.spilled or self.scratch:
            found.append(f"{self.spilled} vector registers are spilled, {self.scratch} bytes of scratch")
        if self.lds > gpu.block_shared:
            found.append(f"{self.lds} bytes of LDS, of {gpu.block_shared}")
        if self.waves > _MOST_WAVES:
            found.append(f"{self.waves} waves of {_LANES} lanes, of {_MOST_WAVES}")
        if self.matrix == "missing":
            found.append("a dot did not become mfma")
        return found

    def loops(self) -> list[Loop]:
        return []  # AMD's machine code is not analysed

    def assembly(self) -> str:
        return self.llir

    def machine_code(self) -> str:
        return self.code

    def describe(self, gpu: Device) -> str:
        spilled = f"{self.spilled} spilled" + (f" ({self.sgprs_spilled} scalar)" if self.sgprs_spilled else "")
        return (
            f"{self.vgprs:>3} VGPRs ({self.agprs} AGPRs)  {self.sgprs:>3} SGPRs  {spilled}  {self.lds:>6} B LDS  "
            f"{self.waves:>2} warps  {self.occupancy(gpu):>4.0%} occupancy  "
            f"{'/'.join(map(str, self.access_bytes))} B an access{'  ' + self.matrix if self.matrix else ''}"
        )


def without_foreign_options(launches: list[Launch]) -> list[Launch]:
    """The distinct launches after removing the options that AMD's backend does not have."""
    kept = [replace(x, options=tuple((k, v) for k, v in x.options if k not in _FOR_NVIDIA)) for x in launches]
    return list(dict.fromkeys(kept))


def compile_for(launch: Launch, arch: str, brief: bool = False) -> AmdCost:
    """Compiles for an architecture of `GPUS`, with Triton's own cache on disk.

    Raises:
        Exception: the compiler's error.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from foundry_kernels._triton.launch import compiler_options

    (launch,) = without_foreign_options([launch])
    # As at a launch, marks tensors below 2 GB, which the backend addresses with 32 bits.
    source = source_of(launch, {name: [["tt.pointer_range", 32]] for name in launch.small})
    compiled = triton.compile(
        source, target=GPUTarget("hip", arch, _LANES), options=compiler_options() | dict(launch.options)
    )
    code = compiled.asm["amdgcn"]
    matrix = ""
    if re.search(DOT_IN_16_BITS, compiled.asm["ttir"]):
        product = re.search(r"v_mfma_\w+", code)
        matrix = product[0] if product else "missing"
    return AmdCost(
        vgprs=_number(code, "vgpr_count"),
        agprs=_number(code, "agpr_count"),
        sgprs=_number(code, "sgpr_count"),
        spilled=_number(code, "vgpr_spill_count"),
        sgprs_spilled=_number(code, "sgpr_spill_count"),
        scratch=_number(code, "private_segment_fixed_size"),
        lds=compiled.metadata.shared,
        waves=compiled.metadata.num_warps,
        access_bytes=_access_bytes(code),
        matrix=matrix,
        llir=compiled.asm["llir"],
        code=code,
    )


def _number(code: str, name: str) -> int:
    """Reads a number from the kernel's metadata after its code."""
    found = re.search(rf"^ .*\.{name}: +(\d+)$", code, re.M)
    assert found, name
    return int(found[1])


_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "byte": 1}


def _access_bytes(code: str) -> tuple[int, ...]:
    found = re.findall(r"\b(?:buffer|global)_(?:load|store)_(dwordx?[234]?|u?short|u?byte)", code)
    return tuple(sorted({_WIDTHS[width] for width in found}, reverse=True))
