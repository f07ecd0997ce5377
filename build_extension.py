"""Compiles the extension `foundry_kernels._C` for setup.py.

- csrc/cpu is compiled once per instruction set. A wheel has all sets. A build that stays on this machine (`pip install
  -e .`, `build_ext --inplace`) has only the best one that the processor supports, which halves the build time.
  `--instruction-sets` or FOUNDRY_KERNELS_INSTRUCTION_SETS override this: `all`, `native`, or names separated by commas.
- csrc/torch and the Python module include torch's headers; they are compiled once, several files as one.
- With FOUNDRY_KERNELS_MANYLINUX=1 csrc/wheels is linked in, so that an extension made here loads where glibc is older.
- csrc/cuda is compiled by nvcc if torch is a CUDA build and CUDA_HOME has nvcc. csrc/cuda/hopper is compiled only for
  compute capability 9.0, and only if TORCH_CUDA_ARCH_LIST names it.

MAX_JOBS files are compiled at a time (default: the number of processors), and only files whose inputs changed.
`build_ext --sanitize` builds an extension that reports invalid memory accesses and undefined behaviour, in a folder of
its own (see tests/support/sanitize.py).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from setuptools.errors import BaseError
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

import bootstrap

ROOT = Path(__file__).parent
COMPILER = os.environ.get("CXX", "c++")


def compiler_has(flag: str) -> bool:
    command = [*COMPILER.split(), flag, "-x", "c++", "-fsyntax-only", os.devnull]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


#: Every processor of the architecture supports the first one (csrc/cpu/isa.h).
ISA_FLAGS: dict[str, list[str]] = {}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISA_FLAGS["baseline"] = ["-O2"]  # compiles twice as fast; processors of the last ten years do not use it
    ISA_FLAGS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISA_FLAGS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
    if compiler_has("-mavx512bf16"):
        ISA_FLAGS["avx512_bf16"] = [*ISA_FLAGS["avx512"], "-mavx512bf16"]
        if compiler_has("-mamx-bf16"):
            ISA_FLAGS["amx_bf16"] = [*ISA_FLAGS["avx512_bf16"], "-mamx-tile", "-mamx-bf16"]
elif platform.machine().lower() in ("aarch64", "arm64"):
    ISA_FLAGS["neon"] = []
    if sys.platform == "linux" and compiler_has("-march=armv8.2-a+bf16"):  # isa.cpp asks Linux for it
        ISA_FLAGS["neon_bf16"] = ["-march=armv8.2-a+bf16"]
else:
    ISA_FLAGS["baseline"] = []
LOWEST = next(iter(ISA_FLAGS))
#: Only attention has AMX kernels; all else uses the kernels of this set.
NEEDS = {"amx_bf16": "avx512_bf16"}
#: Instruction sets for which only the files of csrc/cpu with this prefix are compiled (see isa.h).
ISA_SOURCES = {"amx_bf16": "flash_attention"}
#: No -ffast-math: the kernels handle NaN and infinity, and sums keep their order. Contraction to FMA is intended.
FLAGS = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-ffp-contract=fast", "-fno-math-errno"]
#: Without the first, torch's autograd headers include the declarations of all operators. The second silences warnings
#: in these headers.
TORCH_FLAGS = ["-DAT_PER_OPERATOR_HEADERS", "-Wno-array-bounds"]
#: at::parallel_for is in a header: without OpenMP it would run on one thread. The flag is for compiling only, not for
#: linking: torch's OpenMP runtime must provide the symbols, because a second one would bring a second pool of threads.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []
#: AddressSanitizer and UndefinedBehaviorSanitizer, as a library that must be loaded before all others. A finding
#: ends the process. vptr is off because it needs type information that torch hides. null and pointer-overflow are off
#: because they take most of the compile time; AddressSanitizer detects accesses through such pointers anyway. -O0,
#: because optimisation would remove some invalid accesses. Checks are calls: inline ones compile four times slower.
SANITIZE = [
    *("-fsanitize=address,undefined", "-fno-sanitize=vptr,null,pointer-overflow", "-fno-sanitize-recover=all"),
    *("-O0", "-g1"),
]
for wanted in ("--param=asan-instrumentation-with-call-threshold=0", "-shared-libasan"):
    if compiler_has(wanted):  # GCC has the first, Clang the second, which is GCC's default
        SANITIZE.append(wanted)

#: Compute capabilities of the CUDA kernels unless TORCH_CUDA_ARCH_LIST is set: 8.0 runs on 8.x, PTX on newer GPUs.
CUDA_ARCHITECTURES = "8.0;9.0+PTX"
#: For csrc/cuda/hopper: its instructions exist only on 9.0, and code for them runs nowhere else.
HOPPER_FLAG = "-gencode=arch=compute_90a,code=sm_90a"


#: What csrc/wheels has older versions of.
OLD_SYMBOLS = ("exp", "log", "pow", "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE")
MANYLINUX = os.environ.get("FOUNDRY_KERNELS_MANYLINUX", "") not in ("", "0")


def sources(folder: str, suffix: str = ".cpp") -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / folder).glob(f"*{suffix}"))


@cache
def why_no_cuda() -> str | None:
    """Why the extension has no CUDA kernels, and what they need; None if they are compiled."""
    if torch.version.cuda is None:
        return "torch is a CPU build"
    if CUDA_HOME == "none":
        return "CUDA_HOME=none"
    needs = f"torch needs nvcc {torch.version.cuda} in CUDA_HOME or on the PATH"
    nvcc = shutil.which("nvcc", path=f"{CUDA_HOME}/bin")
    if nvcc is None:
        return needs
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError as error:
        return f"nvcc does not run ({error.strerror}), {needs}"
    release = re.search(r"release (\d+)\.\d+", said)
    if release is None:
        return f"nvcc does not print its version, {needs}"
    if release[1] != torch.version.cuda.split(".")[0]:  # torch's rule: headers of another minor version fit
        return f"nvcc is {release[0].removeprefix('release ')}, {needs}"
    return None


def extension() -> CppExtension:
    files = [*sources("."), *sources("torch")]
    if (reason := why_no_cuda()) is not None:
        files = [f for f in files if not f.endswith("_cuda.cpp")]
        flags = [*FLAGS, *TORCH_FLAGS, *OPENMP, '-DFK_CUDA_ARCHITECTURES=""', f'-DFK_WITHOUT_CUDA="{reason}"']
        return CppExtension("foundry_kernels._C", files, extra_compile_args=flags)
    # Without a GPU torch needs this variable; it would find no architecture to compile for and fail.
    named = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
    flags = [*FLAGS, *TORCH_FLAGS, *OPENMP, f'-DFK_CUDA_ARCHITECTURES="{named}"']
    kernels = sources("cuda", ".cu")
    if wants_hopper(named):
        kernels += sources("cuda/hopper", ".cu")
        flags.append("-DFK_HAVE_HOPPER")
    return CUDAExtension(
        "foundry_kernels._C",
        [*files, *kernels],
        extra_compile_args={"cxx": flags, "nvcc": ["-O3", "-lineinfo", "-Xptxas=-v", "-Xfatbin=-compress-all"]},
    )


def wants_hopper(named: str) -> bool:
    """Whether TORCH_CUDA_ARCH_LIST names compute capability 9.0 or, if it names none, a GPU of this machine has it."""
    if named in ("", "native"):
        return any(torch.cuda.get_device_capability(i) == (9, 0) for i in range(torch.cuda.device_count()))
    return any(re.fullmatch(r"(9\.0a?|Hopper)(\+PTX)?", each) for each in re.split(r"[ ;]+", named))


def for_hopper(command: list[str]) -> list[str]:
    """The compile command of a source; files of csrc/cuda/hopper are compiled only for 9.0a."""
    if Path(command[command.index("-c") + 1]).parent.name != "hopper":
        return command
    return [*(flag for flag in command if not flag.startswith("-gencode")), HOPPER_FLAG]


class Build(BuildExtension):
    """Also compiles csrc/cpu per instruction set: BuildExtension does not support flags per file."""

    user_options: ClassVar = [
        *BuildExtension.user_options,
        ("sanitize", None, "build/sanitized, with sanitizers"),
        ("instruction-sets=", None, f"all, native (what this processor has), or of {','.join(ISA_FLAGS)}"),
    ]
    boolean_options: ClassVar = [*BuildExtension.boolean_options, "sanitize"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, use_ninja=False)  # `compile` below replaces it

    def initialize_options(self) -> None:
        super().initialize_options()
        self.sanitize = False
        self.instruction_sets: str | None = None

    def finalize_options(self) -> None:
        asked = self.instruction_sets or os.environ.get("FOUNDRY_KERNELS_INSTRUCTION_SETS")
        self.isas = instruction_sets(asked or ("native" if self.inplace or self.editable_mode else "all"))
        self.lowest = self.isas[0]
        self.defines = [f"-DFK_HAVE_{isa.upper()}" for isa in self.isas[1:]]
        if self.lowest != LOWEST:
            self.defines.append(f"-DFK_LOWEST={self.lowest}")
        if self.sanitize:
            if self.inplace:
                raise ValueError("--sanitize does not support --inplace: it would replace the extension in use")
            self.build_lib, self.build_temp = "build/sanitized", "build/sanitized/temp"
        super().finalize_options()
        self.force = True  # setuptools compares only the times of sources, not of headers

    def build_extensions(self) -> None:
        if self.editable_mode:  # pip uses a new folder each time, which would recompile everything
            self.build_temp = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        try:
            super().build_extensions()
        except (BaseError, OSError, RuntimeError, subprocess.SubprocessError) as error:  # also torch's checks
            sys.exit(f"error: the C++ extension of foundry_kernels was not built: {error}; {bootstrap.WITHOUT}")
        cuda = f"without CUDA kernels: {why_no_cuda()}" if why_no_cuda() else "with CUDA kernels"
        print(f"foundry_kernels: the C++ extension is built for {', '.join(self.isas)}, {cuda}")

    def build_extension(self, ext: Any) -> None:
        ext.sources = units(ext.sources)
        given = ext.extra_compile_args
        flags = given["cxx"] if isinstance(given, dict) else given
        flags += self.defines
        if self.sanitize:
            flags += SANITIZE
            ext.extra_link_args += SANITIZE
        if MANYLINUX:
            ext.extra_link_args += ["-s", *(f"-Wl,--wrap={name}" for name in OLD_SYMBOLS)]
        compile_sources, spawn = self.compiler.compile, self.compiler.spawn

        def compile_all(*args: Any, **kwargs: Any) -> list[str]:
            """Collects BuildExtension's compile commands; one pool runs them and those of the CPU kernels."""
            commands: list[list[str]] = []
            self.compiler.spawn = commands.append
            try:
                objects = compile_sources(*args, **kwargs)
            finally:
                self.compiler.spawn = spawn
            self.compile([*map(for_hopper, commands), *kernels])
            return [*objects, *(target_of(command) for command in kernels)]

        kernels = self.cpu_kernels()
        self.compiler.compile = compile_all
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_sources

    def cpu_kernels(self) -> list[list[str]]:
        """The compile commands of csrc/cpu, the largest files first: they take longest."""
        folder = Path(self.build_temp, "cpu")
        folder.mkdir(parents=True, exist_ok=True)
        commands = []
        for source in sorted(sources("cpu"), key=lambda path: -Path(path).stat().st_size):
            shared = Path(source).name == "isa.cpp"
            for isa in [self.lowest] if shared else self.isas:
                if not Path(source).name.startswith(ISA_SOURCES.get(isa, "")):
                    continue
                target = folder / f"{Path(source).stem}.{isa}.o"
                # A kernel is declared only for its own set, so that a change of other sets does not recompile it.
                own = [f"-DFK_HAVE_{each.upper()}" for each in (isa, NEEDS.get(isa)) if each and each != LOWEST]
                flags = [*FLAGS, *ISA_FLAGS[isa], *own, *(SANITIZE if self.sanitize else [])]
                if shared:
                    flags = [*FLAGS, *self.defines]
                command = [*COMPILER.split(), "-std=c++17", "-fPIC", *flags, f"-DFK_ISA={isa}"]
                commands.append([*command, "-c", source, "-o", str(target)])
        for source in sources("wheels") if MANYLINUX else ():
            target = folder / f"{Path(source).stem}.o"
            commands.append([*COMPILER.split(), "-std=c++17", "-fPIC", *FLAGS, "-c", source, "-o", str(target)])
        return commands

    def compile(self, commands: list[list[str]]) -> None:
        """Runs the commands that are not up to date in parallel and prints progress every few seconds. After a failure
        no new command starts. ninja takes the same time, and every machine that builds would need it."""
        wanted = [command for command in commands if not up_to_date(command)]
        began, shown = time.monotonic(), 0.0
        if wanted:
            print(f"compiling {len(wanted)} files for {', '.join(self.isas)}, {jobs()} at a time", flush=True)
        with ThreadPoolExecutor(jobs()) as pool:
            waiting = {pool.submit(self.compile_one, command) for command in wanted}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=5, return_when=FIRST_COMPLETED)
                    for each in done:
                        each.result()
                    elapsed = time.monotonic() - began
                    if not waiting or elapsed - shown >= 5:
                        print(f"compiled {len(wanted) - len(waiting)} of {len(wanted)}, {elapsed:.0f} s", flush=True)
                        shown = elapsed
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def compile_one(self, command: list[str]) -> None:
        target = target_of(command)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        done = Path(f"{target}.command")
        done.unlink(missing_ok=True)
        began = time.time()
        self.spawn([*command, "-MMD", "-MF", f"{target}.d"])
        done.write_text(str(command))
        os.utime(done, (began, began))  # a file that changed meanwhile then counts as newer


