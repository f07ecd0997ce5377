"""What build_extension.py compiles, and what bootstrap.py says of a machine that lacks something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import sanitize
from programs import fake

from foundry_kernels.core import extension

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "bootstrap.py"


@pytest.fixture(scope="module")
def script() -> types.ModuleType:
    return sanitize.build_script()


def test_a_build_for_this_machine_has_the_best_set_of_its_processor(script: types.ModuleType) -> None:
    info = extension.build_info()
    if not info:
        pytest.skip(str(extension.MISSING))
    native = script.instruction_sets("native")
    assert native[-1] == info["processor"]
    assert len(native) <= 2
    assert info["usable_instruction_sets"][-1] == info["processor"], "make test compiles every instruction set"


def test_instruction_sets_by_name(script: types.ModuleType) -> None:
    known = list(script.ISA_FLAGS)
    assert script.instruction_sets("all") == known
    assert script.instruction_sets(",".join(reversed(known))) == known
    if "amx_bf16" in known:
        assert script.instruction_sets("amx_bf16") == ["avx512_bf16", "amx_bf16"]
    with pytest.raises(SystemExit, match=r"must be all, native, or of .*; got avx3"):
        script.instruction_sets("avx3")


def test_every_source_is_in_one_unit(script: types.ModuleType) -> None:
    sources = [*script.sources("."), *script.sources("torch")]
    units = script.units([*sources, "csrc/cuda/rms_norm.cu"])
    assert units[-1] == "csrc/cuda/rms_norm.cu"
    held = [line.split('"../../')[1][:-1] for unit in units[:-1] for line in (ROOT / unit).read_text().splitlines()]
    assert sorted(held) == sorted(sources)
    assert len(units) <= 5


def test_hopper_kernels_are_compiled_where_its_architecture_is_named(script: types.ModuleType) -> None:
    for named in ("8.0;9.0+PTX", "9.0a", "8.0 9.0a+PTX", "Hopper", script.CUDA_ARCHITECTURES):
        assert script.wants_hopper(named), named
    assert not script.wants_hopper("8.0+PTX;10.0a;12.0")


@pytest.mark.parametrize("named", ["", "native"])
@pytest.mark.parametrize(("gpus", "wanted"), [([(8, 0), (9, 0)], True), ([(10, 0)], False), ([], False)])
def test_without_a_name_the_gpus_at_hand_decide(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, named: str, gpus: list[tuple[int, int]], wanted: bool
) -> None:
    monkeypatch.setattr(script.torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(script.torch.cuda, "get_device_capability", gpus.__getitem__)
    assert script.wants_hopper(named) is wanted


def test_hopper_sources_are_compiled_for_it_alone(script: types.ModuleType) -> None:
    """What torch adds to every .cu file stays with the others."""
    targets = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=compute_90"]

    def command(source: str) -> list[str]:
        return ["nvcc", "-I.", "-c", source, "-o", "out.o", "-O3", *targets, "-std=c++20"]

    for source in script.sources("cuda", ".cu"):
        assert script.for_hopper(command(source)) == command(source)
    hopper = script.sources("cuda/hopper", ".cu")
    assert "csrc/cuda/hopper/tensor_map.cu" in hopper
    for source in hopper:
        changed = script.for_hopper(command(source))
        assert [flag for flag in changed if "arch" in flag] == ["-gencode=arch=compute_90a,code=sm_90a"]
        assert [flag for flag in changed if "arch" not in flag] == [
            flag for flag in command(source) if flag not in targets
        ]


@pytest.mark.parametrize(("lowest", "runs"), [("baseline", "1"), ("neon_bf16", "0")])
def test_an_extension_for_other_processors_says_so(
    script: types.ModuleType, tmp_path: Path, lowest: str, runs: str
) -> None:
    """The module refuses to load where `isa_usable(Isa::lowest)` is false."""
    if "baseline" not in script.ISA_FLAGS:
        pytest.skip("x86-64 only")
    main = '#include <cstdio>\nint main() { std::printf("%d", foundry::isa_usable(foundry::Isa::lowest)); }\n'
    source, program = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text(f'#include "{ROOT / "csrc" / "cpu" / "isa.cpp"}"\n{main}')
    subprocess.run([*script.COMPILER.split(), f"-DFK_LOWEST={lowest}", str(source), "-o", str(program)], check=True)
    assert subprocess.run([str(program)], capture_output=True, text=True).stdout == runs


@pytest.mark.parametrize(
    ("release", "why"),
    [
        ("13.0", None),
        ("13.2", None),
        ("12.4", "nvcc is 12.4, torch needs nvcc 13.0 in CUDA_HOME or on the PATH"),
        (None, "torch needs nvcc 13.0 in CUDA_HOME or on the PATH"),
        ("", "nvcc does not print its version, torch needs nvcc 13.0 in CUDA_HOME or on the PATH"),
    ],
)
def test_another_cuda_builds_the_cpu_half(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str | None, why: str | None
) -> None:
    if release is not None:
        fake(tmp_path / "bin", "nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.88'")
    monkeypatch.setattr(script.torch.version, "cuda", "13.0")
    monkeypatch.setattr(script, "CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    script.why_no_cuda.cache_clear()
    try:
        assert script.why_no_cuda() == why
        if why is not None:
            extension = script.extension()
            assert f'-DFK_WITHOUT_CUDA="{why}"' in extension.extra_compile_args
            assert not any("cuda" in Path(source).name for source in extension.sources)
    finally:
        script.why_no_cuda.cache_clear()


def bootstrap(tmp_path: Path, code: str = "", *packages: str, **variables: str) -> str:
    """The one line that it ends with, after `code` has changed the machine that it sees."""
    script = tmp_path / "run.py"
    script.write_text(
        f"import sys, runpy\n{code}\nsys.argv = ['bootstrap.py', {str(tmp_path / 'venv')!r}, *{packages!r}]\n"
        f"runpy.run_path({str(BOOTSTRAP)!r}, run_name='__main__')\n"
    )
    env = {**os.environ, "PIP_NO_INPUT": "1", **variables}
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize(
    ("code", "variables", "says"),
    [
        ("sys.version_info = (3, 10, 4)", {}, "needs Python 3.11 or newer; {python} is 3.10.4: make PYTHON=python3.11"),
        ("sys.modules['ensurepip'] = None", {}, "cannot make virtual environments: apt-get install python3-venv"),
        ("", {"CXX": "no-such-c++"}, "there is no C++ compiler, no-such-c++: apt-get install g++, or set CXX"),
        ("import sysconfig\nsysconfig.get_paths = lambda: {'include': '/none'}", {}, "apt-get install python3-dev"),
    ],
    ids=["python", "venv", "compiler", "headers"],
)  # fmt: skip
def test_what_a_machine_lacks_is_said_in_one_line(
    tmp_path: Path, code: str, variables: dict[str, str], says: str
) -> None:
    assert says.format(python=sys.executable) in bootstrap(tmp_path, code, **variables)
    assert not (tmp_path / "venv").exists()


def test_without_a_network(tmp_path: Path) -> None:
    """Packages from an address at which nobody listens."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(shutil.which(sys.executable) or sys.executable)
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
    }
    said = bootstrap(tmp_path, "", "a-package-that-is-not-there", **nowhere)
    assert "cannot download packages; is there a network? pip: ERROR" in said
