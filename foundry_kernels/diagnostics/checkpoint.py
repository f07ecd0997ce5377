"""The checkpoints that the command reads, and how their texts become tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foundry_kernels.diagnostics.reparam import SigmaReparam
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.ops.rope import RopeScaling


class CheckpointError(Exception):
    """A checkpoint that cannot be read; the message is for the user."""


Encode = Callable[[str], list[int]]


def load(path: Path) -> tuple[Transformer, Encode]:
    """Returns a model, and what makes tokens of a text: the tokenizer that lies with the model, or its bytes.

    Args:
        path: a folder that transformers has saved; or a file of ``torch.save({"config": dataclasses.asdict(config),
            "model": model.state_dict()}, path)``; or a checkpoint of `examples/train.py`.

    Raises:
        CheckpointError: there is none, it is none of these, or `Transformer` has no such model.
    """
    try:
        if path.is_dir():
            return _from_folder(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of foreign pickles and then raises
            content = torch.load(path, map_location="cpu", weights_only=True)
        config, state, tokenizer = _content(content)
        model = Transformer(config)
        reparam = SigmaReparam(model) if SigmaReparam.is_in(state) else None
        model.load_state_dict(state)
        if reparam is not None:
            reparam.remove()
        if tokenizer is not None:
            return model, _tokens_of(tokenizer)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file raises whatever the damaged part leads to
        lines = str(error).strip().splitlines() or [""]
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {lines[0][:200]}") from None
    return model, _bytes_of(model)


def _from_folder(path: Path) -> tuple[Transformer, Encode]:
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json: it is no folder that transformers has saved")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = Transformer.from_hf(AutoModelForCausalLM.from_pretrained(path, local_files_only=True))
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return model, _bytes_of(model)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return model, lambda text: tokenizer(text)["input_ids"]


def _content(content: Any) -> tuple[ModelConfig, dict[str, Any], str | None]:
    if isinstance(content, dict) and {"config", "model"} <= content.keys():
        return _config(content["config"]), content["model"], None
    if isinstance(content, dict) and {"settings", "state"} <= content.keys():
        fields = {k.removeprefix("model "): v for k, v in content["settings"].items() if k.startswith("model ")}
        return _config(fields), content["state"]["model"], content["state"].get("tokenizer")
    raise CheckpointError("it holds neither config and model, nor a run of examples/train.py")


def _config(fields: dict[str, Any]) -> ModelConfig:
    scaling = fields.get("rope_scaling")
    return ModelConfig(**{**fields, "rope_scaling": RopeScaling(**scaling) if isinstance(scaling, dict) else scaling})


def _tokens_of(tokenizer: str) -> Encode:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CheckpointError("tokenizers is missing; pip install 'foundry-kernels[tokenizers]'") from None
    encode = Tokenizer.from_str(tokenizer).encode
    return lambda text: encode(text).ids


def _bytes_of(model: Transformer) -> Encode:
    if model.config.vocab_size < 256:
        raise CheckpointError(f"a vocabulary of {model.config.vocab_size} has no place for bytes, and no tokenizer")
    return lambda text: list(text.encode())
