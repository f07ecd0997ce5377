"""Extends a model to longer sequences than it was trained on."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypeVar

import torch
from torch import nn

from foundry_kernels.core.checks import check_int
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.nn import RotaryEmbedding
from foundry_kernels.nn._tables import FixedTables, PositionTables
from foundry_kernels.ops.rope import RopeScaling

Model = TypeVar("Model", bound=nn.Module)


def extended(model: Model, max_seq_len: int, rope_scaling: RopeScaling | str | None = None) -> Model:
    """Returns `model` for `max_seq_len` positions: a second model with the same parameters, not copies of them, and its
    own tables of positions and configuration. Training one trains the other; `model` itself does not change.

    Only learned positions limit the length, so other models accept longer sequences without this function. An extended
    model has its tables from the start, and its `config`, and therefore a checkpoint, records the new length.

    Args:
        model: a :class:`Transformer`, or an :class:`EncoderDecoder`, whose both parts are extended.
        max_seq_len: positions, at least those of the model's configuration.
        rope_scaling: how rotary positions are scaled: a :class:`foundry_kernels.RopeScaling`, or "linear" (position
            interpolation), "dynamic" (NTK-aware), "yarn" or "llama3", of the factor ``max_seq_len /
            config.max_seq_len`` and the configuration's `max_seq_len` as the trained length
            (:meth:`foundry_kernels.RopeScaling.to_length`). None does not scale them. With "dynamic", the frequencies
            of `max_seq_len` are used up to that length, so that keys in a cache are consistent. If `max_seq_len` is the
            configuration's own, the frequencies follow the length of each call, as in transformers.

    Raises:
        TypeError: `max_seq_len` is not an int, or `rope_scaling` has another type.
        ValueError: `max_seq_len` is below the configuration's; the model has learned positions; a scaling is given for
            a model without rotary positions; or a name is given for a model that has a scaling already, whose trained
            length is unknown.
    """
    check_int("max_seq_len", max_seq_len, minimum=1)
    configs = [_extended_config(part.config, max_seq_len, rope_scaling) for part in _parts(model)]
    tables = (module._current() for module in model.modules() if isinstance(module, FixedTables))
    own = {id(table) for of in tables for table in of}
    shared = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in own]
    # A deep copy preserves hooks, adapters and replaced classes. Objects in memo are not copied.
    result = copy.deepcopy(model, {id(t): t for t in shared})
    for part, config in zip(_parts(result), configs, strict=True):
        part.config = config
        for module in part.modules():
            if isinstance(module, PositionTables):
                module.max_positions = config.max_seq_len
                if isinstance(module, RotaryEmbedding):
                    module.scaling = config.rope_scaling
                with torch.no_grad():
                    module.reset_parameters()
    return result


def _parts(model: nn.Module) -> list[Any]:
    """The modules that have a configuration: a model, or an :class:`EncoderDecoder` and then its parts."""
    return [module for module in model.modules() if isinstance(getattr(module, "config", None), ModelConfig)]


def _extended_config(config: ModelConfig, max_seq_len: int, rope_scaling: RopeScaling | str | None) -> ModelConfig:
    if max_seq_len < config.max_seq_len:
        raise ValueError(f"max_seq_len must be at least the model's {config.max_seq_len}; got {max_seq_len}")
    if config.positions == "learned" and max_seq_len > config.max_seq_len:
        raise ValueError(
            f"max_seq_len must be {config.max_seq_len}, the length of the table of learned positions, which cannot be "
            f"extended; got {max_seq_len}"
        )
    if rope_scaling is None:
        return dataclasses.replace(config, max_seq_len=max_seq_len)
    if isinstance(rope_scaling, str):
        if config.rope_scaling is not None:
            raise ValueError(
                f"rope_scaling must be a RopeScaling where the model has one, {config.rope_scaling}; got "
                f"{rope_scaling!r}"
            )
        rope_scaling = RopeScaling.to_length(rope_scaling, config.max_seq_len, max_seq_len)
    elif not isinstance(rope_scaling, RopeScaling):
        raise TypeError(f"rope_scaling must be a RopeScaling, its type or None; got {type(rope_scaling).__name__}")
    return dataclasses.replace(config, max_seq_len=max_seq_len, rope_scaling=rope_scaling)
