"""Tables and pictures of the results in a folder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.studies.ablation.machine import sentence
from examples.studies.ablation.page import fill, megabytes, table
from examples.studies.ablation.settings import Settings, UsageError, load, save
from examples.studies.ablation.training import load_run
from examples.studies.ablation.variants import title

#: The claims of tutorials for attention without its matrix and for RMSNorm. Most give no shapes, machine or baseline.
#: Both tables show all of them.
TUTORIALS = "Tutorials claim 1.9x and 1.8x, or 3.6x, 3.4x and 3.9x, mostly without shapes or machine."
#: The fields of a run that tables and pictures show; its folder has the rest.
KEPT = ("parameters", "held_out", "curve", "text")


def write(folder: Path, settings: Settings, names: Sequence[str], seeds: Sequence[int], page: Path | None) -> None:
    """Prints the tables, and writes `report.md` and pictures to the folder. With `page`, it fills the page's marked
    parts instead, and writes pictures and numbers to the folder with the page's name.

    Raises:
        UsageError: nothing was trained, or the page has no marks.
    """
    results = collect(folder, settings, names, seeds)
    parts = {
        "variants": variants(results),
        "heads": heads(results["tables"]),
        "attention": attention(results["tables"]),
        "norms": norms(results["tables"]),
    }
    print("\n\n".join(parts.values()))
    target = folder if page is None else page.with_suffix("")
    save(target / "results.json", results)
    pictures(results, target)
    if page is None:
        (folder / "report.md").write_text("\n\n".join(parts.values()) + "\n", encoding="utf-8")
    else:
        fill(page, parts)


def collect(folder: Path, settings: Settings, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """All results, as they are stored next to the page."""
    found = {n: {str(s): r for s in seeds if (r := load_run(folder, n, s)) is not None} for n in names}
    runs = {n: {s: {key: r[key] for key in KEPT} for s, r in of.items()} for n, of in found.items() if of}
    if not runs:
        raise UsageError(f"{folder} has no run of {', '.join(names)}, seeds {', '.join(map(str, seeds))}: train first")
    speed = load(folder / "speed.json") or {}
    return {
        "settings": asdict(settings),
        "titles": {name: title(name, settings.shape) for name in runs},
        "runs": runs,
        "speed": speed if speed.get("settings") in (None, asdict(settings)) else {},
        "tables": load(folder / "tables.json") or {},
    }


def pictures(results: dict[str, Any], target: Path) -> None:
    try:
        from examples.studies.ablation import plots
    except ImportError as error:
        print(f"\nno pictures: matplotlib does not import ({error}); pip install 'foundry-kernels[train]'")
        return
    plots.variants(results, target / "variants.png")
    plots.curves(results, target / "curves.png")


def variants(results: dict[str, Any]) -> str:
    """One row per variant, compared with the first."""
    speed, settings = results["speed"], results["settings"]
    first = next(iter(results["runs"]))
    base = losses(results, first)
    rows = []
    for name, found in results["runs"].items():
        of = losses(results, name)
        shared = [s for s in of if s in base]
        change = statistics.fmean(of[s] - base[s] for s in shared) if shared else math.nan
        step, token = (speed.get(part, {}).get(name) for part in ("step", "token"))
        memory = speed.get("memory", {}).get(name)
        rows.append([
            results["titles"][name],
            f"{next(iter(found.values()))['parameters']:,}",
            ", ".join(f"{loss:.3f}" for loss in of.values()),
            f"{math.exp(statistics.fmean(of.values())):.2f}",
            "" if name == first else f"{change:+.3f}",
            *timing(step),
            *timing(token),
            megabytes(memory["peak_bytes"]) if memory else "–",
            f"{memory['cache_bytes_a_token']:,}" if memory else "–",
        ])  # fmt: skip
    seeds = " and ".join(next(iter(results["runs"].values())))
    head = ["", "parameters", f"held-out loss (seeds {seeds})", "perplexity", "change of loss", "ms a step", "× first",
            "ms a token", "× first", "peak MB of a step", "cache bytes a token"]  # fmt: skip
    tokens = settings["steps"] * settings["batch"] * settings["seq_len"]
    text = next(iter(next(iter(results["runs"].values())).values()))["text"]
    about = (
        f"{settings['layers']} layers of width {settings['dim']}, {settings['heads']} heads ({settings['kv_heads']} "
        f"key-value heads with GQA), {settings['steps']} steps of {settings['batch']} x {settings['seq_len']} bytes of "
        f"{text['name']} ({tokens / 1e6:.2f} M), {settings['dtype']}, AdamW at {settings['lr']:g}. Losses are nats a "
        "byte. "
    )
    about += f"Times: {sentence(speed['machine'])}." if speed else "Times are not measured yet: --only speed."
    return f"{about}\n\n{table(head, rows)}"


def losses(results: dict[str, Any], name: str) -> dict[str, float]:
    return {seed: run["held_out"] for seed, run in results["runs"].get(name, {}).items()}


def timing(row: dict[str, Any] | None) -> list[str]:
    return [f"{row['ms']:.3g}" if row["ms"] < 100 else f"{row['ms']:.0f}", f"{row['ratio']:.2f}"] if row else ["–", "–"]


def heads(tables: dict[str, Any]) -> str:
    if "heads" not in tables:
        return "Not measured yet: --only tables."
    sizes = tables["sizes"]
    rows = [
        [
            f"{name}, Hk={row['kv_heads']}",
            f"{row['parameters'] / 1e6:.1f} M",
            megabytes(row["cache_bytes"]),
            *(c for part in ("decode", "prefill", "decode_attention", "prefill_attention") for c in timing(row[part])),
        ]
        for name, row in tables["heads"].items()
    ]
    head = ["", "parameters", "cache, MB", "ms a token", "× MHA", "prefill, ms", "× MHA"]
    head += ["attention alone, ms a token", "× MHA", "attention alone, prefill, ms", "× MHA"]
    return (
        f"A model of {sizes['layers']} layers, H={sizes['heads']} D={sizes['head_dim']}, float32, one sequence of "
        f"T={sizes['tokens']}. {sentence(tables['machine'])}.\n\n{table(head, rows)}"
    )


def attention(tables: dict[str, Any]) -> str:
    """Times and memory relative to the explicit form, and the claims of tutorials."""
    if "attention" not in tables:
        return "Not measured yet: --only tables."
    sizes, rows = tables["sizes"], []
    for case, found in tables["attention"].items():
        base = next(iter(found.values()))
        for name, row in found.items():
            rows.append([
                f"{case}: {name}",
                timing(row)[0],
                f"{1.0 / row['ratio']:.2f}x",
                megabytes(row["peak_bytes"]),
                f"{base['peak_bytes'] / max(row['peak_bytes'], 1):.1f}x",
            ])  # fmt: skip
    return (
        f"B=1 H={sizes['heads']} Hk={sizes['heads']} T={sizes['tokens']} D={sizes['head_dim']}, causal. Memory is "
        f"what a run adds to what is there before it. {sentence(tables['machine'])}. {TUTORIALS}\n\n"
        + table(["", "ms", "times as fast", "peak MB", "times less"], rows)
    )


def norms(tables: dict[str, Any]) -> str:
    """LayerNorm's time over RMSNorm's, and the claims of tutorials."""
    if "norms" not in tables:
        return "Not measured yet: --only tables."
    sizes, rows = tables["sizes"], []
    for case, found in tables["norms"].items():
        of = {name: row["ms"] for name, row in found.items()}
        rows.append([
            case,
            *(f"{of[name]:.2f}" for name in ("fk LayerNorm", "fk RMSNorm")),
            f"{of['fk LayerNorm'] / of['fk RMSNorm']:.2f}x",
            *(f"{of[name]:.2f}" for name in ("PyTorch LayerNorm", "PyTorch RMSNorm")),
            f"{of['PyTorch LayerNorm'] / of['PyTorch RMSNorm']:.2f}x",
            f"{of['PyTorch LayerNorm'] / of['fk RMSNorm']:.2f}x",
        ])  # fmt: skip
    head = ["", "fk.layer_norm, ms", "fk.rms_norm, ms", "ratio", "F.layer_norm, ms", "F.rms_norm, ms", "ratio",
            "F.layer_norm / fk.rms_norm"]  # fmt: skip
    return (
        f"{sizes['rows']} rows of {sizes['width']}. {sentence(tables['machine'])}. {TUTORIALS}\n\n{table(head, rows)}"
    )
