"""Which backends of each operation work here, and why the others do not; or, with a command:

python -m foundry_kernels check                   # whether every operation is right on the device at hand, in a minute
python -m foundry_kernels tune                    # the fastest launches and backends on this GPU, measured and kept
python -m foundry_kernels inspect OP --arch 90    # what Triton kernels cost on a GPU that is not present
python -m foundry_kernels size llama-2-7b         # a model's parameters, cache, FLOPs and training memory, by part
python -m foundry_kernels patch-report            # what fk.patch replaces in each family of transformers
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from typing import Any

import torch

from foundry_kernels import OPS, __version__, _triton
from foundry_kernels._triton import devices
from foundry_kernels.core import extension
from foundry_kernels.core.registry import BACKENDS, OpSpec


def main(argv: list[str]) -> int:
    _triton.load()  # or it would not be known whether Triton imports
    commands = {"check": check, "inspect": inspect, "patch-report": patch_report, "size": size, "tune": tune}
    if argv and argv[0] in commands:  # which parse what follows
        return commands[argv[0]](argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m foundry_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=tuple(commands), help="each has a --help of its own")
    parser.parse_args(argv)
    lines = ["foundry_kernels " + __version__, "", *versions(), ""]
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    print("\n".join([*lines, *table(devices)]))
    return 0


def versions() -> list[str]:
    """One line each for Python, torch, Triton, the GPU and the extension."""
    triton = "not usable: " + _triton.MISSING if _triton.MISSING else importlib.import_module("triton").__version__
    if _triton.INTERPRET:
        triton += ", interpreted on the CPU (TRITON_INTERPRET=1)"
    no_gpu = devices.why_no_gpu()
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        gpu = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
        gpu += f"; {no_gpu}" if no_gpu else ""
    else:
        gpu = str(no_gpu)
    lines = [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("triton", triton),
        ("gpu", gpu),
    ]
    info = extension.build_info()
    if not info:
        lines.append(("extension", str(extension.MISSING)))
    else:
        lines += [
            ("extension", f"compiled by {info['compiler']} for torch {info['torch']}"),
            ("  cpu", instruction_sets(info)),
            ("  bfloat16", bfloat16_products(info)),
            ("  threads", str(torch.get_num_threads())),
            ("  cuda", cuda_architectures(info)),
        ]
    return [f"{name:<11} {text}" for name, text in lines]


def instruction_sets(info: dict[str, Any]) -> str:
    """What the CPU kernels are compiled for, and whether this processor has more."""
    text = f"compiled for {', '.join(info['instruction_sets'])}; uses {info['instruction_set']}"
    if info["processor"] not in info["instruction_sets"]:
        text += f"; this processor has {info['processor']}, for which it must be compiled again: {extension.REBUILD}"
    return text


def bfloat16_products(info: dict[str, Any]) -> str:
    """How products of bfloat16 are made on the CPU, and whether oneDNN does what was chosen."""
    choice = extension.BFLOAT16
    if choice is not None and choice.products and "bfloat16" not in info["fast_products"]:
        return f"{choice}; but oneDNN has none of them in this process: widened"
    return str(choice)


def cuda_architectures(info: dict[str, Any]) -> str:
    """What the CUDA kernels are compiled for; attention has some for 9.0 alone."""
    if not info["cuda_architectures"]:
        return "not compiled in"
    hopper = "9.0a" if info.get("hopper") else "not compiled in"
    return f"{info['cuda_architectures']}; attention's kernels for Hopper: {hopper}"


def table(devices: tuple[str, ...]) -> list[str]:
    """Ops x backends; reasons below, each once."""
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


def inspect(argv: list[str]) -> int:
    from foundry_kernels.tools.inspect.command import main

    return main(argv)


def check(argv: list[str]) -> int:
    from foundry_kernels.tools.check import main

    return main(argv, ["foundry_kernels " + __version__, "", *versions()])


def tune(argv: list[str]) -> int:
    from foundry_kernels.tools.tune import main

    return main(argv, ["foundry_kernels " + __version__, "", *versions()])


def size(argv: list[str]) -> int:
    from foundry_kernels.diagnostics.size import main

    return main(argv)


def patch_report(argv: list[str]) -> int:
    """Patch a small model of each family and print how many modules were replaced by which operations."""
    parser = argparse.ArgumentParser(prog="python -m foundry_kernels patch-report", description=patch_report.__doc__)
    parser.add_argument("family", nargs="*", help="model types of transformers (default: all that are supported)")
    options = parser.parse_args(argv)
    from foundry_kernels import patch
    from foundry_kernels.integrations import tiny_encoders
    from foundry_kernels.integrations.patch import parts
    from foundry_kernels.integrations.table import LLAMA_LIKE, PATCHED

    known = (*PATCHED, *tiny_encoders.FAMILIES)
    unknown = [family for family in options.family if family not in known]
    if unknown:
        parser.error(f"family must be one of {', '.join(known)}; got {unknown[0]}")
    try:
        version = importlib.import_module("transformers").__version__
    except ImportError as e:
        parser.error(f"transformers cannot be imported ({e}); pip install transformers")
    from foundry_kernels.integrations.tiny import tiny_model

    rows: list[tuple[str, ...]] = [("family", "norms", "MLP", "attention", "loss", "left as it was")]
    rows.append(tuple("-" * len(title) for title in rows[0]))
    for family in options.family or LLAMA_LIKE:
        model = tiny_model(family) if family in PATCHED else tiny_encoders.tiny_encoder(family)
        rows.append((family, *parts(patch(model).report())))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print(f"transformers {version}: modules of a two-layer model, and the operations that serve them")
    print("\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
