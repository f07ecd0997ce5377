"""The models here are so small that a second thread only costs."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers", reason="the tests of models of transformers need it")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
