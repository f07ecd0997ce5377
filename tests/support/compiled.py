"""Kernels compiled for GPUs that are not here: the command, and a made-up cost."""

from __future__ import annotations

import os
import subprocess
from functools import cache

import fresh
import pytest

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.tools.inspect import aot

OPS = [name for name, op in fk.OPS.items() if op.impl("triton")]
needs_triton = pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))


@cache
def inspect(*args: str) -> subprocess.CompletedProcess[str]:
    """Runs in a process of its own: kernels that this one may interpret cannot be compiled here."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return fresh.python("-m", "foundry_kernels", "inspect", *args, env=env)


def cost(**changes: object) -> aot.Cost:
    base = {
        "registers": 64,
        "stack": 0,
        "shared": 0,
        "warps": 4,
        "access_bytes": (16,),
        "matrix": "",
        "ptx": "",
        "cubin": b"",
    }
    return aot.Cost(**(base | changes))  # type: ignore[arg-type]
