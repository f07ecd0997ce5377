"""What tests/core/test_launch.py runs in a process of its own, where kernels are not interpreted: how many calls of our
Python functions one call of an operation makes, as a measure of host time that no busy machine changes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from launch_recorder import Recorder

import foundry_kernels as fk
from benchmarks.test_overhead import _both, _forward, _small_case
from foundry_kernels.core.registry import OpSpec

pytest_plugins = ["launch_recorder"]

OURS = str(Path(fk.__file__).parent)

#: The most calls of functions of this package, without gradients and with them, forward and backward. Each costs about
#: 0.1 us. Who adds a layer to the path of every call sees it here; who takes one away writes the lower number.
MOST = {
    "rms_norm": (27, 47),
    "add_rms_norm": (33, 53),
    "layer_norm": (29, 54),
    "add_layer_norm": (35, 60),
    "swiglu": (26, 43),
    "geglu": (24, 41),
    "glu": (25, 42),
    "reglu": (25, 42),
    "rope": (42, 72),
    "qk_norm_rope": (53, 103),
    "flash_attention": (46, 105),
    "flash_attention_varlen": (61, 121),
}


def calls_of(call: Any) -> Counter[str]:
    """Our functions that a call calls, comprehensions left out: they are calls before Python 3.12 alone."""
    seen: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and not code.co_name.endswith("comp>"):
            seen[f"{Path(code.co_filename).name}: {code.co_name}"] += 1

    for _ in range(3):  # plans are made, and kernels kept
        call()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize("op", [pytest.param(fk.OPS[name], id=name) for name in MOST])
def test_few_calls(op: OpSpec, direction: str, gpu: Recorder) -> None:
    case = _small_case(op)

    def function(**args: Any) -> Any:
        return op.public(**args, **case.options, backend="triton")

    with torch.autograd.set_multithreading_enabled(False):  # backward in this thread, which is the one that is watched
        seen = calls_of((_forward if direction == "forward" else _both)(function, case))
    assert gpu.take(), "nothing was launched"
    most = MOST[op.name][direction == "both"]
    assert seen.total() <= most, "\n".join(f"{n} {name}" for name, n in seen.most_common())
