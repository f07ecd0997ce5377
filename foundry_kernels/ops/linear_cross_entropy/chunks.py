"""The chunked way over any cross-entropy kernel: two operators and the autograd function around them.

`native` and `triton` make one set of operators each. A chunk's logits are made by one product; its gradients, where
they are wanted, by two more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels._triton.operators import refuse_second_derivative
from foundry_kernels.core import extension
from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.registry import short_dtype, wide_dtype

#: Tokens of a chunk, if not given: at least so many (on a CPU each chunk reads and writes the whole sum of the weight's
#: gradient, in the time of a product over about a hundred tokens), and at most this share of all where logits are of 4
#: bytes.
_LEAST, _LEAST_CPU, _SHARE = 64, 256, 16
#: Classes whose 16-bit gradients are widened at a time: the copy stays in the cache. On a GPU, those of which a share
#: of the weight's gradient exists beside it.
_CLASSES = 4096

_OPTIONS = (
    "int ignore_index, str reduction, float label_smoothing, float z_loss, float? softcap, float logit_scale, "
    "SymInt? chunk_size"
)
_NEEDS = "bool need_dhidden, bool need_dweight, bool need_dbias"
FWD = (
    "linear_cross_entropy_fwd(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, "
    f"{_OPTIONS}, bool save_lse, bool save_z_loss, bool save_stats, {_NEEDS}) "
    "-> (Tensor loss, Tensor lse, Tensor lse_low, Tensor z_loss, Tensor dscale, Tensor dhidden, Tensor dweight, "
    "Tensor dbias)"
)
BWD = (
    "linear_cross_entropy_bwd(Tensor dloss, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, "
    f"Tensor? class_weight, Tensor lse, Tensor lse_low, {_OPTIONS}, {_NEEDS}) "
    "-> (Tensor dhidden, Tensor dweight, Tensor dbias)"
)


@functools.cache
def fast_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of `dtype` faster than the same in float32 (`csrc/torch/products.h`)."""
    return short_dtype(dtype) in extension.build_info().get("fast_products", ())


def rows_of(x: Tensor, part: slice) -> Tensor:
    """x[part]; quicker."""
    return x.narrow(0, part.start, part.stop - part.start)


#: sum += a b, bfloat16 into float32.
accumulate_product = extension.operator("accumulate_product_")

#: Whether the backward pass that is running may be followed by another one through the same graph.
_graph_is_retained = torch._C._autograd._get_current_graph_task_keep_graph

#: Multiplications up to which the CPU computes logits of 16-bit inputs in float32.
_SMALL = 1 << 22


