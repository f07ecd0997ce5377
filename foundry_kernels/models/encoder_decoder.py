"""A sequence-to-sequence model: an encoder, and a decoder whose layers attend to the encoder's output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from foundry_kernels.core.checks import check_int, check_integer
from foundry_kernels.core.late import module_above
from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.context import Context
from foundry_kernels.models.extend import extended
from foundry_kernels.models.generate import generate
from foundry_kernels.models.sampling import read_prompts
from foundry_kernels.models.transformer import Transformer
from foundry_kernels.nn._backend import Backend
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.rope import RopeScaling

#: Fields of a decoder that do not apply to the encoder of the same shape.
_DECODERS = ("context_dim", "head", "tie_embeddings", "output_bias", "logit_scale")


class ReadModel(NamedTuple):
    """An encoder-decoder of transformers, converted: two configurations, two sets of weights under the names of
    :class:`Transformer`, and the decoder's start token."""

    encoder: ModelConfig
    decoder: ModelConfig
    encoder_state: dict[str, Tensor]
    decoder_state: dict[str, Tensor]
    start_token: int | None


class EncoderDecoder(nn.Module):
    """An encoder of source tokens and a causal decoder, whose layers attend to the encoder's last hidden states between
    self-attention and feed-forward. Both are a :class:`Transformer`: `encoder` and `decoder`.

    The original Transformer is ``ModelConfig(norm="layer_norm", norm_placement="post", positions="sinusoidal",
    activation="relu", attention_bias=True, mlp_bias=True, tie_embeddings=True, embedding_scale=dim ** 0.5, ...)``;
    ``norm_placement="pre"``, learned or "relative" positions are other values of the same fields.

    Args:
        config: the decoder's configuration. `causal` and `head` must be True; `context_dim` is the encoder's width.
        encoder: the encoder's configuration, with ``causal=False, head=False``; None uses the decoder's shape and
            choices.
        backend: as for :class:`Transformer`.
        share_embeddings: one embedding for both; they must have the same width and vocabulary.
        start_token: the decoder's first token, used if `targets` are given without `tokens`, and in :meth:`generate`.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is not a ModelConfig, or the two do not fit each other; the message names the
            field.

    Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoder: ModelConfig | None = None,
        backend: Backend = "auto",
        *,
        share_embeddings: bool = True,
        start_token: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, given in (("config", config), ("encoder", encoder)):
            if not isinstance(given, ModelConfig) and (name, given) != ("encoder", None):
                raise TypeError(f"{name} must be a ModelConfig; got {type(given).__name__}")
        encoder = encoder_of(config) if encoder is None else encoder
        _check_configs(config, encoder, share_embeddings)
        if start_token is not None:
            check_int("start_token", start_token, minimum=0)
            if start_token >= config.vocab_size:
                raise ValueError(f"start_token must be below vocab_size={config.vocab_size}; got {start_token}")
        self.config = dataclasses.replace(config, context_dim=encoder.dim)
        self.start_token, self.share_embeddings = start_token, share_embeddings
        self.decoder = Transformer(self.config, backend, device=device, dtype=dtype)
        self.encoder = Transformer(encoder, backend, device=device, dtype=dtype)
        self._share()

    def _share(self) -> None:
        if self.share_embeddings:  # shares the module, because `to_empty` would split a shared parameter in two
            self.encoder.tok_embeddings = self.decoder.tok_embeddings

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initialises the weights again; see :meth:`Transformer.init_weights`."""
        for part in (self.encoder, self.decoder):
            part.init_weights(generator)

    @classmethod
    def from_hf(cls, model: nn.Module, backend: Backend = "auto", **changes: Any) -> EncoderDecoder:
        """Converts a model of transformers. The result has copies of its weights, with their dtype and device. T5 (also
        T5 1.1 and Flan-T5) and BART with language-model heads are supported.

        Args:
            model: a model of transformers.
            backend: as for the class.
            changes: fields to change in both configurations, if shapes stay the same, such as a dropout or
                `max_seq_len` (2048 for T5).

        Raises:
            TypeError: the class is not supported.
            ValueError: as :meth:`Transformer.from_hf`.
        """
        read: ReadModel = module_above("seq2seq").read(model, changes)
        shares = read.encoder_state["tok_embeddings.weight"] is read.decoder_state["tok_embeddings.weight"]
        with torch.device("meta"):
            ours = cls(read.decoder, read.encoder, backend, share_embeddings=shares, start_token=read.start_token)
        ours.decoder = Transformer.from_state(ours.config, read.decoder_state, model, backend)
        ours.encoder = Transformer.from_state(ours.encoder.config, read.encoder_state, model, backend)
        ours._share()
        return ours.train(model.training)

    def encode(
        self,
        source: Tensor,
        *,
        source_lengths: Tensor | None = None,
        source_mask: Tensor | AttentionMask | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """The encoder's last hidden states ``[B, S, dim]`` of source tokens ``[B, S]``."""
        states: Tensor = self.encoder(source, attn_mask=source_mask, lengths=source_lengths, token_types=token_types)
        return states

    def read(self, source: Tensor, *, source_lengths: Tensor | None = None, **options: Any) -> Context:
        """Encodes source tokens ``[B, S]`` and computes the decoder's keys and values for them, for any number of
        calls.

        Args:
            options: `source_mask` and `token_types` of :meth:`encode`.
        """
        return self.decoder.read_context(self.encode(source, source_lengths=source_lengths, **options), source_lengths)

    def forward(
        self,
        source: Tensor | Context,
        tokens: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        source_lengths: Tensor | None = None,
        source_mask: Tensor | AttentionMask | None = None,
        attn_mask: Tensor | AttentionMask | None = None,
        lengths: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
        ignore_index: int = -100,
        return_logits: bool = False,
    ) -> Tensor | tuple[Any, ...]:
        """Returns logits of the decoder, or the loss if there are targets.

        Args:
            source: ``[B, S]`` int32 or int64 tokens of the encoder, or the result of :meth:`read`.
            tokens: ``[B, T]`` int32 or int64, the decoder's input. None is `start_token` followed by the targets
                without the last one, in which `start_token` replaces ignored targets.
            targets: ``[B, T]`` int32 or int64, the token that follows each position, or `ignore_index`.
            source_lengths: ``[B]`` int32 or int64: source tokens from ``source_lengths[b]`` on are padding, which
                neither the encoder nor the decoder sees.
            source_mask: mask of the encoder, like `attn_mask` of :class:`Transformer`.
            attn_mask, lengths, cache, last_only, ignore_index, return_logits: the decoder's, as for
                :class:`Transformer`.

        Returns:
            As for :class:`Transformer`: logits ``[B, T, V]``, or with targets ``(None, loss)``, or ``(logits, loss)``.

        Raises:
            TypeError, ValueError: as for :class:`Transformer`; there are neither tokens nor targets, targets without
                tokens or a `start_token`, or lengths or a mask for a source that was read before.
        """
        if tokens is None:
            tokens = self._moved(targets, ignore_index)
        context: Tensor | Context
        if isinstance(source, Context):
            for name, given in (("source_lengths", source_lengths), ("source_mask", source_mask)):
                if given is not None:
                    raise ValueError(f"{name} must be None: the source has been read with its own")
            context, context_lengths = source, None
        else:
            context = self.encode(source, source_lengths=source_lengths, source_mask=source_mask)
            context_lengths = source_lengths
        result: Tensor | tuple[Any, ...] = self.decoder(
            tokens,
            targets,
            attn_mask=attn_mask,
            lengths=lengths,
            context=context,
            context_lengths=context_lengths,
            cache=cache,
            last_only=last_only,
            ignore_index=ignore_index,
            return_logits=return_logits,
        )
        return result

    def _moved(self, targets: Tensor | None, ignore_index: int) -> Tensor:
        """The decoder's input for predicting `targets`."""
        if targets is None:
            raise ValueError("tokens must be given without targets; got neither")
        check_integer("targets", targets)
        if self.start_token is None:
            raise ValueError("tokens must be given: the model has no start_token to put before the targets")
        moved = targets.roll(1, -1)
        moved[..., :1] = self.start_token
        return moved.masked_fill(moved == ignore_index, self.start_token)

    def extended(self, max_seq_len: int, rope_scaling: RopeScaling | str | None = None) -> Self:
        """Returns the model with an encoder and a decoder for `max_seq_len` positions and this one's parameters; see
        :func:`foundry_kernels.models.extend.extended`."""
        return extended(self, max_seq_len, rope_scaling)

    def make_cache(self, batch_size: int, max_len: int | None = None) -> KVCache:
        """Returns an empty cache of the decoder; see :meth:`Transformer.make_cache`."""
        return self.decoder.make_cache(batch_size, max_len)

    @torch.no_grad()
    def generate(
        self,
        source: Tensor | Sequence[Tensor | Sequence[int]],
        max_new_tokens: int,
        *,
        source_lengths: Tensor | None = None,
        prompts: Tensor | Sequence[Tensor | Sequence[int]] | None = None,
        **options: Any,
    ) -> Any:
        """Generates a sequence for each source. The sources are encoded once, and their keys and values are reused.

        Args:
            source: ``[B, S]`` tokens, or a sequence of 1-D sources, which are padded and their lengths known.
            max_new_tokens: for each source; 0 or more.
            source_lengths: as in :meth:`forward`; only for a ``[B, S]`` tensor.
            prompts: the first tokens of the decoder for each source; None is `start_token`.
            options: options of :func:`foundry_kernels.models.generate`: `temperature`, `stop_token` and others.
                `return_stats` counts only the decoder's time.

        Returns:
            For each source, the prompt and its continuation, 1-D int64 on the model's device; with a `return_`
            option a tuple, as for :func:`foundry_kernels.models.generate`.

        Raises:
            TypeError, ValueError: as :func:`foundry_kernels.models.generate` and :meth:`forward`, the numbers of
                prompts and sources differ, or there is neither a prompt nor a `start_token`.
        """
        device = self.decoder.tok_embeddings.weight.device
        if not isinstance(source, Tensor):
            if source_lengths is not None:
                raise ValueError("source_lengths are for a [B, S] tensor; rows of a sequence have their own")
            rows = read_prompts(source, self.encoder.config.vocab_size, "source")
            if not rows:
                return generate(self.decoder, [], max_new_tokens, **options)
            source_lengths = torch.tensor([len(row) for row in rows], device=device)
            source = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        if prompts is None:
            if self.start_token is None:
                raise ValueError("prompts must be given: the model has no start_token")
            prompts = [[self.start_token]] * source.shape[0]
        elif len(prompts) != source.shape[0]:
            raise ValueError(f"prompts must be one for each of {source.shape[0]} sources; got {len(prompts)}")
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            context = self.read(source, source_lengths=source_lengths)
            return generate(self.decoder, prompts, max_new_tokens, context=context, **options)
        finally:
            for module, mode in modes:
                module.training = mode


def encoder_of(config: ModelConfig) -> ModelConfig:
    """Returns the configuration of an encoder with a decoder's shape and choices."""
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig; got {type(config).__name__}")
    fields: dict[str, Any] = {name: ModelConfig.__dataclass_fields__[name].default for name in _DECODERS}
    return dataclasses.replace(config, **{**fields, "causal": False, "head": False})


def _check_configs(config: ModelConfig, encoder: ModelConfig, share_embeddings: bool) -> None:
    for name, part, wanted in (
        ("config", config, {"causal": True, "head": True}),
        ("encoder", encoder, {"causal": False, "head": False, "context_dim": None}),
    ):
        for field, value in wanted.items():
            if getattr(part, field) != value:
                raise ValueError(f"{name} must have {field}={value}; got {getattr(part, field)}")
    if config.context_dim not in (None, encoder.dim):
        raise ValueError(f"config must have context_dim={encoder.dim}, the encoder's width; got {config.context_dim}")
    for field in ("dim", "vocab_size") if share_embeddings else ():
        ours, theirs = getattr(config, field), getattr(encoder, field)
        if ours != theirs:
            raise ValueError(f"share_embeddings needs one {field}; the decoder has {ours}, the encoder {theirs}")
