"""Holds our kernels and torch to one instruction set, where the processor has more of them: `--isa avx2`.

torch, oneDNN and MKL read their switches from the environment when they are first used, so these are set before torch
is imported. Inductor follows torch's for the width of its vectors and needs one of its own for the flags of its
compiler. Processes that this one starts inherit all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

#: By name of an instruction set of ours, the environment that holds the others to it.
_NAMES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "TORCHINDUCTOR_CPP_MARCH")
SWITCHES = {
    name: dict(zip(_NAMES, values, strict=True))
    for name, values in {
        "baseline": ("default", "SSE41", "SSE4_2", "x86-64"),
        "avx2": ("avx2", "AVX2", "AVX2", "x86-64-v3"),
        "avx512": ("avx512", "AVX512_CORE", "AVX512", "x86-64-v4"),
        "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512", "x86-64-v4"),
        "amx_bf16": ("avx512", "AVX512_CORE_AMX", "AVX512", "x86-64-v4"),
    }.items()
}
#: What torch calls its own set where it obeys; all others are AVX512 to it.
_TORCH = {"baseline": ("DEFAULT", "NO AVX"), "avx2": ("AVX2",)}


@dataclass(frozen=True)
class Isa:
    """What a run uses: of `ours` and of torch the name of the instruction set, and whether it was forced."""

    ours: str
    torch: str
    forced: str | None = None
    obeyed: bool = True
    #: Whether oneDNN multiplies matrices of 16-bit numbers.
    products16: bool = True

    def kept(self) -> dict[str, Any]:
        """Returns what a run says of it."""
        found: dict[str, Any] = {"ours": self.ours, "torch": self.torch, "forced": self.forced}
        return found if self.forced is None else found | {"obeyed": self.obeyed, "switches": SWITCHES[self.forced]}

    def lacks_products(self, itemsize: int, products: bool) -> bool:
        """Returns whether torch has no fast products of numbers of that size because it was forced."""
        return self.forced is not None and not self.products16 and products and itemsize == 2


#: What this process uses; `force` and `found` set it.
current = Isa("", "")


def switch(name: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the switches of torch and its libraries; before torch is imported.

    Raises:
        ValueError: there is no instruction set of that name.
    """
    if name not in SWITCHES:
        raise ValueError(f"there is no instruction set {name!r}; there are {', '.join(SWITCHES)}")
    environment.update(SWITCHES[name])


def force(name: str) -> Isa:
    """Restricts this process to `name`: `switch`, then our kernels; asks torch what it made of it.

    Raises:
        ValueError: there is no such instruction set, or this machine or this build of the extension has not got it.
    """
    # What is already loaded may have read its switches; where they are as they should be, it does not matter.
    early = "torch" not in sys.modules or all(os.environ.get(k) == v for k, v in SWITCHES.get(name, {}).items())
    switch(name)
    import torch

    from foundry_kernels.core import extension

    if torch.cuda.is_available():
        raise ValueError("a GPU is measured here, which has no instruction set of a CPU")
    if extension.MISSING is not None:
        raise ValueError(f"our kernels cannot be restricted to {name!r}: {extension.MISSING}")
    usable = extension.build_info()["usable_instruction_sets"]
    if name not in usable:
        raise ValueError(f"our kernels have no {name!r} here; they have {', '.join(usable)}")
    extension._C.force_instruction_set(name)
    reports = torch.backends.cpu.get_cpu_capability()
    obeyed = early and reports in _TORCH.get(name, ("AVX512",))
    return _remember(Isa(name, reports, name, obeyed, _products16()))


def found() -> Isa:
    """Returns what this process uses without being forced."""
    import torch

    from foundry_kernels.core import extension

    ours = extension.build_info().get("instruction_set", "")
    return _remember(Isa(ours, torch.backends.cpu.get_cpu_capability(), None, True, _products16()))


def _products16() -> bool:
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def _remember(isa: Isa) -> Isa:
    global current
    current = isa
    return isa


def no_products() -> str:
    """Returns why a row of torch's is no peer; see `Isa.lacks_products`."""
    return f"plain loops stand in for oneDNN's products of 16 bits, as oneDNN is restricted to {current.forced}"
