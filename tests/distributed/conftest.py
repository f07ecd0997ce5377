"""The processes, which all tests of this folder share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch.distributed as dist
from processes import scenarios
from processes.example import OPTIONS


def _folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """One for all workers of pytest-xdist, whose own temporary folders lie side by side."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    pytest.importorskip("tqdm", reason="the example needs tqdm")
    return processes.run(scenarios.of_two(), _folder(tmp_path_factory, "processes"))


@pytest.fixture(scope="session")
def slow_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return processes.run(scenarios.SLOW, _folder(tmp_path_factory, "slow-processes"))


@pytest.fixture(scope="session")
def results_of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    pytest.importorskip("tqdm", reason="the example needs tqdm")
    return processes.run(scenarios.OF_FOUR, _folder(tmp_path_factory, "four-processes"), 4)


@pytest.fixture(scope="session")
def script() -> Any:
    pytest.importorskip("tqdm", reason="the example needs tqdm")
    from examples import train

    return train


@pytest.fixture(scope="session")
def resumed(script: Any) -> Callable[..., None]:
    """Asserts that a run of the example which was continued is that of one process which was not interrupted."""
    from examples.training import loop, text

    recipe = script.make_recipe(script.parse(OPTIONS), 5)
    whole = loop.train(recipe, "auto", text.read_text(None, recipe.seq_len), None, progress=False)

    def check(result: dict[str, Any], weights_within: float = 1e-5) -> None:
        assert len(result["losses"]) == 6
        assert result["losses"] == pytest.approx(whole.losses, abs=1e-5)
        assert result["held_out"] == pytest.approx(whole.held_out, abs=1e-5)
        for key, weight in whole.model.state_dict().items():
            assert (result["weights"][key] - weight).abs().max() <= weights_within * weight.abs().max(), key

    return check


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Six processes in two dimensions, of which this is one and the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=6)
    yield dist.device_mesh.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "cp"))
    dist.destroy_process_group()
