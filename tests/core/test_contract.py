"""What the modules of an operation's folder offer, and operations whose folder lacks some of them."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch

import foundry_kernels as fk
from foundry_kernels import ops
from foundry_kernels.core.contract import Bench, Cases, Fuzz, Sharding, load, members
from foundry_kernels.core.registry import OpSpec

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
            wanted = {"ALONG": str} | dict.fromkeys(("CASES", "DIMS", "MUTATED", "SAVED"), dict)
            assert type(offered) is wanted.get(member, tuple), f"{name}.{member}"


@over_kinds
def test_every_member_is_offered_by_some_operation(kind: type) -> None:
    modules = [vars(importlib.import_module(f"{package}.{kind.__name__.lower()}")) for package in PACKAGES]
    assert [m for m in members(kind) if not any(m in module for module in modules)] == []


def test_operations_are_public_functions() -> None:
    """Of the package; without what is for `nn` alone."""
    assert [name for name, op in fk.OPS.items() if getattr(fk, name, None) is not op.public] == ["decode_linear"]
    assert fk.OPS.keys() - {"decode_linear"} <= {*fk.__all__}
    assert {package.rpartition(".")[2] for package in PACKAGES} == {*ops.FOLDERS}


def test_a_module_that_lacks_a_member_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "half_op").mkdir()
    (tmp_path / "half_op" / "__init__.py").touch()
    (tmp_path / "half_op" / "bench.py").write_text("def bytes_moved(args):\n    return 1, 1\n")
    with pytest.raises(TypeError, match=r"half_op\.bench must define bench_cases, peers: see .*contract\.Bench"):
        load(Bench, "half_op")
    spec = OpSpec("half", lambda x: x, (), "half_op")
    with pytest.raises(ModuleNotFoundError, match=r"half has no cases: half_op\.cases does not exist"):
        _ = spec.cases
    assert spec.sharding is None


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
    for op in fk.OPS.values():
        names = op.sharding.OPERATORS if op.sharding is not None else ()
        made = [f"{prefix}{{}}" for prefix, backend in (("triton_", "triton"), ("", "native")) if op.impl(backend)]
        for name in names:
            arguments = {str(schemas[form.format(name)]).partition("(")[2] for form in made}
            assert len(arguments) <= 1, f"triton_{name} and {name}: {arguments}"


def test_every_operator_belongs_to_an_operation() -> None:
    known = {name for op in fk.OPS.values() if op.sharding is not None for name in op.sharding.OPERATORS}
    assert {name.removeprefix("triton_").removeprefix("reference_") for name in operators()} <= known
