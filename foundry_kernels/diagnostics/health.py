"""The recorded health of a model, and the concerns about it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: A head whose entropy is a smaller fraction of the largest one looks at one token and nothing else.
LEAST_ENTROPY = 0.05
#: Activations with a smaller fraction of the directions that they could have are nearly the same for every token; and
#: a head with one of the directions that its queries and keys could have scores by next to nothing.
LEAST_RANK = 0.05
#: A head whose query-key product has an effective rank below this scores by one direction.
LEAST_QK_RANK = 1.5
#: Ranks that have fallen below this fraction of what they were. (Those of random weights are near the most: in 400
#: steps of the example, in which nothing was wrong, those of query-key products fell from 15 to 5 of 16.)
RANK_KEPT = 0.25
#: Logits beyond this leave bfloat16's steps of half a nat, and grow from step to step where they are not clipped.
MOST_LOGIT = 100.0
#: Logits that have grown so many times are on their way there from half of it.
LOGIT_GROWTH = 10.0
#: A layer whose gradient is so many times larger or smaller than the median of all, or a median that has grown so.
GRADIENTS_APART = 100.0
#: A median of the layers' gradients that has become so many times smaller, which training to a small loss does not do.
GRADIENTS_GONE = 1e4

#: The gradient norms of a layer: a field of `LayerHealth`, and whose they are.
_GRADIENTS = (
    ("gradient_norm", "gradients"),
    ("attention_gradient_norm", "gradients of attention"),
    ("feed_forward_gradient_norm", "gradients of the feed-forward part"),
)


@dataclass(frozen=True)
class LayerHealth:
    """One layer, or of a layer with several attentions one of these.

    Attributes:
        entropy: of each head, the mean over all rows of attention's entropy, as a fraction of the mean of the largest
            that there is (the logarithm of the number of keys seen): 0 is one key, 1 is all alike.
        max_logit: of each head, the largest score of any row, after scale, cap and ALiBi (whose bias grows with the
            key's position in transformers' BLOOM, and falls with its distance in the kernels here).
        qk_rank: of each head, :func:`qk_ranks`; empty where neither weights nor queries and keys were recognised.
        activation_rank: the effective rank of the tokens' activations behind the layer; `most_ranks` is the most, 0
            where the layer returns none.
        gradient_norm: Euclidean norm of all gradients of the layer, or None without a backward pass.
        attention_gradient_norm, feed_forward_gradient_norm: likewise, of its two branches, or None where it has not
            such a one.
        name: of the attention in the model.
        most_qk_ranks: the most that `qk_rank` could be; None is the head_dim of all.
        qk_rank_of: "weights", the product of the projections; or "activations", the scores before scale and mask of
            queries and keys as attention got them, where the projections are not recognised.
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
    """All layers, the first one first."""

    layers: list[LayerHealth]
    head_dim: int

    def concerns(self, since: Health | None = None, *, rank_kept: float = RANK_KEPT) -> list[str]:
        """Returns a line for each thing that is wrong or soon will be; empty if nothing is.

        Args:
            since: the health of the same model before, at the beginning of its training perhaps: what has changed for
                the worse since is a reason to worry too.
            rank_kept: a rank that has fallen below this fraction of what it was has.

        Raises:
            ValueError: `since` has other layers or heads.
        """
        if since is not None:
            self.check_same_model(since)
        return [*self._concerns(since, rank_kept), *self._of_all(since)]

    def check_same_model(self, since: Health) -> None:
        """Raises ValueError where `since` has other layers or heads."""
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
            yield f"logits of head {_list(high)} up to {largest:.0f}: QKClip or SigmaReparam holds them down"
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
        """Of the gradients of all layers."""
        now = _median(layer.gradient_norm for layer in self.layers)
        if not math.isfinite(now):  # there are none, or what is not finite was said of its layer
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
        """Returns what JSON can hold: the layers as they are, and the concerns. What is not finite is None."""
        found: dict[str, Any] = plain({**dataclasses.asdict(self), "concerns": self.concerns()})
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Health:
        """Returns the health that :meth:`as_dict` was made of, but that a number that was not finite is NaN.

        Raises:
            KeyError, TypeError: it is no such dict.
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
            return  # the branches' say the same


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
    """What JSON can hold: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
