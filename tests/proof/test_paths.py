"""Files that pages, docstrings, comments and messages name are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: A path from the root, which may have a `*`; and a file in backticks, by its name or the end of its path.
_FROM_ROOT = r"(?<![\w/.~}-])(?:foundry_kernels|csrc|tests|benchmarks|docs|examples)/[\w./*-]*"
_SUFFIXES = r"\.(?:py|md|cpp|h|cu|cuh|toml|ipynb)\b"
_PATH = re.compile(_FROM_ROOT + _SUFFIXES)
_NAME = re.compile(rf"`((?:[\w*-]+/)*[\w*-]+{_SUFFIXES})`")
#: Files that a program of ours writes, or that belong to another project.
_ELSEWHERE = {"report.md"}


def wrong(text: str, files: list[str]) -> list[str]:
    """The paths and names in a text that no file has."""

    def exists(path: str) -> bool:
        pattern = re.compile("(?:.*/)?" + re.escape(path).replace(r"\*", ".*"))
        return any(pattern.fullmatch(file) for file in files)

    named = [*(m[0] for m in _PATH.finditer(text)), *(m[1] for m in _NAME.finditer(text))]
    return sorted({path for path in named if path not in _ELSEWHERE and not exists(path)})


def test_named_files_exist() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [file for file in listed.stdout.splitlines() if (ROOT / file).is_file()]
    texts = [f for f in files if re.search(_SUFFIXES + "$", f) or f in ("Makefile", ".ci/run", "mkdocs.yml")]
    found = {f: w for f in texts if (w := wrong((ROOT / f).read_text(encoding="utf-8"), files))}
    found.pop(Path(__file__).relative_to(ROOT).as_posix(), None)
    assert found == {}
