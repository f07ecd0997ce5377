"""The scripts that are there to be copied run as they are, and learn."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import limits
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("patch_hugging_face.py", []),
        pytest.param("nanogpt_style.py", [], marks=pytest.mark.slow),
        pytest.param("plain_loop.py", [], marks=pytest.mark.slow),
        ("hybrid.py", ["--steps", "80"]),
        ("reverse.py", ["--steps", "90"]),
        pytest.param("reverse.py", [], marks=pytest.mark.slow),
        pytest.param("reverse.py", ["--positions", "relative", "--norm-placement", "pre"], marks=pytest.mark.slow),
    ],
)
def test_example(script: str, options: list[str]) -> None:
    done = limits.run(
        [sys.executable, str(EXAMPLES / script), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) >= 5
    assert losses[-1] < losses[0] - 1.0, losses
    if script == "patch_hugging_face.py":
        assert "10 of 10 modules replaced" in done.stdout
        assert "continues with" in done.stdout
    if script == "reverse.py" and "--steps" not in options:
        correct = int(done.stdout.split("%")[0].split()[-1])
        assert correct >= 60, done.stdout
