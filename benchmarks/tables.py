"""Markdown tables of kept results."""

from __future__ import annotations

from typing import Any

OURS = ("triton", "native", "reference")
LIMITS = ("memcpy", "fresh memcpy", "GEMM")

Row = dict[str, Any]


def header(kept: dict[str, Any], source: str) -> str:
    environment = kept["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton") if name in environment)
    return "\n".join(
        [
            f"Measured {kept['date']} on {kept['device']} ({versions}), from [{source}]({source}).",
            "Medians of rounds in which all took turns. `x peer`: the peer's time over ours: above 1 we are faster.",
            "`of limit`: our rate over that of a copy of the same bytes into memory that exists, or (TFLOP/s) of a",
            "matrix product. `warm`: the inputs lie in the caches; `cold`: they rotate and do not; `fresh`: cold, and",
            "outputs cost page faults, which elsewhere they do not.",
        ]
    )


def _of(kept: dict[str, Any], kind: str) -> list[Row]:
    return [r for r in kept["rows"] if r.get("kind", "op") == kind]


def _ours(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """The rows of our backends, and all their peers."""
    ours = [r for r in rows if r["row"] in OURS]
    names = (n for r in ours for n in r.get("speedup_over", {}))
    return ours, [n for n in dict.fromkeys(names) if n not in OURS]


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _halves(kept: dict[str, Any]) -> list[list[Row]]:
    """Rows of operations, those with matrix products apart: they have other peers and another unit."""
    rows = _of(kept, "op")
    products = {r["op"] for r in rows if "TFLOP/s" in r and r["row"] not in LIMITS}
    return [[r for r in rows if r["op"] not in products], [r for r in rows if r["op"] in products]]


def _shape(row: Row) -> str:
    return f"{row['case']} {row['memory']}"


def _ratio(row: Row, peer: str) -> str:
    if "wrong" in row:
        return "wrong"
    over = row.get("speedup_over", {})
    return f"{over[peer]:.2f}" if peer in over else "–"


def _of_limit(row: Row) -> str:
    if "of_limit" in row:
        return f"{row['of_limit']:.0%}"
    return f"{1 / row['time_over_memcpy']:.0%}" if row.get("time_over_memcpy") else "–"


def _rate(row: Row) -> str:
    if "tokens/s" in row:
        return f"{row['tokens/s']:,.0f} tokens/s"
    return f"{row['TFLOP/s']:.3g} TFLOP/s" if "TFLOP/s" in row else f"{row.get('GB/s', 0):,.1f} GB/s"


def _time(row: Row) -> str:
    return f"{row['median_us']:,.0f}" if row["median_us"] >= 10 else f"{row['median_us']:.1f}"


def _mega(row: Row, key: str) -> str:
    return f"{row[key] / 1e6:,.1f}" if key in row else "–"


def operations(kept: dict[str, Any]) -> str:
    """Every row of our backends, with its time, memory and what it is relative to the peers."""
    parts = []
    for rows in _halves(kept):
        ours, peers = _ours(rows)
        gpu = any("device_us" in r for r in ours)
        heads = ["operation", "direction", "dtype", "shape", "backend", "µs", *(f"x {p}" for p in peers), "of limit"]
        heads += ["rate", "peak MB", "saved MB", *(["GPU µs", "in a graph µs"] if gpu else [])]
        lines = []
        for r in ours:
            cells = [f"`{r['op']}`", r["direction"], r["dtype"], _shape(r), r["row"], _time(r)]
            cells += [*(_ratio(r, p) for p in peers), _of_limit(r), _rate(r)]
            cells += [_mega(r, "peak_bytes"), _mega(r, "saved_bytes")]
            cells += [str(r.get(key, "–")) for key in ("device_us", "graph_us")] if gpu else []
            lines.append(cells)
        parts.append(_markdown(heads, lines))
    return "\n\n".join(part for part in parts if part)


def summary(kept: dict[str, Any]) -> str:
    """Forward and backward on the shapes of the quick set, dtypes side by side; of a shape that fits the caches the
    warm rows, of others the cold ones."""
    parts = []
    for rows in _halves(kept):
        ours, peers = _ours(rows)
        warm = {(r["op"], r["case"]) for r in ours if r["memory"] == "warm"}
        chosen = [
            r
            for r in ours
            if r["direction"] != "both"
            and r.get("quick", "cached" in r["case"] or "large" in r["case"])
            and not ((r["op"], r["case"]) in warm and r["memory"] == "cold")
        ]
        dtypes = list(dict.fromkeys(r["dtype"] for r in chosen))
        groups: dict[tuple[str, ...], dict[str, Row]] = {}
        for r in chosen:
            groups.setdefault((r["op"], r["direction"], _shape(r), r["row"]), {})[r["dtype"]] = r
        lines = []
        for (op, direction, shape, backend), by_dtype in groups.items():
            found = [by_dtype[d] for d in dtypes if d in by_dtype]
            cells = [f"`{op}`", direction, shape, backend, " / ".join(map(_time, found))]
            cells += [" / ".join(_ratio(r, p) for r in found) for p in peers]
            cells.append(" / ".join(map(_of_limit, found)))
            lines.append(cells)
        heads = ["operation", "direction", "shape", "backend", "µs", *(f"x {p}" for p in peers), "of limit"]
        if lines:
            parts += [f"Each cell: {' / '.join(dtypes)}.", _markdown(heads, lines)]
    return "\n\n".join(parts)


def models(kept: dict[str, Any]) -> str:
    """Whole models, each beside the one that its family is held against."""
    lines = []
    for r in _of(kept, "model"):
        over = r.get("speedup_over", {})
        base = r.get("base", "")
        speed = "1" if r["row"] == base else f"{over[base]:.2f}" if base in over else "wrong" if "wrong" in r else "–"
        rate, peak = f"{r['tokens/s']:,.0f}", _mega(r, "peak_bytes")
        lines.append([f"{r['op']}, {r['case']}", r["direction"], r["dtype"], r["row"], rate, speed, peak])
    return _markdown(["model", "task", "dtype", "", "tokens/s", "speed", "peak MB"], lines)


def overhead(kept: dict[str, Any]) -> str:
    """Microseconds that the calling thread is busy with the smallest call."""
    rows = _of(kept, "overhead")
    names = list(dict.fromkeys(r["row"] for r in rows))
    by_op: dict[str, dict[str, Row]] = {}
    for r in rows:
        by_op.setdefault(r["op"], {})[r["row"]] = r
    lines = [
        [f"`{op}`", *(f"{found[n]['host_us']:.1f}" if n in found else "–" for n in names)]
        for op, found in by_op.items()
    ]
    return _markdown(["µs a call", *names], lines)


def scaling(kept: dict[str, Any]) -> str:
    """Exponents of time and memory; ours in bold where they pass what the operation asks for: a line, and of attention
    over its tokens a square in time."""
    lines = []
    for r in _of(kept, "scaling"):
        for name, line in r["lines"].items():
            if "time_exponent" not in line:
                continue
            square = any(line.get("TFLOP/s", ())) and r["axis"] == "T"
            allowed = {"time": 2.25 if square else 1.25, "memory": 1.25}
            cells = [f"`{r['op']}`", r["direction"], r["dtype"], _sizes(r), name]
            for kind in ("time", "memory"):
                for key in (f"{kind}_exponent", f"last_{kind}_exponent"):
                    text = f"{line[key]:.2f}" if key in line else "–"
                    cells.append(f"**{text}**" if name in OURS and line.get(key, 0) > allowed[kind] else text)
            lines.append(cells)
    heads = ["operation", "direction", "dtype", "over", "", "time", "last 3", "memory", "last 3"]
    return _markdown(heads, lines)


def _sizes(row: Row) -> str:
    return f"{row['axis']} = {row['sizes'][0]} .. {row['sizes'][-1]}"


def absent(kept: dict[str, Any]) -> str:
    """Why rows have no figures or no ratios, each reason once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for r in [*kept.get("absent", []), *kept["rows"]]:
        reason = r.get("why_not") or r.get("wrong") or r.get("graph_why_not")
        if reason:
            found.setdefault((r["op"], r["row"], reason), []).append(r["case"])
    lines = []
    for (op, name, reason), cases in found.items():
        distinct = list(dict.fromkeys(cases))
        where = distinct[0] if len(distinct) == 1 else f"{len(distinct)} shapes"
        lines.append(f"- `{op}`, {name} ({where}): {reason}")
    return "\n".join(lines)
