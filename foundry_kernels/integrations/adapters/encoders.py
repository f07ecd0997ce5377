"""Norms and MLPs of encoders, of encoder-decoders and of models of images and sound.

Their attention needs no row (`interface.py`), their LayerNorms are those of torch. What is left are MLPs, of which one
class each is in a family, and T5's RMSNorm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.base import (
    ONE_INPUT,
    Adapter,
    Gated,
    Norm,
    _norm_forward,
    gated,
    layers_of,
    split_names,
)
from foundry_kernels.integrations.adapters.gpt_like import PlainMLP, activated, gelu_of
from foundry_kernels.ops.swiglu import geglu


@dataclass(frozen=True)
class Intermediate(PlainMLP):
    """``gelu(dense(x))``; BERT has its second matmul in another module."""

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": activated}


@dataclass(frozen=True)
class SpeechMLP(PlainMLP):
    """A `PlainMLP` with dropout behind the activation too, by the name `inner_dropout`."""

    inner_dropout: str = "intermediate_dropout"

    def known(self) -> frozenset[str]:
        return super().known() | {self.inner_dropout}

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _speech_mlp}


def _speech_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    row: SpeechMLP = self._foundry_row
    x = getattr(self, row.inner_dropout)(activated(self, hidden_states))
    out: Tensor = getattr(self, row.dropout)(layers_of(self, x).linear(x, getattr(self, row.second)))
    return out


@dataclass(frozen=True)
class ModernBertMLP(Gated):
    """One matmul for the gate followed by the values that it multiplies."""

    names = split_names("Wi chunk Wo drop act")
    arguments = ONE_INPUT

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _modernbert_mlp}


def _modernbert_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    layers = layers_of(self, hidden_states)
    return layers.linear(self.drop(gated(self._foundry, layers.linear(hidden_states, self.Wi), None)), self.Wo)


@dataclass(frozen=True)
class T5MLP(Adapter):
    """``wo(dropout(gelu(wi_0(x)) * wi_1(x)))``; `wo` may be kept in float32, or be quantised."""

    names = split_names("act wi_0 wi_1 dropout isinstance wo weight torch Tensor dtype int8 to")
    arguments = ONE_INPUT

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("geglu",)

    def why_not(self, module: nn.Module) -> str | None:
        act = getattr(module, "act", None)
        return None if gelu_of(act) else f"its activation is {type(act).__name__}, which no gated kernel has"

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _t5_mlp}


def _t5_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    approximate, backend = gelu_of(self.act), self._foundry.backends["geglu"]
    assert approximate is not None  # or the module is left as it was
    layers = layers_of(self, hidden_states)
    gate, up = layers.each(hidden_states, self.wi_0, self.wi_1)
    x = geglu(gate, up, approximate=approximate, backend=backend)
    x = self.dropout(x)
    weight = getattr(self.wo, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype not in (x.dtype, torch.int8):
        x = x.to(weight.dtype)
    return layers.linear(x, self.wo)


@dataclass(frozen=True)
class T5Norm(Norm):
    """RMSNorm, rounded before the weight where the weight is of lower precision."""

    names = split_names(
        "to torch float32 pow mean rsqrt variance_epsilon weight dtype float16 bfloat16"  # of the class's own forward
    )

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _t5_norm}


def _t5_norm(self: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != self.weight.dtype:  # float16 with `wo` in float32: the result has the weight's dtype
        out: Tensor = self._foundry_original.forward(self, hidden_states)
        return out
    return _norm_forward(self, hidden_states)


INTERMEDIATE = Intermediate(first="dense", act="intermediate_act_fn")
FC = PlainMLP(first="fc1", second="fc2", act="activation_fn")
SPEECH = SpeechMLP(
    first="intermediate_dense", second="output_dense", act="intermediate_act_fn", dropout="output_dropout"
)
T5_CLASSES: dict[str, Adapter] = {"LayerNorm": T5Norm(round_before_weight=True), "DenseGatedActDense": T5MLP()}

#: A family's folder in transformers and what the names of its classes begin with: what follows, and its adapter.
ENCODERS: dict[tuple[str, str], dict[str, Adapter]] = {
    ("bert", "Bert"): {"Intermediate": INTERMEDIATE},
    ("roberta", "Roberta"): {"Intermediate": INTERMEDIATE},
    ("xlm_roberta", "XLMRoberta"): {"Intermediate": INTERMEDIATE},
    ("camembert", "Camembert"): {"Intermediate": INTERMEDIATE},
    ("electra", "Electra"): {"Intermediate": INTERMEDIATE},
    ("modernbert", "ModernBert"): {"MLP": ModernBertMLP(act="act")},
    ("vit", "ViT"): {"MLP": FC},
    ("clip", "CLIP"): {"MLP": FC},
    ("siglip", "Siglip"): {"MLP": FC},
    ("siglip2", "Siglip2"): {"MLP": FC},
    ("wav2vec2", "Wav2Vec2"): {"FeedForward": SPEECH},
    ("hubert", "Hubert"): {"FeedForward": SPEECH},
    ("t5", "T5"): T5_CLASSES,
    ("mt5", "MT5"): T5_CLASSES,
}
