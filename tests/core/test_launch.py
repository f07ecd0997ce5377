"""Runs launches.py and host_calls.py in processes of their own: this one may interpret Triton's kernels, or have a GPU
of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundry_kernels import _triton
from foundry_kernels.core.extension import triton_call

pytestmark = pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))


def test_launches() -> None:
    run("launches.py")


@pytest.mark.skipif(triton_call("pointers") is None, reason="needs the extension, without which Python calls more")
def test_host_calls() -> None:
    run("host_calls.py")


def run(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__).with_name(file))]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
