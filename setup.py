"""Builds the extension `foundry_kernels._C` where a compiler is found; the package works without it, and says so.

csrc/cpu is compiled once per instruction set, csrc/torch and the Python module (what knows torch) once, csrc/cuda by
nvcc where torch is a CUDA build and CUDA_HOME has one. All files are compiled side by side, MAX_JOBS at a time
(default: as many as there are processors), and only those again that something changed for. `build_ext --sanitize`
builds an extension that reports invalid memory accesses and undefined behaviour, in a folder of its own (see
tests/sanitize.py).
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import setuptools
import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

if int(setuptools.__version__.split(".")[0]) < 77:  # it would say that project.license is not valid
    found = f"foundry_kernels needs setuptools 77 or newer, not {setuptools.__version__}"
    sys.exit(f"{found}: pip install 'setuptools>=77'")

ROOT = Path(__file__).parent
COMPILER = os.environ.get("CXX", "c++")


def compiler_has(flag: str) -> bool:
    command = [*COMPILER.split(), flag, "-x", "c++", "-fsyntax-only", os.devnull]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


#: The first is what every processor of the architecture has (csrc/cpu/isa.h).
ISA_FLAGS: dict[str, list[str]] = {}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISA_FLAGS["baseline"] = ["-O2"]  # half the time to compile, and no processor of the last ten years runs it
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
#: Instruction sets that only some of csrc/cpu is compiled for, by the beginning of their names (see isa.h).
ISA_SOURCES = {"amx_bf16": "flash_attention"}
#: No -ffast-math: NaN and infinity are handled, sums keep their order. Contraction to fma is wanted.
FLAGS = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-ffp-contract=fast", "-fno-math-errno"]
#: Without it, torch's headers for autograd read the declarations of all its operators.
TORCH_FLAGS = ["-DAT_PER_OPERATOR_HEADERS"]
#: AddressSanitizer and UndefinedBehaviorSanitizer, as a library that must be loaded before all others. Without vptr,
#: which wants type information that torch hides, and without null and pointer-overflow, which take most of the time to
#: compile: AddressSanitizer sees an access through such a pointer. The first finding ends the process. Not optimised,
#: which would remove some invalid accesses, and checked by calls: inline checks take four times as long to compile.
SANITIZE = [
    *("-fsanitize=address,undefined", "-fno-sanitize=vptr,null,pointer-overflow", "-fno-sanitize-recover=all"),
    *("-O0", "-g1"),
]
for wanted in ("--param=asan-instrumentation-with-call-threshold=0", "-shared-libasan"):
    if compiler_has(wanted):  # GCC has the first; Clang the second, which is GCC's only way
        SANITIZE.append(wanted)

#: Compute capabilities of the CUDA half, unless TORCH_CUDA_ARCH_LIST names them: 8.0 serves 8.x, the PTX what is newer.
CUDA_ARCHITECTURES = "8.0;9.0+PTX"
#: CUDA_HOME=none leaves the CUDA half out.
WITH_CUDA = torch.version.cuda is not None and shutil.which("nvcc", path=f"{CUDA_HOME}/bin") is not None


def sources(folder: str, suffix: str = ".cpp") -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / folder).glob(f"*{suffix}"))


def extension() -> CppExtension:
    files = [*sources("."), *sources("torch")]
    if not WITH_CUDA:
        files = [f for f in files if not f.endswith("_cuda.cpp")]
        flags = [*FLAGS, *TORCH_FLAGS, *OPENMP, '-DFK_CUDA_ARCHITECTURES=""']
        if torch.version.cuda is not None:
            print(f"foundry_kernels: no CUDA kernels: nvcc {torch.version.cuda} is needed, in CUDA_HOME or on the PATH")
        return CppExtension("foundry_kernels._C", files, extra_compile_args=flags)
    # Without a GPU and without this variable torch finds no architecture to compile for and fails.
    named = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
    flags = [*FLAGS, *TORCH_FLAGS, *OPENMP, f'-DFK_CUDA_ARCHITECTURES="{named}"']
    return CUDAExtension(
        "foundry_kernels._C",
        [*files, *sources("cuda", ".cu")],
        extra_compile_args={"cxx": flags, "nvcc": ["-O3", "-lineinfo", "-Xptxas=-v"]},
    )


class Build(BuildExtension):
    """Compiles csrc/cpu per instruction set beside what BuildExtension does, which has no flags per file."""

    user_options: ClassVar = [
        *BuildExtension.user_options,
        ("sanitize", None, "build/sanitized, with sanitizers"),
        ("instruction-sets=", None, f"comma-separated, {LOWEST} among them (default: {','.join(ISA_FLAGS)})"),
    ]
    boolean_options: ClassVar = [*BuildExtension.boolean_options, "sanitize"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, use_ninja=False)  # `compile` below takes its place

    def initialize_options(self) -> None:
        super().initialize_options()
        self.sanitize = False
        self.instruction_sets: str | None = None

    def finalize_options(self) -> None:
        wanted = set(ISA_FLAGS) if self.instruction_sets is None else set(self.instruction_sets.split(","))
        if not {LOWEST} <= wanted <= set(ISA_FLAGS):
            raise ValueError(f"--instruction-sets must be {LOWEST} and any of {', '.join(ISA_FLAGS)}; got {wanted}")
        if "amx_bf16" in wanted:
            wanted.add("avx512_bf16")  # whose kernels it runs where it has none
        self.isas = [isa for isa in ISA_FLAGS if isa in wanted]
        self.defines = [f"-DFK_HAVE_{isa.upper()}" for isa in self.isas if isa != LOWEST]
        if self.sanitize:
            if self.inplace:
                raise ValueError("--sanitize does not go with --inplace: it would replace the extension in use")
            self.build_lib, self.build_temp = "build/sanitized", "build/sanitized/temp"
        super().finalize_options()
        self.force = True  # setuptools compares times of sources alone, and not of headers

    def build_extensions(self) -> None:
        if self.editable_mode:  # pip names a new folder each time, in which everything would be compiled again
            self.build_temp = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        must_build = os.environ.get("CI") or self.sanitize
        for ext in self.extensions:
            ext.optional = not must_build
        try:
            super().build_extensions()
        except Exception as error:  # BuildExtension asks for the compiler's version first
            if must_build:
                raise
            self.say_that_it_was_not_built(error)

    def build_extension(self, ext: Any) -> None:
        given = ext.extra_compile_args
        flags = given["cxx"] if isinstance(given, dict) else given
        flags += self.defines
        if self.sanitize:
            flags += SANITIZE
            ext.extra_link_args += SANITIZE
        compile_sources, spawn = self.compiler.compile, self.compiler.spawn

        def compile_all(*args: Any, **kwargs: Any) -> list[str]:
            """BuildExtension says how each of its sources is compiled; one pool compiles these and the CPU kernels."""
            commands: list[list[str]] = []
            self.compiler.spawn = commands.append
            try:
                objects = compile_sources(*args, **kwargs)
            finally:
                self.compiler.spawn = spawn
            self.compile([*commands, *kernels])
            return [*objects, *(target_of(command) for command in kernels)]

        kernels = self.cpu_kernels()
        self.compiler.compile = compile_all
        try:
            super().build_extension(ext)
        except Exception as error:
            if not ext.optional:
                raise
            self.say_that_it_was_not_built(error)
        finally:
            self.compiler.compile = compile_sources

    def say_that_it_was_not_built(self, error: Exception) -> None:
        print(f"\nfoundry_kernels: the C++ extension was not built: {error}", file=sys.stderr)
        print("foundry_kernels: the reference and Triton backends work without it.\n", file=sys.stderr)

    def cpu_kernels(self) -> list[list[str]]:
        """The commands that compile csrc/cpu, those of the largest files first: they take longest."""
        folder = Path(self.build_temp, "cpu")
        folder.mkdir(parents=True, exist_ok=True)
        commands = []
        for source in sorted(sources("cpu"), key=lambda path: -Path(path).stat().st_size):
            shared = Path(source).name == "isa.cpp"
            for isa in [LOWEST] if shared else self.isas:
                if not Path(source).name.startswith(ISA_SOURCES.get(isa, "")):
                    continue
                target = folder / f"{Path(source).stem}.{isa}.o"
                flags = [*FLAGS, *ISA_FLAGS[isa], *(SANITIZE if self.sanitize else []), *self.defines]
                command = [*COMPILER.split(), "-std=c++17", "-fPIC", *flags, f"-DFK_ISA={isa}"]
                commands.append([*command, "-c", source, "-o", str(target)])
        return commands

    def compile(self, commands: list[list[str]]) -> None:
        """All that are not up to date, side by side. The first that fails stops those that have not begun."""
        wanted = [command for command in commands if not up_to_date(command)]
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            try:
                list(pool.map(self.compile_one, wanted))
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
        os.utime(done, (began, began))  # a file that changed meanwhile is newer


def target_of(command: list[str]) -> str:
    return command[command.index("-o") + 1]


def up_to_date(command: list[str]) -> bool:
    """Whether it was done by the same command, after the last change to any file that it read."""
    target = target_of(command)
    done, read = Path(f"{target}.command"), Path(f"{target}.d")
    if not (Path(target).exists() and done.exists() and read.exists() and done.read_text() == str(command)):
        return False
    files = re.split(r"(?<!\\)\s+", read.read_text().replace("\\\n", " ").partition(": ")[2].strip())
    try:
        return all(os.stat(file.replace("\\ ", " ")).st_mtime < done.stat().st_mtime for file in files)
    except FileNotFoundError:  # a header that is gone
        return False


# at::parallel_for is a header: without OpenMP it would run on one thread. Only compiled so, not linked: the symbols
# must come from the OpenMP runtime that torch has loaded, for a second one would bring a second pool of threads.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []

if __name__ == "__main__":
    setup(ext_modules=[extension()], cmdclass={"build_ext": Build})
