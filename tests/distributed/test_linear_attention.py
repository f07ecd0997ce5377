"""The gated delta rule and the short convolution of sequences over two processes, and over four, against one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import states
from processes.outcomes import outcome

import foundry_kernels as fk
from foundry_kernels.distributed.linear_attention import _Parts, _states
from foundry_kernels.distributed.zigzag import Place

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_outputs_and_gradients_equal_those_of_one_process(size: int, request: pytest.FixtureRequest) -> None:
    results: dict[str, list[Any]] = request.getfixturevalue("results" if size == 2 else "results_of_four")
    for found in outcome(results, "linear attention"):
        assert len(found) == 5 * len(states.DOCUMENTS) + 3
        for case, pairs in found.items():
            for name, (actual, expected) in pairs.items():
                torch.testing.assert_close(
                    actual,
                    expected,
                    rtol=1e-10,
                    atol=1e-12,
                    equal_nan=True,
                    msg=lambda m, at=f"{case}, {name}": f"{at}: {m}",
                )
            if case.startswith("NaN"):
                output, key, dim = ("y", "B", 1) if case.endswith("Mamba-2") else ("output", "k", 2)
                wrong = {n: set(pairs[n][0].isnan().nonzero()[:, dim].tolist()) for n in (output, key)}
                assert wrong[output] == set(range(states.BAD, 25))
                assert wrong[key] <= set(range(5, 25))


def test_states_keep_their_precision_under_autocast(mesh: Any) -> None:
    parts = _Parts(Place(0, 2), mesh["cp"].get_group(), 4, None)
    maps = torch.randn(4, 1, 2, 8, 8 + 6)
    with torch.autocast("cpu", torch.bfloat16):
        found = _states(parts, maps, 8)
    first, *others = maps
    state = first[..., 8:]
    for before, each in zip(found[2:], others, strict=False):
        state = each[..., :8] @ state + each[..., 8:]
        torch.testing.assert_close(before, state)


def test_what_cannot_be_sharded_is_refused_before_anything_is_sent(mesh: Any) -> None:
    distributed, mesh = fk.distributed, mesh["cp"]
    q, g = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match=r"q must have two chunks of tokens in dimension 2; got \(1, 2, 3, 8\)"):
        distributed.sharded_gated_delta_rule(q[:, :, :3], q, q, g, g, mesh)
    with pytest.raises(TypeError, match=r"v must be a torch\.Tensor; got NoneType"):
        distributed.sharded_gated_delta_rule(q, q, None, g, g, mesh)
    with pytest.raises(ValueError, match="cu_seqlens"):
        distributed.sharded_gated_delta_rule(q, q, q, g, g, mesh, cu_seqlens=torch.tensor([0, 13]))
    with pytest.raises(ValueError, match="q must hold one row with cu_seqlens"):
        distributed.sharded_gated_delta_rule(
            *[torch.cat([q, q])] * 3, None, None, mesh, cu_seqlens=torch.tensor([0, 12])
        )
    with pytest.raises(ValueError, match=r"x must have at least W - 1 = 3 tokens in each of its two chunks; got 2"):
        distributed.sharded_short_conv1d(torch.zeros(1, 4, 6), torch.zeros(6, 4), None, None, mesh)
