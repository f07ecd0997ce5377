"""The wheel for 64-bit ARM that tests/support/arm.py makes, and a part of the suite on it, under emulation.

`make test-arm` runs more of the suite."""

from __future__ import annotations

import os
import re
import zipfile

import arm
import pytest

ELF_MACHINE_AARCH64 = (183).to_bytes(2, "little")


@pytest.mark.slow
def test_the_wheel_for_arm() -> None:
    if (reason := arm.unavailable(install="CI" in os.environ)) is not None:
        pytest.skip(reason)
    arm.set_up()
    wheel = arm.build_wheel()
    assert re.fullmatch(r"foundry_kernels-[\d.]+-cp3\d+-cp3\d+-linux_aarch64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as held:
        [name] = [name for name in held.namelist() if name.endswith(".so")]
        library = held.read(name)
    assert re.fullmatch(r"foundry_kernels/_C\.cpython-3\d+-aarch64-linux-gnu\.so", name)
    assert library[18:20] == ELF_MACHINE_AARCH64
    assert {cpu: arm.instruction_sets(cpu) for cpu in arm.CPUS} == arm.CPUS
    code, end = arm.run_suite(arm.BF16, "--most-elements=300")
    assert code == 0, end
    assert re.search(r"\d{3} passed", end), end
