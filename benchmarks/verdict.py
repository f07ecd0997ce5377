"""Says where our kernels pay on this machine and where they do not, from the rows of a run: in a screen, and what is
slower than a peer one and all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.tables import LIMITS, OUR_MODELS, OURS, markdown, of_kind, shape_of

Row = dict[str, Any]

#: Within this of 1, a ratio says nothing: runs of the same code differ by as much.
MARGIN = 1.05
#: What each of our models is compared with.
_PAIRS = {
    "ours": "reference",
    "ours, compiled": "reference, compiled",
    "patched by ours": "Hugging Face",
    "continuous batching": "one after the other",
}
_MOST = 8


def lines(rows: Sequence[Row]) -> list[str]:
    """Returns the verdict; empty where no row of ours was compared with a peer."""
    found = [*_operations(rows), *_models(rows)]
    parts: list[str] = []
    for title, low, high in (
        ("It pays here:", MARGIN, float("inf")),
        ("No difference (within 5 %):", 1 / MARGIN, MARGIN),
        ("It does not pay here:", 0.0, 1 / MARGIN),
    ):
        of = [text for ratio, text in found if low <= ratio < high]
        parts += [title, *(f"  {text}" for text in of)] if of else []
    return parts + _behind(rows) + _wrong(rows)


def _operations(rows: Sequence[Row]) -> list[tuple[float, str]]:
    """Returns by operation, direction and kernel the median over the peer that is hardest to beat, and a sentence."""
    by: dict[tuple[str, str, str], list[Row]] = {}
    for row in _ours(rows):
        by.setdefault((row["op"], row["direction"], row["row"]), []).append(row)
    several = len({name for _, _, name in by}) > 1
    found = []
    for (op, direction, name), mine in by.items():
        ratios = [_over(row) for row in mine]
        peers = dict.fromkeys(p for over in ratios for p in over)
        over = {p: statistics.median(r[p] for r in ratios if p in r) for p in peers}
        hardest = min(over, key=lambda p: over[p])
        shown = [hardest, *(p for p in ("eager",) if p in over and p != hardest)]
        behind = sum(_least(row)[1] < 1 / MARGIN for row in mine)
        text = f"{op} {direction}{f' ({name})' if several else ''}: {', '.join(f'{over[p]:.2f}x {p}' for p in shown)}"
        text += f" (median of {len(mine)} rows)" if len(mine) > 1 else ""
        found.append((over[hardest], text + (f"; behind on {behind}" if behind else "")))
    return found


def _models(rows: Sequence[Row]) -> list[tuple[float, str]]:
    found = []
    for row in rows:
        peer = _PAIRS.get(row["row"], "") if row.get("kind") == "model" else ""
        if (ratio := row.get("speedup_over", {}).get(peer)) is not None:
            text = f"{row['op']} {row['case']}, {row['direction']}: {row['row']} {ratio:.2f}x {peer}"
            found.append((ratio, text))
    return found


def _ours(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of our kernels that were compared with a peer."""
    kernels = (r for r in rows if r.get("kind", "op") == "op" and r["row"] in ("native", "triton"))
    return [r for r in kernels if _over(r)]


def _over(row: Row, ours: Sequence[str] = OURS) -> dict[str, float]:
    """Returns how many times as fast as each peer; our other kernels or models are none."""
    return {p: ratio for p, ratio in row.get("speedup_over", {}).items() if p not in ours}


def _least(row: Row) -> tuple[str, float]:
    """Returns the peer that the row is furthest behind, or least ahead of, and the ratio."""
    return min(_over(row).items(), key=lambda item: item[1])


