"""The shape of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foundry_kernels.ops.rope import RopeScaling


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a :class:`Transformer`, in the names of Meta's `params.json`.

    Attributes:
        dim: width of the residual stream.
        n_layers: blocks.
        n_heads: query heads.
        n_kv_heads: key-value heads, a divisor of `n_heads`; None is `n_heads`, 1 is multi-query attention.
        vocab_size: tokens are 0 .. vocab_size - 1.
        max_seq_len: positions the rotary tables cover.
        multiple_of: the feed-forward width is rounded up to a multiple of it.
        ffn_dim_multiplier: factor on the feed-forward width before it is rounded up.
        hidden_dim: the feed-forward width itself, which overrides the two above.
        head_dim: width of a head, even; None is ``dim // n_heads``.
        norm_eps: epsilon of every RMSNorm.
        norm_round_before_weight: round ``x / rms`` before the weight multiplies it, as Meta's code does. It matters
            only in low precision; False is more accurate.
        rope_base: base of the rotary wavelengths (`rope_theta` in Meta's files).
        rope_scaling: None, or a :class:`foundry_kernels.RopeScaling`.
        rope_interleaved: True pairs the dimensions (2i, 2i+1), as Meta's checkpoints need; False (i, i + D/2).
        tie_embeddings: the output projection is the embedding's matrix.
        init_std: standard deviation of the initial weights.

    Raises:
        TypeError, ValueError: a field is invalid; the message names it.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None = None
    vocab_size: int = 32000
    max_seq_len: int = 2048
    multiple_of: int = 8
    ffn_dim_multiplier: float | None = None
    hidden_dim: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-5
    norm_round_before_weight: bool = False
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = True
    tie_embeddings: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "vocab_size", "max_seq_len", "multiple_of"):
            _check_size(name, getattr(self, name))
        for name in ("n_kv_heads", "hidden_dim", "head_dim"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
        for name, low in (("ffn_dim_multiplier", 0.0), ("norm_eps", 0.0), ("rope_base", 1.0), ("init_std", 0.0)):
            value = getattr(self, name)
            if value is not None and not (value > low and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and > {low:g}; got {value}")
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads={self.kv_heads}; got {self.n_heads}")
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(
                f"dim must be a multiple of n_heads={self.n_heads} unless head_dim is given; got {self.dim}"
            )
        if self.head_width % 2:
            raise ValueError(f"head_dim must be even, for the rotary pairs; got {self.head_width}")

    # The three below are derived and not filled in, so that `dataclasses.replace` derives them anew.

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        """Feed-forward width: ``int(2 * 4 dim / 3)``, times `ffn_dim_multiplier`, up to a multiple of `multiple_of`."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        width = int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-width // self.multiple_of) * self.multiple_of


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")
