"""Plain PyTorch, with all logits, differentiated by autograd: what every other strategy must equal."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.ops._linear_loss.reference import all_logits
from foundry_kernels.ops.cross_entropy import reference, tokens
from foundry_kernels.ops.linear_cross_entropy.loss import scaled
from foundry_kernels.ops.linear_cross_entropy.options import LinearCrossEntropyOptions


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    class_weight: Tensor | None,
    options: LinearCrossEntropyOptions,
) -> dict[str, Tensor | None]:
    logits = all_logits(hidden, weight, target, bias, low, up, options)
    predicted = tokens.predictions(logits, target, options.ignore_index) if options.return_predictions else None
    if not options.token_scaling:
        loss, lse, z = reference.with_lse(logits, target, class_weight, *options.of_logits(options.reduction))
        return {"loss": loss, "lse": lse, "z_loss": z, "predicted": predicted}
    per_token = options.of_logits("none")._replace(return_lse=True)
    losses, lse, zs = reference.with_lse(logits, target, class_weight, *per_token)
    assert lse is not None  # which was asked for
    p = tokens.probabilities(logits, target, lse, options.ignore_index, options.softcap)
    zs = zs if options.return_z_loss else None
    return {"lse": lse, "predicted": predicted} | scaled(losses, zs, p, target, class_weight, options)
