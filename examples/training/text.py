"""The text of `train.py`, and batches from it. Here a token is a byte; `tokens.py` has other tokens."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

STDLIB_BYTES = 2_000_000  # limit of the standard library's source: a few hundred steps never read more


class TextError(Exception):
    """The text cannot be used for training; the message is for the user."""


class Bytes:
    """A vocabulary of bytes."""

    size = 256
    unit = "byte"
    description = "bytes as tokens"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def count_bytes(self, tokens: Tensor) -> int:
        """The number of bytes of text in the tokens."""
        return tokens.numel()

    def state(self) -> str | None:
        """The tokenizer as JSON, for a checkpoint."""
        return None


BYTES = Bytes()


@dataclass(frozen=True)
class Text:
    """A text as tokens: the head to train on, the tail held out."""

    name: str
    train: Tensor  # uint8, uint16 or uint32 [n]
    held_out: Tensor  # the same [m]
    digest: str
    vocabulary: Bytes = BYTES

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Windows at random positions: tokens and their successors, int64 ``[size, length]``."""
        starts = torch.randint(len(self.train) - length, (size,), generator=generator)
        return _windows(self.train, starts, length)

    def held_out_batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Windows spread evenly over the held-out tail, the same in every call."""
        starts = torch.linspace(0, len(self.held_out) - length - 1, size).long()
        return _windows(self.held_out, starts, length)


def read_text(path: Path | None, length: int) -> Text:
    """The file at `path`, or the standard library's source. Windows of `length` bytes must fit both of its parts.

    Raises:
        TextError: the file is missing, unreadable, empty or too short.
    """
    if path is None:
        name, data = "the Python standard library's source", _standard_library()
    else:
        name = str(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TextError(f"cannot read the text {path}: {error.strerror or error}") from None
    if not data:
        raise TextError(f"the text {name} is empty")
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return split(name, tokens, length, hashlib.sha256(data).hexdigest(), BYTES)


def split(name: str, tokens: Tensor, length: int, digest: str, vocabulary: Bytes) -> Text:
    """Holds out a tenth of the tokens, at most 100,000.

    Raises:
        TextError: windows of `length` tokens do not fit both parts.
    """
    tail = max(length + 1, min(len(tokens) // 10, 100_000))
    if len(tokens) < tail + 2 * (length + 1):
        raise TextError(
            f"the text {name} is too short: {len(tokens)} {vocabulary.unit}s; sequences of {length} need at least "
            f"{3 * (length + 1)}"
        )
    return Text(name, tokens[:-tail], tokens[-tail:], digest, vocabulary)


def _standard_library() -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise TextError(f"no source of the standard library in {folder}; pass a text with --text")
    parts, size = [], 0
    for file in files:
        parts.append(file.read_bytes())
        size += len(parts[-1])
        if size >= STDLIB_BYTES:
            break
    return b"".join(parts)[:STDLIB_BYTES]


def _windows(data: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = data[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
