"""How texts become tokens, and how tokens are spelled on the axes of a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Signs for what would not be seen.
_VISIBLE = {" ": "␣", "▁": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True)
class Tokens:
    """What a checkpoint makes of texts: called with one, it returns the tokens.

    Attributes:
        encode: the tokens of a text.
        spell: a token's own text, or the nearest to it that the tokenizer knows.
    """

    encode: Callable[[str], list[int]]
    spell: Callable[[int], str]

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)

    def labels(self, tokens: Sequence[int]) -> list[str]:
        """Returns a label for each token, in which spaces and ends of lines are seen."""
        return [visible(self.spell(token)) for token in tokens]


def visible(text: str) -> str:
    """`text` with a sign for each space, tab and end of a line, and escapes for what else has no sign of its own."""
    return "".join(_VISIBLE.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text)


def spell_byte(token: int) -> str:
    """A byte as the character of ASCII, or as an escape; a token that is no byte as its number."""
    return chr(token) if token < 128 else f"\\x{token:02x}" if token < 256 else f"<{token}>"


def spell_bytes_of(token: str) -> str:
    """A token of a byte-level encoding, which writes each byte as a printable character (GPT-2's way); bytes that are
    a part of a character only become escapes."""
    try:
        return bytes(map(_BYTES.__getitem__, token)).decode(errors="backslashreplace")
    except KeyError:  # a special token, which is no bytes
        return token


def _byte_characters() -> dict[str, int]:
    """Bytes by the characters that stand for them: themselves where they are printable, or the next from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
