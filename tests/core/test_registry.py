"""Choice of a backend, its refusals, and imports where something is missing."""

from __future__ import annotations

import re
import subprocess
import textwrap

import fresh
import pytest
import torch

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.core.registry import Impl, OpSpec, override, register, resolve
from foundry_kernels.tools.environment import cuda_architectures

NATIVE = extension.MISSING is None


def spec(*impls: Impl) -> OpSpec:
    return OpSpec("sample", lambda x: x, impls, "sample")


def test_auto_takes_the_first_usable_row() -> None:
    reference, native = Impl("reference", lambda: "r"), Impl("native", lambda: "n", ("cpu",), (torch.float32,))
    both = spec(reference, native)
    assert resolve(both, "auto", torch.ones(1)) is native.fn
    assert resolve(both, "auto", torch.ones(1, dtype=torch.float64)) is reference.fn
    assert resolve(both, "auto", torch.ones(1, device="meta")) is reference.fn
    missing = Impl("native", lambda: "n", missing="not built")
    assert resolve(spec(reference, missing), "auto", torch.ones(1)) is reference.fn


def test_auto_on_the_cpu_never_interprets() -> None:
    reference, triton = Impl("reference", lambda: "r"), Impl("triton", lambda: "t", ("cpu",))
    assert resolve(spec(triton, reference), "auto", torch.ones(1)) is reference.fn


def test_a_named_backend_is_used_or_raises_with_every_reason() -> None:
    op = spec(
        Impl("reference", lambda: "r"),
        Impl("native", lambda: "n", missing="not built"),
        Impl("triton", lambda: "t", ("cuda",)),
    )
    with pytest.raises(fk.BackendUnavailable) as error:
        resolve(op, "native", torch.ones(1))
    message = str(error.value)
    assert "backend 'native' does not support float32 on cpu" in message
    assert "reference: usable" in message
    assert "native: not built" in message
    assert "triton: runs on cuda, not on cpu" in message


def test_no_backend_at_all() -> None:
    with pytest.raises(fk.BackendUnavailable, match=r"no backend cannot|no backend") as error:
        resolve(spec(Impl("native", lambda: "n", missing="not built")), "auto", torch.ones(1))
    assert "sample has no triton kernel" in str(error.value)


def test_an_override_lasts_for_its_block() -> None:
    native = Impl("native", lambda: "n", ("cpu",))
    op = spec(Impl("reference", lambda: "r"), native)

    def other() -> str:
        return "o"

    with override(op, "native", fn=other) as changed:
        assert resolve(op, "auto", torch.ones(1)) is other
        assert (changed.fn, changed.devices) == (other, ("cpu",))
        with pytest.raises(fk.BackendUnavailable), override(op, "native", devices=("cuda",)):
            resolve(op, "native", torch.ones(1))
        assert resolve(op, "native", torch.ones(1)) is other
    assert op.impl("native") is native
    with pytest.raises(ZeroDivisionError), override(op, "reference", missing="gone"):
        _ = 1 / 0
    assert resolve(op, "reference", torch.ones(1))() == "r"
    with pytest.raises(KeyError, match="sample has no triton kernel"), override(op, "triton", missing="gone"):
        pass


def test_a_compiled_call_sees_an_override() -> None:
    """What `resolve` reads is guarded: a graph of the kernel before is not used for the one after."""
    compiled = torch.compile(fk.swiglu, fullgraph=True, backend="eager")
    x = torch.ones(2, 4)
    before = compiled(x, x, backend="reference")
    with override(fk.OPS["swiglu"], "reference", fn=lambda gate, up: gate + 41):
        assert torch.equal(compiled(x, x, backend="reference"), x + 41)
    assert torch.equal(compiled(x, x, backend="reference"), before)


@pytest.mark.parametrize("name", ["cuda", "", "Triton", None])
def test_unknown_backend(name: object) -> None:
    with pytest.raises(ValueError, match="backend must be one of auto, reference, triton, native"):
        fk.rms_norm(torch.ones(2, 2), backend=name)  # type: ignore[arg-type]


def test_a_name_registers_once() -> None:
    with pytest.raises(ValueError, match="registered already"):
        register(fk.OPS["rms_norm"])


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process, without the interpreter that these tests switch on."""
    import os

    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return fresh.python("-c", textwrap.dedent(code), env=env)


BLOCK = """
    import sys
    for name in {names!r}:
        sys.modules[name] = None
