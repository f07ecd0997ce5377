"""Options, progress, and what a run leaves in its JSON beside pytest-benchmark's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_ABSENT = pytest.StashKey[list[dict[str, Any]]]()
_FIGURES = "figures"
_HERE = Path(__file__).parent
_SIZE = re.compile(r"\b([A-Z][a-z]?)=(\d+)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all shapes, dtypes and directions; over half an hour")


def pytest_configure(config: pytest.Config) -> None:
    """A table short enough to read, the rows of one comparison together; a line for each row as it is done."""
    config.stash[_ABSENT] = []
    if hasattr(config.option, "benchmark_columns"):
        config.option.benchmark_columns = ["median", "iqr", "rounds"]
        config.option.benchmark_group_by = "group"
        config.option.benchmark_sort = "name"
    if config.option.verbose == -1:  # as pyproject.toml sets it for the tests
        config.option.verbose = 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets -k choose by size: it has no "=", so that `T=512` is T512 to it."""
    for item in items:
        if item.path.parent == _HERE:
            item.extra_keyword_matches.update(f"{letter}{size}" for letter, size in _SIZE.findall(item.name))


def pytest_report_teststatus(report: object, config: pytest.Config) -> tuple[str, str, str] | None:
    """The figures in place of PASSED."""
    if not isinstance(report, pytest.TestReport) or report.when != "call" or not report.passed:
        return None
    figures = dict(report.user_properties).get(_FIGURES)
    return ("passed", ".", str(figures)) if figures else None


class Record:
    """Keeps a row: its figures in pytest-benchmark's JSON, or the reason why there are none."""

    def __init__(self, request: pytest.FixtureRequest, show: Callable[[str, object], None]) -> None:
        self._config, self._show = request.config, show
        self.full = bool(request.config.getoption("full", False))

    def __call__(self, benchmark: Any, row: dict[str, Any]) -> None:
        benchmark.extra_info.update(row)
        self._show(_FIGURES, in_a_line(row))

    def absent(self, row: dict[str, Any]) -> bool:
        """Keep and skip a row that says why it could not be measured; False for others."""
        if "why_not" not in row:
            return False
        self._config.stash[_ABSENT].append(row)
        pytest.skip(row["why_not"])


@pytest.fixture
def record(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Record:
    return Record(request, record_property)


def in_a_line(row: dict[str, Any]) -> str:
    """The figures that fit behind the name of a row."""
    parts = [f"{row['median_us']:,.1f} us"] if "median_us" in row else []
    if "of_limit" in row:
        parts.append(f"{row['of_limit']:.0%} of {row['limit']}")
    over = row.get("speedup_over", {})
    if row.get("row") in ("triton", "native", "ours"):
        parts += [f"{ratio:.2f} x {name}" for name, ratio in over.items()]
    parts += [f"{key} {row[key]}" for key in ("tokens/s", "host_us", "time_exponent") if row.get(key) is not None]
    return ", ".join(parts)


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """What the figures were measured with, and the rows that have none, beside them."""
    import torch

    from foundry_kernels.__main__ import versions

    output_json["environment"] = dict(line.split(None, 1) for line in versions())
    output_json["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    output_json["full"] = bool(config.getoption("full", False))
    output_json["absent"] = config.stash[_ABSENT]
