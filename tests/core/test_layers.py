"""The folders of the package import only from those below them, and its files in no circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import foundry_kernels

ROOT = Path(foundry_kernels.__file__).parent
#: The floors, from the ground up. Folders of one floor do not import each other.
FLOORS = (
    ("core",),
    ("_triton", "testing"),
    ("ops", "tools"),
    ("nn", "compat", "losses"),
    ("models",),
    ("diagnostics", "distributed", "integrations"),
)
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
#: The floors of the files of `models`: a configuration, the parts of a model, generation, whole models.
MODELS = (
    ("fields", "validate", "presets", "count", "config"),
    (
        "pages", "state_slots", "cache", "hybrid_cache", "paged_cache", "context", "call", "decode_block",
        "blocks", "cross_blocks", "init", "model", "inputs", "embeddings", "losses", "log_probs", "extend",
    ),
    ("sampling", "requests", "speculative", "generate", "generator"),
    ("transformer", "encoder_decoder", "memory"),
)  # fmt: skip
#: Those of the rooms of `integrations`, and of its files beside them.
INTEGRATIONS = (
    ("families", "modules", "release"),
    ("attention", "convert"),
    ("adapters",),
    ("patching",),
    ("trainers",),
    ("trainer", "lightning", "torchtitan"),
)


def imports(file: Path) -> set[str]:
    """The folders of the package that a file imports from, at its top or inside of a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "foundry_kernels":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    names = {name.removeprefix("foundry_kernels.").split(".")[0] for name in found}
    return names & FLOOR.keys()


@pytest.mark.parametrize("folder", FLOOR)
def test_a_folder_imports_from_the_floors_below(folder: str) -> None:
    for file in sorted((ROOT / folder).rglob("*.py")):
        above = {other for other in imports(file) if other != folder and FLOOR[other] >= FLOOR[folder]}
        assert not above, f"{file.relative_to(ROOT)} imports from {', '.join(sorted(above))}"


def test_every_folder_has_its_floor() -> None:
    assert {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()} == set(FLOOR)
    assert {p.name for p in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


# --- files ------------------------------------------------------------------------------------------------------------


def modules(root: Path) -> dict[str, Path]:
    """The files of the package whose folder is `root`, by the names of their modules."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(file: Path, known: set[str]) -> set[str]:
    """The modules of `known` that a file imports, in functions and for types too: by statements, and by constant names
    given to `import_module`."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports are not followed"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.append(whole if whole in known else str(node.module))
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            names.append(str(getattr(node.args[0], "value", "")))
    return known.intersection(names)


def graph(root: Path) -> dict[str, set[str]]:
    files = modules(root)
    return {name: imported(file, set(files)) - {name} for name, file in files.items()}


def circle(root: Path) -> list[str]:
    """The names of modules that import each other in a circle; none where there is no circle."""
    try:
        TopologicalSorter(graph(root)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert len(graph(ROOT)) > 200
    found = circle(ROOT)
    assert not found, " <- ".join(found)


def test_losses_on_one_engine_do_not_import_each_other() -> None:
    """Nor does the engine import a loss: another loss is a folder beside them."""
    folder_of = {name: name.split(".")[2] for name in modules(ROOT) if name.startswith("foundry_kernels.ops.")}
    imports_of: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for name, others in graph(ROOT).items():
        if name in folder_of:
            imports_of[folder_of[name]] |= {folder_of[other] for other in others if other in folder_of}
    losses = {folder for folder, found in imports_of.items() if "_linear_loss" in found - {folder}}
    assert losses >= {"linear_cross_entropy", "linear_log_probs", "linear_kl_div"}
    for folder in ("_linear_loss", *losses):
        assert not imports_of[folder] & losses - {folder}, folder


@pytest.mark.parametrize(("folder", "floors"), [("models", MODELS), ("integrations", INTEGRATIONS)])
def test_a_file_imports_from_its_floor_or_those_below(folder: str, floors: tuple[tuple[str, ...], ...]) -> None:
    """A room is a file, or a folder."""
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
    edges = graph(ROOT)
    room_of = {name: name.split(".")[2] for name in edges if name.startswith(f"foundry_kernels.{folder}.")}
    assert set(room_of.values()) == floor.keys()
    for name, room in room_of.items():
        above = [other for other in edges[name] & room_of.keys() if floor[room_of[other]] > floor[room]]
        assert not above, f"{name} imports {', '.join(above)}"


@pytest.mark.parametrize(
    "planted",
    [
        "from toy.a import thing",
        "from toy import a",
        "import toy.a",
        "def late():\n    from toy.a import thing",
        "import importlib\ndef late():\n    return importlib.import_module('toy.a')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import toy.a",
    ],
)
def test_a_planted_circle_is_seen(tmp_path: Path, planted: str) -> None:
    root = tmp_path / "toy"
    (root / "deep").mkdir(parents=True)
    for name, text in (("__init__", ""), ("a", "from toy.deep import b"), ("deep/__init__", ""), ("deep/b", "")):
        (root / f"{name}.py").write_text(text)
    assert circle(root) == []
    (root / "deep" / "b.py").write_text(planted)
    assert set(circle(root)) == {"toy.a", "toy.deep.b"}


def reached(name: str, edges: dict[str, set[str]]) -> set[str]:
    """The modules that are imported with `name`, but for the packages that they are in."""
    found: set[str] = set()
    open_ = [name]
    while open_:
        for other in edges[open_.pop()] - found:
            found.add(other)
            open_.append(other)
    return found


def test_the_configuration_of_a_model_needs_no_module_of_nn() -> None:
    edges = graph(ROOT)
    assert "foundry_kernels.core.choices" in reached("foundry_kernels.models.config", edges)
    assert not [n for n in reached("foundry_kernels.models.config", edges) if n.startswith("foundry_kernels.nn")]
    assert not edges["foundry_kernels.integrations.families"]
