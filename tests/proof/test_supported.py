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
        **{
            shown_as: [PINS["constraints.txt"][name], f"{PINS['constraints-2.11.txt'][name]}, the newest"]
            for shown_as, name in (("PyTorch", "torch"), ("Triton", "triton"))
        },
        "transformers": [pinned, f"{oldest}, the newest"],
    }
    always, _, sixths = CI.partition("case $sixth in")
    assert "make test\n" in always
    for each in ("make test-stack STACK=2.11", "make test-stack test-native STACK=newest", "make test-releases"):
        assert each in sixths, each
    pins = PINS["constraints-2.11.txt"]
    assert [pins["torch"], pins["triton"]] == [f"{requirement('torch').removeprefix('>=')}.0", "3.6.0"]
    assert set(pins) <= set(PINS["constraints.txt"])
    assert set(stack.without_version((ROOT / "constraints-newest.txt").read_text())) >= {
        "torch", "triton", "transformers",
    }  # fmt: skip
