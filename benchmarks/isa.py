"""Restricts this package's kernels and torch to one instruction set: `--isa avx2`.

torch, oneDNN and MKL read their switches from the environment at first use, so the switches are set before torch is
imported. Inductor uses torch's switch for the width of its vectors, and has its own for the flags of its compiler.
Child processes inherit all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

#: The environment variables that restrict the libraries.
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
#: torch's names for a restricted set; it calls all others AVX512.
_TORCH = {"baseline": ("DEFAULT", "NO AVX"), "avx2": ("AVX2",)}


@dataclass(frozen=True)
class Isa:
    """The instruction sets of a run: the names of this package's (`ours`) and torch's, and whether they were forced."""

    ours: str
    torch: str
    forced: str | None = None
    obeyed: bool = True
    #: Whether oneDNN has 16-bit matmuls.
    products16: bool = True

    def kept(self) -> dict[str, Any]:
        """Returns the fields for stored results."""
        found: dict[str, Any] = {"ours": self.ours, "torch": self.torch, "forced": self.forced}
        return found if self.forced is None else found | {"obeyed": self.obeyed, "switches": SWITCHES[self.forced]}

    def lacks_products(self, itemsize: int, products: bool) -> bool:
        """Returns whether the restriction leaves torch without fast matmuls for numbers of this size."""
        return self.forced is not None and not self.products16 and products and itemsize == 2


#: The instruction sets of this process; `force` and `found` set it.
current = Isa("", "")


def switch(name: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the switches of torch and its libraries; before torch is imported.

    Raises:
        ValueError: the instruction set does not exist.
    """
    if name not in SWITCHES:
        raise ValueError(f"there is no instruction set {name!r}; there are {', '.join(SWITCHES)}")
    environment.update(SWITCHES[name])


def force(name: str) -> Isa:
    """Restricts this process to `name`: first `switch`, then this package's kernels. Returns the resulting sets.

    Raises:
        ValueError: the instruction set does not exist, or this machine or this build of the extension does not have it.
    """
    # Loaded libraries may have read their switches already; this is fine if the switches were right.
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
    """Returns the instruction sets of this process without a restriction."""
    import torch

    from foundry_kernels.core import extension

    ours = extension.build_info().get("instruction_set", "")
    return _remember(Isa(ours, torch.backends.cpu.get_cpu_capability(), None, True, _products16()))


def _products16() -> bool:
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # torch without oneDNN
        return False


def _remember(isa: Isa) -> Isa:
    global current
    current = isa
    return isa


def no_products() -> str:
    """Returns why a row of torch's is not a peer; see `Isa.lacks_products`."""
    return f"plain loops stand in for oneDNN's products of 16 bits, as oneDNN is restricted to {current.forced}"
