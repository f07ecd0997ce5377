"""The folders of the package import only from those below them, and its files in no circle."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter
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
        "mixers", "pages", "state_slots", "cache", "hybrid_cache", "paged_cache", "context", "call", "decode_block",
        "blocks", "cross_blocks", "init", "model", "inputs", "embeddings", "losses", "log_probs", "extend",
    ),
    ("sampling", "requests", "speculative", "generate", "generator"),
    ("transformer", "encoder_decoder", "memory"),
)  # fmt: skip
#: Those of the rooms of `integrations`, and of its files beside them.
INTEGRATIONS = (
    ("families", "modules", "release"),
    ("attention", "convert"),
    ("adapters", "recognise"),
    ("patching",),
    ("trainers",),
    ("trainer", "lightning", "torchtitan"),
)


def test_a_folder_imports_from_the_floors_below() -> None:
    for name, others in graph().items():
        folder = name.split(".")[1] if "." in name else ""
        folders = {other.split(".")[1] for other in others if "." in other} & FLOOR.keys()
        above = {other for other in folders if other != folder and FLOOR[other] >= FLOOR.get(folder, len(FLOORS))}
        assert not above, f"{name} imports from {', '.join(sorted(above))}"


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


@functools.cache
def graph() -> dict[str, set[str]]:
    files = modules(ROOT)
    return {name: imported(file, set(files)) - {name} for name, file in files.items()}


def test_no_files_import_each_other_in_a_circle() -> None:
    assert len(graph()) > 200
    TopologicalSorter(graph()).prepare()  # raises CycleError with their names


def test_losses_on_one_engine_do_not_import_each_other() -> None:
    """Nor does the engine import a loss: another loss is a folder beside them."""
    folder_of = {name: name.split(".")[2] for name in modules(ROOT) if name.startswith("foundry_kernels.ops.")}
    imports_of: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for name, others in graph().items():
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
    edges = graph()
    room_of = {name: name.split(".")[2] for name in edges if name.startswith(f"foundry_kernels.{folder}.")}
    assert set(room_of.values()) == floor.keys()
    for name, room in room_of.items():
        above = [other for other in edges[name] & room_of.keys() if floor[room_of[other]] > floor[room]]
        assert not above, f"{name} imports {', '.join(above)}"


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
    edges = graph()
    assert "foundry_kernels.core.choices" in reached("foundry_kernels.models.config", edges)
    assert not [n for n in reached("foundry_kernels.models.config", edges) if n.startswith("foundry_kernels.nn")]
    assert not edges["foundry_kernels.integrations.families"]
