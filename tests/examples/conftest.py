"""A text for the examples to learn."""

from pathlib import Path

import pytest


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 30)
    return path
