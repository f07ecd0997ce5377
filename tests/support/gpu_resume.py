"""A pytest plugin that records the tests that pass, and skips those that passed before. It also records failed tests
with their errors, even if the run is interrupted before printing them.

`--passed-file` is written after each test, and `--already-passed` is read. These are two files because with
pytest-xdist each process reads the second one, and all must read the same contents.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed-file", type=Path, help="append the tests that pass or are skipped to this file")
    parser.addoption("--failed-file", type=Path, help="write the tests that fail and their errors to this file")
    parser.addoption("--already-passed", type=Path, help="leave out the tests named in this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--passed-file") and not hasattr(config, "workerinput"):  # receives all reports
        config.pluginmanager.register(Results(config.getoption("--passed-file"), config.getoption("--failed-file")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    already = config.getoption("--already-passed")
    if already is None or not already.exists():
        return
    names = set(already.read_text().splitlines())
    done = [item for item in items if item.nodeid in names]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in names]


class Results:
    def __init__(self, passed: Path, failed: Path | None) -> None:
        self.passed = passed.open("a", buffering=1)
        self.failed = None if failed is None else failed.open("w", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.when == "call" and report.passed):
            self.passed.write(report.nodeid + "\n")
        elif report.failed and self.failed is not None:
            self.failed.write(f"{report.nodeid}\t{error_of(report)}\n")

    def pytest_sessionfinish(self) -> None:
        self.passed.close()
        if self.failed is not None:
            self.failed.close()


def error_of(report: pytest.TestReport) -> str:
    """Returns the location of the failure and the error's text in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
    return " ".join(text.split())[:600]
