"""The tables of the page. Missing measurements are marked."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from examples.studies.ablation.machine import sentence
from examples.studies.ablation.page import megabytes, table
from examples.studies.ablation.report import timing
from examples.studies.ablation.tables import ATTENTION, NORMS
from examples.studies.claims.results import Results
from examples.studies.claims.studies import STUDIES

MISSING = "not measured"

# --- losses -----------------------------------------------------------------------------------------------------------


#: The losses of a study's variants by label and seed; None: the run diverged.
Losses = dict[str, dict[str, float | None]]


def losses(results: Results, key: str, what: str = "held_out") -> Losses:
    runs = results.get("studies", {}).get(key, {}).get("runs", {})
    return {label: {seed: run[what] for seed, run in of.items()} for label, of in runs.items()}


def mean(values: Iterable[float | None]) -> float | None:
    """The mean; None if a run diverged, or without values."""
    losses = list(values)
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if known and len(known) == len(losses) else None


def best(results: Results, key: str) -> Losses:
    """The lowest held-out losses during training, for a study that records them."""
    runs = results.get("studies", {}).get(key, {}).get("runs", {})
    return {
        label: {seed: min(loss for _, loss in run["held_out_curve"] if loss is not None) for seed, run in of.items()}
        for label, of in runs.items()
    }


def changes(of: Losses) -> dict[str, float | None]:
    """The difference of each variant's loss to the first one's, averaged over their common seeds."""
    base = next(iter(of.values()), {})
    differences = {}
    for label, found in of.items():
        pairs = [(found[seed], base[seed]) for seed in found if seed in base]
        differences[label] = mean(None if a is None or b is None else a - b for a, b in pairs)
    return differences


def spread(results: Results, key: str) -> float | None:
    """The largest difference between a variant's seeds; None without two seeds."""
    found = []
    for of in losses(results, key).values():
        known = [loss for loss in of.values() if loss is not None]
        found += [max(known) - min(known)] if len(known) > 1 else []
    return max(found, default=None)


def mean_loss(of: Losses, label: str) -> str:
    return loss(mean(of[label].values())) if label in of else MISSING


def loss(value: float | None, sign: bool = False) -> str:
    return "diverged" if value is None else f"{value:+.3f}" if sign else f"{value:.3f}"


def study(results: Results, key: str) -> str:
    """The table of a study, with its settings and machine."""
    found = results.get("studies", {}).get(key)
    if found is None:
        return f"{MISSING}: --only train --studies {key}"
    seeds = sorted({seed for of in found["runs"].values() for seed in of}, key=int)
    above, trained = changes(losses(results, key)), losses(results, key, "trained_on")
    rows = []
    for label in STUDIES[key].variants:
        of = found["runs"].get(label, {})
        rows.append([
            label,
            f"{next(iter(of.values()))['parameters']:,}" if of else MISSING,
            ", ".join(loss(of[seed]["held_out"]) if seed in of else MISSING for seed in seeds),
            loss(above[label], sign=True) if label in above else MISSING,
            mean_loss(trained, label),
        ])  # fmt: skip
    name = f"seeds {' and '.join(seeds)}" if len(seeds) > 1 else f"seed {seeds[0]}"
    head = ["", "parameters", f"held-out loss ({name})", "above the first", "loss on the text trained on"]
    note = f" {STUDIES[key].note}" if STUDIES[key].note else ""
    return f"{about(found)}{note}\n\n{table(head, rows)}"


def about(found: dict[str, Any]) -> str:
    settings, text = found["settings"], found["text"]
    read = settings["steps"] * settings["batch"] * settings["seq_len"]
    return (
        f"Scale {found['scale']}: {settings['layers']} layers of width {settings['dim']}, {settings['heads']} heads, "
        f"{settings['steps']} steps of {settings['batch']} x {settings['seq_len']} bytes, {read / text['train']:.2g} "
        f"times {text['train'] / 1e6:.2g} MB of {text['name']} (sha256 {text['sha256'][:12]}), {settings['dtype']}, "
        f"AdamW at {settings['lr']:g}. {sentence(found['machine'])}."
    )


# --- times ------------------------------------------------------------------------------------------------------------


def measured_on(part: dict[str, Any]) -> str:
    return f"{sentence(part['machine'])}."


def norms(results: Results) -> str:
    part = results.get("norms")
    if part is None:
        return f"{MISSING}: --only timings"
    rows = []
    for case, of in part["cases"].items():
        ms = {name: row["ms"] for name, row in of.items()}
        rows.append([
            case,
            *(f"{ms[f'{whose} {norm}']:.2f}" for whose in NORMS for norm in ("LayerNorm", "RMSNorm")),
            *(norm_ratio(results, case, *names) for names in NORM_PAIRS),
        ])  # fmt: skip
    head = ["", "fk.layer_norm, ms", "fk.rms_norm, ms", "F.layer_norm, ms", "F.rms_norm, ms"]
    head += [f"{one} / {other}" for one, other in (("fk.layer_norm", "fk.rms_norm"), ("F.layer_norm", "F.rms_norm"))]
    head += ["F.layer_norm / fk.rms_norm"]
    sizes = part["sizes"]
    return f"{sizes['rows']} rows of {sizes['width']}. {measured_on(part)}\n\n{table(head, rows)}"


