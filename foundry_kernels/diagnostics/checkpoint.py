"""Reads the checkpoints of the command, and tokenizes texts for them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from foundry_kernels.diagnostics.reparam import SigmaReparam
from foundry_kernels.diagnostics.tokens import Tokens, spell_byte, spell_bytes_of
from foundry_kernels.models import EncoderDecoder, ModelConfig, Transformer
from foundry_kernels.ops.rope import RopeScaling


class CheckpointError(Exception):
    """A checkpoint cannot be read; the message is for the user."""


def load(path: Path) -> tuple[Transformer, Tokens]:
    """Returns a model that is not an encoder-decoder, and its tokens; see :func:`read`.

    Raises:
        CheckpointError: as :func:`read`, or the model is an encoder with a decoder.
    """
    model, tokens = read(path)
    if isinstance(model, EncoderDecoder):
        raise CheckpointError(f"{path} is an encoder with a decoder; it must be a single Transformer")
    return model, tokens


def read(path: Path) -> tuple[Transformer | EncoderDecoder, Tokens]:
    """Returns a model and its :class:`Tokens`: those of the tokenizer next to the model, or bytes.

    Args:
        path: a folder saved by transformers (a language model, an encoder, an encoder with a decoder); or a file of
            ``torch.save({"config": dataclasses.asdict(config), "model": model.state_dict()}, path)``; or a checkpoint
            of `examples/train.py`.

    Raises:
        CheckpointError: it does not exist, is not one of these, or `from_hf` does not support the model.
    """
    with _refusing(path):
        if path.is_dir():
            return _from_folder(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about other pickles before it raises
            content = torch.load(path, map_location="cpu", weights_only=True)
        config, state, tokenizer = _content(content)
        model = Transformer(config)
        reparam = SigmaReparam(model) if SigmaReparam.is_in(state) else None
        model.load_state_dict(state)
        if reparam is not None:
            reparam.remove()
        return model, _bytes_of(model) if tokenizer is None else _tokens_of(tokenizer)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turns any error into one that names the checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # damaged files raise errors of many types
        lines = str(error).strip().splitlines() or [""]
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {lines[0][:200]}") from None


def load_config(path: Path) -> ModelConfig:
    """Returns the configuration of a checkpoint for :func:`load`, without loading its weights.

    Raises:
        CheckpointError: as :func:`load`.
    """
    with _refusing(path):
        if path.is_dir():
            config, kind, family = _kind_of(path)
            if family is EncoderDecoder:
                raise CheckpointError(f"{path} is an encoder with a decoder; it must be a single Transformer")
            with torch.device("meta"):
                model = kind.from_config(config)
            return Transformer.read_hf(model, {})[0]
        return _content(torch.load(path, map_location="cpu", weights_only=True, mmap=True))[0]


def _kind_of(path: Path) -> tuple[Any, Any, type[Transformer] | type[EncoderDecoder]]:
    """The configuration of a folder, the class of transformers that loads it, and the class in this package that
    replaces it."""
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json: transformers has not saved it")
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    if config.is_encoder_decoder:
        return config, transformers.AutoModelForSeq2SeqLM, EncoderDecoder
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        return config, transformers.AutoModel, Transformer  # an encoder: its head does not predict the next token
    return config, transformers.AutoModelForCausalLM, Transformer


def _from_folder(path: Path) -> tuple[Transformer | EncoderDecoder, Tokens]:
    _, kind, family = _kind_of(path)
    model = family.from_hf(kind.from_pretrained(path, local_files_only=True))
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return model, _bytes_of(model)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spell = _spelling(lambda token: str(tokenizer.convert_ids_to_tokens(token)), backend)
    return model, Tokens(lambda text: tokenizer(text)["input_ids"], spell)


def _content(content: Any) -> tuple[ModelConfig, dict[str, Any], str | None]:
    if isinstance(content, dict) and {"config", "model"} <= content.keys():
        return _config(content["config"]), content["model"], None
    if isinstance(content, dict) and {"settings", "state"} <= content.keys():
        fields = {k.removeprefix("model "): v for k, v in content["settings"].items() if k.startswith("model ")}
        return _config(fields), content["state"]["model"], content["state"].get("tokenizer")
    raise CheckpointError("it has neither config and model, nor a run of examples/train.py")


def _config(fields: dict[str, Any]) -> ModelConfig:
    if fields.get("positions", "rope") != "rope":  # older releases wrote the default True to each file
        fields = {name: value for name, value in fields.items() if name != "rope_interleaved"}
    scaling = fields.get("rope_scaling")
    return ModelConfig(**{**fields, "rope_scaling": RopeScaling(**scaling) if isinstance(scaling, dict) else scaling})


def _tokens_of(tokenizer: str) -> Tokens:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CheckpointError("tokenizers is missing; pip install 'foundry-kernels[tokenizers]'") from None
    found = Tokenizer.from_str(tokenizer)
    return Tokens(lambda text: found.encode(text).ids, _spelling(found.id_to_token, found))


def _spelling(token_of: Callable[[int], str | None], tokenizer: Any) -> Callable[[int], str]:
    """Returns a function that spells tokens, from their strings by `token_of`. `tokenizer` is from the library
    tokenizers, or None."""
    bytewise = tokenizer is not None and '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])

    def spell(token: int) -> str:
        string = token_of(token) or f"<{token}>"
        return spell_bytes_of(string) if bytewise else string

    return spell


def _bytes_of(model: Transformer | EncoderDecoder) -> Tokens:
    if model.config.vocab_size < 256:
        raise CheckpointError(
            f"a vocabulary of {model.config.vocab_size} is too small for bytes: a tokenizer is needed"
        )
    return Tokens(lambda text: list(text.encode()), spell_byte)
