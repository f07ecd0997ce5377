"""The longest sequence for which attention fits a memory budget. Each length's peak is measured in a fresh process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import last_exponent
from examples.studies.ablation.machine import machine
from examples.studies.ablation.memory import peak_bytes
from examples.studies.ablation.settings import load, save
from examples.studies.ablation.speed import begin
from examples.studies.ablation.tables import ATTENTION, Attend, Sizes

#: Bytes for inputs, results and intermediates by scale.
BUDGETS = {"small": 128 * 2**20, "tutorial": 4 * 2**30}
SHORTEST = 1024
DIRECTIONS = ("forward", "forward+backward")
PARTS = 16  # the search stops at this fraction of the largest power of two that fits


def measure(folder: Path, scale: str, device: str) -> None:
    """Measures what is missing in `memory.json` or was measured on another machine."""
    path, sizes = folder / "memory.json", Sizes(device=device)
    context = {
        "machine": machine(device),
        "sizes": {"heads": sizes.heads, "head_dim": sizes.head_dim, "dtype": "float32", "budget": BUDGETS[scale]},
    }
    kept: dict[str, Any] = begin(load(path) or {}, context) | {"scale": scale}
    cases = kept.setdefault("cases", {})
    for direction in DIRECTIONS:
        for name in ATTENTION:
            rows = cases.setdefault(direction, {})
            if name not in rows:
                rows[name] = search(_peak(name, sizes, direction), BUDGETS[scale])
                save(path, kept)
            print(f"{direction}, {name}: {rows[name]['longest']} tokens", flush=True)


def search(peak: Callable[[int], int], budget: int) -> dict[str, Any]:
    """Doubles the length until `peak` exceeds `budget`, then bisects the last interval. `longest` is None if the first
    length does not fit. `exponent` is the exponent of the peak's growth in the last doublings."""
    peaks: dict[int, int] = {}
    length = SHORTEST
    while (found := peak(length)) <= budget:
        peaks[length] = found
        length *= 2
    peaks[length] = found
    doubled = sorted(peaks)
    if length == SHORTEST:
        return {"longest": None, "peaks": peaks, "exponent": None}
    low, high = length // 2, length
    least = low // PARTS
    while high - low > least:
        middle = (low + high) // 2
        peaks[middle] = peak(middle)
        low, high = (middle, high) if peaks[middle] <= budget else (low, middle)
    exponent = last_exponent(doubled, [peaks[length] for length in doubled])
    return {"longest": low, "peaks": dict(sorted(peaks.items())), "exponent": exponent}


def _peak(name: str, sizes: Sizes, direction: str) -> Callable[[int], int]:
    def peak(tokens: int) -> int:
        run = Attend(name, dataclasses.replace(sizes, tokens=tokens), torch.float32, direction)
        return peak_bytes(run, whole=True, device=sizes.device)

    return peak
