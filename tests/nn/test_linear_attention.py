"""Layers of linear attention: their formulas, transformers' own layers, packed sequences, and states."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels import gated_delta_rule, nn, ssd

SCALES = (0.9, 1.1, 1.2, 0.7, 1.3)
MAMBA: dict[str, dict[str, Any]] = {
    "mamba": {"n_heads": 6, "n_groups": 2, "state_dim": 4, "head_dim": 7, "conv_size": 3, "dt_limit": (0.2, 3.0)},
    "mamba, one norm": {"n_heads": 6, "n_groups": 3, "state_dim": 5, "head_dim": 4, "norm_groups": 1, "bias": True},
    "mamba, no bias": {"n_heads": 2, "state_dim": 8, "head_dim": 8, "conv_size": 1, "conv_bias": False},
    "mamba, norm first": {"n_heads": 6, "n_groups": 2, "state_dim": 4, "head_dim": 7, "norm_before_gate": True},
    "mamba, no norm": {"n_heads": 2, "state_dim": 8, "head_dim": 8, "rmsnorm": False, "in_scales": SCALES},
}
KIMI: dict[str, dict[str, Any]] = {
    "kimi": {"n_v_heads": 3, "head_k_dim": 6, "conv_size": 3},
    "kimi, groups": {"n_v_heads": 6, "n_k_heads": 2, "head_k_dim": 4, "head_v_dim": 7, "low_rank_gate": False},
}
SHAPES: dict[str, dict[str, Any]] = (
    MAMBA
    | KIMI
    | {
        "equal heads": {"n_v_heads": 2, "head_k_dim": 8},
        "groups": {"n_v_heads": 6, "n_k_heads": 2, "head_k_dim": 4, "head_v_dim": 7, "conv_size": 3},
        "one tap": {"n_v_heads": 2, "n_k_heads": 1, "head_k_dim": 8, "conv_size": 1, "negative_eigenvalues": True},
    }
)


every_kind = pytest.mark.parametrize("name", ["groups", "kimi, groups", "mamba"])


def make(name: str = "groups", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    kind: Any = nn.Mamba2 if name in MAMBA else nn.KimiDeltaAttention if name in KIMI else nn.GatedDeltaNet
    layer = kind(20, **{**SHAPES[name], **changes}, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * 0.4 + (0.5 if parameter.dim() == 1 else 0.0))
    return layer


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def convolved(layer: Any, x: Tensor) -> Tensor:
    taps, filters = layer.conv_size, layer.conv1d
    x = F.pad(x.transpose(1, 2), (taps - 1, 0))
    return F.silu(F.conv1d(x, filters.weight, filters.bias, groups=len(filters.weight))).transpose(1, 2)


def mamba_formula(layer: nn.Mamba2, x: Tensor) -> Tensor:
    heads, groups, n, p = layer.n_heads, layer.n_groups, layer.state_dim, layer.head_dim
    parts = layer.in_proj(x).split([heads * p, heads * p, groups * n, groups * n, heads], -1)
    z, *mixed, dt = (part * scale for part, scale in zip(parts, layer.in_scales, strict=True))
    values, b, c = convolved(layer, torch.cat(mixed, -1)).split([heads * p, groups * n, groups * n], -1)
    b, c = (t.unflatten(-1, (groups, n)) for t in (b, c))
    dt = F.softplus(dt + layer.dt_bias).clamp(*layer.dt_limit)
    y = ssd(values.unflatten(-1, (heads, p)), dt, -layer.A_log.exp(), b, c, layer.D, backend="reference")
    y = y.flatten(2) if layer.norm_before_gate else y.flatten(2) * F.silu(z)
    if layer.norm is not None:
        y = y.unflatten(-1, (layer.norm_groups, -1))
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).flatten(2) * layer.norm.weight
    return layer.out_proj(y * F.silu(z) if layer.norm_before_gate else y)


def formula(layer: Any, x: Tensor) -> Tensor:
    """As the docstring has it, with PyTorch's own functions and the operation's reference."""
    if isinstance(layer, nn.Mamba2):
        return mamba_formula(layer, x)
    if isinstance(layer, nn.KimiDeltaAttention):
        qkv, b = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1), layer.b_proj(x)
        a = (layer.f_b_proj(layer.f_a_proj(x)) + layer.dt_bias).unflatten(-1, (layer.n_v_heads, -1))
        gate = (layer.g_b_proj(layer.g_a_proj(x)) if layer.low_rank_gate else layer.g_proj(x)).sigmoid()
        g, limit, eps = -layer.A_log.exp()[:, None] * F.softplus(a), 1.0, 1e-5
    else:
        qkv, b = layer.in_proj_qkv(x), layer.in_proj_b(x)
        gate, limit, eps = F.silu(layer.in_proj_z(x)), 2.0 if layer.negative_eigenvalues else 1.0, 1e-6
        g = -layer.A_log.exp() * F.softplus(layer.in_proj_a(x) + layer.dt_bias)
    channels = layer.conv1d.weight.shape[0]
    mixed = convolved(layer, qkv)
    keys = layer.n_k_heads * layer.head_k_dim
    parts = mixed.split([keys, keys, channels - 2 * keys], -1)
    heads = layer.n_k_heads, layer.n_k_heads, layer.n_v_heads
    q, k, v = (part.unflatten(-1, (n, -1)).transpose(1, 2) for part, n in zip(parts, heads, strict=True))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    beta = limit * b.sigmoid()
    o = gated_delta_rule(q, k, v, g.transpose(1, 2), beta.transpose(1, 2), backend="reference").transpose(1, 2)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * layer.norm_of_heads.weight
    return layer.output_projection(o.flatten(2) * gate)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_formula_and_its_gradients(name: str, dtype: torch.dtype) -> None:
    layer = make(name, dtype)
    x = draw(2, 11, 20, dtype=dtype).requires_grad_()
    expected = formula(layer, x)
    y = layer(x)
    error = 1e-10 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(y, expected, rtol=error, atol=error)
    dy, inputs = draw(2, 11, 20, dtype=dtype, seed=2), (x, *layer.parameters())
    for found, wanted in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=10 * error, atol=10 * error)


def agree(theirs: torch.nn.Module, ours: torch.nn.Module, dtype: torch.dtype, autocast: bool) -> None:
    x = draw(2, 70, 20, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, found = theirs(x), ours(x)
    assert found.dtype == expected.dtype
    error = 2e-5 if found.dtype == torch.float32 else 0.03
    assert (found - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize(
    ("dtype", "norm", "autocast"),
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float32, True),
    ],
)
def test_qwens_own_layer_and_its_state_dict(dtype: torch.dtype, norm: torch.dtype, autocast: bool) -> None:
    pytest.importorskip("transformers.models.qwen3_5")
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    sizes = {"linear_key_head_dim": 4, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3}
    config = Qwen3_5TextConfig(hidden_size=20, num_hidden_layers=1, **heads, **sizes)
    theirs = Qwen3_5GatedDeltaNet(config, 0).to(dtype)
    ours = make(dtype=dtype, norm_round_before_weight=True)
    for layer in (theirs, ours):
        layer.norm.to(norm)
    theirs.load_state_dict(ours.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    agree(theirs, ours, dtype, autocast)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_mambas_own_layer_and_its_state_dict(dtype: torch.dtype, autocast: bool) -> None:
    pytest.importorskip("transformers.models.mamba2")
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    sizes = {"num_heads": 6, "head_dim": 10, "expand": 3, "state_size": 4, "n_groups": 2, "conv_kernel": 3}
    config = Mamba2Config(hidden_size=20, num_hidden_layers=1, **sizes, time_step_limit=(0.2, 3.0))
    theirs = Mamba2Mixer(config, 0).to(dtype).eval()
    groups = None if hasattr(theirs.norm, "group_size") else 1  # one in earlier releases
    ours = make("mamba", dtype=dtype, norm_round_before_weight=True, head_dim=10, norm_groups=groups)
    theirs.load_state_dict(ours.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    agree(theirs, ours, dtype, autocast)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_kimis_own_layer_and_its_state_dict(dtype: torch.dtype, autocast: bool) -> None:
    pytest.importorskip("transformers.models.kimi_linear")
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    sizes = {"linear_num_heads": 3, "linear_head_dim": 6, "linear_conv_kernel_dim": 3}
    theirs = KimiLinearDeltaAttention(KimiLinearConfig(hidden_size=20, num_hidden_layers=1, **sizes), 0).to(dtype)
    ours = make("kimi", dtype=dtype)
    state = {name.removeprefix("forget_gate."): weight for name, weight in theirs.state_dict().items()}
    assert {name: weight.numel() for name, weight in state.items()} == {
        name: weight.numel() for name, weight in ours.state_dict().items()
    }
    for name, weight in theirs.state_dict().items():
        weight.copy_(ours.state_dict()[name.removeprefix("forget_gate.")].view_as(weight))
    agree(theirs, ours, dtype, autocast)


@every_kind
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_sequences_are_read_one_by_one(name: str, index: torch.dtype) -> None:
    layer, lengths = make(name), (3, 0, 1, 9, 2)
    bounds = [0, *itertools.accumulate(lengths)]
    x = draw(1, 15, 20).requires_grad_()
    y = layer(x, cu_seqlens=torch.tensor(bounds, dtype=index))
    parts = [layer(x[:, start:end]) for start, end in itertools.pairwise(bounds)]
    expected = torch.cat(parts, 1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    dy, inputs = draw(1, 15, 20, seed=2), (x, *layer.parameters())
    for found, wanted in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("parts", [(11,), (1,) * 11, (2, 1, 5, 3), (0, 4, 7)])
def test_a_state_continues(name: str, parts: tuple[int, ...]) -> None:
    layer, x = make(name), draw(2, 11, 20)
    state = layer.make_state(2)
    with torch.no_grad():
        found = torch.cat([layer(part, state=state) for part in x.split(parts, 1)], 1)
        torch.testing.assert_close(found, layer(x), rtol=2e-5, atol=2e-5)
        state.reset()
        torch.testing.assert_close(layer(x[:, :1], state=state), layer(x[:, :1]), rtol=2e-5, atol=2e-5)


@every_kind
@torch.no_grad()
def test_states_of_packed_sequences(name: str) -> None:
    layer, x = make(name), draw(1, 9, 20)
    state = layer.make_state(3)
    layer(x, cu_seqlens=torch.tensor([0, 4, 4, 9]), state=state)
    after = layer(draw(3, 1, 20, seed=3), state=state)
    expected = [
        layer(torch.cat([part, draw(3, 1, 20, seed=3)[n : n + 1]], 1))[:, -1:]
        for n, part in enumerate((x[:, :4], x[:, 4:4], x[:, 4:]))
    ]
    torch.testing.assert_close(after, torch.cat(expected), rtol=2e-5, atol=2e-5)


@every_kind
def test_a_state_has_no_gradient(name: str) -> None:
    layer, x = make(name), draw(2, 3, 20)
    for tokens in (3, 1):
        y = layer(x[:, :tokens], state=layer.make_state(2))
        assert y.requires_grad
        with pytest.raises(RuntimeError, match="cache is for inference"):
            y.sum().backward()


@every_kind
@torch.no_grad()
def test_states_under_autocast(name: str) -> None:
    layer, x = make(name), draw(2, 9, 20)
    state = layer.make_state(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        parts = [layer(part, state=state) for part in x.split((5, 1, 3), 1)]
        expected = layer(x)
    assert expected.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0.05, atol=0.05)


@every_kind
def test_copies_pickles_and_text(name: str) -> None:
    layer, x = make(name), draw(1, 5, 20)
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)
    fresh = make(name)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), expected)
    text = {
        "groups": "20, n_v_heads=6, n_k_heads=2, head_k_dim=4, head_v_dim=7, conv_size=3, backend='auto'",
        "kimi, groups": "n_k_heads=2, head_k_dim=4, head_v_dim=7, conv_size=4, low_rank_gate=False, backend='auto'",
        "mamba": "20, n_heads=6, n_groups=2, state_dim=4, head_dim=7, conv_size=3, dt_limit=(0.2, 3.0), backend='auto'",
    }
    assert text[name] in repr(layer)
    assert "negative_eigenvalues=True" in repr(make("one tap"))


def test_initial_gates() -> None:
    layer = nn.GatedDeltaNet(16, 64)
    assert layer.head_v_dim == layer.head_k_dim == 128
    assert 0.01 <= layer.A_log.exp().min() < layer.A_log.exp().max() <= 16.0
    assert torch.equal(layer.dt_bias, torch.ones(64))
    assert nn.GatedDeltaNet(16, 2, device="meta").A_log.is_meta
    mamba = nn.Mamba2(16, 64)
    assert 1.0 <= mamba.A_log.exp().min() < mamba.A_log.exp().max() <= 16.0 * (1 + 1e-6)
    steps = F.softplus(mamba.dt_bias)
    assert 1e-3 * (1 - 1e-4) <= steps.min() < 0.01 < steps.max() <= 0.1 * (1 + 1e-4)
    assert torch.equal(mamba.D, torch.ones(64))
