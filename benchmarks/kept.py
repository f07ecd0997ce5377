"""The format of stored results: JSON with one line for each row, and only with fields that pages, pictures and verdicts
read.

Rows of a kind are arrays under the names of their columns; rows without figures are under "absent". A ratio and its
noise are one array, `[ratio, low, high, itself]`, and a line of growth is the array of its exponents. `dumps` drops
unused fields, so `loads(dumps(x))` is `slim(x)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.tables import OUR_MODELS, OURS

Row = dict[str, Any]

_NAMES = ("op", "row", "direction", "dtype", "case", "memory")
#: The stored columns by kind of row.
COLUMNS = {
    "op": (
        *(*_NAMES, "median_us", "over", "peak_bytes", "saved_bytes", "GB/s", "TFLOP/s", "tokens/s"),
        *("limit", "of_limit", "time_over_memcpy", "device_us", "graph_us", "graph_why_not", "wrong"),
    ),
    "overhead": (*_NAMES, "host_us", "itself"),
    "model": (*_NAMES, "median_us", "tokens/s", "peak_bytes", "base", "over", "held_bytes", "wrong"),
    "scaling": (*_NAMES, "axis", "sizes", "lines", "theory"),
    "absent": ("kind", *_NAMES, "why_not"),
}
_REASONS = {"wrong", "graph_why_not"}
_NOISE = ("low", "high", "itself")
_EXPONENTS = ("time_exponent", "last_time_exponent", "memory_exponent", "last_memory_exponent")


def read(path: Path) -> Any:
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {path} cannot be read as results: {error}") from None


def slim(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the results without unused fields, and without an operation's peers: this package's rows have the ratios
    of times. A peer's row only stays for the reason why it has no ratio."""
    rows = [r for r in kept["rows"] if r.get("kind", "op") != "op" or r["row"] in OURS or r.keys() & _REASONS]
    return kept | {
        "rows": [_slim(row) for row in rows],
        "absent": [{k: row[k] for k in COLUMNS["absent"] if k in row} for row in kept.get("absent", [])],
    }


def merge(kept: dict[str, Any], rows: list[Row]) -> None:
    """Adds rows to results, in place of those with the same names."""

    def names(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("kind", *_NAMES))

    new = {names(row): row for row in rows}
    for key in ("rows", "absent"):
        old = [row for row in kept.get(key, []) if names(row) not in new]
        kept[key] = old + [row for row in new.values() if ("why_not" in row) == (key == "absent")]


def _slim(row: Row) -> Row:
    kind = row.get("kind", "op")
    ratios = ("speedup_over", "noise") if "over" in COLUMNS[kind] else ()
    found = {k: v for k, v in row.items() if k in ("kind", *ratios, *COLUMNS[kind])}
    if "of_limit" in found:
        found.pop("time_over_memcpy", None)
    if "speedup_over" in found:  # rows of this package are not compared with each other, nor peers with each other
        ours = OUR_MODELS if kind == "model" else OURS
        peers = {p for p in found["speedup_over"] if row["row"] in (*OURS, *ours) and p not in ours}
        all_of = peers | {row.get("base")}
        for key in ("speedup_over", "noise"):
            found[key] = {p: v for p, v in found.get(key, {}).items() if p in all_of}
    if kind == "scaling":
        found["lines"] = {name: {k: line[k] for k in _EXPONENTS if k in line} for name, line in row["lines"].items()}
    return found


def dumps(kept: dict[str, Any]) -> str:
    kept = slim(kept)
    by: dict[str, list[Row]] = {}
    for row in kept["rows"]:
        by.setdefault(row.get("kind", "op"), []).append(row)
    by["absent"] = kept["absent"]
    parts = [f"{json.dumps(k)}:{_json(v)}" for k, v in kept.items() if k not in ("rows", "absent")]
    for kind, rows in by.items():
        lines = ",\n".join(_json(_packed(row, COLUMNS[kind])) for row in rows)
        parts.append(f'"{kind}":{{"columns":{_json(COLUMNS[kind])},"rows":[\n{lines}\n]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def loads(text: str) -> Any:
    """The slim input of `dumps`; other JSON is returned unchanged."""
    kept = json.loads(text)
    if not isinstance(kept, dict) or "absent" not in kept or not isinstance(kept["absent"], dict):
        return kept
    tables = {kind: kept.pop(kind) for kind in [*kept] if kind in COLUMNS}
    rows = {k: [_unpacked(t["columns"], values) for values in t["rows"]] for k, t in tables.items()}
    kept["absent"] = rows.pop("absent")
    kept["rows"] = [{"kind": kind, **row} for kind, of in rows.items() for row in of]
    return kept


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _packed(row: Row, columns: tuple[str, ...]) -> list[Any]:
    values = dict(row)
    if "speedup_over" in row:
        noise = row["noise"]
        values["over"] = {p: [r, *_array(noise.get(p, {}), _NOISE)] for p, r in row["speedup_over"].items()}
    if "lines" in row:
        values["lines"] = {name: _array(line, _EXPONENTS) for name, line in row["lines"].items()}
    return _array(values, columns)


def _array(values: Row, names: tuple[str, ...]) -> list[Any]:
    """Returns the values of `names`, with None for missing ones, up to the last existing one."""
    found = [values.get(name) for name in names]
    while found and found[-1] is None:
        found.pop()
    return found


def _named(values: list[Any], names: tuple[str, ...] | list[str]) -> Row:
    return {name: value for name, value in zip(names, values, strict=False) if value is not None}


def _unpacked(columns: list[str], values: list[Any]) -> Row:
    row = _named(values, columns)
    if "over" in row:
        over = row.pop("over")
        row["speedup_over"] = {p: ratio for p, (ratio, *_) in over.items()}
        row["noise"] = {p: known for p, (_, *rest) in over.items() if (known := _named(rest, _NOISE))}
    if "lines" in row:
        row["lines"] = {name: _named(line, _EXPONENTS) for name, line in row["lines"].items()}
    return row
