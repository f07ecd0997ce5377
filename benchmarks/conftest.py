"""Options, the budget, progress, the verdict, and additional data in pytest-benchmark's JSON."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import isa
from benchmarks.budget import DEFAULT, Budget, collected, minutes, ordered

_STARTED = time.monotonic()
_ABSENT = pytest.StashKey[list[dict[str, Any]]]()
_ROWS = pytest.StashKey[list[dict[str, Any]]]()
_BUDGET = pytest.StashKey[Budget]()
_SAID = pytest.StashKey[int]()
_UNIT = pytest.StashKey[str]()
_FIGURES = "figures"
_HERE = Path(__file__).parent
_SIZE = re.compile(r"\b([A-Z][a-z]?)=(\d+)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all shapes, dtypes and directions; over half an hour")
    parser.addoption(
        "--budget",
        type=_minutes,
        metavar="MINUTES",
        help=f"time to keep to, by fewer rounds and then fewer shapes; 0 for none (default: {DEFAULT:g}; --full: 0)",
    )
    parser.addoption(
        "--isa",
        choices=tuple(isa.SWITCHES),
        help="hold our kernels, torch, oneDNN and MKL to this instruction set of the CPU",
    )


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


_minutes.__name__ = "minutes"  # the name in argparse's error messages


def pytest_configure(config: pytest.Config) -> None:
    """Prints a line a minute; with -v also a line after each row, and a table of the rounds."""
    if (name := config.getoption("isa", None)) is not None:
        try:
            isa.force(name)
        except ValueError as error:
            raise pytest.UsageError(f"--isa {name}: {error}") from None
    config.stash[_ABSENT], config.stash[_ROWS], config.stash[_SAID] = [], [], 0
    if hasattr(config.option, "benchmark_columns"):
        config.option.benchmark_columns = ["median", "iqr", "rounds"]
        config.option.benchmark_group_by = "group"
        config.option.benchmark_sort = "name"
    if config.option.verbose >= 0:  # -v: pyproject.toml sets -q for the tests
        config.option.verbose = 1
    elif hasattr(config.option, "benchmark_quiet"):
        config.option.benchmark_quiet = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets -k select by size. -k does not support "=", so `T=512` is also T512."""
    for item in items:
        if item.path.parent == _HERE:
            item.extra_keyword_matches.update(f"{letter}{size}" for letter, size in _SIZE.findall(item.name))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Plan, and announce it."""
    config = session.config
    items = [item for item in session.items if hasattr(getattr(item, "module", None), "unit")]
    if config.option.collectonly or not items or getattr(config.option, "benchmark_disable", False):
        return
    found = []
    for item in items:
        unit = item.module.unit(item.callspec.params)  # type: ignore[attr-defined]
        item.stash[_UNIT] = unit.id
        found.append(unit)
    limit = config.getoption("budget", None)
    if limit is None:
        limit = 0.0 if config.getoption("full", False) else DEFAULT
    units = collected(found)
    if limit:
        units = ordered(units)
        place = {unit.id: index for index, unit in enumerate(units)}
        session.items.sort(key=lambda item: place.get(item.stash.get(_UNIT, ""), -1))
    config.stash[_BUDGET] = Budget(units, limit, _STARTED)
    _write(config, ["", config.stash[_BUDGET].announced()])


def _write(config: pytest.Config, lines: list[str]) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # -p no:terminal
        return
    for line in lines:
        reporter.ensure_newline()
        reporter.write_line(line)
        reporter.flush()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Counts the time of a row. The first row that ends after another minute prints the progress."""
    budget, name = item.config.stash.get(_BUDGET, None), item.stash.get(_UNIT, "")
    if budget is None or not name:
        return (yield)
    start = time.monotonic()
    budget.admit(name)
    try:
        return (yield)
    finally:
        budget.spend(name, time.monotonic() - start)
        if item.config.stash[_SAID] < (passed := int(budget.gone // 60)):
            item.config.stash[_SAID] = passed
            _write(item.config, [budget.progress()])


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget, name = item.config.stash.get(_BUDGET, None), item.stash.get(_UNIT, "")
    if budget is not None and name and budget.admit(name) is None:
        pytest.skip(f"budget: no time for it within {budget.minutes:g} min")


def pytest_report_teststatus(report: object, config: pytest.Config) -> tuple[str, str, str] | None:
    """Shows the figures in place of PASSED, and no dots between the lines of progress."""
    if not isinstance(report, pytest.TestReport) or report.failed:
        return None
    quiet = config.option.verbose < 0 and _BUDGET in config.stash
    if report.skipped:
        return ("skipped", "", "SKIPPED") if quiet else None
    figures = dict(report.user_properties).get(_FIGURES)
    return ("passed", "" if quiet else ".", str(figures)) if figures and report.when == "call" else None


class Record:
    """Stores a row: its figures in pytest-benchmark's JSON, or the reason why there are none."""

    def __init__(self, request: pytest.FixtureRequest, show: Callable[[str, object], None]) -> None:
        self._config, self._show = request.config, show
        self.full = bool(request.config.getoption("full", False))
        budget = request.config.stash.get(_BUDGET, None)
        #: Of the rounds.
        self.fraction = 1.0 if budget is None else budget.admit(request.node.stash.get(_UNIT, "")) or 1.0

    def __call__(self, benchmark: Any, row: dict[str, Any], group: str, times: Sequence[float]) -> None:
        """Stores a row of `group` with the `times` of its rounds. The test fails if the row's result is wrong."""
        from benchmarks.measure import replay

        benchmark.group = group
        replay.give(benchmark, times)
        benchmark.extra_info.update(row)
        self._config.stash[_ROWS].append(row)
        self._show(_FIGURES, in_a_line(row))
        if "wrong" in row:
            pytest.fail(f"no ratio is reported: {row['wrong']}")

    def absent(self, row: dict[str, Any]) -> None:
        """Stores and skips a row that could not be measured; the row has the reason."""
        if "why_not" in row:
            self._config.stash[_ABSENT].append(row)
            pytest.skip(row["why_not"])


@pytest.fixture
def record(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Record:
    return Record(request, record_property)


def in_a_line(row: dict[str, Any]) -> str:
    """Returns the figures for the line after a row's name."""
    parts = [f"{row['median_us']:,.1f} us"] if "median_us" in row else []
    if "of_limit" in row:
        parts.append(f"{row['of_limit']:.0%} of {row['limit']}")
    over = row.get("speedup_over", {})
    if row.get("row") in ("triton", "native", "ours", "patched by ours"):
        parts += [f"{ratio:.2f} x {name}" for name, ratio in over.items()]
    if row.get("kind") == "model" and "peak_bytes" in row:
        parts.append(f"peak {(row.get('held_bytes', 0) + row['peak_bytes']) / 1e9:.1f} GB")
    parts += [f"{key} {row[key]}" for key in ("tokens/s", "host_us", "time_exponent") if row.get(key) is not None]
    return ", ".join(parts)


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """Adds the environment of the measurements, and the rows without figures."""
    import torch

    from foundry_kernels.tools.environment import versions

    output_json["environment"] = dict(line.split(None, 1) for line in versions())
    output_json["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    output_json["full"] = bool(config.getoption("full", False))
    output_json["absent"] = config.stash[_ABSENT]
    output_json["isa"] = (isa.current if isa.current.ours else isa.found()).kept()
    if _BUDGET in config.stash:
        output_json["budget"] = config.stash[_BUDGET].kept()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, object, object]:
    """Prints the verdict after all tables. It ends with the rows that are slower than a peer."""
    result = yield
    rows, budget = config.stash.get(_ROWS, []), config.stash.get(_BUDGET, None)
    if rows and budget is not None:
        from benchmarks import tables, verdict

        held = f", restricted to {isa.current.forced}" if isa.current.forced else ""
        terminalreporter.write_sep("=", f"verdict: {len(rows)} rows in {minutes(budget.gone)}{held}")
        for line in verdict.lines(rows, tables.cuts(budget.kept(), most=6)):
            terminalreporter.write_line(line)
    return result
