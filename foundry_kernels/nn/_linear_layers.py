"""How a forward pass calls its linear layers. There are three ways: each layer is called as it is; with few rows, as in
decoding, several layers run in one pass over their weights and keys and values are written directly into the cache;
with many rows, layers run on the extension's matmuls if PyTorch's matmuls of this dtype are slow.

The operators read each layer's own weight in place. Nothing is packed, copied or cached between calls, so a weight may
be loaded, moved, cast or replaced at any time. A layer is called as it is whenever this could do more than a matmul
with its weight: under autocast, a transform or a hook, in another class, or with a weight that is not a plain dense
tensor; with few rows also under autograd and with a bias.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from foundry_kernels.core import invariance
from foundry_kernels.core.extension import build_info
from foundry_kernels.core.registry import _transformed
from foundry_kernels.nn._layers import is_linear, is_observed, is_plain
from foundry_kernels.nn.rotary import RotaryEmbedding
from foundry_kernels.ops._linear import Linear, chosen, linear
from foundry_kernels.ops._products import has_own_products
from foundry_kernels.ops.decode_linear import DECODE_LINEAR, MAX_ROWS
from foundry_kernels.ops.grouped_mm import GROUPED_MM
from foundry_kernels.ops.rope import ROPE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = (Tensor, nn.Parameter)

#: The largest number of rows for which linear layers in batched decoding run in one pass over the weights, by
#: instruction set, where this was measured to be faster than torch's matmuls (docs/dev/performance.md). On AMX the
#: usual limit applies.
MAX_BATCHED_ROWS = dict.fromkeys(("avx2", "avx512", "avx512_bf16"), 4 * MAX_ROWS)

#: The reason why the decoding path is unavailable in this process, or None.
MISSING = DECODE_LINEAR.why_not("native", "cpu") or ROPE.why_not("native", "cpu")
if MISSING is None:
    from foundry_kernels.ops.decode_linear.native import decode_linear
    from foundry_kernels.ops.rope.native import rope_append

#: Dtypes for which PyTorch's matmuls are slow here and the extension has its own; and the number of multiplications
#: from which these are worth their longer call.
OWN_PRODUCTS = frozenset(
    dtype for dtype in DTYPES if GROUPED_MM.why_not("native", "cpu") is None and has_own_products(dtype)
)
WORTH = 1 << 21


class _Batched(threading.local):
    isa: str | None = None  # the instruction set, while this thread runs a batched decoding step


_batched = _Batched()


@contextmanager
def batched_decode() -> Iterator[None]:
    """In this block, linear layers of this thread run up to `MAX_BATCHED_ROWS` rows in one pass over their weights."""
    before = _batched.isa
    _batched.isa = build_info().get("instruction_set")
    try:
        yield
    finally:
        _batched.isa = before


class KeyValueMemory:
    """Base class of a cache whose memory the rotation's kernel may write directly in decoding."""

    @property
    def length(self) -> int:
        raise NotImplementedError

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def memory(self, new: Tensor, n_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Contiguous keys and values ``[B, Hk, S, D]``, into which those of `new` ``[B, T, ...]`` are to be written
        from ``length`` on; ValueError if they do not fit."""
        raise NotImplementedError


class Layers:
    """Linear layers that are called as they are."""

    def linear(self, x: Tensor, layer: nn.Module) -> Tensor:
        """The layer's result."""
        y: Tensor = layer(x)
        return y

    def each(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        """The layers' results, used if `together` returns None."""
        return tuple(layer(x) for layer in layers)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The result of a layer that only has a `weight` ``[N, dim]``."""
        return F.linear(x, weight)

    @property
    def function(self) -> Linear:
        """The function that replaces `F.linear`, for a backward pass that recomputes layers."""
        return chosen()

    def together(self, x: Tensor, *layers: nn.Module) -> Tensor | None:
        """The layers' results, concatenated along the last dimension; None if each layer must be called."""
        return None

    def append(
        self, packed: Tensor, cache: object, rope: nn.Module | None, n_heads: int, n_kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """For queries, keys and values from `together`, appends the new keys and values to the cache and returns the
        rotated queries, and the keys and values of all positions. None if the rotation and the cache must be called."""
        return None


class Multiplied(Layers):
    """Linear layers on the extension's matmuls, with gradients."""

    def linear(self, x: Tensor, layer: nn.Module) -> Tensor:
        if not is_linear(layer):
            return super().linear(x, layer)
        return multiplied(x, layer.weight, layer.bias)  # type: ignore[arg-type]  # of nn.Linear

    def each(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        return tuple(self.linear(x, layer) for layer in layers)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return multiplied(x, weight)

    @property
    def function(self) -> Linear:
        return multiplied


class Decoding(Layers):
    """Linear layers with few rows, which are bound by reading the weights."""

    def linear(self, x: Tensor, layer: nn.Module) -> Tensor:
        y = self.together(x, layer)
        return super().linear(x, layer) if y is None else y

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        y = _products(x, [weight])
        return super().product(x, weight) if y is None else y

    def together(self, x: Tensor, *layers: nn.Module) -> Tensor | None:
        weights: list[Tensor] = []
        for layer in layers:
            if not is_plain(layer):
                return None
            weights.append(layer.weight)  # type: ignore[arg-type]  # of nn.Linear
        return _products(x, weights)

    def append(
        self, packed: Tensor, cache: object, rope: nn.Module | None, n_heads: int, n_kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if not isinstance(cache, KeyValueMemory) or type(rope) is not RotaryEmbedding or is_observed(rope):
            return None
        if rope.backends["rope"] not in ("auto", "native"):
            return None
        start, end = cache.length, cache.length + packed.shape[1]
        if (tables := whole_tables(rope, end)) is None:
            return None
        cos, sin = tables
        k, v = cache.memory(packed, n_kv_heads, head_dim)
        q = rope_append(packed, cos, sin, rope.interleaved, k, v, n_heads, start)
        return q, k.narrow(2, 0, end), v.narrow(2, 0, end)


class BatchedDecode(Decoding):
    """Linear layers with more rows than the rotation into the cache supports."""

    def append(self, *_: object) -> None:
        return None


_LAYERS, _MULTIPLIED, _DECODING, _BATCHED_DECODE = Layers(), Multiplied(), Decoding(), BatchedDecode()


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` on the extension's matmuls, if they support the tensors and are worth the call."""
    enough = torch.compiler.is_compiling() or x.numel() * weight.shape[0] >= WORTH
    if not enough or not _is_dense(weight, x) or not (bias is None or _is_dense(bias, x)):
        return F.linear(x, weight, bias)
    return linear(x, weight, bias, batch_invariant=False)


def whole_tables(rope: RotaryEmbedding, end: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin with rows for positions below `end`; None if a few rows are computed for this call only."""
    if end > rope.cos.shape[0] and (rope.follows_length or torch.compiler.is_compiling()):
        return None
    cos, sin = rope.reserve(end)
    return cos, sin


def decodes(x: Tensor, max_rows: int = MAX_ROWS) -> bool:
    """Whether a forward pass on `x` ``[..., dim]`` has few rows, runs on the CPU, and is not observed by hooks or
    modes."""
    return (
        MISSING is None
        and not torch.is_grad_enabled()
        and type(x) is Tensor
        and x.is_cpu
        and x.dtype in DTYPES
        and 0 < x.numel() <= max_rows * x.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and not _transformed()
        and not _has_any_global_hook()
    )


def layers_for(x: Tensor, backend: str) -> Layers:
    """How a forward pass on `x` ``[..., dim]`` calls its linear layers; `backend` is that of its operations."""
    if backend not in ("auto", "native"):
        return _LAYERS
    if decodes(x):
        return _DECODING
    if _batched.isa is not None and not torch.compiler.is_compiling() and decodes(x, most_rows()):
        return _BATCHED_DECODE
    return products_for(x, backend)


def products_for(x: Tensor, *backends: str) -> Layers:
    """Returns what `layers_for` returns, except that layers of a pass with few rows are called as they are."""
    own = bool(OWN_PRODUCTS) and all(backend in ("auto", "native") for backend in backends)
    return _MULTIPLIED if own and multiplies(x) else _LAYERS


def multiplies(x: Tensor) -> bool:
    """Whether a forward pass on `x` uses the extension's matmuls: on the CPU, in a dtype of `OWN_PRODUCTS`, without
    observers and with full float32 precision."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.dtype in OWN_PRODUCTS
        and not torch.is_autocast_enabled("cpu")
        and _full_precision()
        and not invariance.on
        and not _transformed()
        and not _has_any_global_hook()
    )


def _full_precision() -> bool:
    return torch.get_float32_matmul_precision() == "highest"


# As `_transformed`. The compiler guards on the precision of matmuls.
_full_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def most_rows() -> int:
    """The largest number of rows, of several sequences, that this thread runs in one pass over the weights."""
    return MAX_ROWS if _batched.isa is None else MAX_BATCHED_ROWS.get(_batched.isa, MAX_ROWS)


def _products(x: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
    """`x` times the transposes of `weights` in one pass; None if the operator does not support one of them."""
    if not all(_is_dense(weight, x) for weight in weights):
        return None
    y: Tensor = decode_linear(x, weights)
    return y


def _is_dense(weight: Tensor, x: Tensor) -> bool:
    """Whether `weight` is a plain tensor on the CPU, of x's dtype."""
    return type(weight) in PLAIN and weight.layout is torch.strided and weight.dtype == x.dtype and weight.is_cpu
