"""`python -m foundry_kernels inspect OP`: the cost of Triton kernels on a GPU that need not be present."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from foundry_kernels import OPS, _triton
from foundry_kernels._triton import tuning
from foundry_kernels._triton.tuning_file import TuningFileError
from foundry_kernels.tools.inspect import amd, aot


def main(argv: list[str]) -> int:
    """Compile an operation's Triton kernels ahead of time and print the cost of each. The exit status is 1 if one has a
    problem."""
    parser = argparse.ArgumentParser(prog="python -m foundry_kernels inspect", description=main.__doc__)
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
    parser.add_argument("--case", default="", help="only launches whose first case has a name that contains this")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--all", action="store_true", help="all shapes, not only the operation's selected ones")
    shapes.add_argument("--timed", action="store_true", help="only shapes that are selected or benchmarked")
    parser.add_argument("--unlike", type=_arch, metavar="CC", help="omit launches that are the same on CC")
    parser.add_argument("--gpu", help="use the configs that were measured on this GPU (torch's name for it)")
    parser.add_argument("--tuning", metavar="FILE", help="measured configs, instead of the cache folder's")
    parser.add_argument("--brief", action="store_true", help="faster: omit loops, and bytes in flight to registers")
    parser.add_argument("--ptx", action="store_true", help="print the PTX (for AMD, the LLVM IR)")
    parser.add_argument("--sass", action="store_true", help="print the machine code (for AMD, the assembly)")
    options = parser.parse_args(argv)
    known = f"{', '.join(map(str, aot.GPUS))}; got {{}} (of AMD's GPUs {', '.join(amd.GPUS)})"
    for name, archs in (("arch", options.arch), ("unlike", [options.unlike] if options.unlike else [])):
        for arch in archs:
            if arch not in aot.GPUS and arch not in amd.GPUS:
                parser.error(f"--{name} must be one of {known.format(arch)}")
    if (reason := aot.why_not()) is not None:
        parser.error(reason)
    try:
        tuning.use(options.tuning)
    except (OSError, TuningFileError) as error:
        parser.error(f"--tuning: {error}")
    return 1 if sum(_inspect_for(arch, options) for arch in options.arch) else 0


def _arch(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _inspect_for(arch: int | str, options: argparse.Namespace) -> int:
    """Prints the cost of each launch on this architecture. Returns the number of launches with a problem."""
    compiler: Any
    gpu: Any
    if isinstance(arch, str):
        capability, present, target = amd.capability(arch), None, f"AMD {arch} (compiled, never run)"
        compiler, gpu = amd.compile_for, amd.GPUS[arch]
    else:
        capability, present, target = arch, current_gpu(arch), f"compute capability {arch / 10}"
        compiler, gpu = aot.compile_for, aot.GPUS[arch]
    op, shapes = OPS[options.op], (options.all, options.timed)
    with tuning.pretend(options.gpu or present), tuning.watched() as chosen:
        recorded = aot.record(op, capability, *shapes)
    if options.unlike is not None:
        same = amd.capability(options.unlike) if isinstance(options.unlike, str) else options.unlike
        known = set(aot.record(op, same, *shapes))
        recorded = [launch for launch in recorded if launch not in known]
    if isinstance(arch, str):
        recorded = amd.without_foreign_options(recorded)
    launches = [launch for launch in recorded if options.kernel in launch.name and options.case in launch.case]
    version = ".".join(map(str, _triton.VERSION))  # some configs depend on it
    print(f"{options.op}, {target}, Triton {version}: {len(launches)} launches")
    bad = _show(launches, arch, compiler, gpu, options)
    print("configs that can be tuned, and their origin:")
    for choice in chosen.values():
        if options.kernel in choice.kernel and len(choice.configs) > 1:
            print(f"  {choice.kernel}, {choice.key}: {choice.origin}")
    return bad


def _show(launches: list[Any], arch: int | str, compiler: Any, gpu: Any, options: argparse.Namespace) -> int:
    """Prints the cost of each launch. Returns the number of launches with a problem."""
    bad = 0
    for launch in launches:
        try:
            cost = compiler(launch, arch, options.brief)
        except Exception as error:  # compilers fail on some tiles
            bad += 1
            print(f"{launch.name:<26} {launch.case:<34} does not compile  [{launch.settings}]")
            print(f"  PROBLEM: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        problems = cost.problems(gpu)
        bad += bool(problems)
        print(f"{launch.name:<26} {launch.case:<34} {cost.describe(gpu)}  [{launch.settings}]")
        for problem in problems:
            print(f"  PROBLEM: {problem}")
        for loop in [] if options.brief else cost.loops():
            print(f"  {loop}")
        if options.ptx:
            print(cost.assembly())
        if options.sass:
            print(cost.machine_code())
    return bad


def current_gpu(arch: int) -> str | None:
    """The name of the current GPU if it has this compute capability."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return torch.cuda.get_device_name() if 10 * major + minor == arch else None
