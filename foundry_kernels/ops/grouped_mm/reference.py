"""Plain PyTorch, a loop of matmuls: what every kernel of the operation must equal.

The loop is one operator, `foundry_kernels::reference_grouped_mm_fwd`, and that of the gradients another: the number of
rows of a group is in a tensor, which a traced graph cannot read; and matmuls write a gradient directly to its place,
where autograd of a loop would copy it. Transforms and second derivatives use the loop itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.core.registry import BackendUnavailable, _transformed, is_subclass, short_dtype
from foundry_kernels.ops.grouped_mm.layout import empty_dweight, transposed


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, batch_invariant: bool = False) -> Tensor:
    if batch_invariant and (missing := _why_variant(x)) is not None:
        raise BackendUnavailable(f"grouped_mm: backend 'reference' has no batch-invariant matmuls: {missing}")
    if values_known(offs) and _transformed():
        return _differentiable(x, weight, offs)
    found: Tensor = torch.ops.foundry_kernels.reference_grouped_mm_fwd(x, weight, offs, batch_invariant)
    return found


#: A matmul with transposed matrices whose rows have the same bits in any batch.
_decode_linear = extension.operator("decode_linear")


def _why_variant(x: Tensor) -> str | None:
    if x.device.type not in ("cpu", "meta"):
        return f"PyTorch's, on {x.device.type}, depend on the number of rows; take backend 'triton'"
    if _decode_linear is None:
        return extension.MISSING or f"the C++ extension is older than this package; {extension.REBUILD}"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"they take float32, bfloat16 and float16, not {short_dtype(x.dtype)}"
    return None if not _transformed() else "there are none under a transform of torch.func"


def _multiply(a: Tensor, b: Tensor, out: Tensor, batch_invariant: bool) -> None:
    """out = a b."""
    if not batch_invariant:
        torch.mm(a, b, out=out)
        return
    assert _decode_linear is not None
    with torch.no_grad():
        out.copy_(_decode_linear(a, [b.t()]))


def _differentiable(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    parts = x.split(_sizes(offs, x.shape[0]))
    rest = x.new_zeros(parts[-1].shape[0], weight.shape[2])
    # For a transposed view, use the matrices as they are stored, so that their gradients are stacked in the same
    # layout.
    flipped = weight.stride(1) == 1 and weight.stride(2) != 1
    matrices = [m.t() for m in weight.transpose(1, 2).unbind(0)] if flipped else weight.unbind(0)
    return torch.cat([*(part @ matrix for part, matrix in zip(parts, matrices, strict=False)), rest])


def values_known(offs: Tensor) -> bool:
    """Whether the values can be read: not while a graph is traced, nor on the meta device."""
    return not (torch.compiler.is_compiling() or offs.is_meta or is_subclass(offs))


def check_ends(ends: list[int], rows: int) -> None:
    """Raise ValueError unless the ends of the groups never decrease and lie in 0 .. rows."""
    before = 0
    for group, end in enumerate(ends):
        if not before <= end <= rows:
            raise ValueError(
                f"offs must never decrease and lie in 0 .. {rows}, the rows of x; got {end} for group {group}, "
                f"after {before}"
            )
        before = end


def _sizes(offs: Tensor, rows: int) -> list[int]:
    """The numbers of rows of each group, and of the rows after them. Backward passes check them too, because the memory
    may have changed."""
    ends = offs.tolist()
    check_ends(ends, rows)
    return [end - start for start, end in zip([0, *ends], [*ends, rows], strict=True)]


def _fwd(x: Tensor, weight: Tensor, offs: Tensor, batch_invariant: bool) -> Tensor:
    y = x.new_empty(x.shape[0], weight.shape[2])
    sizes = _sizes(offs, x.shape[0])
    for matrix, rows, out in zip(weight.unbind(0), x.split(sizes), y.split(sizes), strict=False):
        _multiply(rows, matrix, out, batch_invariant)
    y[x.shape[0] - sizes[-1] :].zero_()
    return y


def _bwd(
    dy: Tensor, x: Tensor, weight: Tensor, offs: Tensor, batch_invariant: bool, need_dx: bool, need_dweight: bool
) -> tuple[Tensor, Tensor]:
    dx = _fwd(dy, weight.transpose(1, 2), offs, batch_invariant) if need_dx else x.new_empty(0)
    if not need_dweight:
        return dx, x.new_empty(0)
    dweight = empty_dweight(weight)
    in_memory, a, b = (dweight.transpose(1, 2), dy, x) if transposed(weight) else (dweight, x, dy)
    sizes = _sizes(offs, x.shape[0])
    for rows, others, out in zip(a.split(sizes), b.split(sizes), in_memory.unbind(0), strict=False):
        _multiply(rows.t(), others, out, batch_invariant)
    return dx, dweight


def _empty_fwd(x: Tensor, weight: Tensor, offs: Tensor, batch_invariant: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _empty_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, offs: Tensor, batch_invariant: bool, need_dx: bool, need_dweight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if need_dx else (0,)), empty_dweight(weight) if need_dweight else x.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.batch_invariant = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need_dweight, *_ = ctx.needs_input_grad
    x, weight, offs = ctx.saved_tensors
    if torch.is_grad_enabled() and values_known(offs) and not ctx.batch_invariant:  # for a second derivative
        sizes = _sizes(offs, x.shape[0])
        *pairs, _ = zip(x.split(sizes), dy.split(sizes), strict=True)
        dx = _differentiable(dy, weight.transpose(1, 2), offs) if need_dx else None
        return dx, torch.stack([a.t() @ b for a, b in pairs]) if need_dweight else None, None, None
    if torch.is_grad_enabled() and ctx.batch_invariant and not torch.compiler.is_compiling():
        raise RuntimeError("grouped_mm has no second derivative where it is batch-invariant")
    flags = (ctx.batch_invariant, need_dx, need_dweight)
    dx, dweight = torch.ops.foundry_kernels.reference_grouped_mm_bwd(dy, x, weight, offs, *flags)
    return dx if need_dx else None, dweight if need_dweight else None, None, None


_LIBRARY = torch.library.Library("foundry_kernels", "FRAGMENT")
for _schema, _function, _fake in (
    (
        "reference_grouped_mm_fwd(Tensor x, Tensor weight, Tensor offs, bool batch_invariant) -> Tensor",
        _fwd,
        _empty_fwd,
    ),
    (
        "reference_grouped_mm_bwd(Tensor dy, Tensor x, Tensor weight, Tensor offs, bool batch_invariant, bool need_dx, "
        "bool need_dweight) -> (Tensor dx, Tensor dweight)",
        _bwd,
        _empty_bwd,
    ),
):
    _name = _schema.split("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _function, _key)
    torch.library.register_fake(f"foundry_kernels::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd(
    "foundry_kernels::reference_grouped_mm_fwd", _backward, setup_context=_save, lib=_LIBRARY
)
