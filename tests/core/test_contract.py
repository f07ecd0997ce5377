"""What the modules of an operation's folder offer, and operations whose folder lacks some of them."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import foundry_kernels as fk
from foundry_kernels.core.contract import Bench, Cases, Fuzz, Sharding, load, members
from foundry_kernels.core.registry import OPS, OpSpec

ROOT = Path(__file__).parents[2]
KINDS = (Cases, Bench, Fuzz, Sharding)
PACKAGES = tuple(dict.fromkeys(op.package for op in fk.OPS.values()))

over_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@over_kinds
@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_offers_what_is_written_of_it(package: str, kind: type) -> None:
    """Functions take the arguments that the protocol names, in its order, and data is of its type."""
    name = f"{package}.{kind.__name__.lower()}"
    assert load(kind, package) is not None, f"{name} does not exist"
    for member in members(kind):
        offered = vars(importlib.import_module(name)).get(member)
        expected = vars(kind)[member]
        if inspect.isfunction(expected) and offered is not None:
            parameters = list(inspect.signature(offered).parameters)
            assert parameters == list(inspect.signature(expected).parameters)[1:], f"{name}.{member}"
        elif offered is not None:
            wanted = dict if member in ("CASES", "MUTATED", "SAVED") else tuple
            assert type(offered) is wanted, f"{name}.{member}"


@over_kinds
def test_every_member_is_offered_by_some_operation(kind: type) -> None:
    modules = [vars(importlib.import_module(f"{package}.{kind.__name__.lower()}")) for package in PACKAGES]
    assert [m for m in members(kind) if not any(m in module for module in modules)] == []


def test_what_a_module_leaves_out_is_the_default() -> None:
    rms_norm, attention = fk.OPS["rms_norm"], fk.OPS["flash_attention"]
    assert rms_norm.cases.FROM_OUTPUT == ()
    assert rms_norm.cases.compiled_cases("rms_norm") is None
    assert attention.cases.FROM_OUTPUT == ("q", "k", "sinks", "attn_mask")
    assert rms_norm.bench is not None
    assert attention.bench is not None
    [large] = [c for c in rms_norm.bench.bench_cases("rms_norm", "cpu") if c.id == "8192x128-heads"]
    cut = rms_norm.bench.parity_case(large)
    assert [a.shape for a in cut.args.values() if a is not None] == [(2048, 128), (128,)]
    sample = rms_norm.bench.sample(large)
    assert sample is not None
    assert (len(sample.rows), sample.dims) == (256, {"x": 0})
    assert rms_norm.bench.flops({}, {}, "forward") is None
    [decode] = [c for c in attention.bench.bench_cases("flash_attention", "cpu") if "S=512" in c.id]
    assert attention.bench.parity_case(decode) is decode
    assert attention.bench.sample(decode) is None
    assert (rms_norm.bench.tokens_made(large), attention.bench.tokens_made(decode)) == (None, 1)


# --- an operation with nothing but cases ------------------------------------------------------------------------------

TOY = {
    "__init__.py": """
        from foundry_kernels.core.registry import Impl, OpSpec, register, resolve

        def toy(x, *, backend="auto"):
            return resolve(TOY, backend, x)(x)

        def double(x):
            return x * 2

        TOY = register(OpSpec("toy", toy, (Impl("reference", double), Impl("native", double)), __name__))
    """,
    "cases.py": """
        from foundry_kernels.testing import Arg, Case

        CASES = {"toy": (Case("3x4", {"x": Arg((3, 4))}), Case("5", {"x": Arg((5,))}))}

        def scales(args, options, cotangents):
            return {}
    """,
}


@pytest.fixture
def toy_folder(tmp_path: Path) -> Path:
    (tmp_path / "toy_op").mkdir()
    for name, text in TOY.items():
        (tmp_path / "toy_op" / name).write_text(inspect.cleandoc(text) + "\n")
    return tmp_path


@pytest.fixture
def toy(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpSpec]:
    """Registered while a test runs."""
    monkeypatch.syspath_prepend(str(toy_folder))
    yield importlib.import_module("toy_op").TOY
    del OPS["toy"]
    for name in [n for n in sys.modules if n.partition(".")[0] == "toy_op"]:
        del sys.modules[name]
    load.cache_clear()


def test_an_operation_with_nothing_but_cases_is_a_whole_operation(toy: OpSpec) -> None:
    assert (toy.bench, toy.fuzz, toy.sharding) == (None, None, None)
    assert [case.id for case in toy.cases.CASES["toy"]] == ["3x4", "5"]
    assert toy.backends("cpu") == ("reference", "native")


def test_rules_of_other_operations_load_beside_one_without_a_rule(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    sharding = pytest.importorskip("foundry_kernels.distributed.sharding")
    before = sharding.operators()
    request.getfixturevalue("toy")
    assert sharding.operators() == before
    assert any(op._schema.name.endswith("rms_norm_fwd") for op in before)


@pytest.mark.slow
def test_the_suites_take_what_there_is_of_an_operation(toy_folder: Path) -> None:
    """Its cases are in the table of parity and pass; it is neither fuzzed nor timed, and nothing else is lost."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(toy_folder), str(ROOT)]), "TRITON_INTERPRET": "1"}

    def pytest_with_toy(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "toy_op", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        return done.stdout

    parity = pytest_with_toy("tests/proof/test_parity.py::test_parity", "-k", "toy", "-vv")
    for dtype in ("float32", "bfloat16", "float16"):
        assert f"test_parity[toy-native-cpu-{dtype}-3x4] PASSED" in parity
    listed = pytest_with_toy("tests/proof/test_fuzz.py", "benchmarks", "--collect-only")
    assert "toy" not in listed
    assert "test_random_cases[rms_norm-native-cpu-" in listed or "native" not in fk.OPS["rms_norm"].backends("cpu")
    assert "rms_norm-overhead-" in listed


def test_a_module_that_lacks_a_member_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, toy_folder: Path) -> None:
    monkeypatch.syspath_prepend(str(toy_folder))
    (toy_folder / "half_op").mkdir()
    (toy_folder / "half_op" / "__init__.py").touch()
    (toy_folder / "half_op" / "bench.py").write_text("def bytes_moved(args, direction):\n    return 1\n")
    with pytest.raises(TypeError, match=r"half_op\.bench must define bench_cases, peers: see .*contract\.Bench"):
        load(Bench, "half_op")
    spec = OpSpec("half", lambda x: x, (), "half_op")
    with pytest.raises(ModuleNotFoundError, match=r"half has no cases: half_op\.cases does not exist"):
        _ = spec.cases
    assert spec.sharding is None


