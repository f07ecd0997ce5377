"""Attention maps. Only these functions allocate T x T matrices, for one text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_integer, check_rank
from foundry_kernels.core.registry import OPS, override
from foundry_kernels.diagnostics.recorder import check_model
from foundry_kernels.models import EncoderDecoder, Transformer
from foundry_kernels.nn.self_attention import SelfAttention
from foundry_kernels.ops.flash_attention import flash_attention, reference

#: The attentions of an encoder with a decoder.
PARTS = ("encoder", "decoder", "cross")
Maps = dict[tuple[int, int], Tensor]


def attention_weights(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """Returns the attention weights ``[B, H, T, S]`` of queries ``[B, H, T, D]`` and keys ``[B, Hk, S, D]``:
    ``softmax(q k^T / sqrt(D))`` over the keys that a query sees. The reference computes them, in q's dtype.

    Args:
        options: `causal`, `scale`, `window`, `softcap`, `alibi_slopes`, `attn_mask`, `sinks` and `align` of
            :func:`foundry_kernels.flash_attention`.

    Raises:
        TypeError, ValueError: as that function.
    """
    check_rank("k", k, 4, "[B, Hk, S, D]")
    weights: Tensor = flash_attention(q, k, _unit_values(k, k.dtype), backend="reference", **options)
    return weights


@torch.no_grad()
def attention_maps(model: Transformer, tokens: Tensor, heads: Sequence[tuple[int, int]]) -> Maps:
    """Returns the attention weights for one text, computed by the reference.

    Args:
        model: a :class:`foundry_kernels.models.Transformer`. It runs in evaluation mode, and its mode is restored.
        tokens: ``[1, T]`` int32 or int64.
        heads: pairs of a layer with attention and a query head.

    Returns:
        for each pair ``[T, T]`` in the dtype of the model's values. Row t has the weights of token t and sums to 1.

    Raises:
        TypeError: another model, or tokens that are not integers.
        ValueError: a layer or head does not exist, or tokens have another shape.
    """
    attentions = _attentions_of(check_model(model))
    _check("tokens", tokens, heads, attentions)
    return _maps(model, attentions, heads, lambda: model(tokens))


@torch.no_grad()
def encoder_decoder_maps(
    model: EncoderDecoder, source: Tensor, tokens: Tensor, part: str, heads: Sequence[tuple[int, int]]
) -> Maps:
    """Returns the attention weights for a source text and a target text, computed by the reference.

    Args:
        model: a :class:`foundry_kernels.models.EncoderDecoder`. It runs in evaluation mode, and its mode is restored.
        source: ``[1, S]`` int32 or int64, the encoder's tokens.
        tokens: ``[1, T]`` int32 or int64, the decoder's tokens.
        part: "encoder" or "decoder" for self-attention, or "cross" for the decoder's attention to the encoder.
        heads: pairs of a layer and a query head of that part.

    Returns:
        for each pair ``[S, S]``, ``[T, T]`` or ``[T, S]``, in the dtype of the model's values.

    Raises:
        TypeError: another model, or tokens that are not integers.
        ValueError: an unknown part, a layer or head that does not exist, or tokens of another shape.
    """
    if not isinstance(model, EncoderDecoder):
        raise TypeError(f"model must be a foundry_kernels.models.EncoderDecoder; got {type(model).__name__}")
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}; got {part!r}")
    if part == "cross":
        attentions = [cast("SelfAttention | None", block.cross_attention) for block in model.decoder.layers]
    else:
        attentions = _attentions_of(model.encoder if part == "encoder" else model.decoder)
    _check("source", source, heads, attentions)
    _check("tokens", tokens, heads, attentions)
    return _maps(model, attentions, heads, lambda: model(source, tokens))


def _unit_values(k: Tensor, dtype: torch.dtype) -> Tensor:
    """Values for which the outputs are the weights: the rows of a unit matrix in each head."""
    return torch.eye(k.shape[2], dtype=dtype, device=k.device).expand(*k.shape[:2], -1, -1)


def _attentions_of(model: Transformer) -> list[SelfAttention | None]:
    """The attention of each layer, or None."""
    return [next((m for m in block.children() if isinstance(m, SelfAttention)), None) for block in model.layers]


def _check(
    name: str, tokens: Tensor, heads: Sequence[tuple[int, int]], attentions: Sequence[SelfAttention | None]
) -> None:
    check_integer(name, tokens, 2, "[1, T]")
    if tokens.shape[0] != 1:
        raise ValueError(f"{name} must be [1, T], one text; got shape {tuple(tokens.shape)}")
    n_layers = len(attentions)
    for layer, head in heads:
        if not 0 <= layer < n_layers:
            raise ValueError(f"heads must be (layer, head) of {n_layers} layers; got ({layer}, {head})")
        if (attention := attentions[layer]) is None:
            raise ValueError(f"heads must be of layers with attention, which layer {layer} has not; got {list(heads)}")
        if not 0 <= head < attention.n_heads:
            raise ValueError(f"heads must be (layer, head) of {attention.n_heads} heads; got ({layer}, {head})")


def _maps(
    model: torch.nn.Module,
    attentions: Sequence[SelfAttention | None],
    heads: Sequence[tuple[int, int]],
    run: Callable[[], Any],
) -> Maps:
    """The weights of these heads of `attentions` in a call of the model by `run`."""
    found: Maps = {}
    running: int | None = None

    def begin(index: int) -> None:
        nonlocal running
        running = index

    def attend(q: Tensor, k: Tensor, v: Tensor, options: Any) -> Any:
        nonlocal running
        if wanted := [head for layer, head in heads if layer == running]:
            asked = options._replace(return_lse=True, return_stats=False)
            weights = reference.flash_attention(q, k, _unit_values(k, v.dtype), asked)
            found.update({(cast(int, running), head): weights[0][0, head].clone() for head in wanted})
        running = None
        return reference.flash_attention(q, k, v, options)

    spec, training = OPS["flash_attention"], model.training
    with ExitStack() as undo:
        for impl in spec.impls:
            undo.enter_context(override(spec, impl.backend, fn=attend))
        for index, attention in enumerate(attentions):
            if attention is None:
                continue
            hook = attention.register_forward_pre_hook(lambda *_, index=index: begin(index))
            undo.callback(hook.remove)
        undo.callback(model.train, training)
        model.eval()
        run()
    return {pair: found[pair] for pair in heads}