NORM_PAIRS = (
    ("fk LayerNorm", "fk RMSNorm"),
    ("PyTorch LayerNorm", "PyTorch RMSNorm"),
    ("PyTorch LayerNorm", "fk RMSNorm"),
)


def norm_ratio(results: Results, case: str, one: str, other: str) -> str:
    of = results.get("norms", {}).get("cases", {}).get(case)
    return MISSING if of is None else f"{of[one]['ms'] / of[other]['ms']:.2f}x"


def attention(results: Results, heads: int) -> str:
    part = results.get(f"attention_{heads}")
    if part is None:
        return f"H={heads}: {MISSING}: --only timings"
    rows = []
    for case, of in part["cases"].items():
        rows.append([
            case,
            *(timing(of[name])[0] for name in ATTENTION),
            *(attention_ratio(results, heads, case, name) for name in list(ATTENTION)[1:]),
        ])  # fmt: skip
    head = ["", *(f"{name}, ms" for name in ATTENTION), *(f"{name}: times as fast" for name in list(ATTENTION)[1:])]
    sizes = part["sizes"]
    shape = f"B=1 H={sizes['heads']} T={sizes['tokens']} D={sizes['head_dim']}, causal."
    return f"{shape} {measured_on(part)}\n\n{table(head, rows)}"


def attention_ratio(results: Results, heads: int, case: str, name: str) -> str:
    of = results.get(f"attention_{heads}", {}).get("cases", {}).get(case)
    return MISSING if of is None else f"{1.0 / of[name]['ratio']:.2f}x"


def memory(results: Results) -> str:
    part = results.get("memory")
    if part is None:
        return f"{MISSING}: --only memory"
    sizes, rows = part["sizes"], []
    for direction, of in part["cases"].items():
        for name, found in of.items():
            peaks = {int(tokens): count for tokens, count in found["peaks"].items()}
            rows.append([
                f"{direction}: {name}",
                *(megabytes(peaks[tokens]) if tokens in peaks else "–" for tokens in (1024, 2048, 4096, 8192)),
                "–" if found["exponent"] is None else f"{found['exponent']:.2f}",
                longest(results, direction, name),
            ])  # fmt: skip
    head = ["", *(f"peak MB at T={tokens}" for tokens in ("1024", "2048", "4096", "8192")), "grows as T to the"]
    head += [f"longest T in {sizes['budget'] / 2**20:,.0f} MiB"]
    return (
        f"Peak bytes of a fresh process above those it had before the inputs were made; the longest T is the last of a "
        f"search by halves (to a sixteenth) whose measured peak is within the budget. H={sizes['heads']} "
        f"D={sizes['head_dim']}, {sizes['dtype']}, causal. {measured_on(part)}\n\n{table(head, rows)}"
    )


def longest(results: Results, direction: str, name: str) -> str:
    found = results.get("memory", {}).get("cases", {}).get(direction, {}).get(name)
    return MISSING if found is None else "none" if found["longest"] is None else f"{found['longest']:,}"


def caches(results: Results) -> str:
    part = results.get("caches")
    if part is None:
        return f"{MISSING}: --only timings"
    sizes, rows = part["sizes"], []
    first = next(iter(part["cases"].values()))
    for name, row in part["cases"].items():
        rows.append([
            f"{name}, {row['kv_heads']} of {sizes['heads']} heads",
            megabytes(row["cache_bytes"]),
            f"{row['cache_bytes'] / first['cache_bytes']:.1%}",
            *(cell for of in ("decode", "prefill", "decode_attention") for cell in timing(row[of])),
        ])  # fmt: skip
    head = [
        "",
        "cache, MB",
        "of MHA's",
        "ms a token",
        "× MHA",
        "prefill, ms",
        "× MHA",
        "attention alone, ms a token",
        "× MHA",
    ]
    return (
        f"Bytes are those of the tensors that `Transformer.make_cache` allocates for {sizes['tokens']} tokens, "
        f"{sizes['layers']} layers, D={sizes['head_dim']}, float32, one sequence. {measured_on(part)}\n\n"
        f"{table(head, rows)}"
    )


def steps(results: Results, key: str) -> str:
    part = results.get(f"steps_{key}")
    if part is None:
        return f"A step of training: {MISSING}: --only timings"
    rows = [[name, *timing(row)] for name, row in part["cases"].items()]
    sizes = part["sizes"]
    return (
        f"A step of training: {sizes['layers']} layers of width {sizes['dim']}, {sizes['heads']} heads, "
        f"{sizes['batch']} x {sizes['seq_len']} bytes, {sizes['dtype']}. {measured_on(part)}\n\n"
        f"{table(['', 'ms a step', '× first'], rows)}"
    )
