"""C++ and CUDA sources: what no compiler checks because it sees one file at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
SUFFIXES = (".h", ".cuh", ".cpp", ".cu")

NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M)
SPECIALIZATION = r"(?:\s*<[^{;()]*>)?"
OPENING = re.compile(
    r"\bnamespace\s+(?P<namespace>[\w:]*)\s*\{"
    rf"|\b(?P<kind>struct|class|union|enum(?:\s+(?:class|struct))?)\s+(?:alignas\([^{{;]*?\)\s*)?(?P<name>\w+)"
    rf"(?P<of>{SPECIALIZATION})(?:\s*final)?\s*(?::[^:{{;][^{{;]*)?\{{"
    r"|(?P<open>\{)|(?P<close>\})"
)


def types(text: str) -> Iterator[str]:
    """Qualified names of the types that a source defines outside functions and unnamed namespaces."""
    scopes: list[str | None] = []  # None: a block, or a namespace that no other file can name
    for found in OPENING.finditer(NOT_CODE.sub(" ", text)):
        if found["close"]:
            scopes.pop()
        elif found["open"]:
            scopes.append(None)
        elif found["namespace"] is not None:
            scopes.append(found["namespace"] or None)
        else:
            name = found["name"] + re.sub(r"\s", "", found["of"])
            if None not in scopes:
                yield "::".join([*(s for s in scopes if s), name])
            scopes.append(name)
    assert not scopes, "unbalanced braces"


def defined_twice(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The types that more than one file defines. Two definitions in one file are alternatives of an #if."""
    places = defaultdict(list)
    for file, text in sources:
        for name in set(types(text)):
            places[name].append(file)
    return {name: files for name, files in places.items() if len(files) > 1}


def test_no_type_is_defined_twice_in_one_library() -> None:
    """Two types of one qualified name violate the one-definition rule: the linker takes either's inline functions for
    both. No tool reports it, since no file includes both."""
    files = [p for p in sorted(CSRC.rglob("*")) if p.suffix in SUFFIXES]
    assert len(files) > 30
    known = set(types((CSRC / "common" / "rope.h").read_text()))
    assert {"foundry::RopeStrides", "foundry::Rope", "foundry::QkNormRopeCall"} <= known
    assert defined_twice((str(p.relative_to(CSRC)), p.read_text()) for p in files) == {}
