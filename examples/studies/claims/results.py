"""The results in a folder, merged with the results next to the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.studies.ablation.settings import load, save
from examples.studies.ablation.training import load_run
from examples.studies.claims.studies import STUDIES, Study
from examples.studies.claims.timings import PARTS

Results = dict[str, Any]

#: The stored fields of a run; the others are equal for a whole study, or too large.
KEPT = ("parameters", "held_out", "trained_on", "seconds")
CURVES = ("curve", "held_out_curve")


def beside(page: Path) -> Path:
    return page.with_suffix("") / "results.json"


def collect(folder: Path, scale: str, page: Path) -> Results:
    """Merges the folder's results into the results next to the page, and saves these.

    Raises:
        UsageError: a file is damaged or cannot be written.
    """
    found: Results = load(beside(page)) or {}
    known = found.setdefault("studies", {})
    for key, study in STUDIES.items():
        if (now := _trained(folder / key, study)) is not None:
            known[key] = {"scale": scale, **now}
    timed = load(folder / "timings.json") or {}
    found |= {part: timed[part] for part in PARTS if "cases" in timed.get(part, {})}
    if memory := load(folder / "memory.json"):
        found["memory"] = memory
    save(beside(page), found)
    return found


def _trained(folder: Path, study: Study) -> dict[str, Any] | None:
    """The runs of a study by label and seed, and their common settings; None without runs."""
    seeds = sorted({int(path.stem.rpartition("-seed")[2]) for path in folder.glob("run-*-seed*.json")})
    runs: dict[str, dict[str, Any]] = {}
    one: dict[str, Any] = {}
    for label, name in study.variants.items():
        for seed in seeds:
            if (run := load_run(folder, name, seed)) is not None:
                kept = KEPT + (CURVES if study.curves else ())
                runs.setdefault(label, {})[str(seed)] = {key: run[key] for key in kept}
                one = run
    if not runs:
        return None
    return {"settings": load(folder / "settings.json"), "machine": one["machine"], "text": one["text"], "runs": runs}
