"""The table of callers in docs/integrations.md: each line names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foundry_kernels import compat

DOCS = Path(__file__).parents[2] / "docs"
TABLE = (DOCS / "integrations.md").read_text(encoding="utf-8").partition("<!-- callers -->")[2]
LINES = TABLE.partition("<!-- end of callers -->")[0].strip().splitlines()[2:]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip())
def test_each_caller_is_a_test(line: str) -> None:
    tests = re.findall(r"\[(\w+)\]\((\S+)\)", line)
    assert tests
    for name, file in tests:
        assert f"\ndef {name}(" in (DOCS / file).read_text(encoding="utf-8"), f"{file} has no {name}"


def test_the_table_names_all_of_attentions_functions() -> None:
    assert len(LINES) > 20
    apart = {"cross_entropy", "linear_cross_entropy", "layer_norm"}
    named = {name for name in compat.__all__ if "attn" in name or "attention" in name or "rotary" in name} - apart
    short = {"flash_attn_kvpacked_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"}
    assert not [name for name in named - short if f"{name}" not in TABLE]
