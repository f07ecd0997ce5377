"""Timings for the claims, by the functions of the ablation. Run them on a quiet machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import release
from examples.studies.ablation import speed, tables
from examples.studies.ablation.machine import machine
from examples.studies.ablation.settings import Settings, load, save
from examples.studies.ablation.variants import config_of
from examples.studies.claims.studies import STUDIES

#: The timings, with the shapes of tutorials: norms of width 4096, attention of 2048 tokens with 8 and 16 heads of 64,
#: and models with 12 heads and 12, 4 or 1 key-value heads.
TABLES: dict[str, tuple[tables.Sizes, Callable[[tables.Sizes], Any]]] = {
    "norms": (tables.Sizes(seconds=4.0), tables.norms),
    "attention_8": (tables.Sizes(heads=8, seconds=6.0), tables.attention),
    "attention_16": (tables.Sizes(heads=16, seconds=6.0), tables.attention),
    "caches": (tables.Sizes(heads=12, group=3), tables.heads),
}
#: The studies whose training steps are timed, and settings that differ from the training: for shared heads, the trained
#: model is too small for attention to matter.
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "steps_heads": ("heads", {"dim": 768, "layers": 4, "seq_len": 512, "batch": 2, "dtype": "bfloat16"}),
    "steps_activations": ("activations", {}),
}
STEP_SECONDS = 20.0
PARTS = (*TABLES, *STEPS)


def measure(folder: Path, scale: str, device: str) -> None:
    """Measures what is missing in `timings.json` or was measured on another machine."""
    path = folder / "timings.json"
    kept: dict[str, Any] = load(path) or {}
    for part in PARTS:
        sizes, measured = _part(part, scale, device)
        found = speed.begin(kept.get(part, {}), {"machine": machine(device), "sizes": dataclasses.asdict(sizes)})
        if "cases" not in found:
            kept[part] = found | {"scale": scale, "cases": measured()}
            save(path, kept)
            release()
        print(f"{part}: measured", flush=True)


def _part(part: str, scale: str, device: str) -> tuple[tables.Sizes | Settings, Callable[[], Any]]:
    if part in TABLES:
        sizes, measured = TABLES[part]
        on = dataclasses.replace(sizes, device=device)
        return on, partial(measured, on)
    key, changes = STEPS[part]
    settings = dataclasses.replace(STUDIES[key].settings[scale], device=device, **changes)
    return settings, partial(_steps, settings, STUDIES[key].variants)


def _steps(settings: Settings, variants: Mapping[str, str]) -> dict[str, Any]:
    configs = {label: config_of(name, settings.shape) for label, name in variants.items()}
    return speed.timed(speed.steps(settings, configs), STEP_SECONDS)
