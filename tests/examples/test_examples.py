"""The scripts that are there to be copied run as they are, and learn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    "script",
    [
        "patch_hugging_face.py",
        pytest.param("nanogpt_style.py", marks=pytest.mark.slow),
        pytest.param("plain_loop.py", marks=pytest.mark.slow),
    ],
)
def test_example(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) >= 5
    assert losses[-1] < losses[0] - 1.0, losses
    if script == "patch_hugging_face.py":
        assert "10 of 10 modules replaced" in done.stdout
        assert "continues with" in done.stdout
