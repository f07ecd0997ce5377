"""A tiny model of every language model class of the installed transformers: nothing is downloaded.

A class's configuration is that of its defaults with each number shrunk by what its name says it counts. Of the layers,
one of each kind is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: How the names of classes end that compute logits of a next token.
GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
VOCABULARY, LAYERS = 128, 2

#: What a number with a name that has one of these in it becomes, if it was larger; the first rule holds.
RULES: tuple[tuple[str, int], ...] = (
    (r"vocab|num_embed(ding)?s$|codebook_size|num_special", VOCABULARY),
    (r"per_tok$|top_?k$|_k$|topk_experts|topk_blocks", 2),
    (r"n_group$|expert_group$|topk_group", 1),
    (r"groups$", 2),
    (r"mamba\w*heads", 8),
    (r"num_filters", 4),
    (r"base_channels", 32),
    (r"^depths$", 1),
    (r"shared_experts$|dense_replace|num_dense_layers|kv_shared_layers|nextn_predict", 1),
    (r"experts$|num_fused|n_speakers", 4),
    (r"layer_offset|insert_layer_id|altup_active|accept_hidden_layer|loop_layer_index", 1),
    (r"(period|interval|pattern|frequency|every_n|sparse_step|interleave\w*step|loop_num_passes)", 2),
    (r"layers?$|depth$|num_blocks$|res_blocks$|layers_per|attn_blocks$|max_window_layers", LAYERS),
    (r"group_norm|norm_groups|num_groups|n_groups", 2),
    (r"key_value_heads|kv_(n_)?heads|n_kv|num_key_heads|index_n_heads|num_global_key", 2),
    (r"heads(_per_layer)?$|n_head$|heads_per_ngram", 4),
    (r"(rope|nope)_head_dim|rotary_dim|rel$|mamba_dt_rank|laurel_rank|lowrank|per_layer_input", 8),
    (r"head_dim$|d_kv$|dim_head$|d_head$|state(_size)?$|time_step_rank|pre_attn_scalar|lora_rank", 16),
    (r"sliding_window|attention_window|chunk_size$|attention_context|rel_extent|local_attention|block_size", 8),
    (r"window", 4),
    (r"moe\w*intermediate|expert\w*_(size|dim|intermediate)|moe_hidden|expert_ffn", 48),
    (r"intermediate|ffn_?(hidden)?|mlp_dim|d_ff|n_inner|inner_dim", 96),
    (r"image_size|crop_size|resolution", 32),
    (r"patch_size|stride$", 8),
    (r"num_mel|mel_bins|mel_dim|feature_size|input_feat|num_patches|num_position_embeddings|query|latents", 16),
    (r"positions|position_embeddings|max_seq_len|max_pos|context_size|max_length|seq_len", 128),
    (r"size|dim|embd|d_model|channel|width|proj|dff|d_inner|n_ctx|zero_expert_num|_length$", 64),
)  # fmt: skip
COMPILED = tuple((re.compile(pattern), value) for pattern, value in RULES)
TOKEN = re.compile(r"token_(id|index)s?$|_id$|token_ids$|_index$|_ids$")
INDICES = re.compile(r"index|idx|indic|_layers$|layer_ids|layers_idx|feature_layer")


def generative() -> list[str]:
    """The names of all of them that can be built and called; of the others, `REFUSED` has the reason."""
    import transformers

    return [name for name in sorted(dir(transformers)) if name.endswith(GENERATIVE) and name not in REFUSED]


#: Why there is no model of a class, or no call of it with a loss.
REFUSED: dict[str, str] = {
    "AutoModelForCausalLM": "no model",
    "Qwen2_5OmniPreTrainedModelForConditionalGeneration": "no model",
    "Qwen3OmniMoePreTrainedModelForConditionalGeneration": "no model",
    "Qwen2_5OmniForConditionalGeneration": "its parts are called, it has no forward",
    "Qwen3OmniMoeForConditionalGeneration": "its parts are called, it has no forward",
    "FastVlmForConditionalGeneration": "needs timm",
    "Gemma3nForConditionalGeneration": "needs timm",
    "PerceptionLMForConditionalGeneration": "needs timm",
    "InklingForConditionalGeneration": "needs SciPy",
    "Gemma4AssistantForCausalLM": "reads the keys of another model",
    "Gemma4UnifiedAssistantForCausalLM": "reads the keys of another model",
    "Llama4ForConditionalGeneration": "its forward fails in transformers 5.24, without a patch",
    "ClvpModelForConditionalGeneration": "reads speech, and has a loss over pairs",
    "DiaForConditionalGeneration": "trained on delayed codes",
    "GradiumPhononTTSForConditionalGeneration": "trained on latents",
    "HiggsAudioV2ForConditionalGeneration": "trained on codes",
    "MoshiForConditionalGeneration": "reads codes of two speakers",
    "MusicgenForConditionalGeneration": "trained on codes",
    "MusicgenMelodyForConditionalGeneration": "trained on codes",
    "PI0ForConditionalGeneration": "trained on actions",
    "PocketTTSForConditionalGeneration": "trained on latents",
    "Qwen2_5OmniTalkerForConditionalGeneration": "reads another model's states",
    "Qwen3OmniMoeTalkerForConditionalGeneration": "reads another model's states",
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": "reads another model's states",
    "SeamlessM4TTextToUnitForConditionalGeneration": "reads another model's states",
    "SeamlessM4Tv2TextToUnitForConditionalGeneration": "reads another model's states",
    "VoxtralRealtimeForConditionalGeneration": "reads a stream of sound",
}


def class_of(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def shrunk(name: str, value: Any) -> Any:
    """The number of this name, or those of a sequence of numbers."""
    if isinstance(value, (list, tuple)):
        return type(value)(shrunk(name, item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        for pattern, small in COMPILED:
            if pattern.search(name):
                return min(value, small)
    return value


def number_of_layers(values: dict[str, Any]) -> int | None:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "layers"):
        if isinstance(values.get(name), int):
            return int(values[name])
    return None


def small(config: Any, tokens: dict[int, int], **changes: Any) -> Any:
    """A configuration of the same class with small numbers. tokens: the ids of special tokens, by those of before."""
    kind = type(config)
    declared = dataclasses.is_dataclass(kind)  # in newer releases
    fields = [f.name for f in dataclasses.fields(kind)] if declared else [*inspect.signature(kind.__init__).parameters]
    own = vars(config)
    values = {name: own.get(name, own.get(kind.attribute_map.get(name, name))) for name in fields}
    values = {name: value for name, value in values.items() if value is not None}
    values |= {name: getattr(config, name) for name in kind.sub_configs if getattr(config, name, None) is not None}
    total = number_of_layers(values)
    lists = {
        name: value for name, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) == total and not INDICES.search(name)
    }  # fmt: skip
    columns = [*zip(*lists.values(), strict=True)]
    kept = sorted({str(column): i for i, column in reversed([*enumerate(columns)])}.values())[:4]
    if total is not None:
        kept = sorted({*kept, *range(LAYERS)})[: max(len(kept), LAYERS)] if len(kept) < LAYERS else kept
    changed: dict[str, Any] = {name: value for name, value in MISSING.items() if name in fields and name not in values}
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        changed["decoder_start_token_id"] = 1
    for name, value in values.items():
        if name in ("id2label", "label2id"):
            continue
        if hasattr(value, "sub_configs"):
            changed[name] = small(value, tokens)
        elif type(value) in (int, float) and re.search("drop|jitter|mask_.*prob", name):
            changed[name] = type(value)(0)  # so that a step of training can be repeated
        elif name in lists:
            changed[name] = shrunk(name, type(value)(value[i] for i in kept))
        elif (total is not None and value == total and "layer" in name) or name == "depth":
            changed[name] = len(kept)
        elif isinstance(value, dict) and "rope" in name:
            changed[name] = rope(value, 8 if "qk_rope_head_dim" in values else 16, has_sections(kind))
        elif TOKEN.search(name) and not (isinstance(value, (list, tuple)) and "layer" in name):
            changed[name] = special(value, tokens)
        elif INDICES.search(name) and isinstance(value, (list, tuple)) and all(isinstance(v, int) for v in value):
            inside = [v for v in value if v < len(kept)] if kept else [-1 - i % LAYERS for i in range(len(value))]
            changed[name] = type(value)(inside or [len(kept) - 1])
        elif (new := shrunk(name, value)) != value or value != getattr(kind, name, None):
            changed[name] = new
    heads = values.get("num_attention_heads")
    if heads is not None and values.get("num_key_value_heads") == heads:
        changed["num_key_value_heads"] = changed.get("num_attention_heads", heads)
    return kind(**{**changed, **EXTRA.get(kind.__name__, {}), **changes})


def special(value: Any, tokens: dict[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(special(item, tokens) for item in value)
    if not isinstance(value, int) or isinstance(value, bool) or value < VOCABULARY:
        return value
    return tokens.setdefault(value, VOCABULARY - 1 - len(tokens))


def rope(value: dict[str, Any], width: int, sections: bool) -> dict[str, Any]:
    """Parameters of a rotation of this width. sections: whether it is by sections, which then fill half of it."""
    if not value or any(isinstance(item, dict) for item in value.values()):
        return {key: rope(item, width, sections) if isinstance(item, dict) else item for key, item in value.items()}
    found = dict(value)
    if sections:
        half = int(width * (value.get("partial_rotary_factor") or 1.0)) // 2
        found["mrope_section"] = [3 * half // 8, 3 * half // 8, half - 2 * (3 * half // 8)]
    for name in found.keys() & {"long_factor", "short_factor"}:
        found[name] = found[name][: width // 2]
    if "original_max_position_embeddings" in found:
        found["original_max_position_embeddings"] = 32
    return found


@functools.cache
def has_sections(kind: type) -> bool:
    """Whether the models of a configuration rotate by sections of positions in time, height and width."""
    source = Path(str(importlib.import_module(kind.__module__).__file__))
    modeling = source.with_name(source.name.replace("configuration_", "modeling_"))
    return modeling.exists() and '"mrope_section"' in modeling.read_text() and "Vision" not in kind.__name__


def config_of(name: str, **changes: Any) -> Any:
    kind = class_of(name).config_class
    try:
        whole = kind()
    except Exception:  # defaults that are no model
        whole = kind(**EXTRA.get(kind.__name__, {}))
    return small(whole, {}, **changes)


#: What is None by default and has to be set.
MISSING = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
ROPE_BY_TYPE = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}
QSA = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
#: Options of a configuration, by its class's name, that its defaults lack or that depend on each other.
EXTRA: dict[str, dict[str, Any]] = {
    "Apertus1p5Config": {"image_token_offset": 128, "audio_token_offset": 192},
    "Apertus1p5TextConfig": {"vocab_size": 512},
    "Apertus1p5VisionTokenizerConfig": {"codebook_size": 64},
    "WavTokenizerConfig": {"codebook_size": 64},
    "Blip2Config": {"image_token_index": 100, "num_query_tokens": 2},
    "InstructBlipConfig": {"image_token_index": 100, "num_query_tokens": 2},
    "InstructBlipVideoConfig": {"video_token_index": 100, "num_query_tokens": 2},
    "BambaConfig": {"attn_layer_indices": [1]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 100}},
    "CohereCompassTextConfig": {"rope_parameters": ROPE_BY_TYPE},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DoryConfig": {
        "num_hidden_layers": 4, "layer_types": None, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 2,
    },
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_qk_rope_head_dim": 8, "swa_v_head_dim": 16,
    },
    "Emu3Config": {"vocabulary_map": {"<image>": 100, "<|extra_200|>": 101}},
    "FalconH1Config": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "GPTNeoConfig": {
        "num_layers": 2, "attention_layers": ["global", "local"], "attention_types": [[["global", "local"], 1]],
    },
    "Glm5NextTextConfig": {"index_kpool": 2},
    "Granite4VisionConfig": {
        "downsample_rate": "1/2", "deepstack_layer_map": [[0, 0], [1, 1]], "spatial_target_layers": [0, 1],
    },
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "HrmTextConfig": {"num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 1, "num_layers_per_stack": None},
    "Inkling2LoopTextConfig": {
        "loop_layer_index_start": 1, "loop_layer_index_end": 2, "n_layers_per_attn_res_block": 1,
    },
    "LongcatFlashConfig": {"head_dim": 8},
    "MoonshineConfig": {"pad_token_id": 0, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 48},
    "Step3p7TextConfig": {"sliding_window": 8},
    "ZambaConfig": {
        "attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "Kosmos2Config": {"latent_query_num": 8},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 8, "head_dim": 16},
    "Qwen4ExpTextConfig": {"eos_token_id": 2, "indexer_budget": 8, "indexer_compress_ratio": 2, **QSA},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "VibeVoiceAsrConfig": {"acoustic_tokenizer_chunk_size": 6400},
    "XmodConfig": {"default_language": "en_XX"},
    "xLSTMConfig": {"chunk_size": 16, "qk_dim_factor": 1.0},
}  # fmt: skip


def tiny(name: str, seed: int = 0, **changes: Any) -> Any:
    """Returns a model of the class of this name in float32 and eval mode. All weights are random: 0 or 1 would hide
    much. changes: other options of its configuration."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = class_of(name)(config_of(name, **changes)).float()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(noise * 0.2)
            else:
                parameter.copy_(noise * 0.15)
    return model.eval()


