"""Small models of encoders and encoder-decoders, and a batch with padding for each."""

from __future__ import annotations

from typing import Any

import torch
from models import tiny

SHORT = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
#: The model's class, options of its configuration, and what it reads.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertForMaskedLM", {}, "text"),
    "roberta": ("RobertaForMaskedLM", {}, "text"),
    "modernbert": ("ModernBertForMaskedLM", {"local_attention": 6}, "text"),
    "vit": ("ViTForImageClassification", {}, "image"),
    "clip": ("CLIPModel", {}, "pair"),
    "siglip": ("SiglipModel", {}, "pair"),
    "whisper": ("WhisperForConditionalGeneration", {"max_source_positions": 20}, "sound"),
    "wav2vec2": ("Wav2Vec2ForCTC", {**SHORT, "apply_spec_augment": False}, "wave"),
    "bart": ("BartForConditionalGeneration", {}, "text"),
    "t5": ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu"}, "text"),
}


def tiny_encoder(family: str, **changes: Any) -> Any:
    name, options, _ = FAMILIES[family]
    model = tiny(name, **{**options, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if family == "t5" and parameter.dim() > 1:
                parameter.mul_(0.5)  # it does not scale its scores, whose weights would all be 0 or 1
    return model


def tiny_batch(family: str, seed: int = 0) -> dict[str, Any]:
    """Returns the arguments of a call of `tiny_encoder`'s model that has a loss; of two rows, with padding between and
    after the tokens where the family knows padding."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 32, (2, 12), generator=g)
    mask = torch.ones_like(tokens)
    mask[0, 9:] = mask[1, 6] = 0
    reads = FAMILIES[family][2]
    if reads == "text":
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    if reads == "sound":
        sound = torch.randn(2, 16, 40, generator=g)
        return {"input_features": sound, "decoder_input_ids": tokens, "decoder_attention_mask": mask, "labels": tokens}
    if reads == "wave":
        heard = torch.ones(2, 400, dtype=torch.long)
        heard[0, 300:] = 0
        return {"input_values": torch.randn(2, 400, generator=g), "attention_mask": heard, "labels": tokens[:, :5]}
    images = {"pixel_values": torch.randn(2, 3, 32, 32, generator=g)}
    if reads == "image":
        return {**images, "labels": torch.tensor([0, 1])}
    return {**images, "input_ids": tokens, "attention_mask": mask, "return_loss": True}
