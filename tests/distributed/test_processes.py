"""The processes that the tests of this folder share: a scenario that fails takes no other one with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"),
]


def summed(rank: int, folder: Path, ports: list[int]) -> float:
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    return x.item()


def failing(rank: int, folder: Path, ports: list[int]) -> None:
    """One fails before a collective that the other has begun."""
    if rank == 1:
        raise ValueError("made up")
    dist.all_reduce(torch.ones(1))


def waiting(rank: int, folder: Path, ports: list[int]) -> None:
    """Both wait for what the other one does not send."""
    dist.recv(torch.ones(1), src=1 - rank)


def ending(rank: int, folder: Path, ports: list[int]) -> float:
    """Both processes are lost, the first time."""
    if not (mark := folder.parents[1] / f"seen {rank}").exists():
        mark.touch()
        os._exit(7)
    return summed(rank, folder, ports)


def test_what_fails_is_told_and_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "IDLE", 4.0)
    scenarios: dict[str, Any] = {"before": summed, "failing": failing, "between": summed, "waiting": waiting}
    found = processes.run(scenarios | {"after": summed}, tmp_path / "processes")
    assert found["before"] == found["between"] == found["after"] == [1.0, 1.0]
    assert "ValueError: made up" in found["failing"][1]
    assert isinstance(found["failing"][0], str)
    for said in found["waiting"]:
        assert "in 4 s no thread was running" in said


def test_processes_that_were_lost_before_they_said_anything_are_started_once_more(tmp_path: Path) -> None:
    assert processes.run({"ending": ending}, tmp_path / "processes") == {"ending": [1.0, 1.0]}
