"""What `patch` does with the classes of each family of Hugging Face transformers.

Classes are named by module and name, so that nothing has to be imported to know them. A row says in what a family
differs; what all share is in `attention.py` and `base.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from foundry_kernels.integrations.adapters.attention import Attention
from foundry_kernels.integrations.adapters.base import REPLACED, Adapter
from foundry_kernels.integrations.adapters.causal_lm import LOSS_STAYS, LanguageModel, language_model
from foundry_kernels.integrations.adapters.experts import ClampedExperts, LoraExperts, SortedExperts, decorated_experts
from foundry_kernels.integrations.adapters.gpt_like import NemotronNorm, NeoXAttention
from foundry_kernels.integrations.adapters.gpt_like_alibi import BloomAttention, BloomMLP, FalconAttention
from foundry_kernels.integrations.adapters.interface import interface_adapter
from foundry_kernels.integrations.adapters.linear_attention import DeltaNet, KimiDelta, by_key_head, one_each
from foundry_kernels.integrations.adapters.lora import LORA
from foundry_kernels.integrations.adapters.own_attention import OwnAttention
from foundry_kernels.integrations.adapters.state_space import Mamba2
from foundry_kernels.integrations.adapters.torch_nn import TORCH
from foundry_kernels.integrations.families import FAMILIES
from foundry_kernels.integrations.recognise import recognised
from foundry_kernels.integrations.recognise.attention import own_attention
from foundry_kernels.integrations.recognise.code import twin_of

#: Of a family: what follows in the name of a class, and the adapter of that class.
Row = Mapping[str, Adapter]


# What an attention function or a gate gets besides, read from the module.


def _config_window(module: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(module.config, "sliding_window", None)}


def _layer_window(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window}


def _window_and_cap(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window, "softcap": module.attn_logit_softcapping}


def _window_and_sinks(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window, "s_aux": module.sinks}


def _clamped_gate(module: Any) -> dict[str, Any]:
    return {"alpha": module.alpha, "limit": module.limit, "up_offset": 1.0, "interleaved": True}


_LAYER_WINDOW: dict[str, Any] = {"passes": _layer_window, "uses": ("sliding_window",)}
_CONFIG_WINDOW: dict[str, Any] = {"passes": _config_window, "uses": ("getattr",)}
_SEPARATE = DeltaNet(uses=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))

#: The rows of families. Others whose attention is that of one of these are known by it (`recognise/code.py`).
_ROWS: dict[str, Row] = {
    "llama": {"Attention": Attention()},
    "mistral": {"Attention": Attention(**_CONFIG_WINDOW)},
    "qwen2": {"Attention": Attention(**_LAYER_WINDOW)},
    "qwen3": {"Attention": Attention(norms="heads", **_LAYER_WINDOW)},
    "gemma2": {"Attention": Attention(passes=_window_and_cap, uses=("sliding_window", "attn_logit_softcapping"))},
    "gemma3": {"Attention": Attention(norms="heads", **_LAYER_WINDOW)},
    "phi3": {"Attention": Attention(packed=True, **_CONFIG_WINDOW)},
    "olmo2": {"Attention": Attention(norms="projection")},
    "olmo3": {"Attention": Attention(norms="projection", **_LAYER_WINDOW)},
    "smollm3": {"Attention": Attention(optional_rope=True, **_LAYER_WINDOW)},
    "gpt_oss": {
        "Attention": Attention(half_tables=True, passes=_window_and_sinks, uses=("sliding_window", "sinks")),
        "Experts": ClampedExperts(passes=_clamped_gate),
    },
    "glm4": {"Attention": Attention(interleaved=True)},
    "qwen3_next": {
        "Attention": Attention(norms="heads", gated=True),
        "GatedDeltaNet": DeltaNet(
            by_key_head, uses=("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering", "cat")
        ),
    },
    "qwen3_5": {"GatedDeltaNet": _SEPARATE},
    "qwen3_5_moe": {"GatedDeltaNet": _SEPARATE},
    "olmo_hybrid": {
        "Attention": Attention(norms="projection", optional_tables=True),
        "GatedDeltaNet": DeltaNet(
            one_each,
            norm="o_norm",
            out="o_proj",
            uses=("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "cat", "view", "allow_neg_eigval"),
        ),
    },
    "kimi_linear": {"DeltaAttention": KimiDelta()},
    "bailing_hybrid": {"DeltaAttention": KimiDelta()},
    "gpt_neox": {"Attention": NeoXAttention()},
    "bloom": {
        "Attention": BloomAttention(),
        "MLP": BloomMLP("dense_h_to_4h", "dense_4h_to_h", ("bias_gelu", "tanh")),
    },
    "falcon": {"Attention": FalconAttention()},
}

#: The families of which a small model can be made: those like Llama, and those before it, whose norm is a LayerNorm.
LLAMA_LIKE = tuple(name for name, family in FAMILIES.items() if family.norm is not None)
GPT_LIKE = ("gpt2", "gpt_neox", "bloom", "falcon")
PATCHED = (*LLAMA_LIKE, *GPT_LIKE)

#: Class (module, name) -> its adapter.
TABLE: dict[tuple[str, str], Adapter] = {
    **TORCH,
    **LORA,
    ("peft.tuners.lora.layer", "ParamWrapper"): LoraExperts(),
    ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"): SortedExperts(),
    ("transformers.models.nemotron.modeling_nemotron", "NemotronLayerNorm1P"): NemotronNorm(
        "eps", 1.0, op="layer_norm", bias="bias", one_dtype=True
    ),
    # Bamba's, Granite 4's, Nemotron-H's and Zamba 2's layers have the code of the first.
    ("transformers.models.mamba2.modeling_mamba2", "Mamba2Mixer"): Mamba2(),
    ("transformers.models.falcon_h1.modeling_falcon_h1", "FalconH1Mixer"): Mamba2(
        scaled=True, uses=("ssm_in_multiplier", "mup_vector", "mamba_rms_norm", "float32", "nn", "functional", "silu")
    ),
    **{
        (f"transformers.models.{family}.modeling_{family}", FAMILIES[family].name + end): adapter
        for family, row in _ROWS.items()
        for end, adapter in row.items()
    },
}

#: How the names of classes end that this package might support.
CANDIDATES = ("Norm", "NormGated", "MLP", "Mlp", "FeedForward", "ActDense", "Attention", "Experts")
#: What is said of a class of such a name that has no row.
NO_ROW = "no adapter for this class"


def adapter_for(module: nn.Module, recognise: bool = True) -> Adapter | str | None:
    """Returns the adapter of `module`, or the reason why there is none; None where it is of no kind that we support.

    recognise: whether a class without a row may be recognised by what its code computes.
    """
    row = row_of(module)
    if row is not None and not isinstance(row, str):
        return row
    found = recognised(module) if recognise else None
    if found is not None and not isinstance(found, str):
        return found
    if row is not None:
        return row
    cls = next(base for base in type(module).__mro__ if "_foundry_class" not in vars(base))
    unnamed = interface_adapter(cls)
    own = None
    if recognise and not isinstance(unnamed, Attention):
        own = own_attention(module, unnamed.rotations if unnamed else ())
        if isinstance(own, OwnAttention):
            return own
        unnamed = replace(unnamed, stays=f"its attention stays: {own}") if unnamed and own else unnamed
    if unnamed is not None and not recognise:
        unnamed = unnamed.unrecognised()
    twin = (decorated_experts(module) or twin_of(cls, TABLE)) if recognise else None
    if (twin is not None or unnamed is not None) and (replaced := replaced_forward(module)) is not None:
        return replaced
    if unnamed is not None and (reason := unnamed.why_not(module)) is not None:
        return unnamed.without_attention(reason)  # which must be such that any function can run it, for a twin too
    if twin is not None:
        return twin.why_not(module) or twin
    if unnamed is not None:
        served = unnamed.for_family(module)
        return served if recognise or served == unnamed else "its family does not run on SDPA"
    if any(base.__name__.endswith(CANDIDATES) for base in cls.__mro__):
        # The shape of attention may be that of an MLP, by accident.
        asked = own if cls.__name__.endswith("Attention") else found
        return replaced_forward(module) or (f"{NO_ROW}: {asked}" if asked else NO_ROW)
    loss = language_model(module)
    return f"{LOSS_STAYS}{NO_ROW}" if isinstance(loss, LanguageModel) and not recognise else loss


def has_row(module: nn.Module, adapter: Adapter) -> bool:
    """Returns whether `adapter` is that of the row of a module's class."""
    return any(TABLE.get((base.__module__, base.__qualname__)) is adapter for base in type(module).__mro__)


def replaced_forward(module: nn.Module) -> str | None:
    """Returns the reason why a module whose forward was replaced is left."""
    return REPLACED if "forward" in vars(module) else None


def row_of(module: nn.Module) -> Adapter | str | None:
    """Returns the adapter in the row of a module's class, or the reason why the module is left; None without a row."""
    cls = type(module)
    for base in cls.__mro__:
        if "_foundry_class" in vars(base):  # has the original's name, perhaps
            continue
        found = TABLE.get((base.__module__, base.__qualname__))
        if found is None:
            continue
        if "forward" in vars(module):
            return REPLACED
        if getattr(cls, found.method) is not getattr(base, found.method):
            return f"its class has a {found.method} of its own, which need not do what that of {base.__name__} does"
        return found.why_changed(base) or found.why_not(module) or found
    return None
