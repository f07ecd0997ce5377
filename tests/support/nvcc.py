"""Compiles csrc/cuda with nvcc and prints the cost of each kernel: `python tests/support/nvcc.py`. It fails for spills,
and for wgmma that ptxas serialises.

The output of ptxas and the machine code are cached in build/nvcc by the content of the sources, so that only changes
are compiled again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "build" / "nvcc"
KERNELS = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
#: Sources for compute capability 9.0 only, with launches but no kernels.
WITHOUT_KERNELS = ("attention_backward", "tensor_map")
HOPPER = sorted(p for p in (ROOT / "csrc" / "cuda" / "hopper").glob("*.cu") if p.stem not in WITHOUT_KERNELS)
ARCHITECTURES = ("80", "90a")
#: The compiled sources and their architectures.
JOBS = [*((source, arch) for source in KERNELS for arch in ARCHITECTURES), *((source, "90a") for source in HOPPER)]

#: Allowed bytes of stack: two numbers, which are read once for each head and once at the end of masked tiles; and of
#: Hopper's forward kernels with options one, which is read and written once for a tile of rows.
STACK = {
    **{f"attention_backward_tiles<{dtype}, 128, 4, false>": 8 for dtype in ("bfloat16", "__half")},
    **{
        f"hopper::forward::attention_forward<{dtype}, hopper::forward::Shape<{width}, {width}, 0>, true>": 8
        for dtype in ("bfloat16", "__half")
        for width in (192, 256)
    },
}


@dataclass(frozen=True)
class Kernel:
    name: str
    registers: int
    stack: int
    spilled: int
    shared: int
    #: ptxas's warning about wgmma that it serialises or orders with additional instructions.
    warning: str = ""

    @property
    def problem(self) -> str:
        if self.warning:
            return self.warning
        if self.stack <= STACK.get(self.name, 0):
            return ""
        if self.spilled:
            return f"{self.spilled} bytes of registers are spilled"
        return f"{self.stack} bytes of stack"


def nvcc() -> str | None:
    """nvcc, from CUDA_HOME or the PATH."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    return found or shutil.which("nvcc")


def compile_kernels(source: Path, arch: str) -> list[Kernel]:
    """Raises RuntimeError with nvcc's output, and with advice if the host compiler is too new."""
    return parse(_kept(source, arch).with_suffix(".txt").read_text())


def _kept(source: Path, arch: str) -> Path:
    """The path of the machine code. The output of ptxas has the suffix txt."""
    program = nvcc()
    assert program is not None
    kept = REPORTS / f"{source.stem}-{arch}.{_content(source, program)}.cubin"
    if not kept.exists() or not kept.with_suffix(".txt").exists():
        report, code = _compile(program, source, arch)
        REPORTS.mkdir(parents=True, exist_ok=True)
        for target, content in ((kept.with_suffix(".txt"), report.encode()), (kept, code)):
            partial = target.with_suffix(f".{os.getpid()}.tmp")  # another process may be writing it too
            partial.write_bytes(content)
            partial.rename(target)
    return kept


def _content(source: Path, program: str) -> str:
    """Returns a digest of everything that the report depends on."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    headers = [p for folder in ("common", "cuda") for p in sorted((ROOT / "csrc" / folder).rglob("*.*h"))]
    texts = [version, *(p.read_text() for p in (Path(__file__), source, *headers))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _compile(program: str, source: Path, arch: str) -> tuple[str, bytes]:
    """The output of ptxas, and the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        target = ["-gencode", f"arch=compute_{arch},code=sm_{arch}", "-o", str(Path(folder) / "out.o")]
        keep = ["--keep", "--keep-dir", folder]
        command = [program, "-std=c++17", "-O3", "-Xptxas=-v", *keep, *target, "-c", str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        code = [p.read_bytes() for p in Path(folder).glob("*.cubin")]
    if done.returncode:
        hint = ""
        if "unsupported GNU version" in done.stderr or "unsupported clang version" in done.stderr:
            hint = (
                "\nThis nvcc is older than the host compiler allows: name an older one with NVCC_CCBIN=/usr/bin/g++-N"
            )
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr.strip()}{hint}")
    [found] = code
    return done.stderr, found


