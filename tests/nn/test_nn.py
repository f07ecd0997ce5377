"""The modules: what they compute, what they keep, what they refuse."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F

from foundry_kernels import OPS, BackendUnavailable, nn, rope
from foundry_kernels.nn import _backend

OPERATIONS = ("rms_norm", "add_rms_norm", "rope", "swiglu", "flash_attention")


@pytest.fixture
def rope_without_kernels(monkeypatch):
    """Behaves as if the package had nothing but a reference of rope."""
    spec = OPS["rope"]
    reference = tuple(impl for impl in spec.impls if impl.backend == "reference")
    monkeypatch.setitem(OPS, "rope", dataclasses.replace(spec, impls=reference))


# --- backends ---------------------------------------------------------------------------------------------------------


def test_named_backend_uses_the_reference_only_where_there_is_no_kernel_and_says_so(rope_without_kernels):
    with pytest.warns(UserWarning, match="'native' has no kernel yet for rope"):
        planned = _backend.plan("native", ("rms_norm", "rope"))
    assert planned == {"rms_norm": "native", "rope": "reference"}


def test_auto_and_reference_warn_of_nothing(rope_without_kernels):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(_backend.plan("auto", OPERATIONS).values()) == {"auto"}
        assert set(_backend.plan("reference", OPERATIONS).values()) == {"reference"}


def test_mapping_is_taken_literally(rope_without_kernels):
    assert _backend.plan({"rms_norm": "triton"}, ("rms_norm", "rope")) == {"rms_norm": "triton", "rope": "auto"}
    with pytest.raises(BackendUnavailable, match="rope has no native kernel"):
        _backend.plan({"rope": "native"}, ("rope",))
    with pytest.raises(ValueError, match="unknown operation 'ropes'"):
        _backend.plan({"ropes": "native"}, ("rope",))
    with pytest.raises(TypeError, match="backend must be a string or a mapping"):
        _backend.plan(3, ("rope",))


def test_kernel_that_exists_and_cannot_serve_raises_at_the_call():
    norm = nn.RMSNorm(8, backend="native", dtype=torch.float64)  # there is no float64 kernel, built or not
    assert norm.backends == {"rms_norm": "native", "add_rms_norm": "native"}
    with pytest.raises(BackendUnavailable, match="native"):
        norm(torch.randn(2, 8, dtype=torch.float64))


def test_serving_resolves_auto_and_keeps_names():
    found = _backend.serving({"rms_norm": "auto", "rope": "triton"}, "cpu", torch.float64)
    assert found == {"rms_norm": "reference", "rope": "triton"}


# --- RotaryEmbedding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions_as_int_tensor_and_table(interleaved):
    embedding = nn.RotaryEmbedding(8, 32, interleaved=interleaved)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    expected = rope(q, k, embedding.cos[3:8], embedding.sin[3:8], interleaved=interleaved)
    for positions in (3, torch.arange(3, 8), torch.arange(3, 8).expand(2, 5)):
        for got, want in zip(embedding(q, k, positions), expected, strict=True):
            torch.testing.assert_close(got, want)
    for got, want in zip(embedding(q, k), embedding(q, k, 0), strict=True):
        assert torch.equal(got, want)


# --- SwiGLU and Attention ---------------------------------------------------------------------------------------------


def test_swiglu_formula_and_names():
    block = nn.SwiGLU(6, 10)
    assert {name: tuple(p.shape) for name, p in block.named_parameters()} == {
        "w1.weight": (10, 6),
        "w2.weight": (6, 10),
        "w3.weight": (10, 6),
    }
    x = torch.randn(2, 3, 6)
    w1, w2, w3 = block.w1.weight, block.w2.weight, block.w3.weight
    torch.testing.assert_close(block(x), (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T)


def feed_forward(recompute, backend="native", frozen=(), **options):
    torch.manual_seed(0)
    block = nn.SwiGLU(16, 40, recompute=recompute, backend=backend, **options)
    for name in set(frozen) - {"x"}:
        getattr(block, name).requires_grad_(False)
    return block, torch.randn(3, 5, 16, **options).requires_grad_("x" not in frozen)


def kept_elements(block, x):
    """Elements that a backward pass keeps alive, each storage counted once, without the weights."""
    storages = {}

    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(x)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    return y, sum(n for address, n in storages.items() if address not in weights)


@pytest.mark.skipif("native" not in OPS["swiglu"].backends("cpu"), reason="the C++ extension is not built")
@pytest.mark.parametrize(
    ("recompute", "a_token"), [("none", 16 + 3 * 40), ("product", 16 + 2 * 40), ("projections", 16)]
)
def test_swiglu_keeps_what_it_says(recompute, a_token):
    y, kept = kept_elements(*feed_forward(recompute))
    assert kept == 15 * a_token
    y, kept = kept_elements(*feed_forward(recompute, frozen=("w2",)))
    assert kept == 15 * min(a_token, 16 + 2 * 40)
    block, x = feed_forward(recompute)
    with torch.autocast("cpu", torch.bfloat16):  # x is kept in bfloat16 besides float32 where it is cast
        y, kept = kept_elements(block, x)
    assert y.dtype == torch.bfloat16
    with torch.no_grad():
        assert kept_elements(block, x)[1] == 0


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize(
    "frozen", [(), ("w1",), ("w2",), ("w3",), ("x",), ("w1", "w3", "x"), ("w1", "w2", "w3")], ids=str
)
def test_swiglu_recomputing_changes_no_bit(frozen, backend):
    if (reason := OPS["swiglu"].why_not(backend, "cpu", torch.float32)) is not None:
        pytest.skip(reason)
    results = []
    for recompute in ("none", "product", "projections"):
        block, x = feed_forward(recompute, backend, frozen)
        wanted = [t for t in (x, *block.parameters()) if t.requires_grad]
        y = block(x)
        first, second = (torch.autograd.grad(y.sum() * 3, wanted, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, second))
        results.append((y, *first))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("recompute", ["none", "product", "projections"])
def test_swiglu_gradients_and_second_derivative(recompute):
    block, x = feed_forward(recompute, "reference", dtype=torch.float64)
    names = [name for name, _ in block.named_parameters()]

    def function(x, *weights):
        return torch.func.functional_call(block, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *block.parameters()), fast_mode=True)
    if OPS["swiglu"].why_not("native", "cpu", torch.float32) is None:
        block, x = feed_forward(recompute)
        with pytest.raises(RuntimeError, match=r"swiglu has no second derivative.*create_graph=True"):
            torch.autograd.grad(block(x).sum(), [x, *block.parameters()], create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "product", "projections"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_swiglu_compiles_whole(recompute, backend):
    block, x = feed_forward(recompute, backend)
    wanted = [x, *block.parameters()]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x), block(x)
    torch.testing.assert_close(y, expected)
    for a, e in zip(*(torch.autograd.grad(t.square().sum(), wanted) for t in (y, expected)), strict=True):
        torch.testing.assert_close(a, e)


def test_swiglu_layers_that_were_replaced():
    """They are called as they are: a random part draws its numbers once, and hooks run once."""
    results = []
    for recompute in ("none", "product", "projections"):
        block, x = feed_forward(recompute, "reference")
        block.w2 = torch.nn.Sequential(torch.nn.Dropout(0.5), block.w2)
        called = []
        block.w1.register_forward_hook(lambda *_, called=called: called.append(1))
        torch.manual_seed(1)
        y = block(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])))
        assert called == [1]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def attend(block, x, embedding):
    """Attention spelled out, with the key-value heads repeated."""
    batch, length, _ = x.shape

    def heads(linear, count):
        return linear(x).view(batch, length, count, block.head_dim).transpose(1, 2)

    q, k, v = heads(block.wq, block.n_heads), heads(block.wk, block.n_kv_heads), heads(block.wv, block.n_kv_heads)
    if embedding is not None:
        q, k = rope(q, k, embedding.cos, embedding.sin, interleaved=embedding.interleaved, backend="reference")
    k, v = (t.repeat_interleave(block.n_heads // block.n_kv_heads, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=block.causal)
    return block.wo(out.transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("with_rope", [True, False], ids=["rope", "no rope"])
@pytest.mark.parametrize("kv_heads", [None, 2, 1], ids=["MHA", "GQA", "MQA"])
def test_attention_is_attention(kv_heads, with_rope, causal):
    embedding = nn.RotaryEmbedding(6, 16, interleaved=True) if with_rope else None
    block = nn.Attention(20, 4, kv_heads, 6, rope=embedding, causal=causal)
    x = torch.randn(2, 7, 20)
    torch.testing.assert_close(block(x), attend(block, x, embedding))


@pytest.mark.parametrize("with_rope", [True, False], ids=["rope", "no rope"])
@pytest.mark.parametrize("max_seqlen", [None, 4], ids=["no maximum", "maximum"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_sequences_are_attended_one_by_one(with_rope, max_seqlen, index):
    """Positions start at 0 in each; the gradient of each is its own."""
    block = nn.Attention(20, 4, 2, 6, rope=nn.RotaryEmbedding(6, 16) if with_rope else None)
    lengths = (3, 0, 4, 1)
    x = torch.randn(1, sum(lengths), 20, requires_grad=True)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(index)
    packed = block(x, cu_seqlens=starts, max_seqlen=max_seqlen, return_lse=True, return_stats=True)
    alone = [block(part, return_lse=True, return_stats=True) for part in x.split(lengths, 1)]
    for i, (whole, parts) in enumerate(zip(packed, zip(*alone, strict=True), strict=True)):
        assert whole.shape[0] == 1
        torch.testing.assert_close(whole, torch.cat(parts, 1 if i == 0 else 2))
    expected = torch.cat([parts[0] for parts in alone], 1)
    cotangent = torch.randn_like(expected)
    for a, e in zip(*(torch.autograd.grad(y, x, cotangent) for y in (packed[0], expected)), strict=True):
        torch.testing.assert_close(a, e)


def test_attention_returns_what_the_operation_does():
    block, x = nn.Attention(16, 4, 2), torch.randn(2, 5, 16)
    y, lse, entropy, max_logit = block(x, return_lse=True, return_stats=True)
    torch.testing.assert_close(y, block(x))
    assert [t.shape for t in (lse, entropy, max_logit)] == [(2, 4, 5)] * 3
    torch.testing.assert_close(block(x, return_lse=True)[1], lse)
    for a, e in zip(block(x, return_stats=True)[1:], (entropy, max_logit), strict=True):
        torch.testing.assert_close(a, e)
    assert (entropy[:, :, 0] == 0).all()  # the first token sees itself alone
    torch.testing.assert_close(max_logit[:, :, 0], lse[:, :, 0])


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy_is_a_linear_layer_with_its_loss(bias):
    torch.manual_seed(0)
    head = nn.LinearCrossEntropy(8, 21, bias, label_smoothing=0.1, softcap=5.0)
    plain = torch.nn.Linear(8, 21, bias)
    plain.load_state_dict(head.state_dict())
    hidden, target = torch.randn(2, 5, 8), torch.randint(21, (2, 5))
    logits = 5.0 * torch.tanh(plain(hidden) / 5.0)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    loss = head(hidden, target)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(head.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert "in_features=8, out_features=21" in repr(head)
    assert "backend='auto'" in repr(head)
