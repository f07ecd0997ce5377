"""`make cuda-build`: the whole extension compiled and loaded, its CUDA half too, by nvcc and without a GPU.

torch must be a CUDA build: `make cuda-build STACK=2.11`, where the Python at hand has none. It is built in build/cuda,
beside the extension in use; what is proved is that it compiles, links and imports, that every operation with CUDA
sources has registered its kernels, and that the CPU half beside them gives right results.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import gpu_archive
import nvcc
import sanitize

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "cuda"

#: In a process of its own: operators by name, for which the package's extension must have CUDA kernels.
REGISTERED = """
import sys, torch, foundry_kernels as fk
from foundry_kernels.core import extension
assert fk.OPS["rms_norm"].impl("native").devices == ("cpu", "cuda"), extension.build_info()
for name in sys.argv[1:]:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("foundry_kernels::" + name, "CUDA"), name
x, w = torch.randn(5, 96), torch.randn(96)
torch.testing.assert_close(fk.rms_norm(x, w, backend="native"), fk.rms_norm(x, w, backend="reference"))
assert extension.HAS_HOPPER
print(f"loads: CUDA kernels for {extension.build_info()['cuda_architectures']}: {', '.join(sys.argv[1:])}")
"""
#: The same of the extension whose path comes first, which takes the place of the package's.
LOAD = f"""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("foundry_kernels._C", sys.argv.pop(1))
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
{REGISTERED}"""

#: What the library has by default: machine code ("elf"), of which that for sm_90a is attention's for Hopper, and PTX,
#: which newer GPUs compile.
CODE = {("elf", "sm_80"), ("elf", "sm_90"), ("elf", "sm_90a"), ("ptx", "sm_90")}


def toolkit(dryrun: str) -> Path:
    """The toolkit's folder, by what `nvcc --dryrun` prints: the nvcc on the PATH may be a script or a link."""
    found = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    assert found is not None, dryrun
    return Path(os.path.normpath(found[1].strip()))


def variables() -> dict[str, str]:
    """Those of a build by the nvcc at hand, for the default architectures."""
    program = nvcc.nvcc()
    assert program is not None
    said = subprocess.run([program, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    found = environment(toolkit(said), Path(sysconfig.get_path("purelib")))
    return found | {"TORCH_CUDA_ARCH_LIST": sanitize.build_script().CUDA_ARCHITECTURES}


def environment(home: Path, packages: Path) -> dict[str, str]:
    """The variables by which the compilers find headers and libraries: the toolkit's, then those of torch's wheels,
    which have what a small toolkit lacks (cusparse.h), and lack what every toolkit has (crt/)."""
    wheels = sorted((packages / "nvidia").glob("cu[0-9]*"))
    paths = {"CPATH": [home / "include", *(w / "include" for w in wheels)], "LIBRARY_PATH": [w / "lib" for w in wheels]}
    found = {name: [*map(str, own), *filter(None, [os.environ.get(name)])] for name, own in paths.items()}
    return {"CUDA_HOME": str(home), **{name: os.pathsep.join(own) for name, own in found.items() if own}}


def why_not() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build; the older stack's is not: make cuda-build STACK=2.11"
    if nvcc.nvcc() is None:
        return f"nvcc {torch.version.cuda} is needed, on the PATH or in CUDA_HOME/bin"
    return None


def main() -> int:
    if (reason := why_not()) is not None:
        print(f"cuda-build stops here: {reason}", file=sys.stderr)
        return 3
    if (library := compile_into(FOLDER, {})) is None:
        return 1
    check_code(library)
    return subprocess.run([sys.executable, "-c", LOAD, str(library), *operators()], cwd=ROOT).returncode


def compile_into(folder: Path, more: dict[str, str], instruction_sets: str = "all") -> Path | None:
    """Compiles the extension in `folder`, with `more` variables; None if that fails, after printing the log's end."""
    env = os.environ | variables() | more
    folder.mkdir(parents=True, exist_ok=True)
    where = [f"--build-lib={folder}", f"--build-temp={folder}/temp", f"--instruction-sets={instruction_sets}"]
    log = folder / "log.txt"
    print(f"compiling with the toolkit in {env['CUDA_HOME']}; log: {log.relative_to(ROOT)}", flush=True)
    with log.open("w") as file:
        command = [sys.executable, "setup.py", "build_ext", *where]
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        print(log.read_text()[-6000:], file=sys.stderr)
        return None
    library = folder / "foundry_kernels" / gpu_archive.EXTENSION
    print(f"compiled: {library.relative_to(ROOT)}, {library.stat().st_size >> 20} MB", flush=True)
    return library


def check_code(library: Path) -> None:
    found = code_of(library)
    assert found == CODE, f"it has code for {sorted(found)}, not for {sorted(CODE)}"


def code_of(library: Path) -> set[tuple[str, str]]:
    """Kinds of code, and what they are for."""
    import triton  # whose package brings the tool along

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(library)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"Fatbin (elf|ptx) code:\n=+\narch = (sm_\w+)", said))


def operators() -> list[str]:
    """Those that csrc/torch registers for CUDA."""
    text = "".join(path.read_text() for path in sorted((ROOT / "csrc" / "torch").glob("*_cuda.cpp")))
    return re.findall(r'm\.impl\("(\w+)"', text)


if __name__ == "__main__":
    sys.exit(main())