def parse(report: str) -> list[Kernel]:
    """Parses the output of `ptxas -v`; each kernel has an entry."""
    warnings: dict[str, list[str]] = {}
    for line in re.findall(r"\(C75\d\d\) (.*)", report):
        named = re.fullmatch(r"(.*?) (?:in|for) (?:the )?function '([^']+)'.*", line)
        assert named is not None, line
        warnings.setdefault(named[2], []).append(named[1])
    kernels = []
    for entry in re.split(r"Compiling entry function ", report)[1:]:
        mangled = re.match(r"'([^']+)'", entry)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        used = re.search(r"Used (\d+) registers", entry)
        assert mangled is not None, entry
        assert frame is not None, entry
        assert used is not None, entry
        shared = re.search(r"(\d+) bytes smem", entry)
        stack, stores, loads = map(int, frame.groups())
        numbers = int(used[1]), stack, stores + loads, int(shared[1]) if shared else 0
        kernels.append(Kernel(_readable(mangled[1]), *numbers, "; ".join(warnings.get(mangled[1], []))))
    return kernels


def _readable(mangled: str) -> str:
    if shutil.which("c++filt") is None:
        return mangled
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True).stdout.strip()
    for noise in ("void ", "foundry::cuda::", "foundry::", "(anonymous namespace)::", "__nv_", "(int)"):
        name = name.replace(noise, "")
    name = re.sub(r"_GLOBAL__N__\w+::|_NV_ANON_NAMESPACE::", "", name)
    return re.sub(r"\(\w+\)(\d)", r"\1", name).split("(")[0]  # enumerators are numbers


def machine_code(source: Path, arch: str) -> dict[str, str]:
    """The output of nvdisasm, by kernel."""
    # This module is also a script, which may run without the installed package.
    from foundry_kernels.tools.inspect.aot import run_on_cubin, tool

    text = run_on_cubin([tool("nvdisasm"), "-c"], _kept(source, arch).read_bytes())
    found = {}
    for part in re.split(r"(?=\.section\s+\.text\.)", text)[1:]:
        mangled = re.match(r"\.section\s+\.text\.(\w+)", part)
        assert mangled is not None, part[:100]
        found[_readable(mangled[1])] = part
    return found


def inner_loops(source: Path, arch: str) -> dict[str, list[Any]]:
    """The innermost loops with matmuls of each kernel, from machine code (`foundry_kernels.tools.inspect.sass`)."""
    from foundry_kernels.tools.inspect.sass import inner_loops as loops_of

    return {name: loops_of(code) for name, code in machine_code(source, arch).items()}


def main() -> int:
    if nvcc() is None:
        print("nvcc is not here (neither in CUDA_HOME/bin nor on the PATH): the CUDA kernels were not compiled")
        return 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda job: compile_kernels(*job), JOBS))
    bad = 0
    for (source, arch), kernels in zip(JOBS, results, strict=True):
        print(f"{source.name}, sm_{arch}: {len(kernels)} kernels")
        for k in kernels:
            note = f"  PROBLEM: {k.problem}" if k.problem else ""
            print(f"  {k.registers:>3} registers  {k.stack} B stack  {k.shared:>5} B shared  {k.name}{note}")
            bad += bool(k.problem)
    print_attention_loops()
    print_hopper_loops()
    return 1 if bad else 0


def print_attention_loops() -> None:
    """Prints the loops without masks of attention's bfloat16 kernels."""
    from foundry_kernels.tools.inspect.aot import tool

    try:
        tool("nvdisasm")
    except FileNotFoundError as error:
        print(f"no machine code: {error}")
        return
    for arch in ("80", "89"):
        for part in ("forward", "backward"):
            loops = inner_loops(ROOT / "csrc" / "cuda" / f"flash_attention_{part}_tiles.cu", arch)
            for name, several in sorted(loops.items()):
                if several and re.search("bfloat16.*(, 0|false)>", name):
                    x = clean_loop(several)
                    print(f"sm_{arch}  {name}: {x.instructions / x.counts['matmul']:.2f} instructions a matmul")


def print_hopper_loops() -> None:
    """Prints the loop without masks, which is the shortest, of each kernel of csrc/cuda/hopper."""
    from wgmma_steps import product_loops

    for source in HOPPER:
        for name, code in sorted(machine_code(source, "90a").items()):
            if loops := [loop for loop in product_loops(code) if loop.steps]:
                print(f"sm_90a  {name}: {min(loops, key=lambda loop: loop.instructions)}")


def clean_loop(loops: list[Any]) -> Any:
    """The loop without masks, which has fewer instructions."""
    return min(loops, key=lambda loop: loop.instructions)


if __name__ == "__main__":
    sys.exit(main())
