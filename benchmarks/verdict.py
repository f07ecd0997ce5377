"""Says where our kernels pay on this machine, where they do not and where it is too noisy to tell, from the rows of a
run: in a screen, and what is slower than a peer one and all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import noise
from benchmarks.tables import FROZEN, LIMITS, OUR_MODELS, OURS, WITHOUT, markdown, of_kind, shape_of

Row = dict[str, Any]

TITLE = "Slower than a peer"
#: What each of our models is compared with.
_PAIRS = {
    "ours": "reference",
    "ours, compiled": "reference, compiled",
    "patched by ours": "Hugging Face",
    "patched by ours, compiled": "Hugging Face, compiled",
    "continuous batching": "one after the other",
}
_TITLES = {
    "faster": "It pays here:",
    "even": "No difference (within 5 %):",
    "slower": "It does not pay here:",
    "noisy": "Too noisy to call:",
}
_MOST = 12


def lines(rows: Sequence[Row], left_out: Sequence[str] = ()) -> list[str]:
    """Returns the verdict, which ends with what is slower than a peer; empty where no row of ours was compared with
    one. `left_out`: what was cut, in sentences."""
    found = [*_operations(rows), *_models(rows)]
    parts: list[str] = []
    for called, title in _TITLES.items():
        of = [text for each, text in found if each == called]
        parts += [title, *(f"  {text}" for text in of)] if of else []
    about_noise = [text] if (text := noise.in_short(rows, (*OURS, *OUR_MODELS))) else []
    wrong = dict.fromkeys(f"{r['op']} {r['direction']} {r['row']}" for r in rows if "wrong" in r)
    of_wrong = [f"Wrong results, so without ratios: {', '.join(wrong)}."] if wrong else []
    parts += [*of_wrong, *left_out, *about_noise]
    behind, held = slower({"rows": rows})
    noisy = too_noisy({"rows": rows})
    parts += ["Rows too noisy to call:", *_named(noisy)] if noisy else []
    return [*parts, counted(behind, held, noisy), *_named(behind)] if held else parts


def _operations(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns by operation, direction and kernel what it is called, and a sentence: the median over the peer that is
    hardest to beat, of the rows that are not too noisy to call."""
    by: dict[tuple[str, str, str], list[Row]] = {}
    for row in _ours(rows):
        by.setdefault((row["op"], row["direction"], row["row"]), []).append(row)
    several = len({name for _, _, name in by}) > 1
    found = []
    for (op, direction, name), mine in by.items():
        calls = {id(row): _call(row) for row in mine}
        clear = [row for row in mine if calls[id(row)] != "noisy"]
        ratios = [_over(row) for row in clear or mine]
        peers = dict.fromkeys(p for over in ratios for p in over)
        over = {p: statistics.median(r[p] for r in ratios if p in r) for p in peers}
        hardest = min(over, key=lambda p: over[p])
        shown = [hardest, *(p for p in ("eager",) if p in over and p != hardest)]
        text = f"{op} {direction}{f' ({name})' if several else ''}: "
        text += ", ".join(f"{over[p]:.2f}x {p}{_itself(clear or mine, p)}" for p in shown)
        text += f" (median of {len(ratios)} rows)" if len(ratios) > 1 else ""
        text += f"; behind on {n}" if (n := [*calls.values()].count("slower")) else ""
        text += f"; {n} too noisy to call" if clear and (n := len(mine) - len(clear)) else ""
        found.append((noise.of_ratio(over[hardest]) if clear else "noisy", text))
    return found


def _models(rows: Sequence[Row]) -> list[tuple[str, str]]:
    found = []
    for row in rows:
        if row.get("kind") != "model":
            continue
        lora = row.get("op") == "lora" and row["row"] in OUR_MODELS
        peer = row["base"] if lora else _PAIRS.get(row["row"], "")
        if (ratio := row.get("speedup_over", {}).get(peer)) is not None:
            text = f"{row['op']} {row['case']}, {row['direction']}: {row['row']} {ratio:.2f}x {peer}"
            found.append((noise.call(row, peer), text + _itself([row], peer)))
    return found


def _itself(rows: Sequence[Row], peer: str) -> str:
    """Returns how far the peer was from itself, in the median of the rows."""
    known = [value for row in rows if (value := noise.itself(row, peer)) is not None]
    return f" {noise.percent(statistics.median(known))}" if known else ""


