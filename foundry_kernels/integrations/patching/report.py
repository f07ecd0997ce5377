"""The report of a patch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """What became of one module: the operations that it runs on, and the reason why it, or one of them, was left.

    by: what it was known by: "row" (the table names its class), "recognised" (by what its code computes), "own" (it is
    a module of this package); "" where it was left.
    """

    name: str
    module_class: str
    ops: tuple[str, ...] = ()
    reason: str | None = None
    by: str = ""


@dataclass(frozen=True)
class Report:
    """What `patch` replaced and what it did not; `str` of it is a table.

    dense_masks: what runs calls with dense masks; "" if it is the kernels, or if such calls are refused.
    mixing: the layers that do not keep packed documents apart, each with what a call with such documents does.
    no_extension: what runs on the reference because the C++ extension is missing, and why; "" if nothing does.
    """

    model_class: str
    replaced: tuple[Entry, ...]
    left: tuple[Entry, ...]
    backends: dict[str, str]
    device: str
    dtype: str
    dense_masks: str = ""
    mixing: tuple[str, ...] = ()
    no_extension: str = ""

    def __str__(self) -> str:
        found = len(self.replaced) + len(self.left)
        lines = [
            f"{self.model_class}: {len(self.replaced)} of {found} modules replaced ({self.dtype} on {self.device})"
        ]
        if self.no_extension:
            lines[0] += f": {self.no_extension}"
        if not found:
            lines[0] = f"{self.model_class}: nothing to patch, it has no norm, gated MLP or attention"
        done = Counter((e.module_class, f"{e.by:<10}  {'; '.join(self._served(e))}") for e in self.replaced)
        left = Counter((e.module_class, e.reason or "") for e in self.left)
        width = max((len(name) for name, _ in (*done, *left)), default=0)
        for title, rows in (("replaced", done), ("left as it was", left)):
            if rows:
                lines += [title, *(f"  {n:>4}  {name:<{width}}  {text}" for (name, text), n in rows.items())]
        if self.dense_masks:
            lines.append(f"calls with dense masks run on {self.dense_masks}")
        if self.mixing:
            lines += ["several documents in a row", *(f"  {line}" for line in self.mixing)]
        return "\n".join(lines)

    def _served(self, entry: Entry) -> list[str]:
        backends = ", ".join(f"{op}: {self.backends[op]}" for op in entry.ops)
        return [backends, entry.reason] if entry.reason else [backends]


def parts(report: Report) -> tuple[str, str, str, str, str, str]:
    """Returns the report in six words for a row of a table: norms, MLPs and experts, attention, loss, how many modules
    were recognised, what was left."""

    def of(*kinds: str) -> str:
        return _counted(op for e in report.replaced if e.module_class.endswith(kinds) for op in e.ops)

    losses = [op for e in report.replaced for op in e.ops if op.endswith("cross_entropy")]

    left = Counter(f"{e.module_class}: {e.reason}" for e in report.left)
    text = ", ".join(f"{n} {text}" for text, n in left.items())
    products = of("MLP", "Experts", "Intermediate", "FeedForward", "ActDense")
    known = f"{sum(e.by == 'recognised' for e in report.replaced)} of {len(report.replaced)}"
    attention = of("Attention", "GatedDeltaNet", "Mixer", "MambaLayer")
    return of("Norm", "NormGated"), products, attention, _counted(losses), known, text


def _counted(ops: Iterable[str]) -> str:
    return ", ".join(f"{n} {op}" for op, n in Counter(ops).items())
