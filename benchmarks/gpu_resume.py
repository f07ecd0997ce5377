"""A plugin for pytest: keeps the name of each test that passed as soon as it has, and leaves out those that did before.

`--passed-file` is written as tests pass (also by a run that is then stopped), `--already-passed` is read. They are two
files because with pytest-xdist each process reads the second, and all must find the same in it.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed-file", type=Path, help="append the tests that pass or are skipped to this file")
    parser.addoption("--already-passed", type=Path, help="leave out the tests named in this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--passed-file") and not hasattr(config, "workerinput"):  # the process that hears of all tests
        config.pluginmanager.register(Passed(config.getoption("--passed-file")))


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


class Passed:
    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.when == "call" and report.passed):
            self.file.write(report.nodeid + "\n")

    def pytest_sessionfinish(self) -> None:
        self.file.close()
