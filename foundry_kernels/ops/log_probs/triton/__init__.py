"""Log-probabilities in Triton.

Forward: a program takes a row, or several of a small vocabulary, and walks over blocks of the classes with a running
maximum, the sum of the exponentials below it without the target's own, and if the entropy is requested the sum of these
times their distances to the maximum. Backward: element by element; each block reads its row's few numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import apply, define
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, contiguous, row_strides
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.cross_entropy.triton import configs
from foundry_kernels.ops.log_probs.options import STATS, LogProbsOptions, row_gradients
from foundry_kernels.ops.log_probs.triton.kernels import log_probs_bwd_kernel, log_probs_fwd_kernel

_FORWARD, _BACKWARD = 4096, 2048  # elements of a program's tile
#: With a soft cap and the entropy 8 bytes are spilled otherwise, on 9.0, for an occupancy that ptxas guesses.
_ENOUGH = {"maxnreg": 72}


def _layout(
    shape: tuple[int, ...], strides: tuple[int, ...], options: LogProbsOptions, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The numbers from n1 on and the constants that the forward and the backward kernel share; None if the kernels do
    not support this layout."""
    layout = row_strides(shape, strides)
    if layout is None:
        return None
    rank, n1, n2, (of_rows,) = layout
    numbers = (n1, n2, *of_rows, options.ignore_index, options.logit_scale, options.softcap or 0.0)
    return numbers, {"RANK": rank, "CAP": options.softcap is not None, "COMPUTE": compute_dtype(dtype)}


@planned
def _plan_fwd(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    options: LogProbsOptions, n_cols: int, first: int,
) -> Plan | None:  # fmt: skip
    found = _layout(shape, strides, options, dtype)
    if found is None:
        return None
    numbers, constants = found
    n_rows, n_out = math.prod(shape[:-1]), shape[-1]
    block = choose("log_probs_fwd_kernel", f"{8 * dtype.itemsize}-bit", configs(n_out, _FORWARD), device)
    grid = (triton.cdiv(n_rows, block["BLOCK_ROWS"]),)
    constants |= {"ENTROPY": options.return_entropy, "STATS": options.return_stats}
    if options.return_entropy and options.softcap is not None:
        constants |= _ENOUGH
    return Plan(grid, (n_rows, n_cols, n_out, first, *numbers), constants | block)


@planned
def _plan_bwd(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    options: LogProbsOptions, n_cols: int, first: int,
) -> Plan | None:  # fmt: skip
    found = _layout(shape, strides, options, dtype)
    if found is None:
        return None
    numbers, constants = found
    n_rows, n_out = math.prod(shape[:-1]), shape[-1]
    block = choose("log_probs_bwd_kernel", f"{8 * dtype.itemsize}-bit", configs(n_out, _BACKWARD), device)
    n_tiles = triton.cdiv(n_out, block["BLOCK_COLS"])
    grid = (triton.cdiv(n_rows, block["BLOCK_ROWS"]) * n_tiles,)
    return Plan(grid, (n_rows, n_cols, n_out, n_tiles, first, *numbers), constants | block)


