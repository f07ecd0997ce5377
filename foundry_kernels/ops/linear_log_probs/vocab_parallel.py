"""Log-probabilities over a vocabulary that is sharded over devices, each of which has some rows of the weight.

As for linear_cross_entropy (see its `vocab_parallel.py`): each device computes the logits of its own classes in chunks
of the tokens, two all-reduces of one to three numbers a token give all devices the results, and the backward pass
needs no collective.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.linear_cross_entropy.calls import Needs
from foundry_kernels.ops.linear_cross_entropy.chunks import Gradients, rows_of
from foundry_kernels.ops.linear_cross_entropy.vocab_parallel import Local, Own, Shards
from foundry_kernels.ops.linear_log_probs.options import LinearLogProbsOptions
from foundry_kernels.ops.log_probs.operators import row_gradients

#: The options that this strategy supports, in the order of the fields.
SUPPORTED = (
    "ignore_index", "logit_scale", "softcap", "chunk_size", "batch_invariant", "return_entropy", "return_lse",
)  # fmt: skip


def linear_log_probs(
    hidden: Any, weight: Any, target: Any, bias: Any, options: LinearLogProbsOptions
) -> tuple[Any, Any, Any]:
    """The results as DTensors. Arguments as for `linear_cross_entropy.vocab_parallel.linear_cross_entropy`."""
    options.refuse_others(SUPPORTED, "linear_log_probs", "vocab-parallel")
    local = Local.of(hidden, weight, target, bias)
    picked, entropy, lse = apply(_VocabParallel, *local.inputs, options, local.shards)
    return (
        local.whole(picked),
        local.whole(entropy) if options.return_entropy else None,
        local.whole(lse) if options.return_lse else None,
    )


class _VocabParallel(torch.autograd.Function):
    """The results from the tensors of one device, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: LinearLogProbsOptions,
        shards: Shards,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        with no_autocast(hidden):
            own = Own(hidden, weight, target, bias, None, options.of_loss(), shards)
            y, nll, entropy = own.statistics(options.return_entropy)
        entropy = y.new_empty(0) if entropy is None else entropy
        results = [
            own.tokens.whole((x * own.counts).masked_fill(own.unknown, torch.nan)).view(target.shape)
            for x in (-nll, *([entropy] if options.return_entropy else []), y + nll)
        ]
        picked, lse = results[0], results[-1]
        ctx.save_for_backward(hidden, weight, target, bias, y, nll, entropy)
        ctx.options, ctx.shards = options, shards
        ctx.needs = Needs(ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        ctx.set_materialize_grads(False)
        return picked, results[1] if options.return_entropy else entropy, lse

    @staticmethod
    def backward(ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None) -> Any:
        refuse_second_derivative("linear_log_probs")
        hidden, weight, target, bias, y, nll, entropy = ctx.saved_tensors
        options = ctx.options
        with no_autocast(hidden):
            own = Own(hidden, weight, target, bias, None, options.of_loss(), ctx.shards)
            returned = (True, options.return_entropy, options.return_lse)
            given = [
                None if d is None or not r else own.tokens.of_kept(d)
                for d, r in zip((dlog_probs, dentropy, dlse), returned, strict=True)
            ]
            rows = row_gradients(given[0], given[1], given[2], entropy, nll)
            found = _gradients(own, rows, y, nll, ctx.needs).of(hidden)
        dhidden, dweight, dbias = (g.to(hidden.dtype) if n else None for g, n in zip(found, ctx.needs, strict=True))
        return dhidden, dweight, None, dbias, None, None


def _gradients(
    own: Own, rows: tuple[Tensor, Tensor | None, Tensor | None], y: Tensor, nll: Tensor, needs: Needs
) -> Gradients:
    """The gradients of this device's logits and inputs; see the mathematics in `log_probs/__init__`."""
    tokens, softcap = own.tokens, own.options.softcap
    found = Gradients(tokens, needs)
    g, c, b = (None if x is None else torch.where(own.counts, x, 0.0).masked_fill(own.unknown, torch.nan) for x in rows)
    assert g is not None
    for part in tokens.chunks() if tokens.weight.shape[0] else ():
        logits, mine, column = own.logits(part), rows_of(own.mine, part), rows_of(own.column, part)
        slope = None if softcap is None else 1.0 - (logits / softcap).square()
        below = logits.sub_(rows_of(y, part).unsqueeze(1)).sub_(rows_of(nll, part).unsqueeze(1))
        p, each = below.exp(), rows_of(g, part).unsqueeze(1)
        at_target = torch.where(mine.unsqueeze(1), -torch.expm1(-rows_of(nll, part).unsqueeze(1)), -p.gather(1, column))
        d = p.neg().scatter_(1, column, at_target).mul_(each)
        if c is not None:
            d.add_(p * rows_of(c, part).unsqueeze(1))
        if b is not None:
            d.add_(p * below.masked_fill_(below == -torch.inf, 0.0) * rows_of(b, part).unsqueeze(1))
        found.add(part, (d if slope is None else d.mul_(slope)).to(tokens.x.dtype))
    if needs.hidden and not tokens.weight.shape[0]:
        found.dx.zero_()
    return found
