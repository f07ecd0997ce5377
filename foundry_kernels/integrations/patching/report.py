"""The report of a patch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from foundry_kernels.core.registry import short_dtype
from foundry_kernels.integrations.adapters.table import NO_ROW
from foundry_kernels.nn._backend import serving, without_extension

#: How the reason begins for a module whose operations the caller left out.
NOT_NAMED = "ops does not name"


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


@dataclass(frozen=True)
class Findings:
    """What `patch` found, of which a report is made: the backends are those asked for."""

    entries: tuple[Entry, ...]
    backends: dict[str, str]
    dense_masks: str = ""
    mixing: tuple[str, ...] = ()

    def report(self, model: nn.Module, more: Iterable[Entry], backends: dict[str, str]) -> Report:
        """Returns the report with the entries of layers that PEFT adds and takes away, and their backends."""
        device, dtype = _device_and_dtype(model)
        entries = _without_containers([*self.entries, *more])
        replaced, left = tuple(e for e in entries if e.ops), tuple(e for e in entries if not e.ops)
        backends = self.backends | backends
        used = serving(backends, device, dtype)
        lacking, reason = without_extension(backends, device, dtype)
        only = "" if len(lacking) == len(backends) else f" for {', '.join(lacking)}"
        no_extension = f"reference{only} (no extension: {reason})" if lacking else ""
        name = type(model).__name__
        return Report(
            name, replaced, left, used, device, short_dtype(dtype), self.dense_masks, self.mixing, no_extension
        )


def _device_and_dtype(model: nn.Module) -> tuple[str, torch.dtype]:
    """Returns those of the first floating-point parameter."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.device.type, parameter.dtype
    return "cpu", torch.float32


def _without_containers(entries: list[Entry]) -> list[Entry]:
    """Leaves out the modules that were left, for no reason of their own, but hold others of the list: those tell what
    there is to know."""
    holders = {e.name[:i] for e in entries for i, letter in enumerate(e.name) if letter == "."}
    own = {e.name for e in entries if e.ops or not str(e.reason).startswith((NO_ROW, NOT_NAMED))}
    return [e for e in entries if e.name in own or e.name not in holders]


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
