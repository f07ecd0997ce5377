"""What was recorded of a model, and what of it is a reason to worry."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: A head whose entropy is a smaller fraction of the largest one looks at one token and nothing else.
LEAST_ENTROPY = 0.05
#: Activations with a smaller fraction of the directions that they could have are nearly the same for every token.
LEAST_RANK = 0.05
#: Logits beyond this leave bfloat16's steps of half a nat, and grow from step to step where they are not clipped.
MOST_LOGIT = 100.0
#: A layer whose gradient is so many times larger or smaller than the median of all.
GRADIENTS_APART = 100.0


@dataclass(frozen=True)
class LayerHealth:
    """One layer.

    Attributes:
        entropy: of each head, the mean over all rows of attention's entropy, as a fraction of the mean of the largest
            that there is (the logarithm of the number of keys seen): 0 is one key, 1 is all alike.
        max_logit: of each head, the largest score of any row, after scale, cap and ALiBi.
        qk_rank: of each head, :func:`qk_ranks`.
        activation_rank: the effective rank of the tokens' activations behind the layer; `most_ranks` is the most.
        gradient_norm: Euclidean norm of all gradients of the layer, or None without a backward pass.
    """

    entropy: list[float]
    max_logit: list[float]
    qk_rank: list[float]
    activation_rank: float
    most_ranks: int
    gradient_norm: float | None


@dataclass(frozen=True)
class Health:
    """All layers, the first one first."""

    layers: list[LayerHealth]
    head_dim: int

    def concerns(self) -> list[str]:
        """Returns a line for each thing that is wrong or soon will be; empty if nothing is."""
        return list(self._concerns())

    def _concerns(self) -> Iterator[str]:
        norms = [layer.gradient_norm for layer in self.layers if layer.gradient_norm is not None]
        middle = statistics.median(norms) if norms else math.nan
        for number, layer in enumerate(self.layers):
            where = f"layer {number}"
            if broken := [name for name, value in _numbers(layer) if not math.isfinite(value)]:
                yield f"{where}: {', '.join(broken)} not finite"
                continue
            if low := [h for h, value in enumerate(layer.entropy) if value < LEAST_ENTROPY]:
                yield f"{where}: entropy collapse, head {_list(low)} below {LEAST_ENTROPY:.0%} of the largest entropy"
            if high := [h for h, value in enumerate(layer.max_logit) if value > MOST_LOGIT]:
                yield f"{where}: logits of head {_list(high)} up to {max(layer.max_logit):.0f}: QKClip holds them down"
            if layer.activation_rank < LEAST_RANK * layer.most_ranks:
                yield (
                    f"{where}: rank collapse, activations have an effective rank of {layer.activation_rank:.1f} "
                    f"of {layer.most_ranks}"
                )
            if layer.gradient_norm is not None:
                if layer.gradient_norm < middle / GRADIENTS_APART:
                    yield f"{where}: gradients vanish, norm {layer.gradient_norm:.1e}; the median is {middle:.1e}"
                if layer.gradient_norm > middle * GRADIENTS_APART:
                    yield f"{where}: gradients explode, norm {layer.gradient_norm:.1e}; the median is {middle:.1e}"

    def as_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold: the layers as they are, and the concerns."""
        return {**dataclasses.asdict(self), "concerns": self.concerns()}


def _numbers(layer: LayerHealth) -> Iterator[tuple[str, float]]:
    for name in ("entropy", "max_logit", "qk_rank"):
        values = getattr(layer, name)
        yield name, next((v for v in values if not math.isfinite(v)), 0.0)
    yield "activation_rank", layer.activation_rank
    yield "gradient_norm", 0.0 if layer.gradient_norm is None else layer.gradient_norm


def _list(heads: list[int]) -> str:
    return ", ".join(map(str, heads[:8])) + (f" and {len(heads) - 8} more" if len(heads) > 8 else "")
