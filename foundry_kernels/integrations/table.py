"""The table: which class of which package is served how.

Classes are named by module and name, so that nothing has to be imported to know them. A row says in what a family
differs; what all share is in `adapters.py`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from foundry_kernels.integrations.adapters import MLP, Adapter, Attention, Norm, TorchNorm
from foundry_kernels.integrations.causal_lm import CausalLM
from foundry_kernels.integrations.experts import ClampedExperts, Experts
from foundry_kernels.integrations.older import GPT2Attention, GPT2Model, NeoXAttention, NeoXModel, PlainMLP
from foundry_kernels.integrations.older_alibi import BloomAttention, BloomMLP, FalconAttention, TransformerModel

# Where the division by the root mean square is rounded: before the weight (Llama), or once, after it.
LLAMA = Norm(round_before_weight=True)
ROUNDED_ONCE = Norm()
GEMMA = Norm(eps="eps", weight_offset=1.0)

GATED = MLP()
PACKED = MLP(act="activation_fn", packed=True)


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


def _divided_logits(module: Any) -> float:
    return 1.0 / float(module.config.logits_scaling)


def _clamped_gate(module: Any) -> dict[str, Any]:
    return {"alpha": module.alpha, "limit": module.limit, "up_offset": 1.0, "interleaved": True}


PLAIN = Attention()
WINDOW = Attention(passes=_layer_window, uses=("sliding_window",))
CONFIG_WINDOW = Attention(passes=_config_window, uses=("getattr",))
QWEN3 = Attention(norms="heads", passes=_layer_window, uses=("sliding_window",))

#: Families of transformers: model type -> name of its classes, norm, MLP or experts, attention.
FAMILIES: dict[str, tuple[str, Norm, Adapter | str, Attention]] = {
    "llama": ("Llama", LLAMA, GATED, PLAIN),
    "mistral": ("Mistral", LLAMA, GATED, CONFIG_WINDOW),
    "mixtral": ("Mixtral", LLAMA, Experts(), CONFIG_WINDOW),
    "qwen2": ("Qwen2", LLAMA, GATED, WINDOW),
    "qwen2_moe": ("Qwen2Moe", LLAMA, Experts(), Attention(passes=_window_if_any)),
    "qwen3": ("Qwen3", LLAMA, GATED, QWEN3),
    "qwen3_moe": ("Qwen3Moe", LLAMA, Experts(), QWEN3),
    "gemma": ("Gemma", GEMMA, GATED, PLAIN),
    "gemma2": (
        "Gemma2",
        GEMMA,
        GATED,
        Attention(passes=_window_and_cap, uses=("sliding_window", "attn_logit_softcapping")),
    ),
    "gemma3": ("Gemma3", GEMMA, GATED, QWEN3),
    "phi3": ("Phi3", LLAMA, PACKED, Attention(packed=True, passes=_config_window, uses=("getattr",))),
    "granite": ("Granite", LLAMA, GATED, PLAIN),
    "olmo2": ("Olmo2", ROUNDED_ONCE, GATED, Attention(norms="projection")),
    "olmo3": (
        "Olmo3",
        ROUNDED_ONCE,
        GATED,
        Attention(norms="projection", passes=_layer_window, uses=("sliding_window",)),
    ),
    "smollm3": (
        "SmolLM3",
        LLAMA,
        GATED,
        Attention(optional_rope=True, passes=_layer_window, uses=("sliding_window",)),
    ),
    "gpt_oss": (
        "GptOss",
        ROUNDED_ONCE,
        ClampedExperts(passes=_clamped_gate),
        Attention(half_tables=True, passes=_window_and_sinks, uses=("sliding_window", "sinks")),
    ),
    "glm4": ("Glm4", LLAMA, PACKED, Attention(interleaved=True)),
}


def _dropout_module(module: Any) -> float:
    return float(module.attention_dropout.p)


def _attn_dropout(module: Any) -> float:
    return float(module.attn_dropout.p)


#: Families before Llama: model type -> the adapter of each of its classes.
OLDER: dict[str, dict[str, Adapter]] = {
    "gpt2": {
        "GPT2Attention": GPT2Attention(dropout=_attn_dropout),
        "GPT2MLP": PlainMLP(first="c_fc", second="c_proj", dropout="dropout"),
        "GPT2LMHeadModel": GPT2Model(),
    },
    "gpt_neox": {
        "GPTNeoXAttention": NeoXAttention(),
        "GPTNeoXMLP": PlainMLP(first="dense_h_to_4h", second="dense_4h_to_h"),
        "GPTNeoXForCausalLM": NeoXModel(),
    },
    "bloom": {
        "BloomAttention": BloomAttention(dropout=_dropout_module),
        "BloomMLP": BloomMLP(first="dense_h_to_4h", second="dense_4h_to_h", act="gelu_impl"),
        "BloomForCausalLM": TransformerModel(),
    },
    "falcon": {
        "FalconAttention": FalconAttention(dropout=_dropout_module),
        "FalconMLP": PlainMLP(first="dense_h_to_4h", second="dense_4h_to_h"),
        "FalconForCausalLM": TransformerModel(uses=("position_ids",)),
    },
}


CAPPED = CausalLM(cap=_final_cap, uses=("final_logit_softcapping", "torch", "tanh"))
MIXTURE = CausalLM(mixture=True)

#: The model with its head and its loss, where it is more than decoder, product and loss.
LANGUAGE_MODELS = {
    "gemma2": CAPPED,
    "gemma3": CAPPED,
    "granite": CausalLM(scale=_divided_logits, uses=("logits_scaling",)),
    "mixtral": MIXTURE,
    "qwen2_moe": MIXTURE,
    "qwen3_moe": MIXTURE,
    "gpt_oss": MIXTURE,
}


def _table() -> dict[tuple[str, str], Adapter | str]:
    torchs = "torch.nn.modules.normalization"
    table: dict[tuple[str, str], Adapter | str] = {
        (torchs, "RMSNorm"): TorchNorm(),
        (torchs, "LayerNorm"): TorchNorm("layer_norm"),
    }
    for family, (name, norm, mlp, attention) in FAMILIES.items():
        home = f"transformers.models.{family}.modeling_{family}"
        mixture = isinstance(mlp, (Experts, str))
        table |= {
            (home, f"{name}RMSNorm"): norm,
            (home, f"{name}{'Experts' if mixture else 'MLP'}"): mlp,
            (home, f"{name}Attention"): attention,
            (home, f"{name}ForCausalLM"): LANGUAGE_MODELS.get(family, CausalLM()),
        }
    for family, classes in OLDER.items():
        home = f"transformers.models.{family}.modeling_{family}"
        table |= {(home, name): adapter for name, adapter in classes.items()}
    # Shared experts, and the dense layers that may lie between those of experts.
    for family, name in (("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe")):
        table[f"transformers.models.{family}.modeling_{family}", f"{name}MLP"] = GATED
    return table


#: Class (module, name) -> the adapter, or the reason why it is left alone.
TABLE = _table()

#: What a class of modules that this package could serve is usually called.
CANDIDATES = ("Norm", "MLP", "Mlp", "FeedForward", "Attention", "Experts")


def adapter_for(module: nn.Module) -> Adapter | str | None:
    """The adapter that serves `module`, or the reason why there is none; None where it is not of a kind we serve."""
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
    if cls.__name__.endswith(CANDIDATES):
        return "no adapter for this class"
    return None