def default_size(n_tokens: int, itemsize: int, cpu: bool = False) -> int:
    """Tokens of a chunk, for logits of so many bytes each."""
    return max(_LEAST_CPU if cpu else _LEAST, -(-n_tokens // (_SHARE * itemsize // 4)))


def dtype_of_products(x: Tensor, n_classes: int) -> torch.dtype:
    """Of logits on a CPU. A small product takes no time in either dtype, and float32 does not round its logits."""
    small = x.numel() * n_classes <= _SMALL
    return wide_dtype(x.dtype) if small or not fast_products(x.dtype) else x.dtype


class Tokens:
    """The tokens of a call as rows of matrices. On the CPU those that are ignored are left out, and 16-bit values
    become float32 where products are not faster without; on a GPU nothing depends on what the targets are."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        ignore_index: int,
        logit_scale: float,
        cpu: bool,
    ) -> None:
        self.dtype, self.n_rows = wide_dtype(hidden.dtype), target.numel()
        self.target = target.reshape(-1)
        x = hidden.reshape(-1, hidden.shape[-1])
        counts = self.target != ignore_index
        self.kept: Tensor | None = None
        if not cpu or torch.compiler.is_compiling():
            x = x.masked_fill(~counts.unsqueeze(1), 0.0)
        elif not bool(counts.all()):
            self.kept = counts.nonzero().squeeze(1)
            x, self.target = x[self.kept], self.target[self.kept]
        within = dtype_of_products(x, weight.shape[0]) if cpu else hidden.dtype
        self.x, self.weight = x.to(within), weight.to(within)
        self.bias = None if bias is None else bias.to(within)
        self.logit_scale, self.cpu = logit_scale, cpu
        self.memory: Tensor | None = None

    def chunks(self, chunk_size: int | None) -> list[slice]:
        n = self.target.numel()
        size = default_size(n, self.x.element_size(), self.cpu) if chunk_size is None else int(chunk_size)
        return [slice(i, min(n, i + size)) for i in range(0, n, size)]

    def logits(self, part: slice) -> Tensor:
        """In memory that the next chunk's are written to."""
        x = rows_of(self.x, part)
        if self.memory is None:
            self.memory = x.new_empty((x.shape[0], self.weight.shape[0]))
        y, w = self.memory.narrow(0, 0, x.shape[0]), self.weight.t()
        torch.mm(x, w, out=y) if self.bias is None else torch.addmm(self.bias, x, w, out=y)
        return y if self.logit_scale == 1.0 else y.mul_(self.logit_scale)

    def whole(self, of_kept: Tensor) -> Tensor:
        """Values of the kept tokens among zeros for the others."""
        if self.kept is None:
            return of_kept
        return of_kept.new_zeros((self.n_rows, *of_kept.shape[1:])).index_copy_(0, self.kept, of_kept)


class Gradients:
    """What is wanted of the gradients of hidden, weight and bias, in the dtype of the arithmetic."""

    def __init__(self, tokens: Tokens, needs: tuple[bool, ...]) -> None:
        n_classes, width = tokens.weight.shape
        empty = tokens.x.new_empty((0,), dtype=tokens.dtype)
        self.tokens, self.needs = tokens, needs
        self.dx = empty.new_empty(tokens.x.shape) if needs[0] else empty
        self.dweight = empty.new_zeros((n_classes, width)) if needs[1] else empty
        self.dbias = empty.new_zeros(n_classes) if needs[2] else empty

    def add(self, part: slice, dlogits: Tensor) -> None:
        tokens = self.tokens
        if tokens.logit_scale != 1.0:
            dlogits.mul_(tokens.logit_scale)
        if self.needs[0]:
            rows_of(self.dx, part).copy_(torch.mm(dlogits, tokens.weight))
        if self.needs[1] and dlogits.dtype == tokens.dtype:
            self.dweight.addmm_(dlogits.t(), rows_of(tokens.x, part))
        elif self.needs[1] and dlogits.dtype == torch.bfloat16 and tokens.cpu and accumulate_product is not None:
            accumulate_product(self.dweight, dlogits.t(), rows_of(tokens.x, part))
        elif self.needs[1]:
            # torch's product of 16 bits would round the share of each chunk. Some classes at a time, for the copy's
            # sake.
            wide, x = dlogits.device.type == "cuda", rows_of(tokens.x, part)
            x = x if wide else x.to(tokens.dtype)
            for total, d in zip(self.dweight.split(_CLASSES), dlogits.split(_CLASSES, 1), strict=True):
                if wide:
                    total += torch.mm(d.t(), x, out_dtype=tokens.dtype)
                else:
                    total.addmm_(d.to(tokens.dtype).t(), x)
        if self.needs[2]:
            self.dbias += dlogits.sum(0, dtype=tokens.dtype)

    def of(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dhidden = self.tokens.whole(self.dx).view(hidden.shape) if self.needs[0] else self.dx
        return dhidden, self.dweight, self.dbias


def empty_fwd(
    hidden: Tensor, weight: Tensor, reduction: str, save_lse: bool, save_z_loss: bool, save_stats: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, reduced = hidden.shape[:-1], hidden.shape[:-1] if reduction == "none" else ()
    shapes = [
        (True, reduced), (save_lse, rows), (save_stats, rows), (save_z_loss, reduced), (any(needs), ()),
        (needs[0], hidden.shape), (needs[1], weight.shape), (needs[2], weight.shape[:1]),
    ]  # fmt: skip
    return tuple(hidden.new_empty(s if wanted else (0,), dtype=wide_dtype(hidden.dtype)) for wanted, s in shapes)


#: Another way for the two operators. None forward: chunks, of which lse is kept.
Tiles = tuple[Callable[..., tuple[Tensor, ...]] | None, Callable[..., tuple[Tensor, ...]]]


#: Whether tiles are better, of hidden, weight, and whether weight gets a gradient.
Preference = Callable[[Tensor, Tensor, bool], bool]


def make(
    prefix: str, define: Callable[..., Any], loss_fwd: Any, loss_bwd: Any, cpu: bool, tiles: Tiles, prefer: Preference
) -> Callable[..., tuple[Tensor, ...]]:
    """The backend over a cross-entropy. `define(schema, function, fake)` registers its two operators, `prefix` before
    their names. `cpu`: they may look at values (see `Tokens`). `tiles`: what they do, forward and backward, where
    `chunk_size` is 0, which is how "tiles" comes to them; `prefer` decides where none is given."""

    def fwd(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
        ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
        logit_scale: float, chunk_size: int | None, save_lse: bool, save_z_loss: bool, save_stats: bool,
        *needs: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        with no_autocast(hidden):
            if chunk_size == 0 and tiles[0] is not None:
                return tiles[0](
                    hidden, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, z_loss,
                    softcap, logit_scale, save_lse, save_z_loss, save_stats,
                )  # fmt: skip
            chunk_size = chunk_size or None
            tokens = Tokens(hidden, weight, target, bias, ignore_index, logit_scale, cpu)
            gradients = Gradients(tokens, needs) if any(needs) else None
            mean, options = reduction == "mean", (ignore_index, "none", label_smoothing, z_loss, softcap)
            total = total_weight(tokens.target, class_weight, ignore_index, tokens.dtype) if mean else None
            # The mean's divisor goes into the gradients at once, but for float16, which would lose what is below its
            # range.
            late = tokens.x.dtype == torch.float16
            one = torch.ones((), dtype=tokens.dtype, device=hidden.device)
            share = one if total is None else total.reciprocal().masked_fill(total == 0, 0.0)
            kept: list[list[Tensor]] = [[], [], [], []]
            for part in tokens.chunks(chunk_size):
                target_part = rows_of(tokens.target, part)
                logits = tokens.logits(part)
                stats = save_stats or gradients is not None
                loss, lse, low, z, _ = loss_fwd(
                    logits, target_part, class_weight, *options, save_lse or stats, save_z_loss, stats
                )
                for found, value in zip(kept, (loss, lse, low, z), strict=True):
                    found.append(value)
                if gradients is not None:
                    dloss = (one if late else share).expand(target_part.shape)
                    dlogits = loss_bwd(dloss, logits, target_part, class_weight, lse, low, None, *options)
                    del logits
                    gradients.add(part, dlogits)
                    del dlogits
            outputs = list(empty_fwd(hidden, weight, reduction, save_lse, save_z_loss, save_stats, (False,) * 3))
            for place, (wanted, found) in enumerate(zip((True, save_lse, save_stats, save_z_loss), kept, strict=True)):
                if wanted:
                    rows = torch.cat(found) if found else one.new_empty(0)
                    if reduction != "none" and place in (0, 3):
                        outputs[place] = rows.sum() * 1.0 if total is None else mean_of(rows, total)
                    else:
                        outputs[place] = tokens.whole(rows).view(target.shape)
            if gradients is not None:
                outputs[4] = share.clone() if late else one
                outputs[5:] = gradients.of(hidden)
            return tuple(outputs)

    def bwd(
        dloss: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
        class_weight: Tensor | None, lse: Tensor, lse_low: Tensor, ignore_index: int, reduction: str,
        label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float, chunk_size: int | None,
        *needs: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        with no_autocast(hidden):
            if chunk_size == 0:
                return tiles[1](
                    dloss, hidden, weight, target, bias, class_weight, lse, lse_low, ignore_index, reduction,
                    label_smoothing, z_loss, softcap, logit_scale, *needs,
                )  # fmt: skip
            tokens = Tokens(hidden, weight, target, bias, ignore_index, logit_scale, cpu)
            gradients = Gradients(tokens, needs)
            of_rows = [x.reshape(-1) for x in (dloss, lse, lse_low)]
            if tokens.kept is not None:
                of_rows = [x[tokens.kept] for x in of_rows]
            for part in tokens.chunks(chunk_size):
                d, each, low = (rows_of(x, part) for x in of_rows)
                gradients.add(
                    part,
                    loss_bwd(
                        d, tokens.logits(part), rows_of(tokens.target, part), class_weight, each, low, None,
                        ignore_index, "none", label_smoothing, z_loss, softcap,
                    ),
                )  # fmt: skip
            found = gradients.of(hidden)
            # A copy where nothing else was written, so that an output is never an input.
            return tuple(
                g.to(x.dtype) if n else g.to(hidden.dtype)
                for g, x, n in zip(found, (hidden, weight, weight), needs, strict=True)
            )

    def fake_fwd(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        reduction, (save_lse, save_z_loss, save_stats), needs = rest[4], rest[10:13], rest[13:]
        return empty_fwd(hidden, weight, reduction, save_lse, save_z_loss, save_stats, needs)

    def fake_bwd(dloss: Tensor, hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        shapes = (hidden.shape, weight.shape, weight.shape[:1])
        return tuple(hidden.new_empty(s if needed else (0,)) for s, needed in zip(shapes, rest[-3:], strict=True))

    fwd_op = define(prefix + FWD, fwd, fake_fwd)
    bwd_op = define(prefix + BWD, bwd, fake_bwd)

    class LinearCrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
            options: tuple[Any, ...], save_lse: bool, save_z_loss: bool,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            ctx.needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
            ctx.options, ctx.recomputes = options, options[1] == "none" or options[-1] == 0
            ctx.dtype = hidden.dtype
            late = (False, False, False)
            loss, lse, low, z, dscale, *gradients = fwd_op(
                hidden, weight, target, bias, class_weight, *options,
                save_lse or ctx.recomputes, save_z_loss, ctx.recomputes, *(late if ctx.recomputes else ctx.needs),
            )  # fmt: skip
            if ctx.recomputes:
                ctx.save_for_backward(hidden, weight, target, bias, class_weight, lse, low)
            else:
                ctx.save_for_backward(dscale, *gradients)
            ctx.mark_non_differentiable(lse, z)
            return loss, lse, z

        @staticmethod
        def backward(ctx: Any, dloss: Tensor, *_: Any) -> Any:
            refuse_second_derivative("linear_cross_entropy")
            if ctx.recomputes:
                found = bwd_op(dloss, *ctx.saved_tensors, *ctx.options, *ctx.needs)
            else:
                dscale, *gradients = ctx.saved_tensors
                factor = dloss * dscale
                found = [_scaled(g, factor, ctx.dtype) for g in gradients]
            dhidden, dweight, dbias = (g if n else None for g, n in zip(found, ctx.needs, strict=True))
            return dhidden, dweight, None, dbias, None, None, None, None

    def linear_cross_entropy(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
        ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
        logit_scale: float, chunk_size: int | str | None, return_lse: bool, return_z_loss: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        learns = torch.is_grad_enabled() and weight.requires_grad
        if chunk_size == "tiles" or (chunk_size is None and prefer(hidden, weight, learns)):
            chunk_size = 0
        options = (ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, chunk_size)
        args = (hidden, weight, target, bias, class_weight)
        wanted = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and wanted:
            return LinearCrossEntropy.apply(*args, options, return_lse, return_z_loss)
        loss, lse, _, z, *_ = fwd_op(*args, *options, return_lse, return_z_loss, False, False, False, False)
        return loss, lse, z

    return linear_cross_entropy


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor, rounded once; without the product where it changes nothing and looking costs nothing.

    Of a graph that is retained the next backward pass needs `gradient`, so it is not handed out."""
    seen = factor.device.type == "cpu" and type(factor) is Tensor and not torch.compiler.is_compiling()
    if seen and factor.item() == 1.0 and not (gradient.dtype == dtype and _graph_is_retained()):
        return gradient.to(dtype)
    if gradient.dtype == dtype or torch.compiler.is_compiling():  # a compiler makes one loop of it
        return (gradient * factor).to(dtype)
    out = torch.empty_like(gradient, dtype=dtype)
    for part, g in zip(out.split(_CLASSES), gradient.split(_CLASSES), strict=True):
        part.copy_(g * factor)
    return out


def total_weight(target: Tensor, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The sum of the weights of the targets that count."""
    counts = target != ignore_index
    if class_weight is None:
        return counts.sum().to(dtype)
    known = counts & (target >= 0) & (target < class_weight.numel())
    return (class_weight.to(dtype).index_select(0, target.masked_fill(~known, 0)) * known).sum()


def mean_of(rows: Tensor, total: Tensor) -> Tensor:
    """The sum of `rows` over `total`; where nothing counts 0, unless it is NaN."""
    nothing, found = total == 0, rows.sum()
    return (found / total.masked_fill(nothing, 1.0)).masked_fill(nothing & ~found.isnan(), 0.0)
