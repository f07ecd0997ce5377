"""The folders of the package import only from those below them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import foundry_kernels

ROOT = Path(foundry_kernels.__file__).parent
#: The floors, from the ground up. Folders of one floor do not import each other.
FLOORS = (
    ("core",),
    ("_triton", "testing"),
    ("ops", "tools"),
    ("nn", "compat"),
    ("models",),
    ("diagnostics", "distributed", "integrations"),
)
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}


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
