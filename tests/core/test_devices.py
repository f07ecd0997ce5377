"""The table of GPUs: every compute capability has one row, and launchers choose by it alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import foundry_kernels
from foundry_kernels._triton.devices import DEVICES, device_of

NAMES = {
    80: "ampere", 86: "small", 87: "ampere", 88: "small", 89: "small", 90: "hopper", 100: "blackwell", 103: "blackwell",
    110: "small", 120: "small", 121: "small", 942: "cdna", 950: "cdna", 0: "interpreter",
}  # fmt: skip


@pytest.mark.parametrize("capability", NAMES)
def test_what_tiles_are_chosen_by(capability: int) -> None:
    device = device_of(capability)
    assert device.name == NAMES[capability]
    assert device.block_shared <= device.sm_shared


def test_gpus_of_one_name_make_the_same_sums() -> None:
    for name in {d.name for d in DEVICES.values()}:
        assert len({d.multiprocessors for d in DEVICES.values() if d.name == name}) == 1


def test_launchers_compare_no_capability() -> None:
    """But for two things that hold for one architecture: the Gluon kernel is 9.0's, and 0 is the interpreter."""
    found = []
    for file in Path(foundry_kernels.__file__).parent.glob("ops/**/*.py"):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if re.search(r"(capability|arch)\b *(//|%|[<>]|in \()", line):
                found.append(f"{file.name}:{number}: {line.strip()}")
    assert found == []
