"""Keeps a run within its time: the order of comparisons, and what is cut.

Order: of each operation the smallest shapes that together have all its directions and dtypes; host times and models;
then all other shapes and growth, the smallest first. If time is short, rounds are halved, then whole shapes are cut
from the end, then `torch.compile` of the first shapes, then these. The plan is made anew before each comparison, with
estimates corrected by what was measured so far.
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
#: Seconds that an estimate weighs as, beside what was measured.
_PRIOR = 5.0


#: Places in the order of a run.
FIRST, NEEDED, LATER, REST = -1, 0, 1, 2


@dataclass(frozen=True)
class Unit:
    """Rows that are compared with each other: all are measured or none.

    shape: what is cut as a whole. kind: estimates of a kind share a correction. fixed, rounds, a_row: seconds before
    the rounds, of all rounds, and of each row. waits: seconds of `fixed` that compile peers. op, what: the
    operation, and its direction and dtype.
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
        """The same without the peers that are compiled."""
        return replace(self, fixed=self.fixed - self.waits, waits=0.0, kind="operation") if self.waits else self


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
    """The fraction of the rounds that is measured, the shapes that are cut, the seconds that the rest takes, and the
    shapes of it without peers that are compiled."""

    effort: float
    cut: tuple[str, ...]
    seconds: float
    plain: tuple[str, ...] = ()


def plan(units: Sequence[Unit], seconds: float, factors: Mapping[str, float] | None = None) -> Plan:
    """Decides what to do with `units` in `seconds`, by estimates that are multiplied by their kind's factor."""
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
    """Returns what is cut in turn: shapes, or (True) what is compiled of them."""
    needed = {u.shape for u in units if u.place <= NEEDED}
    order = _largest_first(units)
    last = [shape for shape in order if shape in needed]
    first = [(shape, False) for shape in order if shape not in needed]
    return [*first, *((shape, True) for shape in last), *((shape, False) for shape in last)]


def _largest_first(units: Sequence[Unit]) -> list[str]:
    """Returns the shapes in the order in which they are cut: the rest and then models, the largest first; then from the
    end."""
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
        """Returns the plan of what has not begun."""
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
        """Returns the fraction of its rounds that a unit gets, None where it is cut; its first row decides."""
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
        """Returns what is going to be measured, in a few lines."""
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
    """Returns what `Budget.kept` would say of two runs as one."""
    sums = ("minutes", "spent", "comparisons", "fewer_rounds", "not_compiled")
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