def test_an_import_that_fails_inside_a_module_is_not_taken_for_its_absence(
    monkeypatch: pytest.MonkeyPatch, toy_folder: Path
) -> None:
    monkeypatch.syspath_prepend(str(toy_folder))
    (toy_folder / "toy_op" / "fuzz.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load(Fuzz, "toy_op")
    del OPS["toy"]
    for name in [n for n in sys.modules if n.partition(".")[0] == "toy_op"]:
        del sys.modules[name]


# --- operators --------------------------------------------------------------------------------------------------------


def operators() -> dict[str, torch._C.FunctionSchema]:
    """The schemas of all operators of kernels by name, without those that are composed of others and those that take
    plain tensors alone."""
    plain = {name for op in fk.OPS.values() if op.sharding is not None for name in op.sharding.UNSHARDED}
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            namespace, _, rest = name.partition("::")
            if namespace == "foundry_kernels" and "." not in rest and rest not in plain:
                found[rest] = getattr(torch.ops.foundry_kernels, rest).default._schema
    return found


def test_triton_and_native_operators_have_the_same_schema() -> None:
    """The same arguments (name, type, default) in the same order, and the same returns: one rule of DTensor fits
    both, and whoever knows one knows the other."""
    from foundry_kernels import _triton
    from foundry_kernels.core import extension

    if extension.MISSING is not None or _triton.MISSING is not None:
        pytest.skip(str(extension.MISSING or _triton.MISSING))
    schemas = operators()
    triton = {name.removeprefix("triton_") for name in schemas if name.startswith("triton_")}
    native = {name for name in schemas if not name.startswith(("triton_", "reference_"))}
    assert triton == native
    assert len(native) >= 2 * len({op.package for op in fk.OPS.values() if op.impl("triton")}) - 1
    for name in sorted(native):
        mine, theirs = (str(schemas[n]).partition("(")[2].split(", ") for n in (f"triton_{name}", name))
        assert mine == theirs, f"triton_{name} and {name}"


def test_every_operator_belongs_to_an_operation() -> None:
    known = {name for op in fk.OPS.values() if op.sharding is not None for name in op.sharding.OPERATORS}
    assert {name.removeprefix("triton_").removeprefix("reference_") for name in operators()} <= known
