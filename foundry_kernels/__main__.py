"""Which backends of each operation work here, and why the others do not; or, with a command:

python -m foundry_kernels check                   # whether every operation is right on the device at hand, in a minute
python -m foundry_kernels tune                    # the fastest launches and backends on this GPU, measured and kept
python -m foundry_kernels inspect OP --arch 90    # what Triton kernels cost on a GPU that is not present
python -m foundry_kernels patch-report            # what fk.patch replaces in each family of transformers
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from typing import Any

import torch

from foundry_kernels import OPS, __version__, _gpu, _native, _triton, tuning
from foundry_kernels.registry import BACKENDS, OpSpec


def main(argv: list[str]) -> int:
    commands = {"check": check, "inspect": inspect, "patch-report": patch_report, "tune": tune}
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
    no_gpu = _gpu.why_not()
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
    info = _native.build_info()
    if not info:
        lines.append(("extension", str(_native.MISSING)))
    else:
        lines += [
            ("extension", f"compiled by {info['compiler']} for torch {info['torch']}"),
            ("  cpu", instruction_sets(info)),
            ("  threads", str(torch.get_num_threads())),
            ("  cuda", info["cuda_architectures"] or "not compiled in"),
        ]
    return [f"{name:<11} {text}" for name, text in lines]


def instruction_sets(info: dict[str, Any]) -> str:
    """What the CPU kernels are compiled for, and whether this processor has more."""
    text = f"compiled for {', '.join(info['instruction_sets'])}; uses {info['instruction_set']}"
    if info["processor"] not in info["instruction_sets"]:
        text += f"; this processor has {info['processor']}, for which it must be compiled again: {_native.REBUILD}"
    return text


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
    """Compile an operation's Triton kernels ahead of time and print what each costs; 1 if one has a problem."""
    parser = argparse.ArgumentParser(prog="python -m foundry_kernels inspect", description=inspect.__doc__)
    parser.add_argument("op", choices=[name for name, op in OPS.items() if op.impl("triton")])
    parser.add_argument(
        "--arch",
        type=_arch,
        nargs="+",
        default=[90],
        metavar="CC",
        help="compute capabilities, 90 for 9.0; gfx942 and gfx950 for AMD GPUs",
    )
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--case", default="", help="only launches first made by a case whose name contains this")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--all", action="store_true", help="every shape, not only those that an operation names")
    shapes.add_argument("--timed", action="store_true", help="only shapes that are named or timed by benchmarks")
    parser.add_argument("--unlike", type=_arch, metavar="CC", help="without launches that are the same there")
    parser.add_argument("--gpu", help="with the launches that were measured on this GPU, by the name that torch has")
    parser.add_argument("--tuning", metavar="FILE", help="measured launches, in place of those in the cache folder")
    parser.add_argument(
        "--brief", action="store_true", help="no loops, nor bytes in flight by loads to registers: quicker"
    )
    parser.add_argument("--peers", action="store_true", help="attention: PyTorch's FlexAttention beside it")
    parser.add_argument("--ptx", action="store_true", help="print the PTX (for AMD, what LLVM was given)")
    parser.add_argument("--sass", action="store_true", help="print the machine code (for AMD in assembly)")
    options = parser.parse_args(argv)
    from foundry_kernels import _aot, _aot_amd

    known = f"{', '.join(map(str, _aot.GPUS))}; got {{}} (of AMD's GPUs {', '.join(_aot_amd.GPUS)})"
    for name, archs in (("arch", options.arch), ("unlike", [options.unlike] if options.unlike else [])):
        for arch in archs:
            if arch not in _aot.GPUS and arch not in _aot_amd.GPUS:
                parser.error(f"--{name} must be one of {known.format(arch)}")
    if options.peers and (options.op != "flash_attention" or any(isinstance(arch, str) for arch in options.arch)):
        parser.error("--peers: of flash_attention alone, on NVIDIA's GPUs")
    if _triton.MISSING or _triton.INTERPRET:
        parser.error(_triton.MISSING or "interpreted kernels cannot be compiled: unset TRITON_INTERPRET")
    try:
        tuning.use(options.tuning)
    except (OSError, tuning.TuningFileError) as error:
        parser.error(f"--tuning: {error}")
    return 1 if sum(_inspect_for(arch, options) for arch in options.arch) else 0


