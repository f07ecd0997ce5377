"""The table of supported versions in docs/install.md is what the package asks for, and what CI runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import stack

from foundry_kernels.integrations.release import OLDEST

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CI = (ROOT / ".ci" / "run").read_text()
PINS = {name: stack.pins((ROOT / name).read_text()) for name in ("constraints.txt", "constraints-2.11.txt")}


def table() -> dict[str, list[str]]:
    text = (ROOT / "docs" / "install.md").read_text()
    lines = text.partition("<!-- versions -->")[2].partition("<!-- end of versions -->")[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: cells for name, *cells in rows[2:]}


def requirement(name: str) -> str:
    """What the package, or an extra of it, asks for."""
    asked = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    found = {re.split(r";", one)[0].strip().removeprefix(name) for one in asked if re.match(rf"{name}[<>=]", one)}
    (only,) = found
    return only


def both(name: str) -> str:
    return f"{PINS['constraints-2.11.txt'][name]}, {PINS['constraints.txt'][name]}"


def test_what_the_package_asks_for() -> None:
    shown = {name: cells[0] for name, cells in table().items()}
    assert shown == {
        "Python": f"{PROJECT['requires-python'].removeprefix('>=')} and newer",
        "PyTorch": f"{requirement('torch').removeprefix('>=')} and newer",
        "Triton": "3.6 to 3.9",
        "transformers": f"{requirement('transformers').removeprefix('>=')} and newer",
    }
    assert requirement("triton") == ">=3.6,<3.10"
    assert ".".join(map(str, OLDEST)) == requirement("transformers").removeprefix(">=")
    listed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3[.]", c)]
    assert listed[0] == PROJECT["requires-python"].removeprefix(">=")


def test_what_is_tested() -> None:
    shown = {name: cells[1:] for name, cells in table().items()}
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (python,) = re.findall(r'python-version: "(.*)"', workflow)
    oldest, pinned = ".".join(map(str, OLDEST)), PINS["constraints.txt"]["transformers"]
    assert shown == {
        "Python": [python, "the newest installed"],
        "PyTorch": [both("torch"), "the newest"],
        "Triton": [both("triton"), "the newest"],
        "transformers": [f"{oldest}, {pinned}, the newest", "the newest"],
    }
    lines = [line for line in CI.splitlines() if "STACK=newest" in line]
    assert len(lines) == 1
    assert "% 3" in lines[0]
    for each in ("make test", "make test-stack STACK=2.11", "make test-releases"):
        assert each in CI.splitlines(), each
    assert set(stack.without_version((ROOT / "constraints-newest.txt").read_text())) >= {
        "torch", "triton", "transformers",
    }  # fmt: skip
