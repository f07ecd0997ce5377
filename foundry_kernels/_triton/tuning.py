"""Measured launches: which row (tile, warps, stages) a Triton kernel takes on the GPU at hand in place of the one in
the code, and which backend `backend="auto"` takes first.

Two files of one format say so: `tuned.json` in this package, measured by the authors, and the user's own, written by
`python -m foundry_kernels tune` into the cache folder. The user's goes first. Entries are per name of GPU and version
of Triton; within one, a row replaces one particular row of the code, which is part of its key, and is taken only if it
is still among that kernel's candidates. So a file that is old or was edited by hand can make kernels slower, not wrong.

A file is read once in a process, when the first kernel is launched or CUDA is initialised, and never while
torch.compile traces. FOUNDRY_KERNELS_TUNING names another file, or is "off": then the package's own table is used.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foundry_kernels import _triton
from foundry_kernels._triton import devices
from foundry_kernels._triton.launch import forget_plans
from foundry_kernels.core import registry

FORMAT, VERSION = "foundry_kernels tuning", 1
VARIABLE = "FOUNDRY_KERNELS_TUNING"
OFF = "off"
#: Measured by the authors; `python -m foundry_kernels tune --write-table` adds to it.
PACKAGED = Path(__file__).with_name("tuned.json")
#: Where kernels are interpreted: nothing that is measured there says anything about a GPU.
INTERPRETER = "Triton's interpreter"

Row = dict[str, int]  # flags among them

#: A row with such a flag launches, in place of the kernel that it is a candidate of, one that no GPU has run, and that
#: could hang one. It is measured where the user asks for that (`tune --untried`), and taken by nothing before.
NEVER_RUN = frozenset({"GLUON"})
#: By the name of such a kernel, the one in whose place it is launched.
STANDS_FOR = {"flash_attention_fwd_gluon_kernel": "flash_attention_fwd_kernel"}


def has_run(row: Row) -> bool:
    """Whether any GPU has run the kernel that the row launches."""
    return NEVER_RUN.isdisjoint(row)


def asked_as(kernel: str) -> str:
    """The name by which the rows of a kernel are asked for."""
    return STANDS_FOR.get(kernel, kernel)


class TuningFileError(ValueError):
    """A tuning file that cannot be read or written; the message names it and says why."""


@dataclass
class Entry:
    """What was measured on GPUs of one name with one version of Triton."""

    gpu: str
    triton: str
    capability: int  # 90 for 9.0
    torch: str = ""
    measured: str = ""  # the day
    #: By kernel and by the row that is replaced (`row_key`): {"row": ..., "speedup": ..., "case": ...}.
    rows: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    #: By operation and dtype: the order of `backend="auto"`.
    auto: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.gpu}, Triton {self.triton}"

    def update(self, newer: Entry, asked: set[tuple[str, str]]) -> None:
        """Take over what was measured later: of the kernels and rows `asked` those that won, and no older winner."""
        for kernel, key in asked:
            self.rows.get(kernel, {}).pop(key, None)
        for kernel, rows in newer.rows.items():
            self.rows.setdefault(kernel, {}).update(rows)
        self.rows = {kernel: rows for kernel, rows in self.rows.items() if rows}
        for op, orders in newer.auto.items():
            self.auto.setdefault(op, {}).update(orders)
        self.capability, self.torch, self.measured = newer.capability, newer.torch, newer.measured


Table = dict[str, Entry]  # by `Entry.key`


def row_key(tags: str, own: Row) -> str:
    """What a measured row is for: the tags, and the row of the code that it replaces."""
    return f"{tags}: {describe(own)}"


def describe(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(row.items()))


# --- files ------------------------------------------------------------------------------------------------------------


def default_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "foundry_kernels" / "tuning.json"


def read(path: Path) -> Table:
    """The table in a file.

    Raises:
        FileNotFoundError: there is none.
        TuningFileError: it is damaged, of another version, or something else altogether.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise TuningFileError(f"{path} is no tuning file that can be read ({error})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise TuningFileError(f'{path} is no tuning file: its "format" must be {FORMAT!r}')
    if found.get("version") != VERSION:
        raise TuningFileError(f"{path} is of version {found.get('version')!r}; this package reads version {VERSION}")
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
    """Raise an error unless everything is of the kind that look-ups rely on."""
    kinds = {"gpu": str, "triton": str, "torch": str, "measured": str, "capability": int, "rows": dict, "auto": dict}
    for name, kind in kinds.items():
        _of_kind(repr(name), getattr(entry, name), kind)
    for kernel, rows in entry.rows.items():
        for key, found in _of_kind(f"what replaces the rows of {kernel}", rows, dict).items():
            of = f"of {kernel}, {key}"
            row = _of_kind(f"the row {of}", _of_kind(f"what is said {of}", found, dict)["row"], dict)
            if not row or not all(isinstance(v, int) for v in row.values()):
                raise ValueError(f"the row {of} must be whole numbers or flags by name")
            float(_of_kind(f"the speedup {of}", found.get("speedup", 0), (int, float)))
    for op, by_dtype in entry.auto.items():
        for dtype, order in _of_kind(f"the orders of {op}", by_dtype, dict).items():
            if not _of_kind(f"the order of {op} in {dtype}", order, list) or not set(order) <= set(registry.BACKENDS):
                raise ValueError(f"the order of {op} in {dtype} must be some of {', '.join(registry.BACKENDS)}")


def _of_kind(what: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise ValueError(f"{what} must be a {' or '.join(k.__name__ for k in kinds)}; got {value!r:.60}")
    return value


def write(path: Path, newer: Entry, asked: set[tuple[str, str]]) -> None:
    """Merge what was measured into a file, all of it or nothing.

    Raises:
        TuningFileError: the file cannot be written, or what is there is no tuning file; it is left as it was.
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
    """Before anything is measured: raise TuningFileError unless `write` would succeed."""
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
    """The file, changed in one step: a reader, or a machine that stops, finds the old one or the new one."""
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
    """Two processes that tune at a time merge one after the other."""
    import fcntl

    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- what is in use ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A table, and what `inspect` calls it."""

    name: str
    table: Table


_chosen: Path | str | None = None  # by `use`; None: what the environment says
_sources: tuple[Source, ...] | None = None  # None: not read yet; the first that has a row is taken
_entries: dict[torch.device, tuple[tuple[str, Entry], ...]] = {}
_pretended: str | None = None


def use(path: str | os.PathLike[str] | None) -> None:
    """Take measured launches from this file from now on, in place of the one in the cache folder; "off": from the
    package's own table alone; None: again from where FOUNDRY_KERNELS_TUNING says. Kernels in flight are not touched.

    Raises:
        FileNotFoundError: there is no such file.
        TuningFileError: it is damaged, of another version, or something else altogether. What was in use stays.
    """
    global _chosen
    if path is not None and path != OFF:
        path = Path(path)
        read(path)
    _chosen = path
    forget()


def forget() -> None:
    """Read the files again when they are needed next."""
    global _sources
    _sources = None
    _entries.clear()
    forget_plans()
    if torch.cuda.is_initialized():
        _order_backends()


def path_in_use() -> Path | None:
    """The user's file, whether or not it exists; None where it is turned off."""
    chosen = _chosen if _chosen is not None else os.environ.get(VARIABLE) or default_path()
    return None if chosen == OFF else Path(chosen)


def sources() -> tuple[Source, ...]:
    """The tables, the user's first. A file that cannot be used is named in a warning, once."""
    global _sources
    if _sources is None:
        path = path_in_use()
        asked_for = _chosen is not None or VARIABLE in os.environ
        found = []
        for each in (path, PACKAGED):
            try:
                if each is not None:
                    found.append(Source("the package's table" if each is PACKAGED else str(each), read(each)))
            except FileNotFoundError:
                if each is path and asked_for:
                    warnings.warn(f"{VARIABLE}: {path} does not exist; built-in launches are used", stacklevel=2)
            except TuningFileError as error:
                warnings.warn(f"{error}; built-in launches are used", stacklevel=2)
        _sources = tuple(found)
    return _sources


def gpu_name(device: torch.device) -> str | None:
    """By which measurements are filed; None for a device on which nothing is launched."""
    if _pretended is not None or devices._RECORDED is not None:
        return _pretended
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    return INTERPRETER if _triton.INTERPRET else None


def entries(device: torch.device) -> tuple[tuple[str, Entry], ...]:
    """What was measured on such a GPU, and where it is written, the user's first."""
    found = _entries.get(device)
    if found is None:
        tables = [source for source in sources() if source.table]
        gpu = gpu_name(device) if tables else None
        key = f"{gpu}, Triton {triton_version()}"
        found = _entries[device] = tuple((s.name, s.table[key]) for s in tables if gpu is not None and key in s.table)
    return found


@cache
def triton_version() -> str:
    return "" if _triton.MISSING is not None else importlib.import_module("triton").__version__


@contextmanager
def pretend(gpu: str | None) -> Iterator[None]:
    """While it lasts, look rows up as on a GPU of this name; for `inspect`, where there is none."""
    global _pretended
    _pretended, before = gpu, _pretended
    _entries.clear()
    forget_plans()
    try:
        yield
    finally:
        _pretended = before
        _entries.clear()
        forget_plans()


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A row that a launcher asked for: the candidates, the first of which is the code's own, and what it got."""

    kernel: str
    key: str
    rows: tuple[Row, ...]
    row: Row
    origin: str


_forced: dict[tuple[str, str], Row] = {}
_watching: list[Callable[[Choice], None]] = []


def choose(kernel: str, tags: str, rows: Sequence[Row], device: torch.device) -> Row:
    """The row of a launch of `kernel`: of `rows`, all of which give right results, the one that was measured to be the
    fastest on this GPU, or the first, which is the code's own. Called when a launch is planned, not when it is made.

    tags: what tells launches apart for which the code has the same row, but the best one may differ: a dtype's size.
    """
    key, row, origin = row_key(tags, rows[0]), rows[0], "built in"
    if (kernel, key) in _forced:
        row, origin = _forced[kernel, key], "forced"
    else:
        for source, entry in entries(device):
            found = entry.rows.get(kernel, {}).get(key)
            if found is not None and found["row"] in rows:
                row = found["row"]
                origin = f"{source}: {entry.gpu}, {entry.measured}, x{found.get('speedup', 0):.2f}"
                break
    for watch in _watching:
        watch(Choice(kernel, key, tuple(rows), row, origin))
    return dict(row)


def is_forced(kernel: str, tags: str, rows: Sequence[Row]) -> bool:
    """Whether `choose` would answer with a row that is forced."""
    return (kernel, row_key(tags, rows[0])) in _forced


@contextmanager
def forced(kernel: str, key: str, row: Row) -> Iterator[None]:
    """While it lasts, launches that ask by this key get `row`. It holds for every thread of the process."""
    _forced[kernel, key] = row
    forget_plans()
    try:
        yield
    finally:
        del _forced[kernel, key]
        forget_plans()


@contextmanager
def watched() -> Iterator[dict[tuple[str, str], Choice]]:
    """The rows that launches ask for while it lasts, by kernel and key, in the order of the first."""
    seen: dict[tuple[str, str], Choice] = {}

    def watch(choice: Choice) -> None:
        seen.setdefault((choice.kernel, choice.key), choice)

    forget_plans()
    _watching.append(watch)
    try:
        yield seen
    finally:
        _watching.remove(watch)


# --- backend="auto" ---------------------------------------------------------------------------------------------------


def _order_backends() -> None:
    """Give the registry the measured orders, if all GPUs have one name: the choice for a call does not look at which
    GPU its tensors are on."""
    try:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        one_kind = len({gpu_name(device) for device in devices}) == 1
        measured = entries(devices[0]) if one_kind else ()
    except RuntimeError as error:
        warnings.warn(f"measured launches are not used: {error}", stacklevel=2)
        measured = ()
    orders: dict[tuple[str, str], tuple[str, ...]] = {}
    for _, entry in reversed(measured):
        orders |= {(op, dtype): tuple(order) for op, of in entry.auto.items() for dtype, order in of.items()}
    registry.prefer("cuda", orders)


def start() -> None:
    """When CUDA is initialised, which is before any tensor is on a GPU, `backend="auto"` learns its order: a name of a
    GPU cannot be asked for earlier, and not later, since a call may then be traced."""
    torch.cuda._lazy_call(_order_backends)
