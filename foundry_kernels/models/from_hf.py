"""Configurations and weights of models of transformers, read into ours by the table in `hf_families.py`.

Nothing of transformers is imported: classes are known by their names, options by their configuration, and weights by
the names of the parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.hf_config import Asked, Family, refuse_unread
from foundry_kernels.models.hf_families import FAMILIES

State = dict[str, Tensor]


def read(model: nn.Module, changes: dict[str, Any]) -> tuple[ModelConfig, State]:
    """The configuration, with `changes`, and the weights of a model of transformers; see `Transformer.from_hf`."""
    name, home = type(model).__name__, type(model).__module__
    if name not in FAMILIES or not hasattr(model, "config") or home.partition(".")[0] != "transformers":
        raise TypeError(f"model must be one of {', '.join(FAMILIES)} of transformers; got {name} of {home}")
    family, theirs = FAMILIES[name], dict(model.named_parameters())
    asked = Asked(model.config)
    fields = family.fields(asked)
    refuse_unread(model.config, asked.names | family.silent)
    fields["tie_embeddings"] = "lm_head.weight" not in theirs  # a shared parameter has one name
    config = ModelConfig(**fields)
    rows = config.max_seq_len
    config = dataclasses.replace(config, **changes)
    if config.positions == "learned" and config.max_seq_len > rows:
        raise ValueError(f"max_seq_len is beyond the {rows} rows of the table of positions; got {config.max_seq_len}")
    dtypes = {weight.dtype for weight in theirs.values()}
    if len(dtypes) != 1 or len({weight.device for weight in theirs.values()}) != 1:
        kinds = ", ".join(sorted({f"{weight.dtype} on {weight.device}" for weight in theirs.values()}))
        raise ValueError(f"model must have weights of one dtype on one device; got {kinds}")
    state: State = {}
    used = set()
    for our_name, their_name in _pairs(family, config.n_layers):
        for kind in (".weight", ".bias", ""):  # "": a parameter itself, as those of experts are
            if their_name + kind not in theirs:
                continue
            used.add(their_name + kind)
            weight = theirs[their_name + kind].detach()
            if family.transposed and weight.dim() == 2 and our_name.startswith("layers."):
                weight = weight.t()
            if our_name == "pos_embeddings":
                weight = weight[family.skipped_positions :][: config.max_seq_len]
            if our_name.endswith("attention.wqkv"):
                state |= _split(our_name.removesuffix("qkv"), kind, weight, config, family.qkv, their_name)
            else:
                state[our_name + kind] = weight
    if unknown := sorted(theirs.keys() - used):
        raise ValueError(f"model has weights that {name} has no place for here: {_few(unknown)}")
    return config, state


def check(state: State, expected: State, model: nn.Module) -> None:
    """Raise ValueError where weights are missing, too many or of another shape."""
    name = type(model).__name__
    if missing := sorted(expected.keys() - state.keys()):
        raise ValueError(f"{name} lacks the weights of {_few(missing)}")
    if unknown := sorted(state.keys() - expected.keys()):
        raise ValueError(f"{name} has weights that its configuration does not ask for: {_few(unknown)}")
    for key, weight in state.items():
        if weight.shape != expected[key].shape:
            raise ValueError(
                f"{name}'s {key} must have shape {tuple(expected[key].shape)}, by its configuration; "
                f"got {tuple(weight.shape)}"
            )


def _pairs(family: Family, n_layers: int) -> Iterator[tuple[str, str]]:
    """Our modules, or parameters, and theirs."""
    for ours, theirs in family.names.items():
        for name in (theirs,) if isinstance(theirs, str) else theirs:
            if ours in ("tok_embeddings", "pos_embeddings", "embedding_norm", "norm", "output"):
                yield ours, name
            else:
                yield from ((f"layers.{n}.{ours}", f"{family.layers}.{n}.{name}") for n in range(n_layers))


def _split(prefix: str, kind: str, weight: Tensor, config: ModelConfig, how: str, name: str) -> State:
    """wq, wk and wv of one matrix, or of one bias."""
    queries, keys, width = config.n_heads, config.kv_heads, config.head_width
    if weight.shape[0] != (queries + 2 * keys) * width:
        raise ValueError(
            f"{name}{kind} must hold {queries} query and 2 x {keys} key and value heads of {width}, "
            f"{(queries + 2 * keys) * width} rows; got {weight.shape[0]}"
        )
    if how == "columns":
        parts = weight.split((queries * width, keys * width, keys * width))
    else:
        group = queries // keys
        heads = weight.unflatten(0, (keys, group + 2, width)).split((group, 1, 1), 1)
        parts = tuple(part.flatten(0, 2) for part in heads)
    return {f"{prefix}{part}{kind}": w for part, w in zip("qkv", parts, strict=True)}


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
