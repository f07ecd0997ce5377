"""The input of a model's first block: embeddings of tokens, with their types and positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels.models.call import Call, Positions
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.inputs import check_range, values_known
from foundry_kernels.models.model import Model
from foundry_kernels.nn import SinusoidalEmbedding
from foundry_kernels.nn._layers import is_observed


def position_embedding(
    config: ModelConfig, device: Any, dtype: torch.dtype | None
) -> nn.Embedding | SinusoidalEmbedding | None:
    if config.positions == "learned":
        return nn.Embedding(config.max_seq_len, config.dim, device=device, dtype=dtype)
    if config.positions == "sinusoidal":
        return SinusoidalEmbedding(config.dim, config.max_seq_len, device=device)
    return None


def embed(model: Model, call: Call, positions: Positions | None) -> Tensor:
    """Returns the stream before the first block. positions: those of the tokens, if they do not simply follow the
    cached ones; `max_seqlen` is then the end of the longest sequence."""
    config, table, types, norm = model.config, model.pos_embeddings, model.type_embeddings, model.embedding_norm
    stream, dropout = _rows(model.tok_embeddings, call.tokens, config.vocab_size), config.embedding_dropout
    if config.embedding_scale != 1.0:
        # Rounded to the embeddings' dtype first, as Gemma was trained.
        stream = stream * torch.full((), config.embedding_scale, dtype=stream.dtype, device=stream.device)
    if types is not None:
        stream = stream + (types.weight[0] if call.token_types is None else types(call.token_types))
    if table is not None:
        start, count = 0 if call.cache is None else call.cache.length, stream.shape[1]
        at, _, longest = (None, None, None) if positions is None else positions
        if isinstance(table, SinusoidalEmbedding):
            stream = table(stream, start, at, count if longest is None else longest)
        else:
            at = torch.arange(start, start + count, device=stream.device) if at is None else at
            stream = stream + table(at)
    if norm is not None:
        stream = norm(stream)
    return F.dropout(stream, dropout, model.training) if dropout else stream


def _rows(table: nn.Embedding, tokens: Tensor, vocab_size: int) -> Tensor:
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
