"""Keeps a run within its time: what each comparison is expected to take, and what is cut where that is too much.

Rounds are cut first; then whole shapes, the largest first, so that every row that is shown has its peers. The smallest
shape of an operation and whole models go last. Estimates are corrected as rows are done, and what to cut is decided
anew before each comparison begins: what was to be cut comes back where the machine turns out to be faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

#: Minutes of the quick set; the full one has no limit unless it is given one.
DEFAULT = 8.0
#: Fractions of the rounds, the first that fits.
EFFORTS = (1.0, 0.5, 0.25)
#: Fraction of the time that is planned for: what comes last can be longer than expected.
_PLANNED = 0.95
#: Seconds that an estimate weighs as, beside what was measured.
_PRIOR = 5.0


@dataclass(frozen=True)
class Unit:
    """Rows that are compared with each other: all are measured or none.

    shape: what is cut as a whole, in words. kind: estimates of a kind are wrong by the same factor. fixed, rounds,
    a_row: seconds that do not depend on how many rounds there are, of all rounds, and more for each row. size: what
    "largest" means. op: the operation, where the row is of one shape of it. last: whether it is cut after all that are
    not.
    """

    id: str
    shape: str
    kind: str
    fixed: float
    rounds: float = 0.0
    size: float = 0.0
    op: str = ""
    last: bool = False
    a_row: float = 0.0
    rows: int = 1

    def seconds(self, effort: float = 1.0) -> float:
        return self.fixed + self.a_row * self.rows + self.rounds * effort


def collected(rows: Iterable[Unit]) -> list[Unit]:
    """Returns the units of rows that each bring their own: counted, and the smallest shape of each operation spared."""
    found: dict[str, Unit] = {}
    for unit in rows:
        known = found.get(unit.id)
        found[unit.id] = unit if known is None else replace(known, rows=known.rows + 1)
    smallest: dict[str, Unit] = {}
    for unit in found.values():
        if unit.op and (unit.op not in smallest or unit.size < smallest[unit.op].size):
            smallest[unit.op] = unit
    spared = {unit.shape for unit in smallest.values()}
    return [replace(u, last=u.last or u.shape in spared) for u in found.values()]


@dataclass(frozen=True)
class Plan:
    """The fraction of the rounds that is measured, the shapes that are cut, and the seconds that the rest takes."""

    effort: float
    cut: tuple[str, ...]
    seconds: float


def plan(units: Sequence[Unit], seconds: float, factors: Mapping[str, float] | None = None) -> Plan:
    """Decides what to do with `units` in `seconds`, by estimates that are multiplied by their kind's factor."""
    by = factors or {}

    def total(chosen: Sequence[Unit], effort: float) -> float:
        return sum(u.seconds(effort) * by.get(u.kind, 1.0) for u in chosen)

    for effort in EFFORTS:
        if (needed := total(units, effort)) <= seconds:
            return Plan(effort, (), needed)
    cut: list[str] = []
    rest = list(units)
    for shape in _largest_first(units):
        if (needed := total(rest, EFFORTS[-1])) <= seconds:
            break
        cut.append(shape)
        rest = [u for u in rest if u.shape != shape]
    return Plan(EFFORTS[-1], tuple(cut), total(rest, EFFORTS[-1]))


def _largest_first(units: Sequence[Unit]) -> list[str]:
    sizes: dict[str, tuple[bool, float]] = {}
    for u in units:
        before = sizes.get(u.shape, (True, 0.0))
        sizes[u.shape] = (before[0] and u.last, max(before[1], u.size))
    return sorted(sizes, key=lambda s: (sizes[s][0], -sizes[s][1]))


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
            self.decided[name] = None if self._by_id[name].shape in found.cut else found.effort
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
        if found.cut:
            lines.append(f"  left out unless time is left: {listed(found.cut)}")
        return lines

    def progress(self) -> str:
        """Returns how far the run is, and what is left of the time."""
        behind = sum(u.rows for u in self.units if u.id in self.decided)
        text = f"{behind} of {sum(u.rows for u in self.units)} rows in {minutes(self.gone)}"
        text += f", about {minutes(self.remaining().seconds)} to go"
        return text + (f", {minutes(max(self.left, 0))} left of {self.minutes:g}" if self.minutes else "")

    @property
    def done(self) -> float:
        """The fraction of the work that is done, by its estimates."""
        ended = sum(u.seconds() for u in self.units if u.id in self.decided)
        return ended / max(sum(u.seconds() for u in self.units), 1e-9)

    def kept(self) -> dict[str, object]:
        """Returns what a page says of it."""
        cut = [self._by_id[name] for name, effort in self.decided.items() if effort is None]
        shapes = dict.fromkeys(u.shape for u in cut)
        fewer = [effort for effort in self.decided.values() if effort is not None and effort < 1]
        return {
            "minutes": self.minutes,
            "spent": round(self.gone / 60, 1),
            "comparisons": len(self.decided),
            "cut": {s: [sum(u.rows for u in of if u.shape == s) for of in (cut, self.units)] for s in shapes},
            "fewer_rounds": len(fewer),
        }


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names, not more than a few: JSON files and pages have them all."""
    more = f"; and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
