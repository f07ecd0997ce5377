"""What each module refuses: a table for every class, of its construction and of its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import nn

Row = tuple[Callable[[], Any], str]


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def longs(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


X, CONTEXT, STARTS = zeros(2, 3, 16), zeros(2, 5, 16), longs(0, 2, 3)
E, H, B, T = 16, 4, 3, 7
Q, NESTED = zeros(B, T, E), torch.nested.nested_tensor([zeros(2, E)])
CAUSAL = torch.ones(T, T).triu(1).bool()


def attend(*args: Any, made: dict[str, Any] | None = None, **options: Any) -> Any:
    return nn.Attention(16, 4, **(made or {}))(*(args or (X,)), **options)


def multihead(*args: Any, made: dict[str, Any] | None = None, **options: Any) -> Any:
    return nn.MultiheadAttention(E, H, batch_first=True, **(made or {}))(*(args or 3 * (Q,)), **options)


def delta(x: Tensor, **options: Any) -> Any:
    return nn.GatedDeltaNet(20, 6, 2, 4, 7, conv_size=3)(x, **options)


def latent(x: Tensor, **options: Any) -> Any:
    return nn.LatentAttention(16, 2, 4)(x, **options)


def state(batch: int, **options: Any) -> Any:
    return nn.GatedDeltaNet(20, 6, 2, 4, 7, conv_size=3).make_state(batch, **options)


def experts(**options: Any) -> Any:
    return nn.MoE(6, 5, 4, **{"top_k": 2, **options})


VALUES: dict[str, list[Row]] = {
    "RMSNorm": [
        (lambda: nn.RMSNorm(8, -1.0), "eps must be finite and >= 0"),
        (lambda: nn.RMSNorm(0), "normalized_shape must hold sizes of at least 1"),
        (lambda: nn.RMSNorm(8, elementwise_affine=False, weight_offset=1.0), "weight_offset needs"),
        (lambda: nn.RMSNorm((2, 8))(zeros(3, 8)), r"x must end in normalized_shape \(2, 8\)"),
        (lambda: nn.RMSNorm(8)(zeros(3, 7)), r"x must end in normalized_shape \(8,\)"),
        (lambda: nn.RMSNorm(8)(zeros(3, 8), zeros(1, 8)), "residual must have shape"),
    ],
    "LayerNorm": [
        (lambda: nn.LayerNorm(8, -1.0), "eps must be finite and >= 0"),
        (lambda: nn.LayerNorm(0), "normalized_shape must hold sizes of at least 1"),
        (lambda: nn.LayerNorm((2, 8))(zeros(3, 8)), r"x must end in normalized_shape \(2, 8\)"),
        (lambda: nn.LayerNorm(8)(zeros(3, 8), zeros(1, 8)), "residual must have shape"),
    ],
    "RotaryEmbedding": [
        (lambda: nn.RotaryEmbedding(7), "dim must be even"),
        (lambda: nn.RotaryEmbedding(8, 32)(*2 * (zeros(1, 1, 5, 8),), -1), "positions must not be below 0; got -1"),
        (lambda: nn.SinusoidalEmbedding(8, 32)(zeros(1, 5, 8), -2), "positions must not be below 0; got -2"),
    ],
    "MLP": [
        (lambda: nn.SwiGLU(6, 0), "hidden_dim must be at least 1"),
        (lambda: nn.SwiGLU(6, 8, recompute="all"), "recompute must be one of none, product, projections; got 'all'"),
        (lambda: nn.GatedMLP(8, 16, activation="glu", gate_options={"limit": 7.0}), "gate_options are those of swiglu"),
        (lambda: nn.MLP(8, 16, activation="swiglu"), "activation must be one of gelu, .*, relu2; got 'swiglu'"),
        (lambda: nn.MLP(8, 16, recompute="projections"), "recompute must be one of none, product; got 'projections'"),
    ],
    "Attention": [
        (lambda: nn.Attention(16, 4, 3), "n_heads must be a multiple of n_kv_heads=3"),
        (lambda: nn.Attention(18, 4), "dim must be a multiple of n_heads=4"),
        (lambda: nn.Attention(16, 4, 0), "n_kv_heads must be at least 1"),
        (lambda: nn.Attention(16, 4, rope=nn.RotaryEmbedding(8)), "rope must rotate at most head_dim=4"),
        (lambda: nn.Attention(8, 2, alibi=nn.AlibiSlopes(4)), "alibi must have a slope for each of n_heads=2; got 4"),
        (lambda: nn.Attention(8, 2, sliding_window=0), "sliding_window must be None or at least 1; got 0"),
        (lambda: nn.Attention(8, 2, dropout=1.5), r"dropout must be in \[0, 1\); got 1.5"),
        (lambda: nn.Attention(16, 4, scale=0.0), "scale must be finite and > 0; got 0"),
        (lambda: nn.Attention(16, 4, qk_norm_over="tokens"), "qk_norm_over must be one of head, projection"),
        (lambda: attend(zeros(2, 16)), "x must be"),
        (lambda: attend(zeros(2, 3, 12)), "x must have dim=16"),
        (lambda: attend(cu_seqlens=STARTS), "x must be .1, total, 16. with cu_seq"),
        (lambda: attend(X[:1], cu_seqlens=STARTS, cache=object()), "exclude each other"),
        (lambda: attend(X[:1], max_seqlen=3), "max_seqlen needs cu_seqlens"),
        (lambda: attend(zeros(1, 4, 16), cu_seqlens=STARTS), "cu_seqlens_q must start at 0"),
        (lambda: attend(X[:1], cu_seqlens=STARTS, attn_mask=zeros(3, 3)), "attn_mask and cu_seqlens exclude"),
        (lambda: attend(X[:1], cu_seqlens=STARTS, lengths=longs(3)), "lengths and cu_seqlens exclude each other"),
    ],
    "Attention, masks": [
        (lambda: attend(attn_mask=zeros(3, 4)), r"attn_mask must broadcast to .* = \(2, 4, 3, 3\)"),
        (lambda: attend(attn_mask=zeros(2, 3, 3)), r"attn_mask must broadcast to .*; got shape \(2, 3, 3\)"),
        (lambda: attend(attn_mask=zeros(3, 3, device="meta")), "attn_mask must be on x's device cpu"),
        (lambda: attend(attn_mask=fk.AttentionMask(zeros(4, 3).bool())), r"attn_mask must .* mask of \(1, 1, 4, 3\)"),
        (lambda: attend(lengths=longs(1, 1, 1)), r"lengths must have shape \(2,\) .one for each sequence"),
        (lambda: attend(lengths=longs(1)), r"lengths must have shape \(2,\)"),
        (lambda: attend(lengths=zeros(2, dtype=torch.int64, device="meta")), "lengths must be on x's device"),
    ],
    "Attention, context": [
        (lambda: attend(context=CONTEXT[:1]), "context must have x's batch of 2; got 1"),
        (lambda: attend(context=CONTEXT[..., :4]), r"context must have context_dim=16 as its .*; got \(2, 5, 4\)"),
        (lambda: attend(context=CONTEXT[0]), r"context must be \[B, S, 16\]; got shape \(5, 16\)"),
        (lambda: attend(context_lengths=longs(1, 2)), "context_lengths needs a context"),
        (lambda: attend(context=CONTEXT, context_lengths=longs(1)), r"context_lengths must have shape \(2,\)"),
        (lambda: attend(context=CONTEXT, lengths=longs(1, 2)), "context and lengths exclude each other"),
        (lambda: attend(context=CONTEXT, positions=3), "context and positions exclude each other"),
        (lambda: attend(context=CONTEXT, attn_mask=zeros(3, 3)), r"attn_mask must broadcast to .* = \(2, 4, 3, 5\)"),
        (lambda: attend(context=CONTEXT, made={"sliding_window": 2}), "context needs sliding_window=None"),
        (lambda: attend(context=CONTEXT, made={"rope": nn.RotaryEmbedding(4, 8)}), "context needs rope=None"),
        (lambda: attend(context=CONTEXT, made={"alibi": nn.AlibiSlopes(4)}), "context needs alibi=None"),
        (lambda: attend(made={"context_dim": 8}), "context must be given: keys are made of width 8, x has 16"),
    ],
    "MultiheadAttention": [
        (lambda: nn.MultiheadAttention(16, 3), "embed_dim must be a multiple of num_heads=3; got 16"),
        (lambda: nn.MultiheadAttention(16, 0), "num_heads must be at least 1"),
        (lambda: nn.MultiheadAttention(16, 4, kdim=0), "kdim must be at least 1"),
        (lambda: nn.MultiheadAttention(16, 4, 1.0), r"dropout must be in \[0, 1\); got 1.0"),
        (lambda: nn.MultiheadAttention(1024, 1), "at most 512 for each of the heads; got 1024"),
        (lambda: multihead(Q[None], Q, Q), r"query must be \[T, E\] or have a batch"),
        (lambda: multihead(Q, Q[0], Q), "key must have query's 3 dimensions, the last of 16"),
        (lambda: multihead(Q, Q, Q[..., :8]), "value must have query's 3 dimensions, the last of 16"),
        (lambda: multihead(Q, Q, Q[:, :2]), r"value must have key's sizes \(3, 7\)"),
        (lambda: multihead(Q[:2], Q, Q), "key must have query's batch size 2"),
        (lambda: multihead(Q.double(), Q, Q), "query must have the weights's dtype"),
        (lambda: multihead(is_causal=True), "attn_mask must be given with is_causal=True"),
        (lambda: multihead(attn_mask=zeros(B, T, T)), r"attn_mask must have shape \(12, 7, 7\)"),
        (lambda: multihead(attn_mask=zeros(T)), r"attn_mask must have shape \(7, 7\)"),
        (lambda: multihead(key_padding_mask=CAUSAL), r"key_padding_mask must have shape \(3, 7\)"),
        (lambda: multihead(NESTED, Q, Q), "must all be nested tensors or none"),
        (lambda: multihead(*3 * (NESTED,), attn_mask=CAUSAL), "attn_mask must be None for nested tensors"),
        (lambda: multihead(*3 * (NESTED,), made={"add_zero_attn": True}), "query must be padded with add_bias"),
        (lambda: nn.MultiheadAttention(E, H)(*3 * (NESTED,)), "nested tensor with batch_first=True"),
    ],
    "RelativeBias": [
        (lambda: nn.RelativeBias(4, 6, causal=False), "buckets must be a multiple of 4 in both directions; got 6"),
        (lambda: nn.RelativeBias(4, 8, 2, causal=False), "max_distance must be above 2, half of a direction's buckets"),
    ],
    "GatedDeltaNet": [
        (lambda: nn.GatedDeltaNet(16, 3, 2), "n_v_heads must be a multiple of n_k_heads=2; got 3"),
        (lambda: nn.GatedDeltaNet(16, 0), "n_v_heads must be"),
        (lambda: nn.GatedDeltaNet(16, 2, head_k_dim=257), "head_k_dim must be at most 256; got 257"),
        (lambda: nn.GatedDeltaNet(16, 2, head_v_dim=600), "head_v_dim must be at most 512; got 600"),
        (lambda: nn.GatedDeltaNet(16, 2, conv_size=9), "conv_size must be at most 8; got 9"),
        (lambda: nn.GatedDeltaNet(16, 2, norm_eps=-1.0), "norm_eps"),
        (lambda: delta(zeros(2, 3, 19)), "x must have dim=20"),
        (lambda: delta(zeros(2, 3, 20), cu_seqlens=longs(0, 3)), r"x must be \[1, total, 20\] with cu_seqlens"),
        (lambda: delta(zeros(2, 3, 20), state=state(3)), r"state\.conv must have shape \(2, 58, 2\)"),
        (
            lambda: delta(zeros(2, 1, 20), state=state(2, dtype=torch.bfloat16)),
            r"state\.conv must have the projection's dtype torch\.float32; got torch\.bfloat16",
        ),
    ],
    "Mamba2": [
        (lambda: nn.Mamba2(16, 3, 2), "n_heads must be a multiple of n_groups=2; got 3"),
        (lambda: nn.Mamba2(16, 2, state_dim=257), "state_dim must be at most 256; got 257"),
        (lambda: nn.Mamba2(16, 2, head_dim=600), "head_dim must be at most 512; got 600"),
        (lambda: nn.Mamba2(16, 4, rmsnorm=False, norm_before_gate=True), "norm_before_gate needs rmsnorm=True"),
        (lambda: nn.Mamba2(16, 4, norm_groups=3), "norm_groups must be a divisor of n_heads=4; got 3"),
        (lambda: nn.Mamba2(16, 2, dt_limit=(1.0, 0.5)), r"dt_limit must rise; got \(1.0, 0.5\)"),
        (lambda: nn.Mamba2(16, 2, norm_eps=-1.0), "norm_eps"),
        (lambda: nn.Mamba2(16, 2)(zeros(2, 3, 19)), "x must have dim=16"),
    ],
    "KimiDeltaAttention": [
        (lambda: nn.KimiDeltaAttention(16, 3, 2), "n_v_heads must be a multiple of n_k_heads=2; got 3"),
        (lambda: nn.KimiDeltaAttention(16, 2, norm_eps=-1.0), "norm_eps"),
        (lambda: nn.KimiDeltaAttention(16, 2)(zeros(2, 3, 15)), "x must have dim=16"),
    ],
    "LatentAttention": [
        (lambda: nn.LatentAttention(16, 2, 0), "kv_lora_rank must be >= 1; got 0"),
        (lambda: nn.LatentAttention(16, 2, 4, 0), "q_lora_rank must be >= 1; got 0"),
        (lambda: nn.LatentAttention(16, 2, 4, v_head_dim=0), "v_head_dim must be >= 1; got 0"),
        (
            lambda: nn.LatentAttention(16, 2, 4, rope=nn.RotaryEmbedding(8)),
            "rope must rotate qk_rope_head_dim=64 dimensions; got 8",
        ),
        (lambda: latent(zeros(2, 3, 15)), "x must have dim=16"),
        (lambda: latent(zeros(2, 3, 16), lengths=longs(1)), r"lengths must have shape \(2,\)"),
    ],
    "MoE": [
        (lambda: experts(top_k=5), "top_k must be at most n_experts=4; got 5"),
        (lambda: experts(top_k=0), "top_k must be at least 1; got 0"),
        (lambda: experts(scoring="tanh"), "scoring must be one of softmax, sigmoid; got 'tanh'"),
        (lambda: experts(scale=0.0), "scale must be finite and > 0; got 0.0"),
        (lambda: experts(activation="tanh"), "activation must be one of swiglu, geglu, .*, relu2; got 'tanh'"),
        (lambda: experts(shared_gate=True), "shared_gate needs shared_width"),
        (lambda: experts(activation="geglu", gate_options={"limit": 7.0}), "gate_options are those of swiglu"),
        (lambda: nn.load_balancing_loss([]), "stats must be those of at least one layer"),
    ],
    "a backend": [
        (lambda make=make: make("fast"), r"backend must be one of auto, .*'fast'")  # type: ignore[misc]
        for make in (
            lambda b: nn.RMSNorm(8, backend=b), lambda b: nn.LayerNorm(8, backend=b),
            lambda b: nn.SwiGLU(8, 16, backend=b), lambda b: nn.RotaryEmbedding(8, backend=b),
            lambda b: nn.Attention(8, 2, backend=b), lambda b: nn.MultiheadAttention(16, 4, backend=b),
            lambda b: nn.LinearCrossEntropy(8, 21, backend=b), lambda b: nn.GatedDeltaNet(16, 2, backend=b),
            lambda b: nn.Mamba2(16, 2, backend=b), lambda b: nn.LatentAttention(16, 2, 4, backend=b),
            lambda b: experts(backend=b),
        )
    ],
}  # fmt: skip
TYPES: list[Row] = [
    (lambda: nn.RotaryEmbedding("8"), "dim must be an int; got str"),
    (lambda: nn.RotaryEmbedding(8, interleaved="yes"), "interleaved must be a bool; got str"),
    (lambda: nn.Attention("8", 2), "dim must be an int; got str"),
    (lambda: nn.Attention(8, 2, causal="yes"), "causal must be a bool; got str"),
    (lambda: nn.Attention(8, 2, sliding_window=(3, 0)), "sliding_window must be an int; got tuple"),
    (lambda: attend(attn_mask=zeros(3, 3).int()), "attn_mask must be bool, float32, .* got torch.int32"),
    (lambda: attend(attn_mask=zeros(3, 3).double()), "attn_mask may be float64 only where x is"),
    (lambda: attend(attn_mask=[1]), "attn_mask must be a torch.Tensor or an AttentionMask; got list"),
    (lambda: attend(lengths=zeros(2)), "lengths must be int32 or int64; got torch.float32"),
    (lambda: attend(lengths=[1, 2]), "lengths must be a torch.Tensor; got list"),
    (lambda: attend(context=[1]), r"context must be a torch\.Tensor; got list"),
    (lambda: attend(context=CONTEXT, context_lengths=zeros(2)), "context_lengths must be int32 or int64"),
    (lambda: multihead(Q, Q, None), "value must be a torch.Tensor"),
    (lambda: multihead(attn_mask=CAUSAL, is_causal="yes"), "is_causal must be a bool; got str"),
    (lambda: multihead(attn_mask=zeros(T, T).int()), "attn_mask must be bool or floating"),
    (lambda: multihead(attn_mask=zeros(T, T).double()), "attn_mask may be float64 only"),
    (lambda: nn.GatedDeltaNet(16, 2.0), "n_v_heads must be an int"),
    (lambda: nn.KimiDeltaAttention(16, 2, low_rank_gate=1), "low_rank_gate must be a bool"),
    (lambda: nn.LatentAttention(16, 2, 4.0), "kv_lora_rank must be an int"),
    (lambda: nn.GatedDeltaNet(16, 2, negative_eigenvalues=1), "negative_eigenvalues must be a bool"),
    (lambda: nn.Mamba2(16, 2, in_scales=(1.0, 2.0)), "in_scales must be 5 numbers"),
    (lambda: nn.Mamba2(16, 2, conv_bias=1), "conv_bias must be a bool"),
    (lambda: nn.Mamba2(16, 2, dt_limit=1.0), "dt_limit must be two numbers; got 1.0"),
    (lambda: delta(zeros(1, 3, 20), cu_seqlens=zeros(2)), "cu_seqlens"),
    (lambda: delta(zeros(2, 3, 20), state=(1, 2)), "state must be a GatedDeltaState; got tuple"),
]


@pytest.mark.parametrize(
    ("call", "message"),
    [pytest.param(*row, id=f"{name}-{i}") for name, rows in VALUES.items() for i, row in enumerate(rows)],
)
def test_values(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), TYPES, ids=range(len(TYPES)))
def test_types(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_masks_are_refused_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Attention, "_queries_keys_values", None)
    for call, message in VALUES["Attention, masks"]:
        with pytest.raises(ValueError, match=message):
            call()
