"""The compared models: GPT-2, each single change toward LLaMA, LLaMA, and LLaMA with each change reverted; also any of
them with options, such as ``llama+norm_placement=post+layers=24+warm_up=0``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foundry_kernels.models import ModelConfig

VOCABULARY = 256  # a token is a byte
#: The largest relative difference of a variant's parameter count from GPT-2's.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Shape:
    """The common shape of all variants. `kv_heads` is for grouped-query attention."""

    dim: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    seq_len: int = 256


@dataclass(frozen=True)
class Change:
    """One choice of LLaMA: the name of a model with it, the name of a LLaMA without it, and its fields."""

    with_it: str
    without_it: str
    fields: dict[str, Any]


def changes(shape: Shape) -> dict[str, Change]:
    """Returns the variants from GPT-2 to LLaMA, by name."""
    return {
        "rope": Change("RoPE", "learned positions", {"positions": "rope"}),
        "rms_norm": Change("RMSNorm", "LayerNorm", {"norm": "rms_norm"}),
        "swiglu": Change("SwiGLU", "GELU", {"activation": "swiglu"}),
        "gqa": Change("GQA", "MHA", {"n_kv_heads": shape.kv_heads}),
        "no_bias": Change("no biases", "biases", {"attention_bias": False, "mlp_bias": False, "norm_bias": False}),
        "untied": Change("a head of its own", "a tied head", {"tie_embeddings": False}),
    }


@dataclass(frozen=True)
class Option:
    """An option ``+name=value`` in a variant's name: how to parse the value, the model's fields that it sets (none for
    a training option), and the variant's title."""

    read: Callable[[str], Any]
    fields: Callable[[Any], dict[str, Any]]
    title: Callable[[Any], str]


def _field(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: value}


OPTIONS = {
    "layers": Option(int, _field("n_layers"), lambda value: f"{value} layers"),
    "kv_heads": Option(int, _field("n_kv_heads"), lambda value: f"{value} key-value heads"),
    "norm_placement": Option(str, _field("norm_placement"), lambda value: f"{value}-norm"),
    "activation": Option(str, _field("activation"), str),
    "init": Option(str, _field("init"), lambda value: f"init {value}"),
    "dropout": Option(
        float,
        lambda value: dict.fromkeys(("embedding_dropout", "residual_dropout", "attention_dropout"), value),
        lambda value: f"dropout {value:g}",
    ),
    "lr": Option(float, lambda value: {}, lambda value: f"learning rate {value:g}"),
    "warm_up": Option(float, lambda value: {}, lambda value: f"warm-up {value:.0%}" if value else "no warm-up"),
}

#: Other positions in a GPT-2, for `examples.studies.extrapolation`.
POSITIONS = ("sinusoidal", "alibi", "none")


def names(shape: Shape, back: bool = False) -> list[str]:
    """The variants of the ablation; with `back` also LLaMA with each change reverted."""
    single = list(changes(shape))
    return ["gpt2", *(f"gpt2+{n}" for n in single), "llama", *(f"llama-{n}" for n in single if back)]


def config_of(name: str, shape: Shape) -> ModelConfig:
    """The model of a variant.

    Raises:
        ValueError: the variant does not exist, or the shape is invalid.
    """
    fields: dict[str, Any] = {}
    known = changes(shape)
    plain, options = split(name)
    base, sign, change = plain.partition("+") if "+" in plain else plain.partition("-")
    if plain in POSITIONS:
        fields = {"positions": plain}
    elif base == "llama" and (not sign or (sign == "-" and change in known)):
        fields = {k: v for n, c in known.items() if n != change for k, v in c.fields.items()}
        # The norm's bias counts as part of LayerNorm, so the reverted changes keep LLaMA's norms without a bias.
    elif base == "gpt2" and sign == "+" and change in known:
        fields = known[change].fields
    elif plain != "gpt2":
        raise ValueError(f"variant must be one of {', '.join((*names(shape, back=True), *POSITIONS))}; got {name!r}")
    sizes = {
        "dim": shape.dim,
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "vocab_size": VOCABULARY,
        "max_seq_len": shape.seq_len,
    }
    fields = sizes | fields
    for option, value in options.items():
        fields |= OPTIONS[option].fields(value)
    return _with_parameters_of_mha(ModelConfig.gpt2(**fields))


def split(name: str) -> tuple[str, dict[str, Any]]:
    """Splits a variant's name from its options and their values.

    Raises:
        ValueError: the option does not exist, or its value cannot be parsed.
    """
    parts = name.split("+")
    options = {}
    for option, _, value in (part.partition("=") for part in parts if "=" in part):
        if option not in OPTIONS:
            raise ValueError(f"variant {name!r}: an option must be one of {', '.join(OPTIONS)}; got {option!r}")
        try:
            options[option] = OPTIONS[option].read(value)
        except ValueError:
            kind = OPTIONS[option].read.__name__
            raise ValueError(f"variant {name!r}: {option} must be of type {kind}; got {value!r}") from None
    return "+".join(part for part in parts if "=" not in part), options


def _with_parameters_of_mha(config: ModelConfig) -> ModelConfig:
    """Moves the parameters that fewer key-value heads save to the feed-forward part, as in Llama 2's comparison of MHA,
    GQA and MQA (Touvron et al., 2023, arXiv:2307.09288, appendix A.2.1)."""
    if config.kv_heads == config.n_heads:
        return config
    saved = 2 * (config.n_heads - config.kv_heads) * config.head_width  # columns of [dim, ...] matrices
    width = config.ffn_width + saved / (3 if config.gated else 2)
    return dataclasses.replace(config, hidden_dim=round(width / config.multiple_of) * config.multiple_of)


def check_parameters(configs: dict[str, ModelConfig]) -> None:
    """Checks that all models are as large as the first one, within `TOLERANCE`.

    Raises:
        ValueError: the message names the model that is not.
    """
    first, expected = next((n, c.n_parameters) for n, c in configs.items())
    for name, config in configs.items():
        off = config.n_parameters / expected - 1.0
        if abs(off) > TOLERANCE:
            raise ValueError(
                f"{name} has {config.n_parameters:,} parameters, {off:+.1%} of {first}'s {expected:,}; at most "
                f"{TOLERANCE:.0%} make a comparison: choose a larger --dim or a shorter --seq-len"
            )


def title(name: str, shape: Shape) -> str:
    """Returns the name for tables."""
    known = changes(shape)
    name, options = split(name)
    if options:
        return ", ".join((title(name, shape), *(OPTIONS[option].title(value) for option, value in options.items())))
    if name == "gpt2":
        return "GPT-2 style"
    if name == "llama":
        return "LLaMA style"
    if name.startswith("gpt2+"):
        return "GPT-2 + " + known[name.removeprefix("gpt2+")].with_it
    if name.startswith("llama-"):
        return "LLaMA + " + known[name.removeprefix("llama-")].without_it
    return {"sinusoidal": "sinusoidal", "alibi": "ALiBi", "none": "none"}[name]


def notable(name: str, shape: Shape) -> str:
    """A `title` for messages, with the name for --variants."""
    return f"{title(name, shape)} ({name})"
