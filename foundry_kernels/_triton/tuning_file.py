"""The file of measured launches: format, reading and writing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundry_kernels.core.cache_folder import cache_folder
from foundry_kernels.core.registry import BACKENDS

FORMAT, VERSION = "foundry_kernels tuning", 1

LaunchConfig = dict[str, int]  # tile, warps, stages; flags among them


class TuningFileError(ValueError):
    """A tuning file cannot be read or written; the message names it and says why."""


@dataclass
class Entry:
    """What was measured on GPUs of one name with one version of Triton."""

    gpu: str
    triton: str
    capability: int  # 90 for 9.0
    torch: str = ""
    measured: str = ""  # the day
    #: By kernel and by the launch config that is replaced (`config_key`): {"row": ..., "speedup": ..., "case": ...}.
    rows: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    #: By operation and dtype: the order of `backend="auto"`.
    auto: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.gpu}, Triton {self.triton}"

    def update(self, newer: Entry, asked: set[tuple[str, str]]) -> None:
        """Merges newer measurements: for the kernels and configs in `asked`, the new winners replace all older ones."""
        for kernel, key in asked:
            self.rows.get(kernel, {}).pop(key, None)
        for kernel, rows in newer.rows.items():
            self.rows.setdefault(kernel, {}).update(rows)
        self.rows = {kernel: rows for kernel, rows in self.rows.items() if rows}
        for op, orders in newer.auto.items():
            self.auto.setdefault(op, {}).update(orders)
        self.capability, self.torch, self.measured = newer.capability, newer.torch, newer.measured


Table = dict[str, Entry]  # by `Entry.key`


def config_key(tags: str, own: LaunchConfig) -> str:
    """The key of a measured launch config: the tags, and the built-in config that it replaces."""
    return f"{tags}: {describe(own)}"


def describe(config: LaunchConfig) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(config.items()))


def default_path() -> Path:
    return cache_folder() / "tuning.json"


def read(path: Path) -> Table:
    """The table in a file.

    Raises:
        FileNotFoundError: there is none.
        TuningFileError: it is damaged, of another version, or not a tuning file.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise TuningFileError(f"{path} cannot be read as a tuning file ({error})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise TuningFileError(f'{path} is not a tuning file: its "format" must be {FORMAT!r}')
    if found.get("version") != VERSION:
        raise TuningFileError(f"{path} has version {found.get('version')!r}; this package reads version {VERSION}")
    entries = found.get("entries")
    if not isinstance(entries, list):
        raise TuningFileError(f'{path} is damaged: its "entries" must be a list')
    table: Table = {}
    for number, fields in enumerate(entries):
        try:
            entry = Entry(**fields)
            _check(entry)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TuningFileError(f"{path} is damaged: entry {number} ({type(error).__name__}: {error})") from error
        table[entry.key] = entry
    return table


def _check(entry: Entry) -> None:
    """Raises an error unless all values have the types that look-ups rely on."""
    kinds = {"gpu": str, "triton": str, "torch": str, "measured": str, "capability": int, "rows": dict, "auto": dict}
    for name, kind in kinds.items():
        _of_kind(repr(name), getattr(entry, name), kind)
    for kernel, rows in entry.rows.items():
        for key, found in _of_kind(f"the rows of {kernel}", rows, dict).items():
            of = f"of {kernel}, {key}"
            row = _of_kind(f"the row {of}", _of_kind(f"the entry {of}", found, dict)["row"], dict)
            if not row or not all(isinstance(v, int) for v in row.values()):
                raise ValueError(f"the row {of} must map names to integers or flags")
            float(_of_kind(f"the speedup {of}", found.get("speedup", 0), (int, float)))
    for op, by_dtype in entry.auto.items():
        for dtype, order in _of_kind(f"the orders of {op}", by_dtype, dict).items():
            if not _of_kind(f"the order of {op} in {dtype}", order, list) or not set(order) <= set(BACKENDS):
                raise ValueError(f"the order of {op} in {dtype} must be some of {', '.join(BACKENDS)}")


def _of_kind(what: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise ValueError(f"{what} must be a {' or '.join(k.__name__ for k in kinds)}; got {value!r:.60}")
    return value


def write(path: Path, newer: Entry, asked: set[tuple[str, str]]) -> None:
    """Merges measurements into a file atomically.

    Raises:
        TuningFileError: the file cannot be written, or exists and is not a tuning file; it is not changed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            try:
                table = read(path)
            except FileNotFoundError:
                table = {}
            table.setdefault(newer.key, Entry(newer.gpu, newer.triton, newer.capability)).update(newer, asked)
            text = json.dumps(
                {"format": FORMAT, "version": VERSION, "entries": [vars(table[key]) for key in sorted(table)]}, indent=1
            )
            _replace(path, text + "\n")
    except OSError as error:
        raise TuningFileError(f"{path} cannot be written ({error})") from error


def check_writable(path: Path) -> None:
    """Raises TuningFileError unless `write` would succeed, before anything is measured."""
    with suppress(FileNotFoundError):
        read(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.{os.getpid()}")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise TuningFileError(f"{path} cannot be written ({error})") from error


def _replace(path: Path, text: str) -> None:
    """Replaces the file in one step, so that a reader, or a restart after a crash, finds the old or the new file."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock, so that two tuning processes merge one after the other."""
    import fcntl

    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
