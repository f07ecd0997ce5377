"""The noise of ratios. A ratio is too noisy to call if its distance from 1 is at most its noise.

There are two statistics of the same rounds. `against_itself` is the ratio of the peer's odd rounds to its even ones,
whose true value is 1, or, if it is larger, the distance within which 95 % of such ratios are. `interval` is the 95 %
interval of the ratio's median, by ranks.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

#: Ratios within this factor of 1 mean nothing: runs of the same code differ by as much, depending on memory addresses.
MARGIN = 1.05
#: The minimum number of rounds. From nine on, 95 % limits exclude the smallest and the largest ratio, so that one
#: disturbed round does not matter.
LEAST = 9
#: The minimum on a GPU, which has few disturbances, if nine would take too long.
LEAST_GPU = 4
#: Standard deviations that hold 95 %; of a median in those of a mean; median deviations in a standard deviation.
_WITHIN, _MEDIAN, _DEVIATION = 1.96, 1.2533, 1 / 0.6745
#: Student's factors in place of the first, for as few rounds.
_STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}


def against_itself(times: Sequence[float]) -> float | None:
    """Returns the distance from 1 of a ratio of these times to themselves, 0.01 for 1 %; None for fewer than three
    rounds."""
    logs = [math.log(t) for t in times]
    if len(logs) < 3:
        return None
    halves = statistics.median(odd - even for even, odd in zip(logs[::2], logs[1::2], strict=False))
    # Neighbouring rounds: if the machine slows down during all rounds, the contenders of a round are equally affected.
    steps = statistics.median(abs(b - a) for a, b in itertools.pairwise(logs))
    around = _STUDENT.get(len(logs), _WITHIN) * _MEDIAN * _DEVIATION * steps / math.sqrt(len(logs))
    return math.expm1(max(abs(halves), around))


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median of `ratios`; for two to five ratios by Student's t."""
    found, n = sorted(ratios), len(ratios)
    if n > max(_STUDENT):
        rank, outside = 0, 2 * 0.5**n  # the probability that the median is outside of all ratios
        while (outside := outside + 2 * math.comb(n, rank + 1) * 0.5**n) <= 0.05:
            rank += 1
        return found[rank], found[n - 1 - rank]
    logs = [math.log(r) for r in found]
    around = _STUDENT[n] * statistics.stdev(logs) / math.sqrt(n)
    middle = statistics.median(logs)
    return math.exp(middle - around), math.exp(middle + around)


def of_peer(peer: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Returns a row's fields for the ratio of a peer's times to this package's, round by round."""
    if len(ours) < 2:
        return {}
    low, high = interval([p / o for p, o in zip(peer, ours, strict=True)])
    found = {"low": round(low, 3), "high": round(high, 3)}
    itself = against_itself(peer)
    return found if itself is None else found | {"itself": round(itself, 4)}


# --- what a row may be called -----------------------------------------------------------------------------------------


def itself(row: Row, peer: str) -> float | None:
    """Returns a peer's difference from itself in the rounds of a row; None if it was not stored."""
    value = row.get("noise", {}).get(peer, {}).get("itself")
    return None if value is None else float(value)


def drowned(row: Row, peer: str) -> bool:
    """Returns whether the ratio over a peer is within the noise; False if the noise was not stored."""
    known = row.get("noise", {}).get(peer, {})
    ratio = max(row["speedup_over"][peer], 1e-9)
    return known.get("low", ratio) <= 1 <= known.get("high", ratio) or (
        abs(math.log(ratio)) <= math.log1p(known.get("itself", 0.0)) and "itself" in known
    )


def call(row: Row, peer: str) -> str:
    """Returns "faster", "slower", "even" (within `MARGIN`), or "noisy" if the noise hides the ratio and exceeds that
    margin."""
    ratio, known = row["speedup_over"][peer], row.get("noise", {}).get(peer, {})
    reach = max(known.get("high", 1.0), 1 / max(known.get("low", 1.0), 1e-9), 1 + known.get("itself", 0.0))
    if drowned(row, peer) and reach > MARGIN:
        return "noisy"
    return of_ratio(ratio)


def of_ratio(ratio: float) -> str:
    """Returns the name of a ratio without noise."""
    if 1 / MARGIN <= ratio < MARGIN:
        return "even"
    return "faster" if ratio > 1 else "slower"


def in_short(rows: Sequence[Row], ours: Sequence[str]) -> str:
    """Returns a sentence about the peers' differences from themselves in a run; empty if they were not stored. `ours`:
    the names of this package's rows."""
    pairs = [(p, row) for row in rows if row.get("row") in ours for p in row.get("noise", {}) if p not in ours]
    known = [(value, p, row) for p, row in pairs if (value := itself(row, p)) is not None]
    if not known:
        return ""
    worst, peer, row = max(known, key=lambda one: one[0])
    middle = statistics.median(one[0] for one in known)
    where = f"{peer} beside {row['op']} {row['direction']}"
    return f"A peer against itself: {percent(middle)} (median of {len(known)}), at most {percent(worst)} ({where})."


def percent(value: float) -> str:
    return f"±{value:.1%}" if value < 0.1 else f"±{value:.0%}"
