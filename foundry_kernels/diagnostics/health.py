"""The recorded health of a model, and the concerns about it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: A head with a smaller fraction of the largest entropy attends to only one token.
LEAST_ENTROPY = 0.05
#: Activations with a smaller fraction of their largest possible rank are nearly the same for all tokens; a head with
#: such a rank of queries and keys has nearly constant scores.
LEAST_RANK = 0.05
#: A head whose query-key product has a smaller effective rank uses only one direction for its scores.
LEAST_QK_RANK = 1.5
#: Ranks that have fallen below this fraction are a concern. (Random weights have nearly the largest ranks: in 400
#: healthy steps of the example, the ranks of query-key products fell from 15 to 5 of 16.)
RANK_KEPT = 0.25
#: Above this, bfloat16 rounds logits to half a nat, and logits grow in each step unless they are clipped.
MOST_LOGIT = 100.0
#: From half of `MOST_LOGIT`, a growth by this factor is a concern too.
LOGIT_GROWTH = 10.0
#: A concern is a layer whose gradient differs from the median of all layers by this factor, or a median that has grown
#: by it.
GRADIENTS_APART = 100.0
#: A concern is a median of the layers' gradients that has shrunk by this factor; training to a small loss shrinks it
#: less.
GRADIENTS_GONE = 1e4

#: The gradient norms of a layer: a field of `LayerHealth`, and its description.
_GRADIENTS = (
    ("gradient_norm", "gradients"),
    ("attention_gradient_norm", "gradients of attention"),
    ("feed_forward_gradient_norm", "gradients of the feed-forward part"),
)


@dataclass(frozen=True)
class LayerHealth:
    """One layer, or one attention of a layer with several.

    Attributes:
        entropy: for each head, the mean entropy of attention over all rows, as a fraction of the mean of the largest
            possible entropy (the logarithm of the number of visible keys): 0 is one key, 1 is all keys equally.
        max_logit: for each head, the largest score of any row, after scale, cap and ALiBi. (ALiBi's bias grows with the
            key's position in transformers' BLOOM, and falls with its distance in the kernels here.)
        qk_rank: for each head, :func:`qk_ranks`; empty if neither weights nor queries and keys were recognised.
        activation_rank: the effective rank of the tokens' activations after the layer. `most_ranks` is the largest
            possible one, or 0 if the layer returns no activations.
        gradient_norm: Euclidean norm of all gradients of the layer, or None without a backward pass.
        attention_gradient_norm, feed_forward_gradient_norm: the same for its two branches, or None without such a
            branch.
        name: the attention module's name in the model.
        most_qk_ranks: the largest possible `qk_rank`; None is head_dim.
        qk_rank_of: "weights" for the product of the projections; or, if these are not recognised, "activations" for the
            product of attention's queries and keys, without scale and mask.
    """

    entropy: list[float]
    max_logit: list[float]
    qk_rank: list[float]
    activation_rank: float
    most_ranks: int
    gradient_norm: float | None
    attention_gradient_norm: float | None = None
    feed_forward_gradient_norm: float | None = None
    name: str = ""
    most_qk_ranks: int | None = None
    qk_rank_of: str | None = "weights"


@dataclass(frozen=True)
class Health:
    """The health of all layers, in order."""

    layers: list[LayerHealth]
    head_dim: int

    def concerns(self, since: Health | None = None, *, rank_kept: float = RANK_KEPT) -> list[str]:
        """Returns a line for each problem, also for those that are about to arise.

        Args:
            since: an earlier health of the same model, for example at the start of its training. Statistics that
                are worse now are concerns too.
            rank_kept: a rank that has fallen below this fraction has become worse.

        Raises:
            ValueError: `since` has other layers or heads.
        """
        if since is not None:
            self.check_same_model(since)
        return [*self._concerns(since, rank_kept), *self._of_all(since)]

    def check_same_model(self, since: Health) -> None:
        """Raises ValueError if `since` has other layers or heads."""
        ours, theirs = ([len(layer.entropy) for layer in health.layers] for health in (self, since))
        if ours != theirs:
            raise ValueError(f"since must be of the same model, with {ours} heads in its layers; got {theirs}")

    def _concerns(self, since: Health | None, kept: float) -> Iterator[str]:
        middles = {name: _median(getattr(layer, name) for layer in self.layers) for name, _ in _GRADIENTS}
        for number, layer in enumerate(self.layers):
            where = f"layer {number} ({layer.name})" if layer.name else f"layer {number}"
            if broken := [name for name, value in _numbers(layer) if not math.isfinite(value)]:
                yield f"{where}: {', '.join(broken)} not finite"
                continue
            before = None if since is None else since.layers[number]
            yield from (f"{where}: {line}" for line in self._of_heads(layer, before, kept))
            yield from (f"{where}: {line}" for line in _of_activations(layer, before, kept))
            yield from (f"{where}: {line}" for line in _of_gradients(layer, middles))

    def _of_heads(self, layer: LayerHealth, before: LayerHealth | None, kept: float) -> Iterator[str]:
        if low := [h for h, value in enumerate(layer.entropy) if value < LEAST_ENTROPY]:
            yield f"entropy collapse, head {_list(low)} below {LEAST_ENTROPY:.0%} of the largest entropy"
        if high := [h for h, value in enumerate(layer.max_logit) if value > MOST_LOGIT]:
            largest = max(layer.max_logit)
            yield f"logits of head {_list(high)} up to {largest:.0f}: QKClip or SigmaReparam limits them"
        elif before is not None:
            pairs = enumerate(zip(layer.max_logit, before.max_logit, strict=True))
            if grown := [h for h, (now, was) in pairs if now > max(MOST_LOGIT / 2, LOGIT_GROWTH * was)]:
                was = max(before.max_logit[h] for h in grown)
                now = max(layer.max_logit[h] for h in grown)
                yield f"logits of head {_list(grown)} explode, from {was:.1f} to {now:.0f}"
        most = self.head_dim if layer.most_qk_ranks is None else layer.most_qk_ranks
        least = min(max(LEAST_QK_RANK, LEAST_RANK * most), most / 2)
        product = "query-key product" if layer.qk_rank_of == "weights" else "product of queries and keys"
        if low := [h for h, value in enumerate(layer.qk_rank) if value < least]:
            yield (
                f"rank collapse, the {product} of head {_list(low)} has an effective rank of "
                f"{min(layer.qk_rank):.1f} of {most}"
            )
        if before is not None and before.qk_rank_of == layer.qk_rank_of:
            pairs = enumerate(zip(layer.qk_rank, before.qk_rank, strict=True))
            if fallen := [h for h, (now, was) in pairs if now < kept * was and h not in low]:
                was, now = (min(ranks[h] for h in fallen) for ranks in (before.qk_rank, layer.qk_rank))
                yield f"the rank of the {product} of head {_list(fallen)} has fallen, from {was:.1f} to {now:.1f}"

    def _of_all(self, since: Health | None) -> Iterator[str]:
        """Yields concerns about the gradients of all layers."""
        now = _median(layer.gradient_norm for layer in self.layers)
        if not math.isfinite(now):  # there are no gradients, or their layers have a concern already
            return
        if now == 0.0:
            yield "gradients vanish, most layers have none at all"
        if since is None:
            return
        was = _median(layer.gradient_norm for layer in since.layers)
        if 0.0 < now < was / GRADIENTS_GONE:
            yield f"gradients vanish, the median of the layers' norms has fallen from {was:.1e} to {now:.1e}"
        if now > was * GRADIENTS_APART:
            yield f"gradients explode, the median of the layers' norms has grown from {was:.1e} to {now:.1e}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the layers and the concerns as values for JSON; numbers that are not finite become None."""
        found: dict[str, Any] = plain({**dataclasses.asdict(self), "concerns": self.concerns()})
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Health:
        """Returns the health from the result of :meth:`as_dict`. Numbers that were not finite are NaN.

        Raises:
            KeyError, TypeError: it is not such a dict.
        """
        fields = {field.name for field in dataclasses.fields(LayerHealth)}
        layers = []
        for layer in values["layers"]:
            known = {name: value for name, value in layer.items() if name in fields}
            for name in ("entropy", "max_logit", "qk_rank"):
                known[name] = [math.nan if value is None else value for value in known[name]]
            if known["activation_rank"] is None:
                known["activation_rank"] = math.nan
            layers.append(LayerHealth(**known))
        return cls(layers, values["head_dim"])


