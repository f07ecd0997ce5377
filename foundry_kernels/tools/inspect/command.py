"""`python -m foundry_kernels inspect OP`: what Triton kernels cost on a GPU that need not be here."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from foundry_kernels import OPS, _triton
from foundry_kernels._triton import tuning
from foundry_kernels._triton.tuning_file import TuningFileError
from foundry_kernels.tools.inspect import amd, aot, peers
from foundry_kernels.tools.inspect.estimate import estimate


def main(argv: list[str]) -> int:
    """Compile an operation's Triton kernels ahead of time and print what each costs; 1 if one has a problem."""
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
    known = f"{', '.join(map(str, aot.GPUS))}; got {{}} (of AMD's GPUs {', '.join(amd.GPUS)})"
    for name, archs in (("arch", options.arch), ("unlike", [options.unlike] if options.unlike else [])):
        for arch in archs:
            if arch not in aot.GPUS and arch not in amd.GPUS:
                parser.error(f"--{name} must be one of {known.format(arch)}")
    if options.peers and (options.op != "flash_attention" or any(isinstance(arch, str) for arch in options.arch)):
        parser.error("--peers: of flash_attention alone, on NVIDIA's GPUs")
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
    """Print what each launch costs on this architecture; how many have a problem."""
    compiler: Any
    gpu: Any
    if isinstance(arch, str):
        capability, at_hand, target = amd.capability(arch), None, f"AMD {arch} (compiled, never run)"
        compiler, gpu = amd.compile_for, amd.GPUS[arch]
    else:
        capability, at_hand, target = arch, gpu_at_hand(arch), f"compute capability {arch / 10}"
        compiler, gpu = aot.compile_for, aot.GPUS[arch]
    op, shapes = OPS[options.op], (options.all, options.timed)
    with tuning.pretend(options.gpu or at_hand), tuning.watched() as chosen:
        recorded = aot.record(op, capability, *shapes)
    if options.unlike is not None:
        same = amd.capability(options.unlike) if isinstance(options.unlike, str) else options.unlike
        known = set(aot.record(op, same, *shapes))
        recorded = [launch for launch in recorded if launch not in known]
    if isinstance(arch, str):
        recorded = amd.without_foreign_options(recorded)
    launches = [launch for launch in recorded if options.kernel in launch.name and options.case in launch.case]
    version = ".".join(map(str, _triton.VERSION))  # some launch configs are for one alone
    print(f"{options.op}, {target}, Triton {version}: {len(launches)} launches")
    beside = peers.Table()
    bad = _show(launches, arch, compiler, gpu, options, beside)
    if options.peers:
        theirs, missing = peers.launches(capability, options.kernel, options.case)
        print(f"peers, of torch {torch.__version__}: {len(theirs)} launches")
        _show(theirs, arch, compiler, gpu, options, beside)
        print("\n".join([*(f"  missing: {why}" for why in missing), *(beside.lines() if arch == 90 else ())]))
    print("configs that can be tuned, and where they come from:")
    for choice in chosen.values():
        if options.kernel in choice.kernel and len(choice.configs) > 1:
            print(f"  {choice.kernel}, {choice.key}: {choice.origin}")
    return bad


def _show(
    launches: list[Any], arch: int | str, compiler: Any, gpu: Any, options: argparse.Namespace, beside: Any
) -> int:
    """Print what each launch costs, and note its estimates in `beside`; how many have a problem."""
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
