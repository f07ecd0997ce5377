"""Pages and messages are in plain English and in the field's words: phrases that readers had to read twice stay out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What is not said, and what says it.
PHRASES = {
    r"cannot serve|does not serve": "does not support",
    r"\bheld to (avx|AVX|that|one|each|them|it)": "restricted to, compared with",
    r"gives? determinism up": "is non-deterministic",
    r"is believed": "is used",
    r"rows of ours": "benchmarks",
    r"(classes|vocabulary) (is|are) divided": "is vocab-sharded",
    r"goes with no\b": "does not support",
    r"no account": "no effect",
    r"\bare not established\b": "are unknown",
    r"\bgoes round\b": "avoids",
    r"\bof nobody\b|\bby nobody\b": "say who",
    r"\bbelow the asked\b": "below the requested",
    r"[Mm]atrix products\b": "matmuls",
    r"\bin its own words\b": "raises its own error",
    r"\bdivided over\b": "sharded over",
    r"\b(of|by) whom\b": "begin another sentence",
    r"\bnone of ours\b": "is not supported, is on another process",
    r"\bsomething else altogether\b": "is not a ... file",
    r"\bwhat decides which\b": "say what it determines",
    r"\b[Ww]hile it lasts\b": "in this block",
    r"\b(is|are) served\b": "runs on, is supported",
    r"\ban argument is no\b": "an argument is not a",
    r"\bcounts? nothing\b": "is ignored",
}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
SOURCES = sorted((ROOT / "foundry_kernels").rglob("*.py"))


def messages(source: Path) -> Iterator[str]:
    """The texts that a module raises, warns of, prints, or says in a docstring."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.Call):
            yield from (c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str))
        elif isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            yield ast.get_docstring(node) or ""


def found(text: str) -> list[str]:
    return [f"{m[0]!r}: say {better!r}" for phrase, better in PHRASES.items() for m in re.finditer(phrase, text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages(page: Path) -> None:
    assert found(" ".join(page.read_text(encoding="utf-8").split())) == []


def test_messages_and_docstrings() -> None:
    wrong = {s.relative_to(ROOT).as_posix(): f for s in SOURCES if (f := [w for m in messages(s) for w in found(m)])}
    assert wrong == {}


def test_a_phrase_is_found() -> None:
    assert found("attention cannot serve this") == ["'cannot serve': say 'does not support'"]
