"""Finds the modules that are attention, and their weights for queries and keys, by the names of classes and layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.nn import Attention

#: Names of the linear layers of queries and of keys.
PAIRS = (
    ("wq", "wk"),
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q_lin", "k_lin"),
    ("to_q", "to_k"),
    ("q", "k"),
    ("query_proj", "key_proj"),
    ("linear_q", "linear_k"),
)
#: Names of layers whose outputs are all queries, then all keys, then all values.
FUSED = ("c_attn", "qkv", "Wqkv", "qkv_proj")
#: Classes with such a layer whose outputs have another order.
OTHER_ORDER = ("CodeGen", "GPTBigCode")
#: Classes whose `query_key_value` has the query, key and value of each head together.
BY_HEAD = ("GPTNeoX", "Bloom")
_NAME = re.compile(r"attention|attn", re.IGNORECASE)


def is_attention(module: nn.Module) -> bool:
    """Whether a softmax in `module` is attention's. This depends on the module's parts or, if no module in it is
    attention, on the name of its class."""
    if _has_projections(module):
        return True
    if _NAME.search(type(module).__name__) is None:
        return False
    return not any(_has_projections(inner) for inner in module.modules())


def _has_projections(module: nn.Module) -> bool:
    if isinstance(module, Attention | nn.MultiheadAttention) or query_key_layers(module) is not None:
        return True
    return any(isinstance(getattr(module, name, None), nn.Module) for name in (*FUSED, "query_key_value"))


def query_key_layers(module: nn.Module) -> tuple[nn.Linear, nn.Linear] | None:
    """The linear layers of a module for its queries and keys, or None."""
    for names in PAIRS:
        q, k = (getattr(module, name, None) for name in names)
        if isinstance(q, nn.Linear) and isinstance(k, nn.Linear) and _is_float(q) and _is_float(k):
            return q, k
    return None


def _is_float(layer: nn.Linear) -> bool:
    """Whether its weight is not quantised. This does not compute a parametrized weight, because parametrizations may
    count calls."""
    parametrized: Any = layer
    found = parametrized.parametrizations.weight.original if is_parametrized(layer, "weight") else layer.weight
    return isinstance(found, Tensor) and found.is_floating_point()


def query_key_weights(module: nn.Module, heads: int, head_dim: int | None) -> tuple[Tensor, Tensor] | None:
    """The weights of queries ``[H, D, N]`` and of keys ``[Hk, D, N']`` by head, or None if they are not recognised.

    Args:
        heads: query heads.
        head_dim: None if unknown; then queries, keys and values are assumed to have the same width.
    """
    if (layers := query_key_layers(module)) is not None:
        q, k = (whole(layer.weight.detach()) for layer in layers)
        return _by_head(q, k, heads)
    any_module: Any = module
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None:
            return _by_head(whole(any_module.q_proj_weight.detach()), whole(any_module.k_proj_weight.detach()), heads)
        q, k, _ = whole(module.in_proj_weight.detach()).chunk(3)
        return _by_head(q, k, heads)
    name = type(module).__name__.removeprefix("Foundry")
    for fused in FUSED:
        weight = _weight(getattr(module, fused, None))
        if weight is not None and not name.startswith(OTHER_ORDER) and getattr(module, "q_attn", None) is None:
            width = head_dim or weight.shape[0] // (3 * heads)
            keys, rest = divmod(weight.shape[0] - heads * width, 2)
            if rest or keys <= 0:
                return None
            return _by_head(weight[: heads * width], weight[heads * width :][:keys], heads)
    weight = _weight(getattr(module, "query_key_value", None))
    if weight is not None and name.startswith(BY_HEAD) and weight.shape[0] % (3 * heads) == 0:
        each = weight.unflatten(0, (heads, 3, -1))
        return each[:, 0], each[:, 1]
    return None


def _weight(layer: Any) -> Tensor | None:
    """``[out, in]``"""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return None
    weight = whole(weight.detach())
    if isinstance(layer, nn.Linear):
        return weight
    return weight.mT if type(layer).__name__ == "Conv1D" else None  # transformers' weight is [in, out]


def _by_head(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor] | None:
    width, rest = divmod(q.shape[0], heads)
    if rest or width == 0 or k.shape[0] % width or k.shape[0] == 0 or heads % (k.shape[0] // width):
        return None
    return q.unflatten(0, (heads, width)), k.unflatten(0, (-1, width))


def whole(x: Tensor) -> Tensor:
    """x itself, or a full copy of a sharded tensor; all processes must call this."""
    gathered: Tensor = x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return gathered


def pairs_of(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The names and layers of all query and key projections in `model`, without repetition."""
    seen: set[nn.Module] = set()
    names = {module: name for name, module in model.named_modules()}
    for module in list(model.modules()):
        for layer in query_key_layers(module) or ():
            if layer not in seen:
                seen.add(layer)
                yield names[layer], layer
