"""The input of a model's first block: embeddings of tokens, with their types and positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.inputs import check_range, values_known
from foundry_kernels.nn import SinusoidalEmbedding
from foundry_kernels.nn._layers import is_observed

if TYPE_CHECKING:
    from foundry_kernels.models.transformer import Transformer


def position_embedding(
    config: ModelConfig, device: Any, dtype: torch.dtype | None
) -> nn.Embedding | SinusoidalEmbedding | None:
    if config.positions == "learned":
        return nn.Embedding(config.max_seq_len, config.dim, device=device, dtype=dtype)
    if config.positions == "sinusoidal":
        return SinusoidalEmbedding(config.dim, config.max_seq_len, device=device)
    return None


def needs_preparing(config: ModelConfig) -> bool:
    """Whether the first block reads anything but the rows of the embedding."""
    added = config.positions in ("learned", "sinusoidal") or config.token_types
    return bool(added or config.embedding_norm or config.embedding_dropout or config.embedding_scale != 1.0)


def embed(table: nn.Embedding, tokens: Tensor, vocab_size: int) -> Tensor:
    """The embeddings of the tokens. On the CPU an error names a token outside of the vocabulary."""
    if not values_known(tokens):
        return table(tokens)
    # The embedding checks each token anyway. This only adds which token it was.
    looks = type(table) is nn.Embedding and table.num_embeddings == vocab_size
    if not looks or is_observed(table):
        check_range("tokens", tokens, vocab_size)
    try:
        return table(tokens)
    except IndexError:
        check_range("tokens", tokens, vocab_size)
        raise


def prepare(
    model: Transformer,
    stream: Tensor,
    start: int,
    positions: Tensor | None,
    token_types: Tensor | None,
    max_seqlen: int | None,
) -> Tensor:
    """Adds embeddings of the positions from `start` on, or of given positions of sequences of at most `max_seqlen`, to
    the stream of the first block."""
    config, table, norm, dropout = (
        model.config, model.pos_embeddings, model.embedding_norm, model.config.embedding_dropout
    )  # fmt: skip
    if config.embedding_scale != 1.0:
        # Rounded to the embeddings' dtype first, as Gemma was trained.
        stream = stream * torch.full((), config.embedding_scale, dtype=stream.dtype, device=stream.device)
    if model.type_embeddings is not None:
        types = model.type_embeddings
        stream = stream + (types.weight[0] if token_types is None else types(token_types))
    if isinstance(table, SinusoidalEmbedding):
        stream = table(stream, start, positions, stream.shape[1] if max_seqlen is None else max_seqlen)
    elif table is not None:
        if positions is None:
            positions = torch.arange(start, start + stream.shape[1], device=stream.device)
        stream = stream + table(positions)
    if norm is not None:
        stream = norm(stream)
    return F.dropout(stream, dropout, model.training) if dropout else stream
