"""Describes this installation: versions, the processor, the GPU and its driver, the extension and, for a bug report,
environment variables."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import foundry_kernels
from foundry_kernels import OPS, __version__, _triton
from foundry_kernels._triton import devices
from foundry_kernels.core import extension
from foundry_kernels.core.registry import BACKENDS, OpSpec

#: A report contains the environment variables with these prefixes.
VARIABLES = ("FOUNDRY_", "TRITON_")
#: A report never shows the values of variables whose names contain these.
SECRETS = ("TOKEN", "SECRET", "KEY", "PASSWORD")
#: Instruction sets that the kernels here or in torch use, by their names in /proc/cpuinfo.
INSTRUCTION_SETS = (
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2",
    "svebf16",
)  # fmt: skip


def heading() -> str:
    return "foundry_kernels " + __version__


def versions() -> list[str]:
    """One line each for Python, torch, Triton, transformers, the processor, the GPU, its driver and the extension."""
    triton = "not usable: " + _triton.MISSING if _triton.MISSING else importlib.import_module("triton").__version__
    if _triton.INTERPRET:
        triton += ", interpreted on the CPU (TRITON_INTERPRET=1)"
    lines = [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("triton", triton),
        ("transformers", installed("transformers")),
        ("processor", f"{processor()}, {count(os.cpu_count() or 1, 'thread')}"),
        ("gpu", gpu()),
        ("driver", driver()),
    ]
    info = extension.build_info()
    if not info:
        lines.append(("extension", str(extension.MISSING)))
    else:
        lines += [
            ("extension", f"compiled by {info['compiler']} for torch {info['torch']}"),
            ("  cpu", instruction_sets(info)),
            ("  bfloat16", bfloat16_matmuls(info)),
            ("  threads", str(torch.get_num_threads())),
            ("  cuda", cuda_architectures(info)),
        ]
    return [f"{name:<12} {text}" for name, text in lines]


def count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def installed(package: str) -> str:
    """The version of a package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """The processor's model name, or its architecture if the system does not report one."""
    for key in ("model name", "Model", "cpu model"):  # x86-64, some ARM boards, MIPS
        if name := _cpuinfo(key):
            return name
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    if platform.system() == "Linux" and (told := _output("lscpu")):  # it knows ARM's part numbers
        named = re.search(r"^Model name:\s*(.+)$", told, re.MULTILINE)
        if named and named[1] != "-":
            return named[1]
    return platform.processor() or platform.machine()


def processor_features() -> str:
    """The processor's `INSTRUCTION_SETS`, and what torch uses."""
    found = set((_cpuinfo("flags") or _cpuinfo("Features") or "").split())
    named = " ".join(name for name in INSTRUCTION_SETS if name in found) or "not known"
    return f"{named}; torch uses {torch.backends.cpu.get_cpu_capability()}"


def _cpuinfo(key: str) -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{key}\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def gpu(index: int | None = None) -> str:
    """A description of a GPU (default: the current one), or the reason why there is none."""
    no_gpu = devices.why_no_gpu()  # must be called before torch.cuda
    if not torch.cuda.is_available():
        return str(no_gpu)
    index = torch.cuda.current_device() if index is None else index
    major, minor = torch.cuda.get_device_capability(index)
    memory = torch.cuda.get_device_properties(index).total_memory / 2**30
    text = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}, {memory:.0f} GiB"
    runtime = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"HIP {torch.version.hip}"
    return f"{text}, {runtime}" + (f"; {no_gpu}" if no_gpu else "")


def driver() -> str:
    """The version of the GPU's driver, and the newest CUDA that it runs."""
    try:
        told = Path("/proc/driver/nvidia/version").read_text(errors="replace")
        found = re.search(r"(?:Module|x86_64|aarch64)\s+(?:for \S+\s+)?(\d+\.\d+(?:\.\d+)?)", told)
        version = found[1] if found else None
    except OSError:
        version = None
    version = version or _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    if torch.version.hip is not None:
        try:
            version = "amdgpu " + Path("/sys/module/amdgpu/version").read_text().strip()
        except OSError:
            version = "amdgpu of the Linux kernel"
    if not version:
        return "none found"
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)  # only in builds with CUDA
    newest = ask() if ask is not None and torch.cuda.is_available() else 0
    return version + (f", for CUDA up to {newest // 1000}.{newest % 1000 // 10}" if newest else "")


