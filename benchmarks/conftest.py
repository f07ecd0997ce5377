from __future__ import annotations

from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A table short enough to read, the rows of one comparison together."""
    config.option.benchmark_columns = ["median", "iqr", "rounds"]
    config.option.benchmark_group_by = "group"
    config.option.benchmark_sort = "name"


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """What the figures were measured with, beside them."""
    import torch

    from foundry_kernels.__main__ import versions

    output_json["environment"] = dict(line.split(None, 1) for line in versions())
    output_json["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
