"""Markdown tables of stored results."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from benchmarks import noise

OURS = ("triton", "native", "reference")
#: A copy of the same bytes to existing or fresh memory, or a matmul of the same dtype.
LIMITS = ("memcpy", "fresh memcpy", "GEMM")
#: The same call of this package without the option. It shows the option's cost, and is not a peer.
WITHOUT = "without the option"
#: A training step of adapters, without them: of the patched model with frozen weights. It shows their cost, and is no
#: peer.
FROZEN = "patched by ours, frozen"

Row = dict[str, Any]


def header(kept: dict[str, Any], source: str) -> str:
    versions = ", ".join(f"{n} {kept['environment'][n]}" for n in ("torch", "triton") if n in kept["environment"])
    text = (
        f"Measured {kept['date']} on {kept['device']} ({versions}), {of_commit(kept)}, from "
        f"[{source}]({source}). Times are "
        "medians over rounds in which all contenders took turns. `× peer` is the peer's time over ours: above 1, ours "
        "is faster. `% of memcpy` is our rate over that of a memcpy of as many bytes into memory that exists, "
        f"`% of GEMM` over that of a square matrix product of the same dtype. `× {WITHOUT}`: over the time of the "
        "same call of ours without its mask, bias or dropout, which is no peer. `warm`: the inputs are in the caches; "
        "`cold`: they rotate, so that they are not; `fresh`: cold, and outputs are new memory, page faults included."
    )
    if about_noise := noise.in_short(kept["rows"], (*OURS, *OUR_MODELS)):
        text += f" {about_noise} A ratio that is no further from 1 than that, or whose own median is not known to lie "
        text += "on one side of 1 (95 %), is marked ≈: too noisy to call."
    return paragraph(text)


def of_commit(kept: dict[str, Any]) -> str:
    if "commit" not in kept:
        return "of a commit that was not recorded"
    of = kept["commit"]
    ids = [name[:10] for name in (of["id"], *of.get("more", ()))]  # their kernels are the same
    return f"of commit{'s' * (len(ids) > 1)} {' and '.join(ids)}" + (" with changes" if of["dirty"] else "")


def held(kept: dict[str, Any]) -> str:
    """Returns an explanation of the instruction set if the run was restricted to one."""
    isa = kept.get("isa", {})
    if not isa.get("forced"):
        return ""
    name, torch = isa["forced"], isa["torch"]
    obeyed = f"it reports {torch}" if isa["obeyed"] else f"**it did not obey and reports {torch}**"
    switches = ", ".join(f"`{k}={v}`" for k, v in isa["switches"].items())
    return paragraph(
        f"**Held to {name}** (`--isa {name}`) on a processor that may have more: our kernels, torch ({obeyed}), "
        f"oneDNN, MKL, and what `torch.compile` generates, by {switches}. A processor that has no more than "
        f"{name} has other ports, caches and clocks. Where oneDNN, so held, has no products of 16 bits, torch computes "
        "them by plain loops: rows of torch's that do so are left out, and no ratio is taken over them."
    )


def cut(kept: dict[str, Any]) -> str:
    """Returns the text about rows that were left out for the budget."""
    budget = kept.get("budget", {})
    if not (lines := cuts(budget)):
        return ""
    return paragraph(f"Budget: {budget['minutes']:g} min, {budget['spent']:g} spent. {' '.join(lines)}")


def cuts(budget: dict[str, Any], most: int | None = None) -> list[str]:
    """Returns lines about the rows that were left out for the budget (the first `most` by name), and about fewer
    rounds."""
    if not budget.get("minutes"):
        return []
    shapes = [f"{shape} ({rows} of {of} rows)" for shape, (rows, of) in budget["cut"].items()]
    more = f"; and {len(shapes) - most} more" if most is not None and len(shapes) > most else ""
    left_out = "; ".join(shapes[:most]) + more
    found = [f"Left out to keep {budget['minutes']:g} min: {left_out}."] if left_out else []
    if budget["fewer_rounds"]:
        found.append(f"Fewer rounds in {budget['fewer_rounds']} of {budget['comparisons']} comparisons.")
    if none_of := budget.get("none_of"):
        found.append(f"No row of {', '.join(none_of)}: this machine was too slow, or too busy.")
    return found


def paragraph(text: str, indent: str = "") -> str:
    """Returns the text in lines; all but the first are indented."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def of_kind(kept: dict[str, Any], kind: str) -> list[Row]:
    return [r for r in kept["rows"] if r.get("kind", "op") == kind]


