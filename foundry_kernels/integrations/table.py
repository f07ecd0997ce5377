"""The table: which class of which package is served how.

Classes are named by module and name, so that nothing has to be imported to know them. A row says in what a family
differs; what all share is in `adapters.py`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from foundry_kernels.integrations.adapters import MLP, Adapter, Attention, Experts, Norm, TorchNorm
from foundry_kernels.integrations.causal_lm import CausalLM

# Where the division by the root mean square is rounded: before the weight (Llama), or once, after it.
LLAMA = Norm(round_before_weight=True)
ROUNDED_ONCE = Norm()
GEMMA = Norm(eps="eps", weight_offset=1.0)

GATED = MLP()
PACKED = MLP(act="activation_fn", packed=True)


def _config_window(module: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(module.config, "sliding_window", None)}


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


PLAIN = Attention()
WINDOW = Attention(passes=_layer_window, uses=("sliding_window",))
CONFIG_WINDOW = Attention(passes=_config_window, uses=("getattr",))

#: Families of transformers: model type -> name of its classes, norm, MLP or experts, attention.
FAMILIES: dict[str, tuple[str, Norm, Adapter | str, Attention]] = {
    "llama": ("Llama", LLAMA, GATED, PLAIN),
    "mistral": ("Mistral", LLAMA, GATED, CONFIG_WINDOW),
    "mixtral": ("Mixtral", LLAMA, Experts(), CONFIG_WINDOW),
    "qwen2": ("Qwen2", LLAMA, GATED, WINDOW),
    "qwen3": ("Qwen3", LLAMA, GATED, Attention(norms="heads", passes=_layer_window, uses=("sliding_window",))),
    "gemma": ("Gemma", GEMMA, GATED, PLAIN),
    "gemma2": (
        "Gemma2",
        GEMMA,
        GATED,
        Attention(passes=_window_and_cap, uses=("sliding_window", "attn_logit_softcapping")),
    ),
    "gemma3": ("Gemma3", GEMMA, GATED, Attention(norms="heads", passes=_layer_window, uses=("sliding_window",))),
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
        "its gate is clamped and its up half shifted by 1, which no gated kernel does",
        Attention(half_tables=True, passes=_window_and_sinks, uses=("sliding_window", "sinks")),
    ),
    "glm4": ("Glm4", LLAMA, PACKED, Attention(interleaved=True)),
}

CAPPED = CausalLM(cap=_final_cap, uses=("final_logit_softcapping", "torch", "tanh"))
MIXTURE = CausalLM(mixture=True)

#: The model with its head and its loss, where it is more than decoder, product and loss.
LANGUAGE_MODELS = {
    "gemma2": CAPPED,
    "gemma3": CAPPED,
    "granite": CausalLM(scale=_divided_logits, uses=("logits_scaling",)),
    "mixtral": MIXTURE,
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
