"""Keeps a run within its time: the order of comparisons, and what is cut.

Order: of each operation the smallest shapes that together have all its directions and dtypes; host times and models;
then all other shapes and growth, the smallest first. If time is short, rounds are halved, then whole shapes are cut
from the end. The plan is made anew before each comparison, from what rows of each kind have taken so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

#: Minutes of the quick set; the full one has no limit unless it is given one.
DEFAULT = 5.0
#: Fractions of the rounds, the first that fits.
EFFORTS = (1.0, 0.5)
#: Fraction of the time that is planned for: what comes last can be longer than expected.
_PLANNED = 0.95
#: By kind, the seconds that a row is expected to take, on 2 cores of a CPU, before any has run; and as how many rows
#: that counts afterwards.
ROW_SECONDS = {"memcpy": 1.0, "GEMM": 2.5, "overhead": 0.3, "growth": 6.0, "model": 10.0, "compiled model": 18.0}
_PRIOR = 2

#: Places in the order of a run.
FIRST, NEEDED, LATER, REST = -1, 0, 1, 2


@dataclass(frozen=True)
class Unit:
    """Rows that are compared with each other: all are measured or none.

    shape: what is cut as a whole. kind: of `ROW_SECONDS`. size: of bytes, by which shapes are ordered. op, what: the
    operation, and its direction and dtype.
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
        """Returns what it is expected to take; half of that is besides the rounds."""
        return self.rows * rates[self.kind] * (1 + effort) / 2


def collected(rows: Iterable[Unit]) -> list[Unit]:
    """Returns the units of rows that each bring their own: counted, and what is `NEEDED` placed so."""
    found: dict[str, Unit] = {}
    for unit in rows:
        known = found.get(unit.id)
        found[unit.id] = unit if known is None else replace(known, rows=known.rows + 1)
    needed = _needed([unit for unit in found.values() if unit.op])
    return [replace(u, place=NEEDED) if u.shape in needed and u.place > NEEDED else u for u in found.values()]


def _needed(units: Sequence[Unit]) -> set[str]:
    """Returns the shapes that together have every direction and dtype of every operation: one that has most of those
    that are left, and of these the smallest."""
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
    """Returns the units in the order in which they are measured, those of a shape in succession: what comes last is
    what is cut first."""
    place = {shape: index for index, shape in enumerate(reversed(_largest_first(units)))}
    return sorted(units, key=lambda u: place[u.shape])


@dataclass(frozen=True)
class Plan:
    """The fraction of the rounds that is measured, the shapes that are cut, and the seconds that the rest takes."""

    effort: float
    cut: tuple[str, ...]
    seconds: float


def plan(units: Sequence[Unit], seconds: float, rates: Mapping[str, float] = ROW_SECONDS) -> Plan:
    """Decides what to do with `units` in `seconds`."""
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
    """Returns the shapes in the order in which they are cut: the rest, models, what is needed; the largest first."""
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
    #: By id of a unit: the fraction of its rounds, None where it was cut.
    decided: dict[str, float | None] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_id = {u.id: u for u in self.units}

    @property
    def gone(self) -> float:
        return self.clock() - self.started

    @property
    def rates(self) -> dict[str, float]:
        """Seconds that all rounds of a row take, by kind."""
        taken = {kind: [_PRIOR * seconds, float(_PRIOR)] for kind, seconds in ROW_SECONDS.items()}
        for name, seconds in self.spent.items():
            if (effort := self.decided.get(name)) is not None:
                unit = self._by_id[name]
                taken[unit.kind][0] += seconds
                taken[unit.kind][1] += unit.rows * (1 + effort) / 2
        return {kind: seconds / rows for kind, (seconds, rows) in taken.items()}

    def remaining(self) -> Plan:
        """Returns the plan of what has not begun."""
        rest = [u for u in self.units if u.id not in self.decided]
        seconds = self.minutes * 60 * _PLANNED - self.gone if self.minutes else float("inf")
        return plan(rest, seconds, self.rates)

    def admit(self, name: str) -> float | None:
        """Returns the fraction of its rounds that a unit gets, None where it is cut; its first row decides."""
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
        """Returns what is going to be measured, in a few lines."""
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
        """Returns how far the run is: the rows that are done, of those that there is time for."""
        left = self.remaining()
        done = sum(u.rows for u in self.units if self.decided.get(u.id) is not None)
        to_go = sum(u.rows for u in self.units if u.id not in self.decided and u.shape not in left.cut)
        return f"{minutes(self.gone)}: {done} of {done + to_go} rows, about {minutes(left.seconds)} to go"

    def kept(self) -> dict[str, object]:
        """Returns what a page says of it."""
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
