"""Runs launches.py and host_calls.py in processes of their own: this one may interpret Triton's kernels, or have a GPU
of its own."""

from __future__ import annotations

import os
from pathlib import Path

import fresh
import pytest

from foundry_kernels import _triton
from foundry_kernels.core.extension import triton_call

pytestmark = pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_launches_and_host_calls(which: str) -> None:
    """Without the extension, Python calls more."""
    files = ["launches.py"] if triton_call("pointers") is None or which == "slow" else ["launches.py", "host_calls.py"]
    paths = [str(Path(__file__).with_name(file)) for file in files]
    command = ["-m", "pytest", "-p", "no:cacheprovider", *paths, "-m", which]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"TRITON_INTERPRET": "0"}
    done = fresh.python(*command, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
