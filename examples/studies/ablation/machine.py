"""A description of the machine of a measurement."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch

from benchmarks import isa
from foundry_kernels.tools.environment import processor


def machine(device: str = "cpu") -> dict[str, Any]:
    """device: the device that computed."""
    used = isa.found()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device != "cpu" else {}
    return {
        "date": datetime.date.today().isoformat(),
        **gpu,
        "cpu": processor(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "isa": used.ours or "none: the extension is not built",
        "torch_isa": used.torch,
        "torch": torch.__version__,
    }


def sentence(found: dict[str, Any]) -> str:
    if "gpu" in found:
        return f"{found['date']}, {found['gpu']}, torch {found['torch']}"
    return (
        f"{found['date']}, {found['cpu']}, {found['cores']} cores, {found['threads']} "
        f"{'thread' if found['threads'] == 1 else 'threads'}, instruction set {found['isa']} (PyTorch's own: "
        f"{found['torch_isa']}), torch {found['torch']}"
    )
