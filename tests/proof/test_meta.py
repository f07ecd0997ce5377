"""The meta device, where tensors have shapes and no memory: every operation, module and model does what it does on the
CPU, as far as can be seen there; and what was built there is whole once it has its memory and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow import rest_slow
from tiny_model import MODELS, TINY, draw
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import foundry_kernels as fk
from foundry_kernels import compat
from foundry_kernels.models import Transformer
from foundry_kernels.testing import Case, call, make_cotangents, run
from foundry_kernels.tools.check import small_cases

Seen = tuple[torch.Size, torch.dtype, tuple[int, ...]]


def on_meta(x: Tensor) -> Tensor:
    """Returns a tensor without values, laid out alike."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return made.requires_grad_(x.requires_grad and x.is_leaf)


def seen(x: Tensor) -> Seen:
    return x.shape, x.dtype, x.stride() if x.numel() else ()


@pytest.mark.parametrize("dtype", rest_slow([torch.bfloat16, torch.float32]), ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", fk.OPS)
def test_operations(name: str, dtype: torch.dtype) -> None:
    """Outputs have the shape, dtype and strides that every backend gives them, gradients their shape and dtype."""
    op = fk.OPS[name]

    def single(case: Case) -> bool:  # a call of the fewest dimensions, which small_cases leaves out
        return all(a is None or len(a.shape) < 2 or a.shape[0] < 3 for a in case.args.values())

    cases = op.cases.CASES[name]
    for case in {c.id: c for c in (*small_cases(cases), *list(filter(single, cases))[:5])}.values():
        args = case.make(dtype)
        cotangents = make_cotangents(call(op, args, case.options, backend="auto"), case.cotangent)
        expected = run(op, args, case.options, cotangents, backend="auto")
        metas = {k: None if x is None else on_meta(x) for k, x in args.items()}
        found = run(op, metas, case.options, tuple(map(on_meta, cotangents)), backend="auto")
        assert all(x.is_meta for x in found.items().values())
        assert list(map(seen, found.outputs)) == list(map(seen, expected.outputs)), case.id
        assert {k: seen(x)[:2] for k, x in found.grads.items()} == {k: seen(x)[:2] for k, x in expected.grads.items()}


GENERATOR = torch.Generator().manual_seed(0)
X, Q = torch.randn(2, 6, 16, generator=GENERATOR), torch.randn(2, 4, 6, 8, generator=GENERATOR)
K, V = torch.randn(2, 2, 2, 6, 8, generator=GENERATOR)
TARGETS = torch.randint(11, (2, 6), generator=GENERATOR)


class Relative(nn.Module):
    """A bias for scores, which is made of two lengths, as a function of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = fk.nn.RelativeBias(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.bias(x.shape[1], x.shape[1]) * x.sum()


#: How each module is built, and what it is called with.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "MLP": (lambda: fk.nn.MLP(16, 24), (X,)),
    "GatedMLP": (lambda: fk.nn.GatedMLP(16, 24, activation="geglu", bias=True), (X,)),
    "SwiGLU": (lambda: fk.nn.SwiGLU(16, 24), (X,)),
    "Attention": (lambda: fk.nn.Attention(16, 4, 2, rope=fk.nn.RotaryEmbedding(4, 8), qk_norm=True), (X,)),
    "MultiheadAttention": (lambda: fk.nn.MultiheadAttention(16, 4, batch_first=True), (X, X, X)),
    "Attention, ALiBi": (lambda: fk.nn.Attention(16, 4, alibi=fk.nn.AlibiSlopes(4), bias=True), (X,)),
    "Attention, a gate": (lambda: fk.nn.Attention(16, 4, 2, output_gate=True), (X,)),
    "GatedDeltaNet": (lambda: fk.nn.GatedDeltaNet(16, 4, 2, 8), (X,)),
    "Mamba2": (lambda: fk.nn.Mamba2(16, 4, 2, 8, 6), (X,)),
    "KimiDeltaAttention": (lambda: fk.nn.KimiDeltaAttention(16, 4, 2, 8), (X,)),
    "LatentAttention": (
        lambda: fk.nn.LatentAttention(16, 4, 8, 6, rope=fk.nn.RotaryEmbedding(4), qk_rope_head_dim=4, bias=True),
        (X,),
    ),
    "RMSNorm": (lambda: fk.nn.RMSNorm(16, weight_offset=1.0), (X,)),
    "LayerNorm": (lambda: fk.nn.LayerNorm(16), (X,)),
    "RotaryEmbedding": (lambda: fk.nn.RotaryEmbedding(8, 32), (Q, K)),
    "SinusoidalEmbedding": (lambda: fk.nn.SinusoidalEmbedding(16, 32), (X,)),
    "RelativeBias": (lambda: Relative(), (X,)),
    "AlibiSlopes": (lambda: fk.nn.Attention(16, 6, head_dim=4, alibi=fk.nn.AlibiSlopes(6)), (X,)),
    "Router": (lambda: fk.nn.Router(16, 4, 2, bias=True), (X.flatten(0, 1),)),
    "MoE": (lambda: fk.nn.MoE(16, 24, 4, 2, selection_bias=True, shared_width=8, shared_gate=True, bias=True), (X,)),
    "LinearCrossEntropy": (lambda: fk.nn.LinearCrossEntropy(16, 11, bias=True), (X, TARGETS)),
    "LinearCrossEntropy, rows": (lambda: fk.nn.LinearCrossEntropy(16, 11, reduction="none"), (X, TARGETS)),
}


def step(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The tensors of its result, and the gradients of all that takes one."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    found = [x for x in tree_leaves(module(*leaves)) if isinstance(x, Tensor)]
    sum(x.sum() for x in found if x.requires_grad).backward()
    owners = [*(x for x in leaves if x.is_floating_point()), *module.parameters()]
    return [*(x.detach() for x in found), *(x.grad for x in owners if x.grad is not None)]


def initialise(module: nn.Module) -> None:
    """Materializes as FSDP does: what each module does by itself."""
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    build, inputs = MODULES[name]
    torch.manual_seed(0)
    whole = build()
    with torch.device("meta"):
        late = build()
    assert all(x.is_meta for x in (*late.parameters(), *late.buffers()))
    found, expected = step(late, *map(on_meta, inputs)), step(whole, *inputs)
    assert all(x.is_meta for x in found)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    late.zero_grad()
    late.to_empty(device="cpu")
    torch.manual_seed(0)
    initialise(late)
    torch.manual_seed(0)
    whole = build()
    if name == "MultiheadAttention":  # PyTorch draws the output's weights first: others are as random
        pairs = zip(late.parameters(), whole.parameters(), strict=True)
        assert all(0.9 < float(a.abs().max() / b.abs().max()) < 1.1 if b.any() else not a.any() for a, b in pairs)
    else:
        for values in ("parameters", "buffers"):
            assert all(map(torch.equal, getattr(late, values)(), getattr(whole, values)())), values
    late.load_state_dict(whole.state_dict())
    assert all(map(torch.equal, step(late, *inputs), step(whole, *inputs)))


def test_every_module_is_tested() -> None:
    """A module stands in the list, or is a part of one that does."""
    built = {type(part) for build, _ in MODULES.values() for part in build().modules()}
    exported = [getattr(fk.nn, name) for name in fk.nn.__all__]
    assert {c for c in exported if isinstance(c, type) and issubclass(c, nn.Module)} <= built


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    config = dataclasses.replace(TINY, **MODELS[name])
    whole = Transformer(config)
    whole.init_weights(torch.Generator().manual_seed(3))
    late = Transformer(config, device="meta")
    tokens = draw()
    for model, given in ((whole, tokens), (late, tokens.to("meta"))):
        logits, loss = model(given, given, return_logits=True)
        assert (logits.shape, loss.shape, loss.device) == ((3, 7, 11), (), given.device)
        assert model(given, given)[0] is None
        loss.backward()
        with torch.no_grad():
            cache = model.make_cache(3, 9)
            assert (cache.device, cache.dtype) == (given.device, torch.float32)
            assert model(given, cache=cache).shape == (3, 7, 11)
            assert model(given[:, :1], cache=cache).shape == (3, 1, 11)
    seen_of = {n: (p.grad.shape, p.grad.dtype) for n, p in whole.named_parameters() if p.grad is not None}
    assert {n: (p.grad.shape, p.grad.dtype) for n, p in late.named_parameters() if p.grad is not None} == seen_of
    late.zero_grad()
    late.to_empty(device="cpu").init_weights(torch.Generator().manual_seed(3))
    assert torch.equal(late(tokens), whole(tokens))
    late = Transformer(config, device="meta").to_empty(device="cpu")
    late.load_state_dict(whole.state_dict())
    assert torch.equal(late(tokens), whole(tokens))


CU = torch.tensor([0, 2, 6], dtype=torch.int32)
BTHD = tuple(x.transpose(1, 2) for x in (Q, K, V))
#: Calls of `fk.compat` and what else is public, on tensors.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "sdpa": (lambda q, k, v: compat.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (Q, K, V)),
    "flash_attn_func": (lambda q, k, v: compat.flash_attn_func(q, k, v, causal=True), BTHD),
    "flash_attn_qkvpacked_func": (compat.flash_attn_qkvpacked_func, (torch.stack([BTHD[0]] * 3, 2),)),
    "flash_attn_kvpacked_func": (compat.flash_attn_kvpacked_func, (BTHD[0], torch.stack(BTHD[1:], 2))),
    "flash_attn_varlen_func": (
        lambda q, k, v, cu: compat.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, causal=True),
        (*(x[0] for x in BTHD), CU),
    ),
    "cross_entropy": (compat.cross_entropy, (X.flatten(0, 1), TARGETS.flatten())),
    "linear_cross_entropy": (compat.linear_cross_entropy, (X, X[0], TARGETS % 6)),
    "layer_norm": (lambda x: compat.layer_norm(x, (16,)), (X,)),
    "apply_rotary_emb": (lambda x, cos, sin: compat.apply_rotary_emb(x, cos, sin), (BTHD[0], X[0, :, :4], X[0, :, :4])),
    "varlen_attn": (
        lambda q, k, v, cu, used: compat.varlen_attn(q, k, v, cu, cu, 4, 4, seqused_k=used, enable_gqa=True),
        (*(x[0] for x in BTHD), CU, CU.diff()),
    ),
    "flash_attn_3 with qv": (
        lambda q, k, v, qv: compat.flash_attn_3.flash_attn_func(q, k, v, qv=qv, attention_chunk=2),
        (*BTHD, torch.randn(*BTHD[0].shape[:3], BTHD[2].shape[3])),
    ),
    "flash_attn_3 with chunks": (
        lambda q, k, v, cu: compat.flash_attn_3.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, attention_chunk=2),
        (*(x[0] for x in BTHD), CU),
    ),
    "flash_attn_with_kvcache": (
        lambda q, k, v, *new: compat.flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=3, causal=True),
        (BTHD[0][:, :2], *BTHD[1:], *(x[:, :2].clone() for x in BTHD[1:])),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_functions(name: str) -> None:
    function, inputs = CALLS[name]
    expected, found = function(*inputs), function(*map(on_meta, inputs))
    assert found.is_meta
    assert seen(found) == seen(expected)


def test_tables() -> None:
    """Built with the meta device in force they have no values either."""
    with torch.device("meta"):
        tables = (*fk.rope_table(8, 16), fk.nn.alibi_slopes(6))
    assert [(x.device.type, tuple(x.shape)) for x in tables] == [("meta", (16, 4)), ("meta", (16, 4)), ("meta", (6,))]