def inputs(model: nn.Module, batch: int = 2, length: int = 12) -> dict[str, Any]:
    """The arguments of a call that has a loss: tokens, none of them special, and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(0)

    def ids(*shape: int, most: int = 90) -> Tensor:
        return torch.randint(8, most, (batch, *(shape or (length,))), generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    tokens = ids()
    labels = tokens.clone()
    labels[0, :3] = -100
    given: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    made = {
        "sound": lambda n, t: {"input_ids": None, "input_features": noise(n, t)},
        "features": lambda *s: {"input_features": noise(*s)},
        "spoken": lambda *s: {"input_ids": None, "input_features": noise(*s)},
        "wave": lambda t: {"input_ids": None, "input_values": noise(t)},
        "image": lambda *s: {"pixel_values": noise(*s)},
        "patches": lambda *s: {"input_ids": None, "flattened_patches": noise(*s).abs()},
        "printed": lambda *s: {"input_ids": None, "pixel_values": noise(*s)},
        "prompt": lambda: {"qformer_input_ids": ids(4)},
        "boxes": lambda: {"bbox": torch.zeros(batch, length, 4)},
        "codes": lambda n: {"input_ids": ids(length, n), "labels": ids(length, n)},
        "streams": lambda n: {"input_ids": ids(length, n)},
        "codebooks": lambda n: {"input_ids": ids(n, length).flatten(0, 1), "labels": ids(length, n)},
        "pictured": lambda n: {"input_ids": torch.cat([torch.full((batch, n), 100), tokens[:, n:]], 1)},
        "masked": lambda n: {"image_embeds_position_mask": (torch.arange(length) < n).expand(batch, length)},
        "types": lambda: {"mm_token_type_ids": torch.zeros_like(tokens)},
        "no cache": lambda: {"use_cache": False},
    }
    for kind, *shape in NEEDED.get(type(model).__name__, ()):
        given |= made[kind](*shape)
    return {name: value for name, value in given.items() if value is not None}


#: What the calls of models need that do not take tokens alone.
NEEDED: dict[str, list[tuple[Any, ...]]] = {
    "BlipForConditionalGeneration": [("image", 3, 32, 32)],
    "Blip2ForConditionalGeneration": [("image", 3, 32, 32), ("pictured", 2)],
    "BltForCausalLM": [("no cache",)],
    "CanaryForConditionalGeneration": [("spoken", 64, 16)],
    "CohereAsrForConditionalGeneration": [("spoken", 64, 16)],
    "CsmForConditionalGeneration": [("codes", 32)],
    "GitForCausalLM": [("image", 3, 32, 32)],
    "InstructBlipForConditionalGeneration": [("image", 3, 32, 32), ("prompt",), ("pictured", 2)],
    "InstructBlipVideoForConditionalGeneration": [("image", 4, 3, 32, 32), ("prompt",), ("pictured", 8)],
    "Kosmos2ForConditionalGeneration": [("image", 3, 32, 32), ("masked", 8)],
    "KyutaiSpeechToTextForConditionalGeneration": [("streams", 33)],
    "Molmo2ForConditionalGeneration": [("types",)],
    "MoonshineForConditionalGeneration": [("wave", 4000)],
    "MoonshineStreamingForConditionalGeneration": [("wave", 4000)],
    "MusicgenForCausalLM": [("codebooks", 4)],
    "MusicgenMelodyForCausalLM": [("codebooks", 4)],
    "PPFormulaNetForConditionalGeneration": [("image", 3, 32, 32)],
    "Pix2StructForConditionalGeneration": [("patches", 9, 66)],
    "RwkvForCausalLM": [("no cache",)],
    "Speech2TextForConditionalGeneration": [("spoken", 64, 16)],
    "UdopForConditionalGeneration": [("boxes",)],
    "WhisperForConditionalGeneration": [("spoken", 16, 256)],
}
