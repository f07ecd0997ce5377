"""The samples of Hopper's instructions, tests/support/cuda_on_cpu/hopper_*.cu, as functions."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from pathlib import Path

import gpu_archive
import nvcc
import torch
from cuda_on_cpu.build import HERE, ROOT, load_plain
from torch import Tensor

SAMPLES, MISTAKES = HERE / "hopper_samples.cu", HERE / "hopper_mistakes.cu"
#: Copies arrive only when nothing else can run, often, or sometimes (hopper_scheduler.h); warps run in another order.
SEEDS = (1, 2, 3)
ON_GPU = 0
HAS_GPU = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability() == (9, 0)
    and (nvcc.nvcc() is not None or gpu_archive.samples().exists())
)


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    loaded = load_plain(source, source.read_text())
    loaded.run_sample.restype = ctypes.c_char_p
    return loaded


def compile_for_gpu(target: Path) -> None:
    sources = [SAMPLES, ROOT / "csrc" / "cuda" / "hopper" / "tensor_map.cu"]
    command = [nvcc.nvcc() or "", "-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-shared"]
    subprocess.run([*command, "-Xcompiler", "-fPIC", *map(str, sources), "-o", str(target)], check=True)


@functools.cache
def library_on_gpu() -> ctypes.CDLL:
    """The samples as `make gpu-cache` compiled them, or compiled once here."""
    target = gpu_archive.samples()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        compile_for_gpu(partial)
        partial.rename(target)
    loaded = ctypes.CDLL(str(target))
    loaded.run_sample.restype = ctypes.c_char_p
    return loaded


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(x.data_ptr()) for x in tensors]


def run(name: str, a: Tensor, b: Tensor, out: Tensor, seed: int, sizes: tuple[int, ...] = (), resident: int = 4) -> str:
    if seed == ON_GPU:
        there = [x.cuda() for x in (a, b, out)]
        report = library_on_gpu().run_sample(name.encode(), *pointers(*there), (ctypes.c_int * 8)(*sizes))
        torch.cuda.synchronize()
        out.copy_(there[2])
        return str(report.decode())
    samples = library(SAMPLES)
    samples.cuda_on_cpu_schedule(seed, resident)
    report = samples.run_sample(name.encode(), *pointers(a, b, out), (ctypes.c_int * 8)(*sizes))
    return str(report.decode())


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small integers, whose products and sums are exact."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


NONE = torch.empty(8, dtype=torch.bfloat16)


def line_of(source: Path, text: str) -> int:
    (number,) = [n for n, line in enumerate(source.read_text().splitlines(), 1) if text in line]
    return number
