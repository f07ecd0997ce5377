"""Keeps a run within its time: orders the comparisons, and cuts some.

First come, for each operation, the smallest shapes that together have all its directions and dtypes; then host times
and models; then all other shapes and growth, the smallest first. If time is short, rounds are halved, then whole shapes
are cut from the end. A new plan is made before each comparison, from the time of the rows of each kind so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

#: Minutes for the quick set; the full set has no limit by default.
DEFAULT = 5.0
#: Fractions of the rounds; the first that fits is used.
EFFORTS = (1.0, 0.5)
#: The planned fraction of the time, because the last comparisons may take longer than expected.
_PLANNED = 0.95
#: The expected seconds of a row by kind, on 2 cores of a CPU; and as how many measured rows they count.
ROW_SECONDS = {"memcpy": 1.0, "GEMM": 2.5, "overhead": 0.3, "growth": 6.0, "model": 10.0, "compiled model": 18.0}
_PRIOR = 2

#: Places in the order of a run.
FIRST, NEEDED, LATER, REST = -1, 0, 1, 2


@dataclass(frozen=True)
class Unit:
    """Rows that are compared with each other; either all or none are measured.

    shape: units of a shape are cut together. kind: a key of `ROW_SECONDS`. size: in bytes; shapes are ordered by it.
    op, what: the operation, and its direction and dtype.
    """

    id: str
    shape: str
    kind: str
    size: float = 0.0
    op: str = ""
    what: str = ""
    place: int = REST
    rows: int = 1

    def seconds(self, effort: float = 1.0, rates: Mapping[str, float] = ROW_SECONDS) -> float:
        """Returns the expected time, of which the rounds are half."""
        return self.rows * rates[self.kind] * (1 + effort) / 2


def collected(rows: Iterable[Unit]) -> list[Unit]:
    """Returns the distinct units of rows, with their numbers of rows and with `NEEDED` ones marked."""
    found: dict[str, Unit] = {}
    for unit in rows:
        known = found.get(unit.id)
        found[unit.id] = unit if known is None else replace(known, rows=known.rows + 1)
    needed = _needed([unit for unit in found.values() if unit.op])
    return [replace(u, place=NEEDED) if u.shape in needed and u.place > NEEDED else u for u in found.values()]


def _needed(units: Sequence[Unit]) -> set[str]:
    """Returns shapes that together have every direction and dtype of every operation. Greedily takes the shape with the
    most missing ones, and the smallest of these."""
    has: dict[str, set[tuple[str, str]]] = {}
    sizes: dict[str, float] = {}
    for u in units:
        has.setdefault(u.shape, set()).add((u.op, u.what))
        sizes[u.shape] = max(sizes.get(u.shape, 0.0), u.size)
    left, chosen = {(u.op, u.what) for u in units}, set()
    while left:
        shape = max(has, key=lambda s: (len(has[s] & left), -sizes[s]))
        chosen.add(shape)
        left -= has[shape]
    return chosen


def ordered(units: Sequence[Unit]) -> list[Unit]:
    """Returns the units in the order of measurement, with the units of a shape together. The last ones are cut
    first."""
    place = {shape: index for index, shape in enumerate(reversed(_largest_first(units)))}
    return sorted(units, key=lambda u: place[u.shape])


@dataclass(frozen=True)
class Plan:
    """The fraction of the rounds to measure, the shapes to cut, and the seconds for the others."""

    effort: float
    cut: tuple[str, ...]
    seconds: float


def plan(units: Sequence[Unit], seconds: float, rates: Mapping[str, float] = ROW_SECONDS) -> Plan:
    """Plans `units` for `seconds`."""
    for effort in EFFORTS:
        if (left := sum(u.seconds(effort, rates) for u in units)) <= seconds:
            return Plan(effort, (), left)
    cut: list[str] = []
    for shape in _largest_first(units):
        if left <= seconds:
            break
        cut.append(shape)
        left -= sum(u.seconds(effort, rates) for u in units if u.shape == shape)
    return Plan(effort, tuple(cut), left)


def _largest_first(units: Sequence[Unit]) -> list[str]:
    """Returns the shapes in the order of cuts: the rest, models, `NEEDED` ones; the largest first."""
    sizes: dict[str, tuple[int, float, int]] = {}
    for u in units:
        place, size, index = sizes.get(u.shape, (u.place, 0.0, len(sizes)))
        sizes[u.shape] = (min(place, u.place), max(size, u.size) if u.place > NEEDED else 0.0, index)
    return sorted(sizes, key=lambda s: sizes[s], reverse=True)


@dataclass
class Budget:
    """The time of a run, from `started` on; without `minutes` everything is measured."""

    units: Sequence[Unit]
    minutes: float
    started: float
    clock: Callable[[], float] = time.monotonic
    #: The fraction of rounds by unit; None if it was cut.
    decided: dict[str, float | None] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_id = {u.id: u for u in self.units}

    @property
    def gone(self) -> float:
        return self.clock() - self.started

    @property
    def rates(self) -> dict[str, float]:
        """The seconds of a row with all its rounds, by kind."""
        taken = {kind: [_PRIOR * seconds, float(_PRIOR)] for kind, seconds in ROW_SECONDS.items()}
        for name, seconds in self.spent.items():
            if (effort := self.decided.get(name)) is not None:
                unit = self._by_id[name]
                taken[unit.kind][0] += seconds
                taken[unit.kind][1] += unit.rows * (1 + effort) / 2
        return {kind: seconds / rows for kind, (seconds, rows) in taken.items()}

    def remaining(self) -> Plan:
        """Returns the plan for the units that have not started."""
        rest = [u for u in self.units if u.id not in self.decided]
        seconds = self.minutes * 60 * _PLANNED - self.gone if self.minutes else float("inf")
        return plan(rest, seconds, self.rates)

    def admit(self, name: str) -> float | None:
        """Returns a unit's fraction of rounds, or None if it is cut. Its first row decides."""
        if name not in self._by_id:
            return 1.0
        if name not in self.decided:
            found = self.remaining()
            self.decided[name] = None if self._by_id[name].shape in found.cut else found.effort
        return self.decided[name]

    def spend(self, name: str, seconds: float) -> None:
        if name in self._by_id:
            self.spent[name] = self.spent.get(name, 0.0) + seconds

    def announced(self) -> list[str]:
        """Returns a few lines about the planned measurements."""
        found = self.remaining()
        rows = sum(u.rows for u in self.units)
        text = f"{rows} rows in {len(self.units)} comparisons, about {minutes(found.seconds + self.gone)}"
        lines = [f"{text}; " + (f"budget {self.minutes:g} min (--budget, 0 for none)" if self.minutes else "no budget")]
        if found.effort < 1:
            lines.append(f"  fewer rounds: {found.effort:.0%} of them")
        if found.cut:
            lines.append(f"  left out unless time is left: {len(found.cut)} shapes, {listed(found.cut[::-1])}")
        return lines

    def progress(self) -> str:
        """Returns the progress of the run: the finished rows, of those for which there is time."""
        left = self.remaining()
        done = sum(u.rows for u in self.units if self.decided.get(u.id) is not None)
        to_go = sum(u.rows for u in self.units if u.id not in self.decided and u.shape not in left.cut)
        return f"{minutes(self.gone)}: {done} of {done + to_go} rows, about {minutes(left.seconds)} to go"

    def kept(self) -> dict[str, object]:
        """Returns the fields for a page."""
        cut = [self._by_id[name] for name, effort in self.decided.items() if effort is None]
        shapes = dict.fromkeys(u.shape for u in cut)
        measured = {self._by_id[name].op for name, effort in self.decided.items() if effort is not None}
        none_of = [op for op in dict.fromkeys(u.op for u in cut) if op and op not in measured]
        return {
            "minutes": self.minutes,
            "spent": round(self.gone / 60, 1),
            "comparisons": len(self.decided),
            "cut": {s: [sum(u.rows for u in of if u.shape == s) for of in (cut, self.units)] for s in shapes},
            "fewer_rounds": sum(effort is not None and effort < 1 for effort in self.decided.values()),
            **({"none_of": none_of} if none_of else {}),
        }


def together(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns what `Budget.kept` would say of two runs as one."""
    sums = ("minutes", "spent", "comparisons", "fewer_rounds")
    found = {key: round(first.get(key, 0) + second.get(key, 0), 1) for key in sums if key in first or key in second}
    if found["minutes"]:  # one without a budget had what it took
        found["minutes"] = round(sum(run["minutes"] or run["spent"] for run in (first, second)), 1)
    none_of = [op for op in first.get("none_of", ()) if op in second.get("none_of", ())]
    return {**found, "cut": first["cut"] | second["cut"], **({"none_of": none_of} if none_of else {})}


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names, not more than a few: JSON files and pages have them all."""
    more = f"; and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