def _arch(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _inspect_for(arch: int | str, options: argparse.Namespace) -> int:
    """Print what each launch costs on this architecture; how many have a problem."""
    from foundry_kernels import _aot, _aot_amd, _peers

    compiler: Any
    gpu: Any
    if isinstance(arch, str):
        capability, at_hand, target = _aot_amd.capability(arch), None, f"AMD {arch} (compiled, never run)"
        compiler, gpu = _aot_amd.compile_for, _aot_amd.GPUS[arch]
    else:
        capability, at_hand, target = arch, gpu_at_hand(arch), f"compute capability {arch / 10}"
        compiler, gpu = _aot.compile_for, _aot.GPUS[arch]
    op, shapes = OPS[options.op], (options.all, options.timed)
    with tuning.pretend(options.gpu or at_hand), tuning.watched() as chosen:
        recorded = _aot.record(op, capability, *shapes)
    recorded += [launch for launch in _aot.record_untried(op, capability, chosen.values()) if launch not in recorded]
    if options.unlike is not None:
        same = _aot_amd.capability(options.unlike) if isinstance(options.unlike, str) else options.unlike
        known = set(_aot.record(op, same, *shapes))
        recorded = [launch for launch in recorded if launch not in known]
    if isinstance(arch, str):
        recorded = _aot_amd.without_foreign_options(recorded)
    launches = [launch for launch in recorded if options.kernel in launch.name and options.case in launch.case]
    version = ".".join(map(str, _triton.VERSION))  # some rows of the tables are for one alone
    print(f"{options.op}, {target}, Triton {version}: {len(launches)} launches")
    beside = _peers.Table()
    bad = _show(launches, arch, compiler, gpu, options, beside)
    if options.peers:
        theirs, missing = _peers.launches(capability, options.kernel, options.case)
        print(f"peers, of torch {torch.__version__}: {len(theirs)} launches")
        _show(theirs, arch, compiler, gpu, options, beside)
        print("\n".join([*(f"  missing: {why}" for why in missing), *(beside.lines() if arch == 90 else ())]))
    print("rows, of those that can be tuned, and where they come from:")
    for choice in chosen.values():
        if options.kernel in choice.kernel and len(choice.rows) > 1:
            print(f"  {choice.kernel}, {choice.key}: {choice.origin}")
    return bad


def _show(
    launches: list[Any], arch: int | str, compiler: Any, gpu: Any, options: argparse.Namespace, beside: Any
) -> int:
    """Print what each launch costs, and note its estimates in `beside`; how many have a problem."""
    from foundry_kernels._estimate import estimate

    bad = 0
    for launch in launches:
        try:
            cost = compiler(launch, arch, options.brief)
        except Exception as error:  # some tiles are too much for a compiler
            bad += 1
            print(f"{launch.name:<26} {launch.case:<34} is not compiled  [{launch.settings}]")
            print(f"  PROBLEM: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        problems = cost.problems(gpu)
        bad += bool(problems)
        print(f"{launch.name:<26} {launch.case:<34} {cost.describe(gpu)}  [{launch.settings}]")
        for problem in problems:
            print(f"  PROBLEM: {problem}")
        loops = [] if options.brief else cost.loops()
        if arch == 90:
            beside.add(launch, cost, loops)
        for loop in loops:
            print(f"  {loop}")
            if arch == 90 and (estimated := estimate(loop, cost.warps - cost.idle)):
                print(f"    {estimated}")
        if options.ptx:
            print(cost.assembly())
        if options.sass:
            print(cost.machine_code())
    return bad


def gpu_at_hand(arch: int) -> str | None:
    """The name of this machine's GPU, if it has this compute capability."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return torch.cuda.get_device_name() if 10 * major + minor == arch else None


def check(argv: list[str]) -> int:
    from foundry_kernels.check import main

    return main(argv, ["foundry_kernels " + __version__, "", *versions()])


def tune(argv: list[str]) -> int:
    from foundry_kernels.tune import main

    return main(argv, ["foundry_kernels " + __version__, "", *versions()])


def patch_report(argv: list[str]) -> int:
    """Patch a small model of each family and print how many modules were replaced by which operations."""
    parser = argparse.ArgumentParser(prog="python -m foundry_kernels patch-report", description=patch_report.__doc__)
    parser.add_argument("family", nargs="*", help="model types of transformers (default: all that are supported)")
    options = parser.parse_args(argv)
    from foundry_kernels import patch
    from foundry_kernels.integrations.patch import parts
    from foundry_kernels.integrations.table import LLAMA_LIKE, PATCHED

    unknown = [family for family in options.family if family not in PATCHED]
    if unknown:
        parser.error(f"family must be one of {', '.join(PATCHED)}; got {unknown[0]}")
    try:
        version = importlib.import_module("transformers").__version__
    except ImportError as e:
        parser.error(f"transformers cannot be imported ({e}); pip install transformers")
    from foundry_kernels.integrations.tiny import tiny_model

    rows: list[tuple[str, ...]] = [("family", "norms", "MLP", "attention", "loss", "left as it was")]
    rows.append(tuple("-" * len(title) for title in rows[0]))
    for family in options.family or LLAMA_LIKE:
        rows.append((family, *parts(patch(tiny_model(family)).report())))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print(f"transformers {version}: modules of a two-layer model, and the operations that serve them")
    print("\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