def _behind(rows: Sequence[Row]) -> list[str]:
    mine = _ours(rows)
    slower = sorted((r for r in mine if _least(r)[1] < 1 / MARGIN), key=lambda r: _least(r)[1])
    if not slower:
        return [f"Behind a peer: none of {len(mine)} rows."] if mine else []
    named = []
    for row in slower[:_MOST]:
        peer, ratio = _least(row)
        what = f"{row['op']} {row['direction']} {row['dtype']} {shape_of(row)}, {row['memory']}"
        named.append(f"  {what}: {ratio:.2f}x {peer}")
    more = [f"  and {len(slower) - _MOST} more"] if len(slower) > _MOST else []
    return [f"Behind a peer, {len(slower)} of {len(mine)} rows:", *named, *more]


def _wrong(rows: Sequence[Row]) -> list[str]:
    wrong = [f"{r['op']} {r['direction']} {r['row']}" for r in rows if "wrong" in r]
    return [f"Wrong results, so without ratios: {', '.join(dict.fromkeys(wrong))}."] if wrong else []


# --- what is slower than a peer, one and all --------------------------------------------------------------------------

TITLE = "Slower than a peer"


@dataclass(frozen=True)
class Slower:
    """A row of ours that takes longer than a peer; `ratio`, below 1, is the peer's time over ours."""

    ratio: float
    peer: str
    what: str
    row: Row

    @property
    def where(self) -> str:
        dtype, memory = self.row.get("dtype", ""), self.row.get("memory", "")
        return f"{self.row['direction']}, {dtype}, {shape_of(self.row)}, {memory}"


def slower(kept: dict[str, Any]) -> tuple[list[Slower], int]:
    """Returns each row of ours and each peer that it is behind, by however little, the worst first; and how many
    rows of ours were compared with a peer at all. Calls of operations, models, and host times."""
    rows = [(f"`{r['op']}`", r, _over(r)) for r in _ours(kept["rows"])]
    models = (r for r in of_kind(kept, "model") if r["row"] in OUR_MODELS)
    rows += [(f"{r['op']}, {r['row']}", r, _over(r, OUR_MODELS)) for r in models]
    rows += [(f"host time of `{r['op']}`", r, over) for r, over in _host_times(kept)]
    held = [(what, row, over) for what, row, over in rows if over]
    found = [Slower(ratio, p, what, row) for what, row, over in held for p, ratio in over.items() if ratio < 1]
    return sorted(found, key=lambda s: s.ratio), len(held)


def _host_times(kept: dict[str, Any]) -> list[tuple[Row, dict[str, float]]]:
    """Our kernels' rows, and by peer its time over ours. A row's name is a contender's, and how it was called."""
    by: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in of_kind(kept, "overhead"):
        name, _, how = row["row"].partition(", ")
        by.setdefault((row["op"], row["case"], how), {})[name] = row
    found = []
    for alike in by.values():
        peers = {n: r["host_us"] for n, r in alike.items() if n not in (*OURS, *LIMITS)}
        mine = [r for n, r in alike.items() if n in ("native", "triton")]
        found += [(r, {n: us / r["host_us"] for n, us in peers.items()}) for r in mine]
    return found


def slower_table(kept: dict[str, Any]) -> str:
    found, held = slower(kept)
    if not held:
        return ""
    lines = [[f"{s.ratio:.2f}", s.peer, s.what, *s.where.split(", ", 2)] for s in found]
    table = markdown(["×", "peer", "", "direction", "dtype", "shape, memory"], lines)
    return f"{counted(found, held)} Runs of the same code differ by up to 5 %.\n\n{table}".strip()


def counted(found: Sequence[Slower], held: int) -> str:
    behind = len({id(s.row) for s in found})
    return f"{behind or 'None'} of {held} rows of ours {'are' if behind > 1 else 'is'} slower than a peer."


def worst(found: Sequence[Slower]) -> str:
    """Returns of each operation and model the row that is furthest behind."""
    first: dict[str, Slower] = {}
    for s in found:  # the worst first
        first.setdefault(s.what, s)
    return "; ".join(f"{s.what} {s.ratio:.2f}x {s.peer}" for s in first.values())
