"""Attention maps of chosen heads: the one thing here that makes T x T matrices, of one text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_integer, check_rank
from foundry_kernels.core.registry import OPS, override
from foundry_kernels.diagnostics.recorder import check_model
from foundry_kernels.models import Transformer
from foundry_kernels.ops.flash_attention import reference


@torch.no_grad()
def attention_maps(
    model: Transformer, tokens: Tensor, heads: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], Tensor]:
    """Returns the weights of attention of one text, by the reference.

    Args:
        model: a :class:`foundry_kernels.models.Transformer`; it is run in evaluation mode, and left as it was.
        tokens: ``[1, T]`` int32 or int64.
        heads: pairs of a layer and a query head.

    Returns:
        for each pair ``[T, T]``, in the dtype of the model's values: row t is where token t looks, and sums to 1.

    Raises:
        TypeError: another model, or tokens that are no integers.
        ValueError: a layer or head that there is not, or tokens of another shape.
    """
    config = check_model(model).config
    check_integer("tokens", tokens)
    check_rank("tokens", tokens, 2, "[1, T]")
    if tokens.shape[0] != 1:
        raise ValueError(f"tokens must be [1, T], one text; got shape {tuple(tokens.shape)}")
    for layer, head in heads:
        if not (0 <= layer < config.n_layers and 0 <= head < config.n_heads):
            raise ValueError(
                f"heads must be (layer, head) below ({config.n_layers}, {config.n_heads}); got ({layer}, {head})"
            )
    maps: dict[tuple[int, int], Tensor] = {}
    calls = 0

    def attend(q: Tensor, k: Tensor, v: Tensor, options: Any) -> Any:
        nonlocal calls
        if wanted := [head for layer, head in heads if layer == calls]:
            # With the rows of a unit matrix for values, the outputs are the weights.
            unit = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
            found = reference.flash_attention(q, k, unit, options._replace(return_lse=True, return_stats=False))
            maps.update({(calls, head): found[0][0, head].clone() for head in wanted})
        calls += 1
        return reference.flash_attention(q, k, v, options)

    spec, training = OPS["flash_attention"], model.training
    with ExitStack() as undo:
        for impl in spec.impls:
            undo.enter_context(override(spec, impl.backend, fn=attend))
        undo.callback(model.train, training)
        model.eval()(tokens)
    return maps
