"""The table of Hugging Face families: what `patch` does with the classes of each, and how `from_hf` reads it.

Classes are named by module and name, so that nothing has to be imported to know them. A row says in what a family
differs; what all share is in `adapters.py` and `reading.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from foundry_kernels.integrations import readings
from foundry_kernels.integrations.adapters import MLP, Adapter, Attention, Norm
from foundry_kernels.integrations.causal_lm import CausalLM
from foundry_kernels.integrations.encoders import ENCODERS
from foundry_kernels.integrations.experts import ClampedExperts, Experts
from foundry_kernels.integrations.interface import interface_adapter
from foundry_kernels.integrations.pre_llama import GPT2Attention, NeoXAttention, PlainMLP
from foundry_kernels.integrations.pre_llama_alibi import BloomAttention, BloomMLP, FalconAttention
from foundry_kernels.integrations.reading import Reading
from foundry_kernels.integrations.torch_nn import TORCH


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
        name: what the names of its classes begin with.
        classes: what follows in the name of a class, and the adapter of that class or the reason why it is left; empty
            where `patch` does not know the family.
        reads: None where `from_hf` does not know it.
        head: what follows in the name of its language model.
    """

    name: str
    classes: Mapping[str, Adapter | str] = field(default_factory=dict)
    reads: Reading | None = None
    head: str = "ForCausalLM"


# What an attention function, a gate or a loss gets besides, read from the module.


def _config_window(module: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(module.config, "sliding_window", None)}


def _window_if_any(module: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(module, "sliding_window", None)}


def _layer_window(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window}


def _window_and_cap(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window, "softcap": module.attn_logit_softcapping}


def _window_and_sinks(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window, "s_aux": module.sinks}


def _final_cap(module: Any) -> float | None:
    cap: float | None = module.config.final_logit_softcapping
    return cap


def _inverse_scaling(module: Any) -> float:
    return 1.0 / float(module.config.logits_scaling)


def _clamped_gate(module: Any) -> dict[str, Any]:
    return {"alpha": module.alpha, "limit": module.limit, "up_offset": 1.0, "interleaved": True}


# Where the division by the root mean square is rounded: before the weight (Llama), or once, after it.
LLAMA = Norm(round_before_weight=True)
ROUNDED_ONCE = Norm()
GEMMA = Norm(eps="eps", weight_offset=1.0)

GATED = MLP()
PACKED = MLP(act="activation_fn", packed=True)
DENSE = PlainMLP(first="dense_h_to_4h", second="dense_4h_to_h")

CROSS = ("CausalLMOutputWithCrossAttentions", "cross_attentions")
CAPPED = CausalLM(cap=_final_cap, uses=("final_logit_softcapping", "torch", "tanh"))
PLAIN_LOSS = CausalLM()
MIXTURE = CausalLM(mixture=True)
BLOOM_LIKE = CausalLM(decoder="transformer", uses=(*CROSS, "return_dict"))

WINDOW = Attention(passes=_layer_window, uses=("sliding_window",))
CONFIG_WINDOW = Attention(passes=_config_window, uses=("getattr",))
QWEN3 = Attention(norms="heads", passes=_layer_window, uses=("sliding_window",))


def _like_llama(
    name: str,
    norm: Norm,
    mlp: Adapter | str,
    attention: Attention,
    loss: CausalLM = PLAIN_LOSS,
    reads: Reading | None = None,
    **others: Adapter,
) -> Family:
    """Returns the row of a family with RMSNorm and gates; what `patch` and `from_hf` both need is given once."""
    feed_forward = "Experts" if isinstance(mlp, (Experts, str)) else "MLP"
    classes = {"RMSNorm": norm, feed_forward: mlp, "Attention": attention, "ForCausalLM": loss, **others}
    if reads is not None:
        shared = {"norm_round_before_weight": norm.round_before_weight, "qk_norm": attention.norms == "heads"}
        reads = dataclasses.replace(reads, choices={**shared, **reads.choices})
    return Family(name, classes, reads)


