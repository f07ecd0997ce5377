"""Keeps a run within its time: orders the comparisons, and leaves out those for which no time is left.

First come, for each operation, the smallest shapes that together have all its directions and dtypes; then host times
and models; then all other shapes and growth, the smallest first. If the rest would take too long, a comparison has half
of its rounds. One that would not end in time is left out. Expected times are those of the rows of a kind so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

#: Minutes for the quick set; the full set has no limit by default.
DEFAULT = 5.0
#: The planned fraction of the time, because the last comparisons may take longer than expected.
_PLANNED = 0.95
#: The expected seconds of a row by kind, on 2 cores of a CPU; and as how many measured rows they count.
ROW_SECONDS = {"memcpy": 1.0, "GEMM": 2.5, "overhead": 0.3, "growth": 6.0, "model": 10.0, "compiled model": 18.0}
_PRIOR = 2

#: Places in the order of a run.
NEEDED, LATER, REST = range(3)


@dataclass(frozen=True)
class Unit:
    """Rows that are compared with each other; either all or none are measured.

    shape: units of a shape are measured together. kind: a key of `ROW_SECONDS`. size: in bytes; shapes are ordered by
    it. op, what: the operation, and its direction and dtype.
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
    return [replace(u, place=min(u.place, NEEDED)) if u.shape in needed else u for u in found.values()]


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
    """Returns the units in the order of measurement: by place, then by size, with the units of a shape together."""
    shapes: dict[str, tuple[int, float]] = {}
    for u in units:
        place, size = shapes.get(u.shape, (u.place, 0.0))
        shapes[u.shape] = (min(place, u.place), max(size, u.size) if u.place > NEEDED else 0.0)
    order = {shape: index for index, shape in enumerate(sorted(shapes, key=lambda shape: shapes[shape]))}
    return sorted(units, key=lambda u: order[u.shape])


@dataclass
class Budget:
    """The time of a run, from `started` on; without `minutes` everything is measured."""

    units: Sequence[Unit]
    minutes: float
    started: float
    clock: Callable[[], float] = time.monotonic
    #: The fraction of rounds by unit; None if it was left out.
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

    def to_go(self) -> float:
        """The seconds that all undecided units would take with all their rounds."""
        rates = self.rates
        return sum(u.seconds(1.0, rates) for u in self.units if u.id not in self.decided)

    def admit(self, name: str) -> float | None:
        """Returns a unit's fraction of rounds, or None if it is left out. Its first row decides."""
        if name not in self._by_id:
            return 1.0
        if name not in self.decided:
            left = self.minutes * 60 * _PLANNED - self.gone if self.minutes else float("inf")
            effort = 1.0 if self.to_go() <= left else 0.5
            fits = self._by_id[name].seconds(effort, self.rates) <= left
            self.decided[name] = effort if fits else None
        return self.decided[name]

    def spend(self, name: str, seconds: float) -> None:
        if name in self._by_id:
            self.spent[name] = self.spent.get(name, 0.0) + seconds

    def announced(self) -> str:
        """Returns a line about the planned measurements."""
        limit = f"budget {self.minutes:g} min (--budget, 0 for none)" if self.minutes else "no budget"
        rows = sum(u.rows for u in self.units)
        return f"{rows} rows in {len(self.units)} comparisons, about {minutes(self.to_go())} for all; {limit}"

    def progress(self) -> str:
        done = sum(u.rows for u in self.units if self.decided.get(u.id) is not None)
        return f"{minutes(self.gone)}: {done} of {sum(u.rows for u in self.units)} rows"

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


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