def _output(*command: str) -> str:
    """A command's output; "" if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=os.environ | {"LC_ALL": "C"})
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def instruction_sets(info: dict[str, Any]) -> str:
    """The instruction sets of the CPU kernels, and whether this processor has a better one."""
    text = f"compiled for {', '.join(info['instruction_sets'])}; uses {info['instruction_set']}"
    if info["processor"] not in info["instruction_sets"]:
        text += f"; this processor has {info['processor']}; to use it, recompile: {extension.REBUILD}"
    return text


def bfloat16_matmuls(info: dict[str, Any]) -> str:
    """The method of bfloat16 matmuls on the CPU, and whether oneDNN supports it."""
    choice = extension.BFLOAT16
    if choice is not None and choice.products and "bfloat16" not in info["fast_products"]:
        return f"{choice}; but oneDNN does not have them in this process: widened"
    return str(choice)


def cuda_architectures(info: dict[str, Any]) -> str:
    """The architectures of the CUDA kernels; attention has kernels for 9.0 only."""
    if not info["cuda_architectures"]:
        return "not compiled in" + (f": {info['without_cuda']}" if "without_cuda" in info else "")
    hopper = "9.0a" if info.get("hopper") else "not compiled in"
    return f"{info['cuda_architectures']}; attention's kernels for Hopper: {hopper}"


def table(devices: tuple[str, ...]) -> list[str]:
    """A table of operations and backends, with the reasons for missing ones below."""
    reasons: list[str] = []

    def cell(op: OpSpec, backend: str) -> str:
        if op.impl(backend) is None:
            return "-"
        usable = [d for d in devices if op.why_not(backend, d) is None]
        if usable:
            return " ".join(usable)
        reason = op.why_not(backend, devices[-1]) or ""
        text = f"{backend}: {reason}"
        if text not in reasons:
            reasons.append(text)
        return f"no [{reasons.index(text) + 1}]"

    rows = [("", *BACKENDS)] + [(op.name, *(cell(op, b) for b in BACKENDS)) for op in OPS.values()]
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    if any("-" in r[1:] for r in rows):
        lines += ["", "-  no kernel yet"]
    return [*lines, *(["", *(f"[{i}] {r}" for i, r in enumerate(reasons, 1))] if reasons else [])]


def overview() -> list[str]:
    above = [heading(), "", *versions(), ""]
    return [*above, *table(("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))]


def report() -> list[str]:
    """The overview, with more details for a bug report. It contains no path except the package's."""
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:  # not Linux, or the file does not exist
        system = ""
    others = ("numpy", "accelerate", "peft", "trl", "lightning", "deepspeed", "liger-kernel", "flash-attn")
    above = overview()
    lines = [
        ("system", ", ".join(part for part in (system, platform.platform()) if part)),
        ("instructions", processor_features()),
        *((f"gpu {i}", gpu(i)) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)),
        ("packages", ", ".join(f"{p} {v}" for p in others if (v := installed(p)) != "not installed") or "nothing"),
        ("package", str(Path(foundry_kernels.__file__).parent).replace(str(Path.home()), "~")),
        *((f"  {key}", str(value)) for key, value in extension.build_info().items()),
        *(variables() or [("variables", f"none of {', '.join(f'{v}*' for v in VARIABLES)}")]),
    ]
    width = max(len(name) for name, _ in lines)
    return [*above, "", *(f"{name:<{width}} {text}" for name, text in lines)]


def variables() -> list[tuple[str, str]]:
    """The set variables of `VARIABLES`: a path is reduced to its last part, and the value of a secret is not shown."""
    return [
        (name, "(set)" if any(word in name for word in SECRETS) else _PATH.sub(r"[...]\1", text))
        for name, text in sorted(os.environ.items())
        if name.startswith(VARIABLES)
    ]


#: An absolute path of at least two parts, the last of them in a group with the separator before it.
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][^/\\:;\s]+)+([/\\][^/\\:;\s]+)[/\\]?")
