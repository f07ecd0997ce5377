"""`make test-isa`: which instruction sets tests are held to, and with what environment. The run itself is a command."""

from __future__ import annotations

from pathlib import Path

import forced_isa
import pytest
from forced_isa import CHOICE, FILES, ROOT, to_run

ALL = ["avx2", "avx512", "avx512_bf16", "amx_bf16"]


def test_all_sets_below_the_best_are_run() -> None:
    """And each of the others is a line that says why not; bfloat16 is widened where it would not be."""
    for usable, chosen in ((["baseline", *ALL], ALL[:3]), (["baseline", "avx2"], []), ([], [])):
        found, skipped = to_run(ALL, usable)
        assert found == chosen
        assert len(skipped) == len(ALL) - len(chosen)
    assert [to_run(["widened"], ["baseline", best])[0] for best in ("avx512", "avx512_bf16")] == [[], ["widened"]]


def test_a_failure_and_what_was_skipped_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forced_isa.extension, "build_info", lambda: {"usable_instruction_sets": ["baseline", *ALL[:3]]})
    monkeypatch.setattr(forced_isa, "run", lambda name, arguments: int(name == "avx512"))
    assert forced_isa.main(["avx2"]) == 0
    assert forced_isa.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" in ")[0] for line in lines if line.startswith("restricted to")] == [
        "restricted to avx2: passed", "restricted to avx2: passed", "restricted to avx512: failed",
        "restricted to widened: passed",
    ]  # fmt: skip
    assert any(line.startswith("amx_bf16: skipped") for line in lines)


def test_what_is_run_exists() -> None:
    assert all((ROOT / file.partition("::")[0]).exists() for file in FILES)
    assert compile(CHOICE, "-k", "eval")
    assert Path(forced_isa.__file__).parent == ROOT / "tests" / "support"
