"""The families of language models in Hugging Face transformers, as data: their names, and how their RMSNorms round.

What `patch` does with the classes of each is in `adapters/table.py`. How `from_hf` reads their configurations is
in `convert/hf_config_maps.py`.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """What is known of a family.

    Attributes:
        name: what the names of its classes begin with.
        head: what follows in the name of its language model.
        norm: its RMSNorm: "llama" rounds before the weight multiplies, "rounded_once" after it, "gemma" too, with a
            weight that is stored less 1; None where it has a LayerNorm, or `tiny.py` makes no model of it.
        head_norms: whether queries and keys have an RMSNorm of each head.
        text: the `model_type` of its language model, if a model of images and text has the family's own name.
    """

    name: str
    head: str = "ForCausalLM"
    norm: str | None = None
    head_norms: bool = False
    text: str | None = None


#: The families, by the names of their folders in transformers.
FAMILIES = {
    "gpt2": Family("GPT2", head="LMHeadModel"),
    "openai": Family("OpenAIGPT", head="LMHeadModel"),
    "gpt_neox": Family("GPTNeoX"),
    "bloom": Family("Bloom"),
    "falcon": Family("Falcon"),
    "opt": Family("OPT"),
    "phi": Family("Phi"),
    "stablelm": Family("StableLm"),
    "starcoder2": Family("Starcoder2"),
    "olmoe": Family("Olmoe"),
    "dots1": Family("Dots1"),
    "glm4_moe": Family("Glm4Moe"),
    "llama": Family("Llama", norm="llama"),
    "mistral": Family("Mistral", norm="llama"),
    "mixtral": Family("Mixtral", norm="llama"),
    "qwen2": Family("Qwen2", norm="llama"),
    "qwen2_moe": Family("Qwen2Moe", norm="llama"),
    "qwen3": Family("Qwen3", norm="llama", head_norms=True),
    "qwen3_moe": Family("Qwen3Moe", norm="llama", head_norms=True),
    "gemma": Family("Gemma", norm="gemma"),
    "gemma2": Family("Gemma2", norm="gemma"),
    "gemma3": Family("Gemma3", norm="gemma", head_norms=True, text="gemma3_text"),
    "phi3": Family("Phi3", norm="llama"),
    "granite": Family("Granite", norm="llama"),
    "olmo2": Family("Olmo2", norm="rounded_once"),
    "olmo3": Family("Olmo3", norm="rounded_once"),
    "smollm3": Family("SmolLM3", norm="llama"),
    "gpt_oss": Family("GptOss", norm="rounded_once"),
    "glm4": Family("Glm4", norm="llama"),
    "qwen3_next": Family("Qwen3Next", norm="gemma", head_norms=True),
    "qwen3_5": Family("Qwen3_5", norm="gemma", head_norms=True, text="qwen3_5_text"),
    "qwen3_5_moe": Family("Qwen3_5Moe", norm="gemma", head_norms=True, text="qwen3_5_moe_text"),
    "olmo_hybrid": Family("OlmoHybrid", norm="rounded_once"),
    "kimi_linear": Family("KimiLinear"),
    "bailing_hybrid": Family("BailingHybrid"),
}


def text_type(family: str) -> str:
    """Returns the `model_type` of the language model of `family`."""
    return FAMILIES[family].text or family
