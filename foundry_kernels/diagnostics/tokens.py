"""Tokenizes texts, and spells tokens on the axes of a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Signs for invisible characters.
_VISIBLE = {" ": "␣", "▁": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True)
class Tokens:
    """A checkpoint's tokenizer; a call with a text returns its tokens.

    Attributes:
        encode: returns the tokens of a text.
        spell: returns a token's text, or the closest text that the tokenizer has.
    """

    encode: Callable[[str], list[int]]
    spell: Callable[[int], str]

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)

    def labels(self, tokens: Sequence[int]) -> list[str]:
        """Returns a label for each token, in which spaces and line ends are visible."""
        return [visible(self.spell(token)) for token in tokens]


def visible(text: str) -> str:
    """`text` with a sign for each space, tab and line end, and escapes for other characters that cannot be printed."""
    return "".join(_VISIBLE.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text)


def spell_byte(token: int) -> str:
    """A byte as its ASCII character or as an escape; a token that is not a byte as its number."""
    return chr(token) if token < 128 else f"\\x{token:02x}" if token < 256 else f"<{token}>"


def spell_bytes_of(token: str) -> str:
    """A token of a byte-level encoding, which writes each byte as a printable character (GPT-2's way); bytes that are
    only a part of a character become escapes."""
    try:
        return bytes(map(_BYTES.__getitem__, token)).decode(errors="backslashreplace")
    except KeyError:  # a special token, which has no bytes
        return token


def _byte_characters() -> dict[str, int]:
    """Bytes by their characters: the byte's own if it is printable, otherwise the next one from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
