"""Keeps a run within its time: orders the comparisons, and cuts some.

First come, for each operation, the smallest shapes that together have all its directions and dtypes; then host times
and models; then all other shapes and growth, the smallest first. If time is short, rounds are halved, then whole shapes
are cut from the end, then `torch.compile` of the first shapes, then these shapes. A new plan is made before each
comparison, with estimates that are corrected by the measurements so far.
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
#: The weight of an estimate relative to measurements, in seconds.
_PRIOR = 5.0


#: Places in the order of a run.
FIRST, NEEDED, LATER, REST = -1, 0, 1, 2


@dataclass(frozen=True)
class Unit:
    """Rows that are compared with each other; either all or none are measured.

    shape: units of a shape are cut together. kind: estimates of a kind share a correction. fixed, rounds, a_row:
    seconds before the rounds, of all rounds, and of each row. waits: the seconds of `fixed` for compiling peers. op,
    what: the operation, and its direction and dtype.
    """

    id: str
    shape: str
    kind: str
    fixed: float
    rounds: float = 0.0
    size: float = 0.0
    op: str = ""
    what: str = ""
    place: int = REST
    a_row: float = 0.0
    rows: int = 1
    waits: float = 0.0

    def seconds(self, effort: float = 1.0) -> float:
        return self.fixed + self.a_row * self.rows + self.rounds * effort

    @property
    def plain(self) -> Unit:
        """The unit without compiled peers."""
        return replace(self, fixed=self.fixed - self.waits, waits=0.0, kind="operation") if self.waits else self


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
    """The fraction of the rounds to measure, the shapes to cut, the seconds for the others, and the shapes without
    compiled peers."""

    effort: float
    cut: tuple[str, ...]
    seconds: float
    plain: tuple[str, ...] = ()


def plan(units: Sequence[Unit], seconds: float, factors: Mapping[str, float] | None = None) -> Plan:
    """Plans `units` for `seconds`, by estimates times the factor of their kind."""
    by = factors or {}

    def total(chosen: Iterable[Unit], effort: float) -> float:
        return sum(u.seconds(effort) * by.get(u.kind, 1.0) for u in chosen)

    for effort in EFFORTS:
        if (left := total(units, effort)) <= seconds:
            return Plan(effort, (), left)
    shapes: dict[str, list[Unit]] = {}
    for u in units:
        shapes.setdefault(u.shape, []).append(u)
    takes = {shape: total(of, effort) for shape, of in shapes.items()}
    cut: list[str] = []
    plain: list[str] = []
    for shape, compiled in _steps(units):
        if left <= seconds:
            break
        now = total((u.plain for u in shapes[shape]), effort) if compiled else 0.0
        (plain if compiled else cut).append(shape)
        left += now - takes[shape]
        takes[shape] = now
    return Plan(effort, tuple(cut), left, tuple(shape for shape in plain if shape not in cut))


def _steps(units: Sequence[Unit]) -> list[tuple[str, bool]]:
    """Returns the cuts in order: shapes or, if True, only their compiled peers."""
    needed = {u.shape for u in units if u.place <= NEEDED}
    order = _largest_first(units)
    last = [shape for shape in order if shape in needed]
    first = [(shape, False) for shape in order if shape not in needed]
    return [*first, *((shape, True) for shape in last), *((shape, False) for shape in last)]


def _largest_first(units: Sequence[Unit]) -> list[str]:
    """Returns the shapes in the order of cuts: the rest and then models, the largest first; then from the end."""
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
    #: Ids of units whose compiled peers were cut.
    plain: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._by_id = {u.id: u for u in self.units}

    @property
    def gone(self) -> float:
        return self.clock() - self.started

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.minutes * 60 - self.gone

    def remaining(self) -> Plan:
        """Returns the plan for the units that have not started."""
        rest = [u for u in self.units if u.id not in self.decided]
        if not self.minutes:
            return Plan(1.0, (), sum(u.seconds() * self.factors.get(u.kind, 1.0) for u in rest))
        return plan(rest, self.left - (1 - _PLANNED) * self.minutes * 60, self.factors)

    @property
    def factors(self) -> dict[str, float]:
        """The ratio of seconds spent to seconds expected, by kind."""
        sums: dict[str, list[float]] = {}
        for name, seconds in self.spent.items():
            unit, effort = self._by_id[name], self.decided.get(name)
            if effort is not None:
                unit = unit.plain if name in self.plain else unit
                found = sums.setdefault(unit.kind, [_PRIOR, _PRIOR])
                found[0] += seconds
                found[1] += unit.seconds(effort)
        return {kind: spent / expected for kind, (spent, expected) in sums.items()}

    def admit(self, name: str) -> float | None:
        """Returns a unit's fraction of rounds, or None if it is cut. Its first row decides."""
        if name not in self._by_id:
            return 1.0
        if name not in self.decided:
            found = self.remaining()
            unit = self._by_id[name]
            self.decided[name] = None if unit.shape in found.cut else found.effort
            if unit.shape in found.plain and unit.waits:
                self.plain.add(name)
        return self.decided[name]

    def spend(self, name: str, seconds: float) -> None:
        if name in self._by_id:
            self.spent[name] = self.spent.get(name, 0.0) + seconds

    def announced(self) -> list[str]:
        """Returns a few lines about the planned measurements."""
        found = self.remaining()
        rows = sum(u.rows for u in self.units)
        text = f"{rows} rows in {len(self.units)} comparisons"
        if not self.minutes:
            return [f"{text}, about {minutes(found.seconds)}; no budget"]
        text += f", about {minutes(found.seconds + self.gone)}; budget {self.minutes:g} min (--budget, 0 for none)"
        lines = [text]
        if found.effort < 1:
            lines.append(f"  fewer rounds: {found.effort:.0%} of them")
        if found.plain:
            lines.append(f"  without what is compiled, unless time is left: {listed(found.plain[::-1])}")
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
        fewer = [effort for effort in self.decided.values() if effort is not None and effort < 1]
        return {
            "minutes": self.minutes,
            "spent": round(self.gone / 60, 1),
            "comparisons": len(self.decided),
            "cut": {s: [sum(u.rows for u in of if u.shape == s) for of in (cut, self.units)] for s in shapes},
            "fewer_rounds": len(fewer),
            **({"not_compiled": len(self.plain)} if self.plain else {}),
            **({"none_of": none_of} if none_of else {}),
        }


def together(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the `Budget.kept` of two runs as one."""
    sums = ("minutes", "spent", "comparisons", "fewer_rounds", "not_compiled")
    found = {key: round(first.get(key, 0) + second.get(key, 0), 1) for key in sums if key in first or key in second}
    if found["minutes"]:  # without a budget, everything was measured
        found["minutes"] = round(sum(run["minutes"] or run["spent"] for run in (first, second)), 1)
    none_of = [op for op in first.get("none_of", ()) if op in second.get("none_of", ())]
    return {**found, "cut": first["cut"] | second["cut"], **({"none_of": none_of} if none_of else {})}


def listed(names: Sequence[str], most: int = 6) -> str:
    """At most a few names; JSON files and pages have all of them."""
    more = f"; and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
