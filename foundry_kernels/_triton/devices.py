"""Facts about GPUs, one entry for each compute capability, and the compute capability of a device.

Launchers choose tiles by a device's `name`, and by its number only where the compiler's code differs within a name.
Tuned tiles are next to the kernels, device facts are here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from foundry_kernels._triton.plans import forget_plans

OLDEST = (8, 0)


@dataclass(frozen=True)
class Device:
    """Facts about the GPUs of a compute capability; sizes in bytes.

    name: the key in tables of tiles; GPUs that use the same tiles share it.
    multiprocessors: their number on a common GPU. It is the same for all GPUs of a `name`: work is split by it, so
        they add in the same order.
    block_shared, sm_shared: shared memory of a program and of a multiprocessor.
    warps, most_warps: the most of a multiprocessor and of a program.
    matrix: the instruction that a dot of 16-bit tiles compiles to.
    """

    name: str
    multiprocessors: int
    block_shared: int
    sm_shared: int
    warps: int
    matrix: str = "mma.sync"
    most_warps: int = 32


_KB = 1 << 10

#: By compute capability, 90 for 9.0; AMD's by the number in gfx942. 0 is Triton's interpreter, whose cases are small.
DEVICES = {
    0: Device("interpreter", 4, 99 * _KB, 100 * _KB, 64),
    80: Device("ampere", 108, 163 * _KB, 164 * _KB, 64),  # A100
    86: Device("small", 128, 99 * _KB, 100 * _KB, 48),  # A10, RTX 3090
    87: Device("ampere", 108, 163 * _KB, 164 * _KB, 48),  # Orin
    89: Device("small", 128, 99 * _KB, 100 * _KB, 48),  # L4, RTX 4090 (which has 128)
    90: Device("hopper", 132, 227 * _KB, 228 * _KB, 64, "wgmma.mma_async"),  # H100, H200
    100: Device("blackwell", 148, 227 * _KB, 228 * _KB, 64, "tcgen05.mma"),  # B200
    103: Device("blackwell", 148, 227 * _KB, 228 * _KB, 64, "tcgen05.mma"),  # B300
    120: Device("small", 128, 99 * _KB, 100 * _KB, 48),  # RTX 5090
    121: Device("small", 128, 99 * _KB, 100 * _KB, 48),  # GB10
    942: Device("cdna", 304, 64 * _KB, 64 * _KB, 32, "mfma", 16),  # MI300X: warps of 64 lanes
    950: Device("cdna", 304, 160 * _KB, 160 * _KB, 32, "mfma", 16),  # MI350X
}

#: A capability without an entry (8.8, 11.0, one that is newer than this table): tiles that fit any GPU of NVIDIA's.
_ANY_OTHER = DEVICES[120]


def device_of(capability: int) -> Device:
    """The facts of a compute capability, 90 for 9.0; 0 is the interpreter."""
    return DEVICES.get(capability) or (DEVICES[942] if capability >= 900 else _ANY_OTHER)


@cache
def too_old(device: int | None = None) -> str | None:
    """The reason why the kernels do not support this GPU (default: the current one), or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST:
        return None
    found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
    return f"{found}, and the kernels are for {OLDEST[0]}.{OLDEST[1]} and newer"


@cache
def why_no_gpu() -> str | None:
    """The reason why there is no GPU that the kernels support, or None if there is one. torch warns once per process if
    a driver is too old, so this must be the first call that asks."""
    if torch.version.cuda is None:
        return "no CUDA device; torch is a CPU build"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        return too_old()
    about = [str(w.message) for w in said if "driver" in str(w.message)]
    return "no CUDA device" + (f": {about[0].partition(' (Triggered')[0]}" if about else "")


def programs(device: torch.device) -> int:
    """Number of programs of a persistent grid: two for each multiprocessor."""
    if _RECORDED_MULTIPROCESSORS is not None:
        return 2 * _RECORDED_MULTIPROCESSORS
    if device.type != "cuda":
        return 4  # the interpreter: few, but more than one, so that sums over programs are exercised
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def total_memory(device: torch.device) -> int:
    """Bytes of the device's memory. In the interpreter, and while launches are recorded, those of a common GPU."""
    if _RECORDED is not None or device.type != "cuda":
        return 80 << 30
    return torch.cuda.get_device_properties(device).total_memory


def capability(device: torch.device) -> int:
    """Compute capability of `device`, 90 for 9.0; 0 in the interpreter. Launch configs depend on it."""
    if _RECORDED is not None:
        return _RECORDED
    return 0 if device.type != "cuda" else _capability(device)


@lru_cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


_RECORDED: int | None = None
_RECORDED_MULTIPROCESSORS: int | None = None


def record_for(arch: int | None, multiprocessors: int | None = None) -> None:
    """From now on, chooses launches for a device of this compute capability (see `inspect`) and number of
    multiprocessors, if given. None: for the current device."""
    global _RECORDED, _RECORDED_MULTIPROCESSORS
    _RECORDED, _RECORDED_MULTIPROCESSORS = arch, multiprocessors
    forget_plans()
