"""The scripts that are there to be copied run as they are, and learn."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fresh
import limits
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("patch_hugging_face.py", []),
        pytest.param("nanogpt_style.py", [], marks=pytest.mark.slow),
        pytest.param("plain_loop.py", [], marks=pytest.mark.slow),
        pytest.param("hybrid.py", ["--steps", "80"], marks=pytest.mark.slow),
        pytest.param("reverse.py", ["--steps", "90"], marks=pytest.mark.slow),
        pytest.param("reverse.py", [], marks=pytest.mark.slow),
        pytest.param("reverse.py", ["--positions", "relative", "--norm-placement", "pre"], marks=pytest.mark.slow),
    ],
)
def test_example(script: str, options: list[str]) -> None:
    done = fresh.python(
        str(EXAMPLES / script), *options, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
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


SHORT = ["--steps", "3", "--prompts", "4", "--examples", "2"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(SHORT, marks=pytest.mark.slow),
        pytest.param(["--steps", "40", "--prompts", "12", "--examples", "15", "--lr", "1e-3"], marks=pytest.mark.slow),
        pytest.param(
            ["--steps", "20", "--beta", "0.05", "--updates", "2", "--loss-type", "grpo"], marks=pytest.mark.slow
        ),
        pytest.param([], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_rewards(options: list[str], tmp_path: Path) -> None:
    """They rise, by the same numbers in each run; and the sampler has the trainer's log-probabilities."""
    found = []
    for threads in ("1", "2"):
        picture = tmp_path / f"{threads}.png"
        done = limits.run(
            [sys.executable, str(EXAMPLES / "grpo.py"), *options, "--plot", str(picture)],
            env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(EXAMPLES.parent)},
        )
        assert done.returncode == 0, done.stderr
        assert picture.stat().st_size > 5000
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
        assert all(line[-1] == "0.0e+00" for line in lines)
        found.append([float(line[3]) for line in lines])
        after = [int(word[:-1]) for word in done.stdout.split() if word.endswith("%")][-1]
    assert found[0] == found[1]
    assert options == SHORT or found[0][-1] > found[0][0] + 0.05
    assert options or after > 90
