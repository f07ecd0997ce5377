"""A program on PyTorch's scores, with its derivatives: by the derived program, not by autograd of each operation, so
that NaN and infinity at hidden pairs reach no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention.score_program.derive import derive
from foundry_kernels.ops.flash_attention.score_program.evaluate import at_indices, evaluate
from foundry_kernels.ops.flash_attention.score_program.program import Program

#: The compiler of PyTorch 2.11 gives this function wrong gradients. There autograd goes through each operation, and NaN
#: beside hidden pairs may reach a gradient.
_BY_EACH_OPERATION = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def modified(code: tuple[int, ...], score: Tensor, places: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """The scores that the program makes of `score` ``[B, H, T, S]``; the arguments are those of `evaluate`.

    Where the gradient of a result is 0, as it is for hidden pairs and for -inf, it adds nothing to any gradient,
    whatever the derivative is there.
    """
    if torch.compiler.is_compiling() and _BY_EACH_OPERATION:
        (result,) = evaluate(_decoded(code), score, places, tensors)
        return result.expand(score.shape)
    function = _Modified if torch.compiler.is_compiling() else _WithForwardMode
    made: Tensor = function.apply(code, score, *places, *tensors)
    return made


def _decoded(code: tuple[int, ...]) -> Program:
    return Program.decode(code)


def _derived(code: tuple[int, ...]) -> Program:
    return derive(Program.decode(code))


# What torch.compiler.assume_constant_result sets, see `core.registry`.
_decoded._dynamo_marked_constant = True  # type: ignore[attr-defined]
_derived._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Modified(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(code: tuple[int, ...], score: Tensor, *others: Tensor) -> Tensor:
        (result,) = evaluate(_decoded(code), score, others[:4], others[4:])
        return result.expand(score.shape).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.code, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        score, *others = ctx.saved_tensors
        places, tensors = others[:4], others[4:]
        program = _derived(ctx.code)
        _, by_score, *by_loads = evaluate(program, score, places, tensors)
        none = grad == 0
        dscore = torch.where(none, 0, grad * by_score) if ctx.needs_input_grad[1] else None
        found: list[Tensor | None] = [None] * len(tensors)
        loads = program.loads()
        for slot, x in enumerate(tensors):
            if not ctx.needs_input_grad[6 + slot]:
                continue
            total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
            for at, derivative in zip(loads, by_loads, strict=True):
                if program.instructions[at].slot == slot:
                    indices = _indices(program, at, score, places, tensors)
                    total = total + _gathered(torch.where(none, 0, grad * derivative), indices, x)
            found[slot] = total.to(x.dtype)
        return None, dscore, None, None, None, None, *found


class _WithForwardMode(_Modified):
    """Also differentiates in forward mode, which torch.compile does not trace."""

    @staticmethod
    def jvp(ctx: Any, _: None, dscore: Tensor | None, *others: Tensor | None) -> Tensor:
        score, *saved = ctx.saved_tensors
        places, tensors, tangents = saved[:4], saved[4:], others[4:]
        program = _derived(ctx.code)
        result, by_score, *by_loads = evaluate(program, score, places, tensors)
        along = torch.zeros_like(score) if dscore is None else dscore * by_score
        for at, derivative in zip(program.loads(), by_loads, strict=True):
            tangent = tangents[program.instructions[at].slot]
            if tangent is not None:
                indices = _indices(program, at, score, places, tensors)
                along = along + derivative * tangent[indices].to(score.dtype)
        return torch.where(result == -torch.inf, 0, along)


def _indices(
    program: Program, at: int, score: Tensor, places: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The elements that a load reads."""
    load = program.instructions[at]
    wanted = Program(program.slots, program.instructions, load.operands)  # `_replace` is not traced on a constant
    return at_indices(load, tensors[load.slot], evaluate(wanted, score, places, tensors))


def _gathered(values: Tensor, indices: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """The sum of the values ``[B, H, T, S]`` for each element of x, in a fixed order, in float64."""
    values = values.double()
    if not indices:
        return values.sum()
    together = torch.broadcast_tensors(*indices)
    shape = together[0].shape
    values = values.sum_to_size((*(1,) * (values.dim() - len(shape)), *shape)).reshape(-1)
    flat = torch.zeros((), dtype=torch.int64, device=x.device)
    for index, size in zip(together, x.shape, strict=True):
        flat = flat * size + index
    flat, total = flat.reshape(-1), torch.zeros(x.numel(), dtype=torch.float64, device=x.device)
    if x.is_cuda:  # sorts, unlike scatter_add there
        return total.index_put((flat,), values, accumulate=True).view(x.shape)
    return total.scatter_add(0, flat, values).view(x.shape)  # adds the elements of a vector in their order