def _ours(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """Returns the rows of this package's backends, and all their peers."""
    ours = [r for r in rows if r["row"] in OURS]
    names = (n for r in ours for n in r.get("speedup_over", {}))
    return ours, [n for n in dict.fromkeys(names) if n not in OURS]


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _halves(kept: dict[str, Any]) -> list[list[Row]]:
    """Rows of operations, in two groups: those with matmuls have other peers and another unit."""
    rows = of_kind(kept, "op")
    products = {r["op"] for r in rows if "TFLOP/s" in r and r["row"] not in LIMITS}
    return [[r for r in rows if r["op"] not in products], [r for r in rows if r["op"] in products]]


def shape_of(row: Row) -> str:
    """Returns the shape and the words after it, without words about its size: "512x2048", "1x4096, decode"."""
    shape, *words = row["case"].split("-")
    words = [w for w in words if w not in ("cached", "large")]
    return f"{shape}, {'-'.join(words)}" if words else shape


def _ratio(row: Row, peer: str) -> str:
    if "wrong" in row:
        return "wrong"
    return _over(row, peer) if peer in row.get("speedup_over", {}) else "–"


def _over(row: Row, peer: str) -> str:
    """Returns the speed relative to a peer, marked if it is too noisy to call."""
    mark = "≈ " if noise.call(row, peer) == "noisy" else ""
    return f"{mark}{row['speedup_over'][peer]:.2f}"


def _of_limit(row: Row, limit: str) -> str:
    """Returns the row's rate as a percentage of `limit`'s, if it is the row's own limit."""
    if row.get("limit") != limit:
        return "–"
    if "of_limit" in row:
        return f"{row['of_limit']:.0%}"
    # A wrong result only has a time.
    return f"{1 / row['time_over_memcpy']:.0%}" if limit == "memcpy" and row.get("time_over_memcpy") else "–"


def _rate(row: Row) -> str:
    if "tokens/s" in row:
        return f"{row['tokens/s']:,.0f} tokens/s"
    return f"{row['TFLOP/s']:.3g} TFLOP/s" if "TFLOP/s" in row else f"{row.get('GB/s', 0):,.1f} GB/s"


def _time(row: Row) -> str:
    return f"{row['median_us']:,.0f}" if row["median_us"] >= 10 else f"{row['median_us']:.1f}"


def _mega(row: Row, key: str) -> str:
    return f"{row[key] / 1e6:,.1f}" if key in row else "–"


def operations(kept: dict[str, Any]) -> str:
    """Returns every row of this package's backends: its time, its memory and the comparison with peers."""
    parts = []
    for rows in _halves(kept):
        ours, peers = _ours(rows)
        gpu = any("device_us" in r for r in ours)
        limits = [limit for limit in ("memcpy", "GEMM") if any(r.get("limit") == limit for r in rows)]
        heads = ["operation", "direction", "dtype", "shape", "memory", "backend", "µs", *(f"× {p}" for p in peers)]
        heads += [*(f"% of {limit}" for limit in limits), "rate", "peak MB", "saved MB"]
        heads += ["GPU µs", "in a graph µs"] if gpu else []
        lines = []
        for r in ours:
            cells = [f"`{r['op']}`", r["direction"], r["dtype"], shape_of(r), r["memory"], r["row"], _time(r)]
            cells += [*(_ratio(r, p) for p in peers), *(_of_limit(r, limit) for limit in limits), _rate(r)]
            cells += [_mega(r, "peak_bytes"), _mega(r, "saved_bytes")]
            cells += [str(r.get(key, "–")) for key in ("device_us", "graph_us")] if gpu else []
            lines.append(cells)
        parts.append(markdown(heads, lines))
    return "\n\n".join(part for part in parts if part)


def forward(kept: dict[str, Any]) -> dict[str, dict[str, Row]]:
    """Returns this package's forward pass on the shape that takes longest, by operation and dtype."""
    rows = [r for half in _halves(kept) for r in _ours(half)[0] if r["direction"] == "forward"]
    return {op: _main([r for r in rows if r["op"] == op]) for op in dict.fromkeys(r["op"] for r in rows)}


def summary(kept: dict[str, Any]) -> str:
    """Returns a row for each operation: its forward pass on the shape that takes longest, with a number in each
    cell."""
    chosen = forward(kept)
    rows = [r for by_dtype in chosen.values() for r in by_dtype.values()]
    if not rows:
        return ""
    dtypes = list(dict.fromkeys(r["dtype"] for r in rows))
    columns: dict[str, Callable[[Row], str]] = {
        "× eager": lambda r: _ratio(r, "eager"),
        "× compiled": lambda r: _ratio(r, rival(r)),
        "% of memcpy": lambda r: _of_limit(r, r["limit"]),
    }
    lines = []
    for op, by_dtype in chosen.items():
        cells = [f"`{op}`", shape_of(next(iter(by_dtype.values())))]
        cells += [show(by_dtype[d]) if d in by_dtype else "–" for show in columns.values() for d in dtypes]
        lines.append(cells)
    heads = ["operation", "shape", *(f"{title}, {_SHORT.get(d, d)}" for title in columns for d in dtypes)]
    backends = " and ".join(dict.fromkeys(r["row"] for r in rows))
    where = "not in the caches" if all(r["memory"] != "warm" for r in rows) else "in the caches where they fit"
    caption = (
        f"Forward passes on {kept['device']} (torch {kept['environment']['torch']}, {kept['date']}), {backends} "
        f"kernels {of_commit(kept)}, inputs {where}. × eager and × compiled: how many times faster than plain PyTorch, "
        "as Hugging Face models write it, and than `torch.compile` of that. % of memcpy: our rate over that of a "
        "memcpy of as many bytes. For attention the peer is SDPA's flash kernel instead of `torch.compile`, and the "
        "limit a GEMM instead of a memcpy."
    )
    return paragraph(caption) + "\n\n" + markdown(heads, lines)


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _main(rows: list[Row]) -> dict[str, Row]:
    """Returns by dtype the rows of the shape that takes longest, with cold inputs if measured, for the first existing
    backend of `OURS`."""
    backend = min((r["row"] for r in rows), key=OURS.index)
    rows = [r for r in rows if r["row"] == backend]
    longest = max(rows, key=lambda r: (r["memory"] == "cold", r["median_us"]))
    return {r["dtype"]: r for r in rows if (r["case"], r["memory"]) == (longest["case"], longest["memory"])}


def rival(row: Row) -> str:
    """Returns the strongest peer: a fused kernel for matmuls, otherwise compiled eager code."""
    return "SDPA flash" if row["limit"] == "GEMM" else "torch.compile"


#: Rows of models on this package's kernels.
OUR_MODELS = ("ours", "ours, compiled", "patched by ours", "patched by ours, compiled", "continuous batching")


def models(kept: dict[str, Any]) -> str:
    """Whole models, compared with the first one of their family."""
    lines = []
    for r in of_kind(kept, "model"):
        base = r.get("base", "")
        speed = "1" if r["row"] == base else _ratio(r, base)
        rate, peak = f"{r['tokens/s']:,.0f}", _mega(r, "peak_bytes")
        lines.append([f"{r['op']}, {r['case']}", r["direction"], r["dtype"], r["row"], rate, speed, peak])
    return markdown(["model", "task", "dtype", "", "tokens/s", "speed", "peak MB"], lines)


def overhead(kept: dict[str, Any]) -> str:
    """Microseconds of host time of the smallest call."""
    rows = of_kind(kept, "overhead")
    names = list(dict.fromkeys(r["row"] for r in rows))
    by_op: dict[str, dict[str, Row]] = {}
    for r in rows:
        by_op.setdefault(r["op"], {})[r["row"]] = r
    lines = [
        [f"`{op}`", *(f"{found[n]['host_us']:.1f}" if n in found else "–" for n in names)]
        for op, found in by_op.items()
    ]
    return markdown(["µs a call", *names], lines)


def scaling(kept: dict[str, Any]) -> str:
    """Exponents of time and memory, and the theoretical ones; this package's are bold if they exceed these."""
    rows = of_kind(kept, "scaling")
    lines = []
    for r in rows:
        for name, line in r["lines"].items():
            if "time_exponent" not in line:
                continue
            over = f"{r['axis']} = {r['sizes'][0]} .. {r['sizes'][-1]}"
            cells = [f"`{r['op']}`", r["direction"], r["dtype"], over, name]
            for kind in ("time", "memory"):
                for key in (f"{kind}_exponent", f"last_{kind}_exponent"):
                    text = f"{line[key]:.2f}" if key in line else "–"
                    past = key in line and line[key] > _allowed(r, kind) + SLACK
                    cells.append(f"**{text}**" if name in OURS and past else text)
                cells.append(f"{r['theory'][kind]:.2f}" if kind in r["theory"] else "–")
            lines.append(cells)
    of_each = [head for kind in ("time", "memory") for head in (kind, "largest", "theory")]
    return markdown(["operation", "direction", "dtype", "over", "", *of_each], lines)


#: The allowed excess of an exponent over theory, for outgrown caches and noise.
SLACK = 0.25


def _allowed(row: Row, kind: str) -> float:
    """Returns the theoretical exponent; for time over threads, one that no measurement exceeds."""
    return float(row["theory"].get(kind, 1.0)) if row["axis"] != "threads" else 1.0


def absent(kept: dict[str, Any]) -> str:
    """Returns the reasons why rows have no figures or no ratios, without repetition."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for r in [*kept.get("absent", []), *kept["rows"]]:
        reason = r.get("why_not") or r.get("wrong") or r.get("graph_why_not")
        if reason:
            found.setdefault((r["op"], r["row"], reason), []).append(shape_of(r))
    lines = []
    for (op, name, reason), cases in found.items():
        distinct = list(dict.fromkeys(cases))
        where = distinct[0] if len(distinct) == 1 else f"{len(distinct)} shapes"
        lines.append(f"- `{op}`, {name} ({where}): {reason}")
    return "\n".join(lines)
