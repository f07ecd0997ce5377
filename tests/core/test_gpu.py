"""What is said where there is no GPU that the kernels are for, or a Triton that is too old."""

from __future__ import annotations

import warnings

import fresh
import pytest
import torch

from foundry_kernels._triton import devices

#: As torch 2.11 words it.
OLD_DRIVER = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU "
    "driver by downloading and installing a new version (Triggered internally at ../c10/cuda/CUDAFunctions.cpp:119.)"
)


def torch_that(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, capability: tuple[int, int] | None, said: str = ""
) -> None:
    def is_available() -> bool:
        if said:
            warnings.warn(said, stacklevel=2)
        return capability is not None

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")


@pytest.mark.parametrize(
    ("cuda", "capability", "said", "expected"),
    [
        (None, None, "", "no CUDA device; torch is a CPU build"),
        ("13.0", None, "", "no CUDA device"),
        ("13.0", None, "something else", "no CUDA device"),
        ("13.0", None, OLD_DRIVER, "no CUDA device: " + OLD_DRIVER.partition(" (Trig")[0]),
        ("13.0", (7, 5), "", "Tesla T4 has compute capability 7.5, and the kernels are for 8.0 and newer"),
        ("13.0", (8, 0), "", None),
        ("13.0", (12, 0), "", None),
    ],
)
def test_why_there_is_no_gpu(
    cuda: str | None,
    capability: tuple[int, int] | None,
    said: str,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_that(monkeypatch, cuda, capability, said)
    devices.too_old.cache_clear()
    try:
        assert devices.why_no_gpu.__wrapped__() == expected
    finally:
        devices.too_old.cache_clear()


def test_an_old_triton_is_refused_and_the_rest_works() -> None:
    code = """
import sys, types
triton = types.ModuleType("triton")
triton.__version__, triton.__path__ = "3.3.1", []
sys.modules |= {"triton": triton, "triton.language": types.ModuleType("triton.language")}
triton.language = sys.modules["triton.language"]
import torch, foundry_kernels as fk
fk.swiglu(torch.ones(2, 4))
print(fk.OPS["swiglu"].why_not("triton", "cuda"))
"""
    done = fresh.python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Triton 3.3.1 is older than 3.6; `pip install -U triton`\n"
