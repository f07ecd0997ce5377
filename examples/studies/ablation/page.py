"""Fills marked parts of a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.studies.ablation.settings import UsageError


def fill(page: Path, parts: Mapping[str, str]) -> None:
    """Replaces the text between ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        UsageError: the page cannot be read, or has no such marks.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--page {page}: {error.strerror or error}") from None
    for name, part in parts.items():
        marks = re.compile(f"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text, count = marks.subn(lambda found, part=part: f"{found[1]}{part}\n{found[2]}", text)  # type: ignore[misc]
        if count != 1:
            raise UsageError(f"--page {page} must have <!-- {name} --> and <!-- end of {name} --> once; got {count}")
    page.write_text(text, encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f}" if count >= 1e7 else f"{count / 1e6:.1f}"
