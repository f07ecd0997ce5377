"""What is timed of masks, biases and dropout, and against what: each also against the same call without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foundry_kernels.core.contract import Peers
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.testing import Arg, Case

#: The peer that is the same call without the option.
PLAIN = "without the option"
#: (B, H, Hk, T, D), by device. Dropout's are of few enough tokens to check all of them: what it leaves of a query
#: depends on the query's place.
_SHAPES = {"cpu": (1, 8, 8, 2048, 64), "cuda": (4, 32, 8, 4096, 128)}
_DROPPED = {"cpu": _SHAPES["cpu"], "cuda": (2, 32, 8, 2048, 128)}
_P = 0.1


@lru_cache
def _two_documents(t: int) -> AttentionMask:
    """Half of the tiles are empty."""
    return AttentionMask.documents(torch.tensor([0, t // 2, t]))


@lru_cache
def _dense(mask: AttentionMask) -> Tensor:
    return mask.dense()


@lru_cache
def pairs(mask: AttentionMask) -> int:
    """Returns the number of pairs of a query and a key that it sees."""
    return int(_dense(mask).sum())


def of_rows(mask: AttentionMask, rows: Tensor) -> Tensor:
    """Returns what these queries see, as a bool tensor."""
    return _dense(mask).index_select(-2, rows)


def _qkv(b: int, h: int, hk: int, t: int, d: int) -> tuple[str, dict[str, Arg | None]]:
    name = f"B={b} H={h} Hk={hk} T={t} D={d}"
    return name, {"q": Arg((b, h, t, d)), "k": Arg((b, hk, t, d)), "v": Arg((b, hk, t, d))}


def cases(device: str) -> tuple[Case, ...]:
    (name, qkv), full = _qkv(*_SHAPES[device]), {"causal": False}
    _, h, _, t, _ = _SHAPES[device]
    dropped, of_dropped = _qkv(*_DROPPED[device])
    bias = Arg((1, h, t, t), grad=False)
    return (
        Case(f"{name}-half-masked", qkv, {**full, "attn_mask": _two_documents(t)}),
        Case(f"{name}-bias", qkv | {"attn_mask": bias}, full),
        Case(f"{name}-bias-gradient", qkv | {"attn_mask": Arg(bias.shape)}, full),  # T5's relative positions
        Case(f"{dropped}-dropout", of_dropped, {**full, "dropout_p": _P}),
    )


def is_masked(case: Case) -> bool:
    return "attn_mask" in case.args or not case.options.keys().isdisjoint(("attn_mask", "dropout_p"))


def _plain(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    from foundry_kernels.ops.flash_attention import flash_attention

    return flash_attention(q, k, v)


def _eager(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float) -> Tensor:
    """Computes it as models in Hugging Face's transformers do, softmax in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    weights = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attn_mask, torch.finfo(q.dtype).min)
    elif attn_mask is not None:
        weights = weights + attn_mask
    return F.dropout(torch.softmax(weights, -1, dtype=torch.float32).to(q.dtype), dropout_p) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, kernel: SDPBackend) -> Tensor:
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, enable_gqa=q.shape[1] != k.shape[1])


def eager_with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes causal attention with dropout likewise."""
    return _eager(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(), _P)


@lru_cache
def _flex(kind: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[0, h, i, j], enable_gqa=True)

    return torch.compile(biased if kind == "bias" else partial(flex_attention, enable_gqa=True), dynamic=False)


@lru_cache
def _block_mask(t: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i * 2 // t == j * 2 // t, None, None, t, t, device=device)


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Any:
    if attn_mask is not None:
        return _flex("bias")(q, k, v, attn_mask)
    return _flex("mask")(q, k, v, block_mask=_block_mask(q.shape[2], str(q.device)))


def peers(case: Case, device: str) -> Peers:
    """Returns the peers that take such masks."""
    dropout_p, mask = case.options.get("dropout_p", 0.0), case.options.get("attn_mask")
    dense = None if mask is None else _dense(mask).to(device)
    learns = (bias := case.args.get("attn_mask")) is not None and bias.grad

    def given(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v, attn_mask=dense: call(q, k, v, attn_mask, dropout_p)

    found: dict[str, Callable[..., Any] | str] = {PLAIN: _plain, "eager": given(_eager)}
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}  # on a CPU "flash" takes masks
    if device != "cpu":
        kernels |= {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    for name, kernel in kernels.items():
        refused = device == "cpu" and (learns or dropout_p) and name == "flash"
        found[f"SDPA {name}"] = "has no such CPU kernel" if refused else given(partial(_sdpa, kernel=kernel))
    found["FlexAttention"] = "has no dropout" if dropout_p else _flex_attention
    return found
