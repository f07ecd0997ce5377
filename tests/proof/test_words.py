"""Pages, messages, docstrings and comments use plain English and the field's words. Phrases that readers had to read
twice must not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
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
    r"\bat hand\b": "current, on this machine",
    r"\bunder way\b": "in flight, running",
    r"\bmended\b": "fixed",
    r"\b(is|are|was|were) (not )?wanted\b": "is requested",
    r"\bmost to do\b": "the most work",
    r"\bof no use\b": "useless",
    r"\bbelieves?\b": "assumes, runs as if",
    r"\blikeliest\b": "most likely",
    r"\bforgiv(es?|en)\b": "allows",
    r"\bby turns\b": "in turns",
    r"\bnobody's\b": "say whose",
    r"\b(has|have) not got\b": "does not have",
    r"\b(its|that's) rounding took\b": "its rounding error",
    r"\bbut for\b": "except for",
    r"\bdropped out\b": "dropped, dropout is applied to",
    r"\bas (it lies|they lie)\b": "with its strides, in its layout",
    r"\bof which what\b": "begin another sentence",
    r"\bfirst time round\b": "in the first iteration",
    r"\bproducts a score\b": "matmuls per score",
    r"\btold (beside|by|that)\b": "gets, takes",
    r"\bbecome of\b": "variants, name what changed",
}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
SOURCES = sorted(path for folder in ("foundry_kernels", "examples") for path in (ROOT / folder).rglob("*.py"))
#: How a docstring begins that is not a sentence or a noun.
FRAGMENT = re.compile(r"Those |That of |Of |As |The same[,.:]|The same (of|with|from|where) ")


def texts(source: Path) -> Iterator[str]:
    """The messages that a module raises, warns of or prints, its docstrings and its comments."""
    code = source.read_text(encoding="utf-8")
    comments = (t for t in tokenize.generate_tokens(io.StringIO(code).readline) if t.type == tokenize.COMMENT)
    yield " ".join(t.string.lstrip("#: ") for t in comments)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Raise | ast.Call):
            yield from (c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str))
    yield from docstrings(source)


def docstrings(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            yield " ".join((ast.get_docstring(node) or "").split())


def found(text: str) -> list[str]:
    return [f"{m[0]!r}: say {better!r}" for phrase, better in PHRASES.items() for m in re.finditer(phrase, text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages(page: Path) -> None:
    assert found(" ".join(page.read_text(encoding="utf-8").split())) == []


def test_messages_docstrings_and_comments() -> None:
    wrong = {s.relative_to(ROOT).as_posix(): f for s in SOURCES if (f := [w for t in texts(s) for w in found(t)])}
    assert wrong == {}


def test_docstrings_are_not_fragments() -> None:
    assert [f"{s.relative_to(ROOT)}: {d[:60]}" for s in SOURCES for d in docstrings(s) if FRAGMENT.match(d)] == []
