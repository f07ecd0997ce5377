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
def test_launches(which: str) -> None:
    run("launches.py", "-m", which)


@pytest.mark.skipif(triton_call("pointers") is None, reason="needs the extension, without which Python calls more")
def test_host_calls() -> None:
    run("host_calls.py")


def run(file: str, *options: str) -> None:
    command = ["-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__).with_name(file)), *options]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"TRITON_INTERPRET": "0"}
    done = fresh.python(*command, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
