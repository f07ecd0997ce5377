"""A small model of families of encoders and encoder-decoders, whose attention `patch` finds by itself, and a batch with
padding for it; built from configurations, nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
BOTH: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SPEECH: dict[str, Any] = {
    "vocab_size": 32,
    **{name: TEXT[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}

#: The model's class without "For..", its options, what it is trained for, and what it reads.
FAMILIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "bert": ("Bert", TEXT, "ForMaskedLM", "text"),
    "roberta": ("Roberta", TEXT, "ForMaskedLM", "text"),
    "modernbert": (
        "ModernBert",
        {**TEXT, "local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        "ForMaskedLM",
        "text",
    ),
    "vit": ("ViT", VISION, "ForImageClassification", "image"),
    "clip": ("CLIP", {"text_config": {**TEXT, "hidden_act": "gelu"}, "vision_config": VISION}, "Model", "pair"),
    "siglip": ("Siglip", {"text_config": TEXT, "vision_config": VISION}, "Model", "pair"),
    "whisper": (
        "Whisper",
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32},
        "ForConditionalGeneration",
        "sound",
    ),
    "wav2vec2": ("Wav2Vec2", SPEECH, "ForCTC", "wave"),
    "bart": ("Bart", {**BOTH, "max_position_embeddings": 64}, "ForConditionalGeneration", "text"),
    "t5": (
        "T5",
        {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
        "ForConditionalGeneration",
        "text",
    ),
}  # fmt: skip


def tiny_encoder(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Returns a model of two layers and width 32, in float32 and eval mode, with random weights everywhere."""
    import transformers

    name, options, head, _ = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**options, **changes})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, name + head)(config).to(torch.float32)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def tiny_batch(family: str, seed: int = 0) -> dict[str, Any]:
    """Returns the arguments of a call of `tiny_encoder`'s model that has a loss; of two rows, with padding between and
    after the tokens where the family knows padding."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 32, (2, 12), generator=g)
    mask = torch.ones_like(tokens)
    mask[0, 9:] = mask[1, 6] = 0
    reads = FAMILIES[family][3]
    if reads == "text":
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    if reads == "sound":
        sound = torch.randn(2, 8, 40, generator=g)
        return {"input_features": sound, "decoder_input_ids": tokens, "decoder_attention_mask": mask, "labels": tokens}
    if reads == "wave":
        heard = torch.ones(2, 400, dtype=torch.long)
        heard[0, 300:] = 0
        return {"input_values": torch.randn(2, 400, generator=g), "attention_mask": heard, "labels": tokens[:, :5]}
    images = {"pixel_values": torch.randn(2, 3, 16, 16, generator=g)}
    if reads == "image":
        return {**images, "labels": torch.tensor([0, 1])}
    return {**images, "input_ids": tokens, "attention_mask": mask, "return_loss": True}