def _ours(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of our kernels that were compared with a peer."""
    kernels = (r for r in rows if r.get("kind", "op") == "op" and r["row"] in ("native", "triton"))
    return [r for r in kernels if _over(r)]


def _over(row: Row) -> dict[str, float]:
    """Returns how many times as fast as each peer; our other kernels or models are none, nor is a call without what
    this one is asked for."""
    ours = (*OUR_MODELS, FROZEN) if row.get("kind") == "model" else (*OURS, WITHOUT)
    return {p: ratio for p, ratio in row.get("speedup_over", {}).items() if p not in ours}


def _call(row: Row) -> str:
    """Returns what the row is called beside the peer that is hardest to beat; see `noise.call`."""
    calls = {p: noise.call(row, p) for p in _over(row)}
    return calls[min(calls, key=lambda p: (calls[p] != "slower", _over(row)[p]))]


# --- what is slower than a peer, one and all --------------------------------------------------------------------------


@dataclass(frozen=True)
class Slower:
    """A row of ours that takes longer than a peer, or may; `ratio` is the peer's time over ours."""

    ratio: float
    peer: str
    what: str
    row: Row

    @property
    def where(self) -> str:
        dtype, memory = self.row.get("dtype", ""), self.row.get("memory", "")
        return f"{self.row['direction']}, {dtype}, {shape_of(self.row)}, {memory}"


def slower(kept: dict[str, Any]) -> tuple[list[Slower], int]:
    """Returns each row of ours and each peer that it is behind, by however little but by more than the noise, the
    worst first; and how many rows of ours were compared with a peer at all. Calls of operations, models, and host
    times."""
    compared = _compared(kept)
    rows = len({id(s.row) for s in compared})
    return [s for s in compared if s.ratio < 1 and not noise.drowned(s.row, s.peer)], rows


def too_noisy(kept: dict[str, Any]) -> list[Slower]:
    """Returns each row of ours and each peer where noise hides which is faster, the smallest ratio first."""
    return [s for s in _compared(kept) if noise.call(s.row, s.peer) == "noisy"]


def _compared(kept: dict[str, Any]) -> list[Slower]:
    rows = [(f"`{r['op']}`", r, _over(r)) for r in _ours(kept["rows"])]
    models = (r for r in of_kind(kept, "model") if r["row"] in OUR_MODELS)
    rows += [(f"{r['op']}, {r['row']}", r, _over(r)) for r in models]
    rows += [(f"host time of `{r['op']}`", r, _over(r)) for r in _host_times(kept)]
    found = [Slower(ratio, p, what, row) for what, row, over in rows for p, ratio in over.items()]
    return sorted(found, key=lambda s: s.ratio)


def _host_times(kept: dict[str, Any]) -> list[Row]:
    """Returns our kernels' rows with, by peer, its time over ours, and the noise of both. A row's name is a
    contender's, and how it was called."""
    by: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in of_kind(kept, "overhead"):
        name, _, how = row["row"].partition(", ")
        by.setdefault((row["op"], row["case"], how), {})[name] = row
    found = []
    for alike in by.values():
        peers = {n: r for n, r in alike.items() if n not in (*OURS, *LIMITS)}
        for mine in (r for n, r in alike.items() if n in ("native", "triton")):
            over = {n: r["host_us"] / mine["host_us"] for n, r in peers.items()}
            known = {n: r["itself"] + mine["itself"] for n, r in peers.items() if "itself" in r and "itself" in mine}
            found.append({**mine, "speedup_over": over, "noise": {n: {"itself": both} for n, both in known.items()}})
    return found


def _named(found: Sequence[Slower]) -> list[str]:
    """Returns the first of them, a line each."""
    named = [f"  {s.ratio:.2f}x {s.peer}{_itself([s.row], s.peer)}: {s.what}, {s.where}" for s in found[:_MOST]]
    return [*named, *([f"  and {len(found) - _MOST} more"] if len(found) > _MOST else [])]


def slower_table(kept: dict[str, Any]) -> str:
    found, held = slower(kept)
    if not held:
        return ""
    noisy = too_noisy(kept)
    parts = [f"{counted(found, held, noisy)} Runs of the same code differ by up to 5 %.", _table(found)]
    if noisy:
        parts += [
            "Too noisy to call, as the peer differs as much from itself in the same rounds, or ours:",
            _table(noisy),
        ]
    return "\n\n".join(part for part in parts if part)


def _table(found: Sequence[Slower]) -> str:
    itself = [noise.itself(s.row, s.peer) for s in found]
    heads = ["×", "peer", "", "direction", "dtype", "shape, memory"]
    lines = [[f"{s.ratio:.2f}", s.peer, s.what, *s.where.split(", ", 2)] for s in found]
    if any(value is not None for value in itself):
        heads.append("peer against itself")
        lines = [[*line, "–" if i is None else noise.percent(i)] for line, i in zip(lines, itself, strict=True)]
    return markdown(heads, lines)


def counted(found: Sequence[Slower], held: int, noisy: Sequence[Slower] = ()) -> str:
    behind = len({id(s.row) for s in found})
    text = f"{behind or 'None'} of {held} benchmarks {'are' if behind > 1 else 'is'} slower than a peer"
    hidden = {_name(s) for s in noisy} - {_name(s) for s in found}
    return f"{text}, {len(hidden)} too noisy to call." if hidden else f"{text}."


def _name(s: Slower) -> tuple[str, str, str]:
    return s.what, s.where, str(s.row["row"])
