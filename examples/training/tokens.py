"""Token files: the tokens of a text in `FILE.bin`, which is memory-mapped, and their description in `FILE.json`.

FILE.bin contains only tokens, in the narrowest of uint8, uint16 and uint32. Tokens are bytes, or byte pairs of an
encoding in FILE.json, which was trained on the text (by https://github.com/huggingface/tokenizers).
"""

from __future__ import annotations

import array
import codecs
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.training.text import BYTES, Bytes, Text, TextError, split

FORMAT, VERSION = "foundry_kernels/examples/tokens", 1
#: By name: torch's dtype, the code of `array`, and the largest vocabulary that fits.
DTYPES = {
    "uint8": (torch.uint8, "B", 2**8),
    "uint16": (torch.uint16, "H", 2**16),
    "uint32": (torch.uint32, "I", 2**32),
}
CHUNK = 1 << 20  # bytes tokenized at a time


class BytePairs(Bytes):
    """A byte-level byte-pair encoding, which encodes any text without loss."""

    unit = "token"

    def __init__(self, state: str) -> None:
        self._state, self._tokenizer = state, _library().Tokenizer.from_str(state)
        self.size = self._tokenizer.get_vocab_size()
        self.description = f"{self.size:,} byte pairs as tokens"
        # Its alphabet has one character per byte.
        self._lengths = torch.tensor([len(self._tokenizer.id_to_token(token)) for token in range(self.size)])

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))

    def count_bytes(self, tokens: Tensor) -> int:
        return int(self._lengths[tokens].sum())

    def state(self) -> str:
        return self._state


def train_byte_pairs(text: Path, size: int) -> BytePairs:
    """An encoding of at most `size` tokens, trained on the first nine tenths because the rest may be held out.

    Raises:
        TextError: the text cannot be read or is not UTF-8, or the library is missing.
    """
    tokenizers = _library()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_characters(text, share=0.9), trainer)
    return BytePairs(tokenizer.to_str())


def write_tokens(text: Path, out: Path, vocabulary: Bytes) -> int:
    """Writes the tokens of `text` to `out`, which is FILE.bin, and FILE.json next to it. Returns the number of tokens.

    Raises:
        TextError: the text cannot be read, or the files cannot be written.
    """
    name = next(name for name, (_, _, room) in DTYPES.items() if vocabulary.size <= room)
    digest, count = hashlib.sha256(), 0
    new = out.with_name(out.name + ".new")
    try:
        with new.open("wb") as file:
            for tokens in _encoded(text, vocabulary):
                packed = array.array(DTYPES[name][1], tokens)
                digest.update(packed)
                packed.tofile(file)
                count += len(packed)
        if not count:
            raise TextError(f"the text {text} is empty")
        state = vocabulary.state()
        about = {
            "format": FORMAT,
            "version": VERSION,
            "text": str(text),
            "dtype": name,
            "tokens": count,
            "sha256": digest.hexdigest(),
            "tokenizer": None if state is None else json.loads(state),
        }
        os.replace(new, out)
        _beside(out).write_text(json.dumps(about))
    except OSError as error:
        raise TextError(f"cannot write the tokens {out}: {error.strerror or error}") from None
    finally:
        new.unlink(missing_ok=True)
    return count


def open_tokens(path: Path, length: int) -> Text:
    """Memory-maps the tokens in `path`. Windows of `length` must fit the training part and the held-out part.

    Raises:
        TextError: a file is missing, damaged, too short or not of this format, or the library is missing.
    """
    about = _about(path)
    dtype = DTYPES[about["dtype"]][0]
    try:
        with path.open("rb") as file:  # read once, in blocks
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TextError(f"cannot read the tokens {path}: {error.strerror or error}") from None
    if digest != about["sha256"]:
        raise TextError(f"{path} is damaged, or not the file that {_beside(path).name} describes: its sha256 differs")
    vocabulary = BYTES
    if about["tokenizer"] is not None:
        try:
            vocabulary = BytePairs(json.dumps(about["tokenizer"]))
        except TextError:
            raise
        except Exception as error:  # damaged files raise errors of many types
            raise TextError(f"{_beside(path)} is damaged: its tokenizer does not load: {error}") from None
    tokens = torch.from_file(str(path), shared=False, size=path.stat().st_size // dtype.itemsize, dtype=dtype)
    return split(str(path), tokens, length, digest, vocabulary)


def _about(path: Path) -> dict[str, Any]:
    """Reads the description of the tokens."""
    beside = _beside(path)
    if path.suffix != ".bin" or not beside.exists():
        raise TextError(f"{path} is not a token file: prepare_tokens.py makes FILE.bin and FILE.json")
    try:
        about = json.loads(beside.read_text())
    except (OSError, ValueError) as error:
        raise TextError(f"cannot read {beside}: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise TextError(f"{beside} was not written by prepare_tokens.py")
    if about.get("version") != VERSION:
        raise TextError(f"{beside} has version {about.get('version')}; this program reads {VERSION}")
    if about.get("dtype") not in DTYPES or not {"sha256", "tokenizer"} <= about.keys():
        raise TextError(f"{beside} is damaged: it has no dtype, sha256 or tokenizer")
    return about


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


def _encoded(text: Path, vocabulary: Bytes) -> Iterator[Sequence[int]]:
    if vocabulary.state() is None:
        yield from _chunks(text)
    else:
        yield from map(vocabulary.encode, _characters(text))


def _characters(text: Path, share: float = 1.0) -> Iterator[str]:
    """The first `share` of a UTF-8 file, in chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _chunks(text, share):
            yield decoder.decode(chunk)
        if share == 1.0:
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise TextError(f"the text {text} is not UTF-8 ({error.reason}): without --vocab tokens are bytes") from None


def _chunks(text: Path, share: float = 1.0) -> Iterator[bytes]:
    try:
        with text.open("rb") as file:
            left = int(os.fstat(file.fileno()).st_size * share)
            while left > 0 and (chunk := file.read(min(CHUNK, left))):
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise TextError(f"cannot read the text {text}: {error.strerror or error}") from None


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise TextError("tokenizers is missing; pip install 'foundry-kernels[tokenizers]'") from None
    return tokenizers
