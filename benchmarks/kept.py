"""The format of stored results: JSON with one line for each row, and only with fields that pages, pictures and verdicts
read.

Rows of a kind are arrays under the names of their columns; rows without figures are under "absent". A ratio and its
noise are one array, `[ratio, low, high, itself]`, and so are the exponents of a line of growth. `dumps` drops unused
fields, so `loads(dumps(x))` is `slim(x)`.
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
#: The required fields of a row; a row with a reason why it has no figures only needs its names.
_FIGURES = {
    "op": ("memory", "median_us"),
    "overhead": ("host_us",),
    "model": ("median_us", "tokens/s", "peak_bytes"),
    "scaling": ("axis", "sizes", "lines", "theory"),
}
_NOISE = ("low", "high", "itself")
_EXPONENTS = ("time_exponent", "last_time_exponent", "memory_exponent", "last_memory_exponent")
#: The fields of a peer's row: those for the roofline, and the time.
_OF_PEERS = {*_NAMES, "kind", "median_us", "GB/s", "TFLOP/s", "device_us", "wrong", "graph_why_not"}


def read(path: Path) -> Any:
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {path} cannot be read as results: {error}") from None


def check(kept: Any, path: Path) -> None:
    """
    Raises:
        SystemExit: the message names the file and the problem.
    """

    def refuse(problem: str) -> None:
        raise SystemExit(f"error: {path} is not a file of kept results: {problem}")

    if not isinstance(kept, dict):
        refuse(f"it holds {type(kept).__name__}, not an object")
    for key, kind in (("date", str), ("device", str), ("environment", dict), ("rows", list)):
        if not isinstance(kept.get(key), kind):
            refuse(f"no {key!r}" if key not in kept else f"{key!r} is {type(kept[key]).__name__}")
    if "torch" not in kept["environment"]:
        refuse("no version of torch in 'environment'")
    for place in ("rows", "absent"):
        for index, row in enumerate(kept.get(place, [])):
            if not isinstance(row, dict):
                refuse(f"{place}[{index}] is {type(row).__name__}")
            kind = row.get("kind", "op")
            if kind not in _FIGURES:
                refuse(f"{place}[{index}] is of the unknown kind {kind!r}")
            needed = (*_NAMES[:5], *(_FIGURES[kind] if place == "rows" else ("why_not",)))
            if missing := [key for key in needed if key not in row]:
                refuse(f"{place}[{index}] has no {missing[0]!r}")


def slim(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the results without unused fields."""
    return kept | {
        "rows": [_slim(row) for row in kept["rows"]],
        "absent": [{k: row[k] for k in COLUMNS["absent"] if k in row} for row in kept.get("absent", [])],
    }


def _slim(row: Row) -> Row:
    kind = row.get("kind", "op")
    ratios = ("speedup_over", "noise") if "over" in COLUMNS[kind] else ()
    found = {k: v for k, v in row.items() if k in ("kind", *ratios, *COLUMNS[kind])}
    if kind == "op" and row["row"] not in OURS:
        found = {k: v for k, v in found.items() if k in _OF_PEERS}
        if "TFLOP/s" not in found and row["row"] != "memcpy":
            found.pop("GB/s", None)
    if "of_limit" in found:
        found.pop("time_over_memcpy", None)
    if "speedup_over" in found:  # rows of this package are not compared with each other, nor peers with each other
        ours = OUR_MODELS if kind == "model" else OURS
        all_of = {p for p in found["speedup_over"] if row["row"] in (*OURS, *ours) and p not in ours} | {
            row.get("base")
        }
        for key in ("speedup_over", "noise"):
            found[key] = {p: v for p, v in found.get(key, {}).items() if p in all_of}
    if kind == "scaling":
        found["lines"] = {name: _slim_line(line, row["axis"]) for name, line in row["lines"].items()}
    return found


def _slim_line(line: Row, axis: str) -> Row:
    """Returns the exponents, the times, and the data of the pictures over tokens and width."""
    drawn: dict[str, tuple[str, ...]] = {"T": ("TFLOP/s", "peak_bytes")} if "TFLOP/s" in line else {"N": ("GB/s",)}
    return {k: v for k, v in line.items() if k in (*_EXPONENTS, "median_us", *drawn.get(axis, ()))}


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
        values["lines"] = {name: _packed_line(line) for name, line in row["lines"].items()}
    return _array(values, columns)


def _packed_line(line: Row) -> Row:
    found = {k: v for k, v in line.items() if k not in _EXPONENTS}
    return found | {"exponents": exponents} if (exponents := _array(line, _EXPONENTS)) else found


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
    for line in row.get("lines", {}).values():
        line |= _named(line.pop("exponents", []), _EXPONENTS)
    return row
