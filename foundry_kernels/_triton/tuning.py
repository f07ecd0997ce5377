"""Measured launches: for the current GPU, the configs (tile, warps, stages) that replace the built-in ones of Triton
kernels, and the backend that `backend="auto"` tries first.

They are read from two files with the same format: `tuned.json` in this package, measured by the authors, and the user's
file, which `python -m foundry_kernels tune` writes into the cache folder and which takes precedence. An entry belongs
to a GPU name and a Triton version. Its configs are keyed on the built-in config that they replace, and are only used if
they are still among the kernel's candidates. So an old or edited file can make kernels slower, but not wrong.

A file is read once in a process, when the first kernel is launched or CUDA is initialised, and never while
torch.compile traces. FOUNDRY_KERNELS_TUNING names another file, or is "off" to use only the package's table.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from foundry_kernels import _triton
from foundry_kernels._triton import devices
from foundry_kernels._triton.plans import forget_plans
from foundry_kernels._triton.tuning_file import (
    Entry,
    LaunchConfig,
    Table,
    TuningFileError,
    config_key,
    default_path,
    read,
)
from foundry_kernels.core import registry

VARIABLE = "FOUNDRY_KERNELS_TUNING"
OFF = "off"
#: Measured by the authors; `python -m foundry_kernels tune --write-table` adds to it.
PACKAGED = Path(__file__).with_name("tuned.json")
#: The GPU name in Triton's interpreter, whose measurements do not apply to any GPU.
INTERPRETER = "Triton's interpreter"

#: A config with this flag launches another kernel instead of the one that it is a candidate for.
ANOTHER = "GLUON"
#: The kernel that each such kernel replaces, by name.
STANDS_FOR = {"flash_attention_fwd_gluon_kernel": "flash_attention_fwd_kernel"}


def asked_as(kernel: str) -> str:
    """The name under which the launch configs of a kernel are looked up."""
    return STANDS_FOR.get(kernel, kernel)


# --- what is in use ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A table, and what `inspect` calls it."""

    name: str
    table: Table


_chosen: Path | str | None = None  # by `use`; None: what the environment says
_sources: tuple[Source, ...] | None = None  # None: not read yet; the first that has a config is taken
_entries: dict[torch.device, tuple[tuple[str, Entry], ...]] = {}
_pretended: str | None = None


def use(path: str | os.PathLike[str] | None) -> None:
    """From now on, uses measured launches from this file instead of the one in the cache folder. "off" uses only the
    package's table; None uses FOUNDRY_KERNELS_TUNING again. Running kernels are not affected.

    Raises:
        FileNotFoundError: there is no such file.
        TuningFileError: it is damaged, of another version, or not a tuning file. The previous file stays in use.
    """
    global _chosen
    if path is not None and path != OFF:
        path = Path(path)
        read(path)
    _chosen = path
    forget()


def forget() -> None:
    """Rereads the files when they are needed next."""
    global _sources
    _sources = None
    _entries.clear()
    forget_plans()
    if torch.cuda.is_initialized():
        _order_backends()


def path_in_use() -> Path | None:
    """The user's file, whether or not it exists; None if it is turned off."""
    chosen = _chosen if _chosen is not None else os.environ.get(VARIABLE) or default_path()
    return None if chosen == OFF else Path(chosen)


def sources() -> tuple[Source, ...]:
    """The tables, the user's first. One warning names a file that cannot be used."""
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
    """Returns the GPU name of measurements; None for a device on which nothing is launched."""
    if _pretended is not None or devices._RECORDED is not None:
        return _pretended
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    return INTERPRETER if _triton.INTERPRET else None


def entries(device: torch.device) -> tuple[tuple[str, Entry], ...]:
    """The measurements for this kind of GPU and their sources, the user's first."""
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
    """In this block, looks launch configs up as on a GPU with this name; for `inspect` without a GPU."""
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


# --- launch configs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A launcher's request for a launch config: the candidates, the built-in one first, and the one that it got."""

    kernel: str
    key: str
    configs: tuple[LaunchConfig, ...]
    config: LaunchConfig
    origin: str


_forced: dict[tuple[str, str], LaunchConfig] = {}
_watching: list[Callable[[Choice], None]] = []


def choose(kernel: str, tags: str, configs: Sequence[LaunchConfig], device: torch.device) -> LaunchConfig:
    """Returns the config for a launch of `kernel`: the one of `configs` that measured fastest on this GPU, or else the
    first one, the built-in config. All of them give right results. A launcher calls this when it plans a launch, not
    when it launches.

    tags: distinguishes launches that share the built-in config but may have different best ones, for example by the
        size of the dtype.
    """
    key, config, origin = config_key(tags, configs[0]), configs[0], "built in"
    if (kernel, key) in _forced:
        config, origin = _forced[kernel, key], "forced"
    else:
        for source, entry in entries(device):
            found = entry.rows.get(kernel, {}).get(key)
            if found is not None and found["row"] in configs:
                config = found["row"]
                origin = f"{source}: {entry.gpu}, {entry.measured}, x{found.get('speedup', 0):.2f}"
                break
    for watch in _watching:
        watch(Choice(kernel, key, tuple(configs), config, origin))
    return dict(config)


def is_forced(kernel: str, tags: str, configs: Sequence[LaunchConfig]) -> bool:
    """Whether `choose` would return a forced config."""
    return (kernel, config_key(tags, configs[0])) in _forced


@contextmanager
def forced(kernel: str, key: str, config: LaunchConfig) -> Iterator[None]:
    """In this block, launches with this key get `config`, in every thread of the process."""
    _forced[kernel, key] = config
    forget_plans()
    try:
        yield
    finally:
        del _forced[kernel, key]
        forget_plans()


@contextmanager
def watched() -> Iterator[dict[tuple[str, str], Choice]]:
    """Yields the configs that launches request in this block, by kernel and key, in the order of the first requests."""
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
    """Registers the measured orders of backends if all GPUs have the same name, because the choice for a call does not
    depend on which GPU its tensors are on."""
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
    """Registers callbacks for the initialisation of CUDA, which happens before any tensor is on a GPU: they import the
    kernels and set the order of `backend="auto"`. Earlier, the GPU's name is unknown; later, torch.compile may already
    be tracing a call."""
    for call in (_triton.load, _order_backends):
        torch.cuda._lazy_call(call)
    _triton.await_operators()