def _outputs(target: Tensor, wanted: tuple[bool, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The tensors of `Rows.outputs`."""
    shapes = [*[target.shape] * 4, (*target.shape, len(STATS))]
    return tuple(
        torch.empty(shape if w else (0,), dtype=dtype, device=target.device)
        for shape, w in zip(shapes, wanted, strict=True)
    )


class Rows:
    """The results of tokens, from the logits of all classes or of one block of classes after another."""

    def __init__(
        self, target: Tensor, n_classes: int, options: LogProbsOptions, dtype: torch.dtype, save_lse: bool,
        save_low: bool,
    ) -> None:  # fmt: skip
        self.target, self.n_classes, self.options = target.contiguous(), n_classes, options
        wanted = (True, options.return_entropy, save_lse, save_low, options.return_stats)
        #: log_probs, entropy, lse, lse_low and stats; one that is not requested is empty.
        self.outputs = _outputs(target, wanted, dtype)
        self.state: Tensor | None = None

    def add(self, logits: Tensor, first: int) -> None:
        """Takes in the logits ``[..., classes]`` of these classes. After the last ones `outputs` are there."""
        n_rows, n_out = self.target.numel(), logits.shape[-1]
        if n_rows == 0:
            return
        if n_out < self.n_classes and self.state is None:
            n_numbers = 3 + self.options.return_entropy + 5 * self.options.return_stats
            self.state = self.outputs[0].new_empty((n_numbers, n_rows))
        wanted = [x if x.numel() else None for x in self.outputs] if first + n_out == self.n_classes else [None] * 5
        plan = _plan_fwd(
            logits.shape, logits.stride(), logits.dtype, logits.device, self.options, self.n_classes, first
        )
        if plan is None:
            return self.add(logits.contiguous(), first)
        launch(log_probs_fwd_kernel, plan, logits, self.target, self.state, *wanted)


def gradients(
    g: Tensor, c: Tensor | None, b: Tensor | None, logits: Tensor, target: Tensor, lse: Tensor, lse_low: Tensor,
    options: LogProbsOptions, out: Tensor, first: int = 0, n_classes: int | None = None,
) -> Tensor:  # fmt: skip
    """Writes the gradient of logits, of the classes from `first` on, to `out`, which may be the logits."""
    if out.numel() == 0:
        return out
    of_all = logits.shape[-1] if n_classes is None else n_classes
    plan = _plan_bwd(logits.shape, logits.stride(), logits.dtype, logits.device, options, of_all, first)
    if plan is None:
        return gradients(g, c, b, logits.contiguous(), target, lse, lse_low, options, out, first, n_classes)
    launch(
        log_probs_bwd_kernel, plan,
        g.contiguous(), contiguous(c), contiguous(b), logits, target.contiguous(), lse.contiguous(),
        lse_low.contiguous(), out,
    )  # fmt: skip
    return out


def _fwd(logits: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, ...]:
    options, (save_entropy, save_lse, save_low, save_stats) = LogProbsOptions.from_operator_args(args)
    options = options._replace(return_entropy=save_entropy, return_stats=save_stats)
    rows = Rows(target, logits.shape[-1], options, wide_dtype(logits.dtype), save_lse, save_low)
    rows.add(logits, 0)
    return rows.outputs


def _fake_fwd(logits: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _, wanted = LogProbsOptions.from_operator_args(args)
    return _outputs(target, (True, *wanted), wide_dtype(logits.dtype))


def _empty_bwd(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _bwd(
    dlog_probs: Tensor, dlse: Tensor | None, dentropy: Tensor | None, logits: Tensor, target: Tensor, lse: Tensor,
    lse_low: Tensor, *args: Any,
) -> Tensor:  # fmt: skip
    options = LogProbsOptions(*args)
    return gradients(dlog_probs, dlse, dentropy, logits, target, lse, lse_low, options, _empty_bwd(logits))


_log_probs_fwd = define(
    f"triton_log_probs_fwd(Tensor logits, Tensor target, {LogProbsOptions.SCHEMA}, bool save_entropy, bool save_lse, "
    "bool save_low, bool save_stats) -> (Tensor log_probs, Tensor entropy, Tensor lse, Tensor lse_low, Tensor stats)",
    _fwd,
    _fake_fwd,
)
_log_probs_bwd = define(
    "triton_log_probs_bwd(Tensor dlog_probs, Tensor? dlse, Tensor? dentropy, Tensor logits, Tensor target, Tensor lse, "
    f"Tensor lse_low, {LogProbsOptions.SCHEMA}) -> Tensor dlogits",
    _bwd,
    lambda g, c, b, logits, *_: _empty_bwd(logits),
)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LogProbsOptions) -> tuple[Tensor, ...]:
        ctx.options = options.operator_args()
        wanted = (options.return_entropy, True, True, options.return_stats)
        picked, entropy, lse, low, stats = _log_probs_fwd(logits, target, *ctx.options, *wanted)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.returns = options.return_entropy, options.return_lse
        ctx.save_for_backward(logits, target, entropy, lse, low)
        return picked, entropy, lse, stats

    @staticmethod
    def backward(ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None, _: Any) -> Any:
        refuse_second_derivative("log_probs")
        logits, target, entropy, lse, low = ctx.saved_tensors
        # torch.compile materializes the gradients of results that nobody gets.
        dentropy, dlse = (d if returned else None for d, returned in zip((dentropy, dlse), ctx.returns, strict=True))
        g, c, b = row_gradients(dlog_probs, dentropy, dlse, entropy, lse)
        return _log_probs_bwd(g, c, b, logits, target, lse, low, *ctx.options), None, None


def log_probs(logits: Tensor, target: Tensor, options: LogProbsOptions) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and logits.requires_grad:
        found = apply(_LogProbs, logits, target, options)
    else:
        wanted = (options.return_entropy, options.return_lse, False, options.return_stats)
        picked, entropy, lse, _, stats = _log_probs_fwd(logits, target, *options.operator_args(), *wanted)
        found = picked, entropy, lse, stats
    return options.requested(*found)