#: The families, by the names of their folders in transformers.
FAMILIES = {
    "gpt2": Family(
        "GPT2",
        {
            "Attention": GPT2Attention(),
            "MLP": PlainMLP(first="c_fc", second="c_proj", dropout="dropout"),
            "LMHeadModel": CausalLM(decoder="transformer", uses=CROSS),
        },
        readings.GPT2,
        head="LMHeadModel",
    ),
    "openai": Family("OpenAIGPT", reads=readings.OPENAI, head="LMHeadModel"),
    "gpt_neox": Family(
        "GPTNeoX",
        {"Attention": NeoXAttention(), "MLP": DENSE, "ForCausalLM": CausalLM(decoder="gpt_neox")},
        readings.GPT_NEOX,
    ),
    "bloom": Family(
        "Bloom",
        {
            "Attention": BloomAttention(),
            "MLP": BloomMLP(first="dense_h_to_4h", second="dense_4h_to_h", act="gelu_impl"),
            "ForCausalLM": BLOOM_LIKE,
        },
        readings.BLOOM,
    ),
    "falcon": Family(
        "Falcon",
        {"Attention": FalconAttention(), "MLP": DENSE, "ForCausalLM": BLOOM_LIKE},
        readings.FALCON,
    ),
    "opt": Family("OPT", reads=readings.OPT),
    "phi": Family("Phi", reads=readings.PHI),
    "stablelm": Family("StableLm", reads=readings.STABLELM),
    "starcoder2": Family("Starcoder2", reads=readings.STARCODER2),
    "olmoe": Family("Olmoe", reads=readings.OLMOE),
    "dots1": Family("Dots1", reads=readings.DOTS1),
    "glm4_moe": Family("Glm4Moe", reads=readings.GLM4_MOE),
    "llama": _like_llama("Llama", LLAMA, GATED, Attention(), reads=readings.LLAMA),
    "mistral": _like_llama("Mistral", LLAMA, GATED, CONFIG_WINDOW, reads=readings.LLAMA),
    "mixtral": _like_llama("Mixtral", LLAMA, Experts(), CONFIG_WINDOW, MIXTURE, readings.MIXTRAL),
    "qwen2": _like_llama("Qwen2", LLAMA, GATED, WINDOW, reads=readings.QWEN2),
    # Besides its experts a mixture has an MLP for the shared expert, and for layers without experts.
    "qwen2_moe": _like_llama(
        "Qwen2Moe",
        LLAMA,
        Experts(),
        Attention(passes=_window_if_any),
        MIXTURE,
        readings.QWEN2_MOE,
        MLP=GATED,
    ),
    "qwen3": _like_llama("Qwen3", LLAMA, GATED, QWEN3, reads=readings.QWEN3),
    "qwen3_moe": _like_llama("Qwen3Moe", LLAMA, Experts(), QWEN3, MIXTURE, readings.QWEN3_MOE, MLP=GATED),
    "gemma": _like_llama("Gemma", GEMMA, GATED, Attention(), reads=readings.GEMMA),
    "gemma2": _like_llama(
        "Gemma2",
        GEMMA,
        GATED,
        Attention(passes=_window_and_cap, uses=("sliding_window", "attn_logit_softcapping")),
        CAPPED,
    ),
    "gemma3": _like_llama("Gemma3", GEMMA, GATED, QWEN3, CAPPED),
    "phi3": _like_llama("Phi3", LLAMA, PACKED, Attention(packed=True, passes=_config_window, uses=("getattr",))),
    "granite": _like_llama(
        "Granite", LLAMA, GATED, Attention(), CausalLM(scale=_inverse_scaling, uses=("logits_scaling",))
    ),
    "olmo2": _like_llama("Olmo2", ROUNDED_ONCE, GATED, Attention(norms="projection")),
    "olmo3": _like_llama(
        "Olmo3",
        ROUNDED_ONCE,
        GATED,
        Attention(norms="projection", passes=_layer_window, uses=("sliding_window",)),
    ),
    "smollm3": _like_llama(
        "SmolLM3",
        LLAMA,
        GATED,
        Attention(optional_rope=True, passes=_layer_window, uses=("sliding_window",)),
    ),
    "gpt_oss": _like_llama(
        "GptOss",
        ROUNDED_ONCE,
        ClampedExperts(passes=_clamped_gate),
        Attention(half_tables=True, passes=_window_and_sinks, uses=("sliding_window", "sinks")),
        MIXTURE,
    ),
    "glm4": _like_llama("Glm4", LLAMA, PACKED, Attention(interleaved=True)),
}

#: The families that `patch` knows: those like Llama, and those before it, whose norm is a LayerNorm.
LLAMA_LIKE = tuple(family for family, row in FAMILIES.items() if "RMSNorm" in row.classes)
PRE_LLAMA = tuple(family for family, row in FAMILIES.items() if row.classes and family not in LLAMA_LIKE)
PATCHED = (*LLAMA_LIKE, *PRE_LLAMA)

#: Class (module, name) -> the adapter, or the reason why it is left alone.
TABLE: dict[tuple[str, str], Adapter | str] = (
    TORCH
    | {
        (f"transformers.models.{family}.modeling_{family}", row.name + end): adapter
        for family, row in FAMILIES.items()
        for end, adapter in row.classes.items()
    }
    | {
        (f"transformers.models.{family}.modeling_{family}", begin + end): adapter
        for (family, begin), classes in ENCODERS.items()
        for end, adapter in classes.items()
    }
)

#: How the names of classes end that this package might support.
CANDIDATES = ("Norm", "MLP", "Mlp", "FeedForward", "Attention", "Experts")
#: What is said of a class of such a name that has no row.
NO_ROW = "no adapter for this class"


def adapter_for(module: nn.Module) -> Adapter | str | None:
    """Returns the adapter of `module`, or the reason why there is none; None where it is of no kind that we support."""
    cls = type(module)
    for base in cls.__mro__:
        if "_foundry_class" in vars(base):  # has the original's name, perhaps
            continue
        found = TABLE.get((base.__module__, base.__qualname__))
        if found is None:
            continue
        if isinstance(found, str):
            return found
        if "forward" in vars(module):
            return "its forward was replaced on the instance, by a hook of another library perhaps"
        if getattr(cls, found.method) is not getattr(base, found.method):
            return f"its class has a {found.method} of its own, which need not do what that of {base.__name__} does"
        return found.why_changed(base) or found.why_not(module) or found
    unnamed = interface_adapter(next(base for base in cls.__mro__ if "_foundry_class" not in vars(base)))
    if unnamed is not None:
        if "forward" in vars(module):
            return "its forward was replaced on the instance, by a hook of another library perhaps"
        return unnamed.why_not(module) or unnamed
    if cls.__name__.endswith(CANDIDATES):
        return NO_ROW
    return None
