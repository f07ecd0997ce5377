"""Runs launches.py in a process of its own: this one may interpret Triton's kernels, or have a GPU of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundry_kernels import _triton


@pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))
def test_launches() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("launches.py")),
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
