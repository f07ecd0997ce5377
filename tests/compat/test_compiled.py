"""The functions under torch.compile: one graph, with the results and gradients of the plain call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_loops import draw
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.compat import (
    apply_rotary_emb,
    apply_rotary_emb_qkv_,
    cross_entropy,
    flash_attn_3,
    flash_attn_func,
    scaled_dot_product_attention,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed, dtype=torch.float32)


COS, SIN = fk.rope_table(8, 32)
OFFSETS, CU = torch.tensor([4, 0]), torch.tensor([0, 2, 5])
CU_Q, CU_K = torch.tensor([0, 5, 5, 14, 16]), torch.tensor([0, 7, 10, 14, 17])
USED: dict[str, Any] = {"seqused_q": torch.tensor([2, 0, 9, 1]), "seqused_k": torch.tensor([6, 0, 3, 3])}
QKV = normal(2, 5, 4, 8), normal(2, 7, 2, 8, seed=1), normal(2, 7, 2, 8, seed=2)
HEADS_FIRST = tuple(x.transpose(1, 2) for x in QKV)
SEEN = normal(2, 1, 5, 7, seed=4) > -1.0
#: Functions of tensors, and what they are called with.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "flash_attn_func": (lambda q, k, v: flash_attn_func(q, k, v, causal=True), QKV),
    "sdpa": (lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True), HEADS_FIRST),
    "sdpa, broadcast": (
        lambda q, k, v: scaled_dot_product_attention(q, k[:1], v[0, :1], enable_gqa=True, scale=-0.5),
        HEADS_FIRST,
    ),
    "sdpa, a mask and dropout": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, SEEN, 0.25, enable_gqa=True),
        HEADS_FIRST,
    ),
    "sdpa, a bias and dropout": (
        lambda q, k, v, bias: scaled_dot_product_attention(q, k, v, bias, 0.25, enable_gqa=True),
        (*HEADS_FIRST, normal(4, 5, 7)),
    ),
    "flash_attn_3, packed": (
        lambda q, k, v: flash_attn_3.flash_attn_varlen_func(
            q, k, v, CU_Q, CU_K, 9, 7, causal=True, attention_chunk=4, **USED
        ),
        (normal(16, 4, 8), normal(17, 2, 8, seed=1), normal(17, 2, 5, seed=2)),
    ),
    "flash_attn_3, qv": (
        lambda q, k, v, qv: flash_attn_3.flash_attn_func(q, k, v, qv=qv, causal=True, attention_chunk=4),
        (*QKV, normal(2, 5, 4, 8, seed=3)),
    ),
    "flash_attn_combine": (
        lambda *parts: flash_attn_3.flash_attn_combine(*parts)[0],
        (normal(2, 3, 5, 2, 4), normal(2, 3, 5, 2)),
    ),
    "rotary": (lambda x: apply_rotary_emb(x, COS, SIN, seqlen_offsets=3), (normal(2, 5, 3, 8),)),
    "rotary, packed": (
        lambda x: apply_rotary_emb(x, COS, SIN, seqlen_offsets=OFFSETS, cu_seqlens=CU, max_seqlen=3),
        (normal(5, 3, 8),),
    ),
    "rotary, in place": (
        lambda x: apply_rotary_emb_qkv_(x * 1.0, COS, SIN, seqlen_offsets=OFFSETS),
        (normal(2, 5, 3, 2, 8),),
    ),
    "cross_entropy of probabilities": (
        lambda x, t: cross_entropy(x, t, label_smoothing=0.1), (normal(5, 7), normal(5, 7, seed=1).softmax(-1))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_gives_what_the_call_gives(name: str) -> None:
    call, given = CALLS[name]
    torch.compiler.reset()
    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in given]
        torch.manual_seed(0)
        out = function(*leaves)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*found)
