"""The text of `train.py`: bytes in, batches out."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

STDLIB_BYTES = 2_000_000  # the standard library is cut there: more is never read in a few hundred steps


class TextError(Exception):
    """The text cannot be trained on."""


@dataclass(frozen=True)
class Text:
    """A text as bytes: the head to train on, the tail held out."""

    name: str
    train: Tensor  # uint8 [n]
    held_out: Tensor  # uint8 [m]
    digest: str

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Windows at random places: tokens and the bytes that follow them, int64 ``[size, length]``."""
        starts = torch.randint(len(self.train) - length, (size,), generator=generator)
        return _windows(self.train, starts, length)

    def held_out_batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Windows spread evenly over the held-out tail, the same at every call."""
        starts = torch.linspace(0, len(self.held_out) - length - 1, size).long()
        return _windows(self.held_out, starts, length)


def read_text(path: Path | None, length: int) -> Text:
    """The file at `path`, or the standard library's source; windows of `length` bytes must fit both its parts.

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
    tail = max(length + 1, min(len(data) // 10, 100_000))
    if len(data) < tail + 2 * (length + 1):
        raise TextError(
            f"the text {name} is too short: {len(data)} bytes; sequences of {length} need at least {3 * (length + 1)}"
        )
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Text(name, tokens[:-tail], tokens[-tail:], hashlib.sha256(data).hexdigest())


def _standard_library() -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise TextError(f"no source of the standard library in {folder}; name a text with --text")
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
