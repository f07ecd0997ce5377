"""Launches of the kernels, on logits of all classes or of one block of classes at a time."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.devices import capability, device_of
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, contiguous
from foundry_kernels._triton.tuning import choose
from foundry_kernels.ops.cross_entropy.options import LossOptions
from foundry_kernels.ops.cross_entropy.triton import configs
from foundry_kernels.ops.linear_cross_entropy.triton.kernels import (
    linear_cross_entropy_bwd_kernel,
    linear_cross_entropy_fwd_kernel,
)

_FORWARD, _BACKWARD = 4096, 2048  # elements of a program's tile
#: The results of the kernel, in the order of its parameters.
RESULTS = ("loss", "lse", "lse_low", "z_loss")
#: Without this, ptxas spills 8 or 16 bytes on 8.0 or 12.0 for an occupancy that it guesses.
_ENOUGH = {"maxnreg": 128}
#: A candidate for logits that become their gradient, which reads them twice: a multiprocessor has one such program, so
#: 132 rows of 128,256 16-bit logits, 34 MB, are in use at a time and stay in an H100's L2 cache of 50 MB. With the
#: built-in launch there are 8 for each.
WIDE = {"BLOCK_ROWS": 1, "BLOCK_COLS": 1 << 14, "num_warps": 32, "maxnreg": 64}


def _forward_tile(n_out: int, dtype: torch.dtype, device: torch.device, writes: bool) -> dict[str, int]:
    candidates = configs(n_out, _FORWARD)
    if writes and n_out > WIDE["BLOCK_COLS"] and device_of(capability(device)).most_warps >= WIDE["num_warps"]:
        candidates.append(WIDE)
    tags = f"{8 * dtype.itemsize}-bit{' in place' if writes else ''}"
    return choose("linear_cross_entropy_fwd_kernel", tags, candidates, device)


def _constants(dtype: torch.dtype, options: LossOptions) -> dict[str, Any]:
    smooth, capped = options.label_smoothing > 0.0, options.softcap is not None
    return {"CAP": capped, "SMOOTH": smooth, "COMPUTE": compute_dtype(dtype)}


def _numbers(n_cols: int, options: LossOptions) -> tuple[Any, ...]:
    smoothing = options.label_smoothing
    return options.ignore_index, smoothing, smoothing / n_cols, options.z_loss, options.softcap or 0.0


@planned
def _plan_fwd(
    n_rows: int, n_cols: int, n_out: int, first: int, dtype: torch.dtype, device: torch.device, options: LossOptions,
    writes: bool,
) -> Plan:  # fmt: skip
    tile = _forward_tile(n_out, dtype, device, writes)
    numbers = (n_rows, n_cols, n_out, first, *_numbers(n_cols, options))
    registers = _ENOUGH if writes and dtype.itemsize == 4 else {}
    grid = (triton.cdiv(n_rows, tile["BLOCK_ROWS"]),)
    return Plan(grid, numbers, _constants(dtype, options) | registers | tile)


@planned
def _plan_bwd(
    n_rows: int, n_cols: int, n_out: int, first: int, dtype: torch.dtype, device: torch.device, options: LossOptions,
    weighted: bool,
) -> Plan:  # fmt: skip
    tags = f"{8 * dtype.itemsize}-bit"
    tile = choose("linear_cross_entropy_bwd_kernel", tags, configs(n_out, _BACKWARD), device)
    n_tiles = triton.cdiv(n_out, tile["BLOCK_COLS"])
    numbers = (n_rows, n_cols, n_out, n_tiles, first, *_numbers(n_cols, options))
    grid = (triton.cdiv(n_rows, tile["BLOCK_ROWS"]) * n_tiles,)
    registers = _ENOUGH if weighted and options.label_smoothing > 0.0 and options.softcap is not None else {}
    return Plan(grid, numbers, _constants(dtype, options) | registers | tile)


def _sum_of(class_weight: Tensor | None, options: LossOptions, dtype: torch.dtype) -> Tensor | None:
    return None if class_weight is None or options.label_smoothing == 0.0 else class_weight.to(dtype).sum()


class Losses:
    """The losses of tokens, from the logits of all classes or of one block of classes at a time."""

    def __init__(
        self, target: Tensor, n_classes: int, class_weight: Tensor | None, options: LossOptions, dtype: torch.dtype,
        wanted: frozenset[str],
    ) -> None:  # fmt: skip
        self.target, self.n_classes, self.options = target.contiguous(), n_classes, options
        self.class_weight = contiguous(class_weight)
        self.weight_sum = _sum_of(class_weight, options, dtype)
        #: The requested results of each token.
        self.results = {
            name: torch.empty(target.shape, dtype=dtype, device=target.device) for name in RESULTS if name in wanted
        }
        self.state: Tensor | None = None

    def add(self, logits: Tensor, first: int, dloss: Tensor | None = None) -> None:
        """Adds the logits ``[tokens, classes]`` of these classes. After the last ones, `results` are complete. `dloss`:
        see the kernel; the logits must have all classes."""
        (n_rows, n_out), n_classes = logits.shape, self.n_classes
        if n_rows == 0:
            return
        if n_out < n_classes and self.state is None:
            n_numbers = 5 if self.options.label_smoothing > 0.0 else 3
            self.state = self.results["loss"].new_empty((n_numbers, n_rows))
        wanted = [self.results.get(name) if first + n_out == n_classes else None for name in RESULTS]
        writes = dloss is not None
        plan = _plan_fwd(n_rows, n_classes, n_out, first, logits.dtype, logits.device, self.options, writes)
        launch(
            linear_cross_entropy_fwd_kernel, plan,
            logits, self.target, self.class_weight, self.weight_sum, self.state, contiguous(dloss), *wanted,
        )  # fmt: skip


def gradients_(
    logits: Tensor, dloss: Tensor, target: Tensor, class_weight: Tensor | None, lse: Tensor, lse_low: Tensor,
    first: int, n_classes: int, options: LossOptions,
) -> None:  # fmt: skip
    """Overwrites the logits of the classes from `first` on with their gradient."""
    n_rows, n_out = logits.shape
    if n_rows == 0:
        return
    weighted = class_weight is not None
    plan = _plan_bwd(n_rows, n_classes, n_out, first, logits.dtype, logits.device, options, weighted)
    launch(
        linear_cross_entropy_bwd_kernel, plan,
        dloss.contiguous(), logits, target.contiguous(), contiguous(class_weight),
        _sum_of(class_weight, options, lse.dtype), lse.contiguous(), lse_low.contiguous(),
    )  # fmt: skip