"""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param((), id="all-there"),
        pytest.param(("triton",), id="no-triton", marks=pytest.mark.slow),
        pytest.param(("foundry_kernels._C",), id="no-extension", marks=pytest.mark.slow),
        pytest.param(
            ("triton", "foundry_kernels._C", "numpy", "matplotlib", "tqdm", "pytest", "transformers"),
            id="nothing-optional",
        ),
    ],
)
def test_import_where_something_is_missing(names: tuple[str, ...]) -> None:
    """The package imports and works, forward and backward, through what is left; what is missing explains itself."""
    code = (
        BLOCK.format(names=names)
        + """
    import torch
    import foundry_kernels as fk
    x = torch.randn(3, 8, requires_grad=True)
    fk.rms_norm(x, torch.ones(8)).sum().backward()
    fk.swiglu(x, x); fk.flash_attention(x[None, None], x[None, None], x[None, None])
    for backend in ("triton", "native"):
        try:
            fk.rms_norm(x, backend=backend)
            print(backend, "works")
        except fk.BackendUnavailable as error:
            print(error)
    """
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    if "triton" in names:
        assert "triton: Triton does not import" in done.stdout
    else:
        assert "triton: runs on cuda, not on cpu" in done.stdout
    if "foundry_kernels._C" in names:
        assert "native: the C++ extension is not built" in done.stdout
    elif NATIVE:
        assert "native works" in done.stdout


@pytest.mark.parametrize(
    ("compiled", "gpu"),
    [
        pytest.param(False, False, id="eager"),
        pytest.param(True, False, id="compiled", marks=pytest.mark.slow),
        pytest.param(False, True, id="gpu"),
    ],
)
def test_the_first_call_without_the_extension_says_so(compiled: bool, gpu: bool) -> None:
    """Once, and only where the extension would serve the call; a GPU that Triton serves needs none."""
    code = """
    import sys
    sys.modules["foundry_kernels._C"] = None
    import warnings, torch, foundry_kernels as fk
    from foundry_kernels.core.registry import override
    torch.cuda.is_available = lambda: {gpu}
    x, calls = torch.randn(3, 8), []
    def count(graph, inputs):
        calls.append(graph)
        return graph.forward
    norm = torch.compile(fk.rms_norm, fullgraph=True, backend=count) if {compiled} else fk.rms_norm
    with warnings.catch_warnings(record=True) as said, override(fk.OPS["rms_norm"], "triton", missing=None):
        warnings.simplefilter("always")
        fk.rms_norm(x.double())
        fk.rms_norm(x, backend="reference")
        torch.func.vmap(fk.rms_norm)(x)
        assert not said, said[0].message
        norm(x), fk.rms_norm(x), fk.swiglu(x, x), norm(x)
        assert len(calls) == {compiled}, "the warning makes the compiler compile again"
    print(fk.patch(torch.nn.LayerNorm(8)).report())
    print(fk.patch(torch.nn.LayerNorm(8), backend="reference").report())
    print(*(str(w.message) for w in said), sep="\\n")
    """
    done = run_python(code.format(gpu=gpu, compiled=compiled))
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    remedy = r"the C\+\+ extension is not built; run `pip install --no-build-isolation -e \.` with a C\+\+ compiler"
    assert re.search(rf"1 of 1 modules replaced .*: reference \(no extension: {remedy}\)$", first)
    assert rest[2].endswith("modules replaced (float32 on cpu)"), "no choice that the extension would change"
    warned = [line for line in rest if line.startswith("foundry_kernels: ")]
    if gpu:
        assert not warned
    else:
        assert re.fullmatch(rf"foundry_kernels: rms_norm runs on the reference, .*: {remedy} \(said once\)", *warned)


@pytest.mark.skipif(not NATIVE, reason=str(extension.MISSING))
def test_an_extension_older_than_the_package_costs_only_what_it_lacks() -> None:
    """The registry is as after an update of the sources that brings an operation, before the extension is built
    again."""
    done = run_python("""
    import torch
    namespace = type(torch.ops.foundry_kernels)
    found = namespace.__getattr__
    def lacking(self, name):
        if self.name == "foundry_kernels" and name == "cross_entropy":
            raise AttributeError(f"'_OpNamespace' 'foundry_kernels' object has no attribute '{name}'")
        return found(self, name)
    namespace.__getattr__ = lacking
    # Before anything of the package is imported: what the extension's module offers beside its operators, but for what
    # the first one had.
    import importlib.util, pathlib, sys, types
    package = importlib.util.find_spec("foundry_kernels").submodule_search_locations[0]
    path = next(pathlib.Path(package).glob("_C.*.so"))
    spec = importlib.util.spec_from_file_location("foundry_kernels._C", path)
    whole = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(whole)
    first = types.ModuleType("foundry_kernels._C")
    for name in ("build_info", "limits", "direct"):
        setattr(first, name, getattr(whole, name))
    sys.modules["foundry_kernels._C"] = first
    import foundry_kernels as fk
    x, target = torch.randn(3, 8), torch.tensor([1, 2, 3])
    fk.rms_norm(x, backend="native"); fk.cross_entropy(x, target)
    try:
        fk.cross_entropy(x, target, backend="native")
    except fk.BackendUnavailable as error:
        print(error)
    import foundry_kernels.distributed, foundry_kernels.__main__
    foundry_kernels.__main__.main([])
    """)
    assert done.returncode == 0, done.stderr
    assert "native: the C++ extension is older than this package" in done.stdout
    assert "no attribute 'cross_entropy'" in done.stdout
    assert "pip install --no-build-isolation -e ." in done.stdout


@pytest.mark.skipif(not NATIVE, reason=str(extension.MISSING))
def test_a_cuda_tensor_with_a_cpu_extension_is_told_what_to_do() -> None:
    if extension.build_info()["cuda_architectures"]:
        pytest.skip("this extension has CUDA kernels")
    reason = fk.OPS["rms_norm"].why_not("native", "cuda")
    assert reason is not None
    assert "runs on cpu, not on cuda" in reason
    assert "rebuild it with a CUDA build of torch, and nvcc" in reason


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"cuda_architectures": ""}, "not compiled in"),
        ({"cuda_architectures": "", "without_cuda": "torch is a CPU build"}, "not compiled in: torch is a CPU build"),
        ({"cuda_architectures": "8.0", "hopper": False}, "8.0; attention's kernels for Hopper: not compiled in"),
        ({"cuda_architectures": "9.0"}, "9.0; attention's kernels for Hopper: not compiled in"),  # an older extension
        ({"cuda_architectures": "8.0;9.0+PTX", "hopper": True}, "8.0;9.0+PTX; attention's kernels for Hopper: 9.0a"),
    ],
)
def test_the_overview_says_what_cuda_kernels_are_for(info: dict[str, object], said: str) -> None:
    assert cuda_architectures(info) == said