def instruction_sets(asked: str) -> list[str]:
    """The instruction sets to compile, from the lowest, which the processor must support to load the extension."""
    if asked == "native":
        asked = processor_isa() or "all"
    if asked == "all":
        return list(ISA_FLAGS)
    wanted = set(asked.split(","))
    if not wanted <= set(ISA_FLAGS):
        raise SystemExit(f"error: instruction sets must be all, native, or of {', '.join(ISA_FLAGS)}; got {asked}")
    wanted |= {NEEDS[isa] for isa in wanted if isa in NEEDS}
    return [isa for isa in ISA_FLAGS if isa in wanted]


def processor_isa() -> str | None:
    """The best set that both this processor and the compiler support, as csrc/cpu/isa.cpp finds it at run time. None if
    that program does not compile or run."""
    program = Path("build", f"processor_isa-{os.getpid()}")
    program.parent.mkdir(exist_ok=True)
    try:
        command = [*COMPILER.split(), "-DFK_PRINT_PROCESSOR_ISA", "csrc/cpu/isa.cpp", "-o", str(program)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        found = subprocess.run([str(program.resolve())], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    finally:
        program.unlink(missing_ok=True)
    if found == "amx_bf16" and found not in ISA_FLAGS:
        found = "avx512_bf16"
    if found == "avx512_bf16" and found not in ISA_FLAGS:
        found = "avx512"
    return found if found in ISA_FLAGS else LOWEST


def jobs() -> int:
    """How many files are compiled at a time."""
    return int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)


def units(files: Iterable[str]) -> list[str]:
    """Sources that include `files`, one for each kind: most of their compile time goes into torch's headers.

    Kinds are schemas, CPU launches, CUDA launches, and the module itself. .cu files stay as they are. With one or two
    files compiled at a time, all but the CUDA launches are one kind: the second job compiles the kernels meanwhile.
    """
    kinds: dict[str, list[str]] = {}
    alone = []
    for file in sorted(files):
        stem, suffix = Path(file).stem, Path(file).suffix
        if suffix != ".cpp":
            alone.append(file)
            continue
        in_torch = Path(file).parent.name == "torch"
        ending = next((e for e in ("_cpu", "_cuda") if stem.endswith(e)), "_schemas")
        kind = f"torch{ending}" if in_torch else "module"
        kinds.setdefault("torch" if jobs() <= 2 and ending != "_cuda" else kind, []).append(file)
    folder = Path("build", "units")
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    for kind, members in kinds.items():
        text = "".join(f'#include "../../{member}"\n' for member in members)
        target = ROOT / folder / f"{kind}.cpp"
        if not target.exists() or target.read_text() != text:
            target.write_text(text)
    return [*(str(folder / f"{kind}.cpp") for kind in kinds), *alone]


def target_of(command: list[str]) -> str:
    return command[command.index("-o") + 1]


def up_to_date(command: list[str]) -> bool:
    """Whether the target was built by the same command after the last change to any file that it reads."""
    target = target_of(command)
    done, read = Path(f"{target}.command"), Path(f"{target}.d")
    if not (Path(target).exists() and done.exists() and read.exists() and done.read_text() == str(command)):
        return False
    files = re.split(r"(?<!\\)\s+", read.read_text().replace("\\\n", " ").partition(": ")[2].strip())
    try:
        return all(os.stat(file.replace("\\ ", " ")).st_mtime < done.stat().st_mtime for file in files)
    except FileNotFoundError:  # a header was removed
        return False