def _of_activations(layer: LayerHealth, before: LayerHealth | None, kept: float) -> Iterator[str]:
    if layer.activation_rank < LEAST_RANK * layer.most_ranks or (layer.most_ranks > 2 and layer.activation_rank < 1.5):
        yield (
            f"rank collapse, activations have an effective rank of {layer.activation_rank:.1f} of {layer.most_ranks}"
        )
    elif before is not None and layer.activation_rank < min(
        kept * before.activation_rank, 2 * LEAST_RANK * layer.most_ranks
    ):
        yield (
            f"the rank of activations has fallen, from {before.activation_rank:.1f} to {layer.activation_rank:.1f} of "
            f"{layer.most_ranks}"
        )


def _of_gradients(layer: LayerHealth, middles: dict[str, float]) -> Iterator[str]:
    for name, of in _GRADIENTS:
        norm, middle = getattr(layer, name), middles[name]
        if norm is None:
            continue
        if norm < middle / GRADIENTS_APART:
            yield f"{of} vanish, norm {norm:.1e}; the median is {middle:.1e}"
        elif norm > middle * GRADIENTS_APART:
            yield f"{of} explode, norm {norm:.1e}; the median is {middle:.1e}"
        else:
            continue
        if name == "gradient_norm":
            return  # the branches' norms would repeat this


def _median(norms: Any) -> float:
    known = [norm for norm in norms if norm is not None]
    return statistics.median(known) if known else math.nan


def _numbers(layer: LayerHealth) -> Iterator[tuple[str, float]]:
    for name in ("entropy", "max_logit", "qk_rank"):
        values = getattr(layer, name)
        yield name, next((v for v in values if not math.isfinite(v)), 0.0)
    for name in ("activation_rank", *(name for name, _ in _GRADIENTS)):
        yield name, 0.0 if getattr(layer, name) is None else getattr(layer, name)


def _list(heads: list[int]) -> str:
    return ", ".join(map(str, heads[:8])) + (f" and {len(heads) - 8} more" if len(heads) > 8 else "")


def plain(value: Any) -> Any:
    """The value for JSON: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
