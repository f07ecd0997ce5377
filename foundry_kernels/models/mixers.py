"""The layers of linear attention that a model may have."""

from __future__ import annotations

from typing import Any

from foundry_kernels.core.choices import MIXERS as OPTIONS
from foundry_kernels.models.fields import ModelFields
from foundry_kernels.nn.gated_delta_net import GatedDeltaNet
from foundry_kernels.nn.kimi_delta import KimiDeltaAttention
from foundry_kernels.nn.linear_attention import LinearMixer
from foundry_kernels.nn.mamba2 import Mamba2

#: By `ModelConfig.linear_kind`.
MIXERS: dict[str, type[LinearMixer]] = {
    "gated_delta_net": GatedDeltaNet,
    "kimi_delta": KimiDeltaAttention,
    "mamba2": Mamba2,
}


def make_mixer(config: ModelFields, **factory: Any) -> Any:
    """Returns a layer of linear attention (a :class:`LinearMixer`)."""
    options = {name: getattr(config, field) for field, name in OPTIONS[config.linear_kind].items()}
    mixer: Any = MIXERS[config.linear_kind]
    if mixer.ROUNDS:
        options["norm_round_before_weight"] = config.norm_round_before_weight
    return mixer(
        config.dim,
        *config.linear_heads,
        conv_size=config.linear_conv_size,
        norm_eps=config.norm_eps,
        **options,
        **factory,
    )
