"""Needs transformers. The models here are so small that a second thread only costs."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from foundry_kernels.integrations.adapters.deferred_scores import FEWEST

MISSING = importlib.util.find_spec("transformers") is None
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> list[str]:
    return ["tests/integrations is left out: transformers is not installed"] if MISSING else []


@pytest.fixture(autouse=True)
def _all_scores_are_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few: those of the models here would be computed."""
    for device in FEWEST:
        monkeypatch.setitem(FEWEST, device, 0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
