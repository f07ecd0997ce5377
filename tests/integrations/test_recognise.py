"""Norms and MLPs are recognised by what they compute, whatever their classes are called; near misses are left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import planted
import pytest
from planted import LEFT

from foundry_kernels.integrations import recognise
from foundry_kernels.integrations.adapters.base import Adapter
from foundry_kernels.integrations.recognise import recognised


@pytest.fixture(autouse=True)
def _nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(recognise, "_KNOWN", {})
    yield


@pytest.mark.parametrize("name", LEFT)
def test_what_differs_in_one_detail_is_left(name: str) -> None:
    found = recognised(LEFT[name]())
    assert found is None or isinstance(found, str), found
    assert "asking what it computes" not in str(found)  # which is an error of ours


def test_there_are_enough_of_them() -> None:
    assert len(LEFT) >= 50
    assert isinstance(recognised(planted.Norm()), Adapter)
    assert isinstance(recognised(planted.Mlp()), Adapter)
