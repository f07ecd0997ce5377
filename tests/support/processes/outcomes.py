"""Compares the results of the processes with those of one process."""

from __future__ import annotations

from typing import Any

import torch

from processes.training import STEPS


def outcome(results: dict[str, list[Any]], name: str) -> list[Any]:
    for rank, result in enumerate(results[name]):
        assert not isinstance(result, str), f"{name} in process {rank}:\n{result}"
    return results[name]


def near(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Checks equality up to the order of float32 (float64) sums."""
    within = 1e-11 if expected.dtype == torch.float64 else 1e-5
    assert (actual - expected).abs().max() <= within * expected.abs().max(), name


def same_training(result: dict[str, Any], alone: dict[str, Any]) -> None:
    """Compares losses, every gradient of every step, and the final weights."""
    for step in range(STEPS):
        near(f"loss of step {step}", result["losses"][step], alone["losses"][step])
        assert result["grads"][step].keys() == alone["grads"][step].keys()
        for parameter, grad in alone["grads"][step].items():
            near(f"step {step}, {parameter}", result["grads"][step][parameter], grad)
    for parameter, weight in alone["weights"].items():
        near(parameter, result["weights"][parameter], weight)
    assert alone["losses"][-1] < alone["losses"][0] - 0.1, "nothing was learnt that could differ"
