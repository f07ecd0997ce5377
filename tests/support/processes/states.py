"""Linear attention with sharded sequences, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LENGTH = 64
#: Documents by name: where each begins, and the end.
DOCUMENTS: dict[str, tuple[int, ...] | None] = {
    "whole": None,
    "packed": (0, 5, 5, 25, 34, 35, LENGTH),
    "at the ends of chunks": (0, 16, 32, LENGTH),
    "one document": (0, LENGTH),
}
#: Tensors that every process has as a whole, and to whose gradients it adds a part.
PARAMETERS = ("weight", "A_log", "dt_bias", "A", "D")
BAD = 20  # a token of the document 5 .. 24, which lies in two processes
Found = dict[str, tuple[Tensor, Tensor]]


def linear_attention(rank: int, folder: Path, ports: list[int]) -> dict[str, Found]:
    """By case, outputs and gradients of the sharded sequence and of the whole one."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name, documents in DOCUMENTS.items():
        for width, frozen in (
            (12, ()),
            (12, ("k", "v", "g", "beta", "x")),
            (250, ()),
        ):  # 250: two calls for a chunk's map
            case = f"{name}, {width} wide{', frozen' * bool(frozen)}"
            torch.manual_seed(0)
            found[case] = _delta_rule(mesh, documents, width, frozen) | _convolution(mesh, documents, frozen)
        for frozen in ((), ("x", "B", "dt_bias", "z")):
            found[f"Mamba-2, {name}{', frozen' * bool(frozen)}"] = _scan(mesh, documents, frozen)
        if name == "packed":
            found["gates and channels"] = _delta_rule(mesh, documents, 12, (), gated=True)
    torch.manual_seed(0)
    found["NaN in one document"] = _delta_rule(mesh, DOCUMENTS["packed"], 12, (), bad=BAD)
    found["NaN in one document, Mamba-2"] = _scan(mesh, DOCUMENTS["packed"], (), bad=BAD)
    return found


def _delta_rule(
    mesh: Any, documents: tuple[int, ...] | None, width: int, frozen: tuple[str, ...], bad: int | None = None,
    gated: bool = False,
) -> Found:  # fmt: skip
    import foundry_kernels as fk
    from foundry_kernels.distributed import sharded_gated_delta_rule

    batch = 2 if documents is None else 1
    shapes = {"q": (2, LENGTH, 8), "k": (2, LENGTH, 8), "v": (4, LENGTH, width), "g": (4, LENGTH), "beta": (4, LENGTH)}
    if gated:  # and a decay for each dimension
        shapes["g"] = (4, LENGTH, 8)
    whole = {name: torch.randn(batch, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    if gated:
        whole |= {"A_log": torch.randn(4, dtype=torch.float64), "dt_bias": torch.randn(4, 8, dtype=torch.float64)}
    else:
        whole["g"], whole["beta"] = -0.3 * whole["g"].abs(), whole["beta"].sigmoid()
    if bad is not None:
        whole["v"][:, :, bad] = torch.nan
    options = {"cu_seqlens": None if documents is None else torch.tensor(documents), "qk_l2norm": True}
    if gated:
        options["beta_limit"] = 1.0

    def sharded(**given: Tensor) -> Tensor:
        return sharded_gated_delta_rule(**given, mesh=mesh, **options)

    return _compare(mesh, whole, frozen, 2, sharded, lambda **given: fk.gated_delta_rule(**given, **options))


def _scan(mesh: Any, documents: tuple[int, ...] | None, frozen: tuple[str, ...], bad: int | None = None) -> Found:
    import foundry_kernels as fk
    from foundry_kernels.distributed import sharded_ssd

    batch = 2 if documents is None else 1
    rows: dict[str, tuple[int, ...]] = {"x": (4, 6), "dt": (4,), "B": (2, 8), "C": (2, 8), "z": (4, 6)}
    whole = {name: torch.randn(batch, LENGTH, *shape, dtype=torch.float64) for name, shape in rows.items()}
    whole |= {"A": -torch.rand(4, dtype=torch.float64), "D": torch.randn(4, dtype=torch.float64)}
    whole["dt_bias"] = torch.randn(4, dtype=torch.float64)
    if bad is not None:
        whole["x"][:, bad] = torch.nan
    options: dict[str, Any] = {"dt_softplus": True, "dt_limit": (0.1, 2.0)}
    options["cu_seqlens"] = None if documents is None else torch.tensor(documents)

    def sharded(**given: Tensor) -> Tensor:
        return sharded_ssd(**given, mesh=mesh, **options)

    return _compare(mesh, whole, frozen, 1, sharded, lambda **given: fk.ssd(**given, **options))


def _convolution(mesh: Any, documents: tuple[int, ...] | None, frozen: tuple[str, ...]) -> Found:
    import foundry_kernels as fk
    from foundry_kernels.distributed import sharded_short_conv1d

    batch = 2 if documents is None else 1
    whole = {"x": torch.randn(batch, LENGTH, 6, dtype=torch.float64), "weight": torch.randn(6, 4, dtype=torch.float64)}
    whole["residual"] = torch.randn_like(whole["x"])
    options: dict[str, Any] = {"bias": None, "activation": "silu"}
    options["cu_seqlens"] = None if documents is None else torch.tensor(documents)

    def sharded(**given: Tensor) -> Tensor:
        return sharded_short_conv1d(**given, mesh=mesh, **options)

    return _compare(mesh, whole, frozen, 1, sharded, lambda **given: fk.short_conv1d(**given, **options))


def _compare(
    mesh: Any, whole: dict[str, Tensor], frozen: tuple[str, ...], dim: int, sharded: Any, single: Any
) -> Found:
    from foundry_kernels.distributed import gather_sequence, shard_sequence

    parts = {n: x.clone() if n in PARAMETERS else shard_sequence(x, mesh, dim) for n, x in whole.items()}
    results = []
    for given, function in ((parts, sharded), (whole, single)):
        given = {name: x.requires_grad_(name not in frozen) for name, x in given.items()}
        output = function(**given)
        cotangent = torch.linspace(-1, 1, LENGTH, dtype=torch.float64).view(LENGTH, *[1] * (output.dim() - dim - 1))
        if function is sharded:
            cotangent = shard_sequence(cotangent, mesh, 0)
        wanted = {name: x for name, x in given.items() if x.requires_grad}
        grads = torch.autograd.grad((output * cotangent).sum(), list(wanted.values()))
        results.append({"output": output.detach()} | dict(zip(wanted, grads, strict=True)))
    found = {}
    for name, part in results[0].items():
        if name in PARAMETERS:
            dist.all_reduce(part)
        name_of = "y" if dim == 1 and name == "output" else name
        found[name_of] = (part if name in PARAMETERS else gather_sequence(part, mesh, dim), results[1][name])
    return found
