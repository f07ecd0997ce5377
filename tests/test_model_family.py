"""The choices of a model, each against plain mathematics in float64: positions, norms, activations, blocks, presets."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_model import TINY, draw, make
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels import OPS, BackendUnavailable
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.models.presets import SIZES
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.reference import attention_with_dropout
from foundry_kernels.testing import compare

#: What differs from a Llama. Each value of each choice is in at least one.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "norm": "layer_norm", "activation": "gelu_tanh", "attention_bias": True}
    | {"mlp_bias": True, "tie_embeddings": True},
    "bloom": {"positions": "alibi", "norm": "layer_norm", "embedding_norm": True, "activation": "gelu_tanh"}
    | {"attention_bias": True, "mlp_bias": True, "n_heads": 6, "dim": 24, "n_kv_heads": None},
    "falcon": {"norm": "layer_norm", "activation": "gelu", "n_kv_heads": 1, "rope_interleaved": False}
    | {"parallel_residual": True, "shared_attention_norm": True, "tie_embeddings": True},
    "neox": {"norm": "layer_norm", "activation": "gelu", "parallel_residual": True, "rope_interleaved": False}
    | {"rope_dim": 2, "attention_bias": True, "mlp_bias": True, "output_bias": True},
    "vaswani": {"positions": "sinusoidal", "norm": "layer_norm", "norm_placement": "post", "activation": "relu"}
    | {"mlp_bias": True},
    "post-rms": {"positions": "none", "norm_placement": "post", "activation": "geglu", "mlp_bias": True},
    "qk-norm": {"qk_norm": True, "rope_interleaved": False, "sliding_window": 3, "head_dim": 6},
    "qk-norm-alibi": {"qk_norm": True, "positions": "alibi", "sliding_window": 4, "activation": "geglu_tanh"},
    "no-bias": {"norm": "layer_norm", "norm_bias": False, "activation": "relu", "rope_dim": 2},
    "experts": {"n_experts": 5, "top_k": 3, "router_scoring": "sigmoid", "router_scale": 1.5, "hidden_dim": 6}
    | {"router_bias": True, "selection_bias": True, "mlp_bias": True}
    | {"shared_expert_dim": 4, "shared_expert_gate": True},
    "qkv-bias": {"attention_bias": True, "attention_out_bias": False, "ffn_rule": "4d", "sliding_window": 1},
}


def config(name: str, **changes: Any) -> ModelConfig:
    return dataclasses.replace(TINY, **{**MODELS[name], **changes})


# --- mathematics ------------------------------------------------------------------------------------------------------

GATES = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
PLAIN = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": GATES["geglu_tanh"],
    "relu": F.relu,
}


def slopes(n: int) -> list[float]:
    """As the authors of ALiBi compute them."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return slopes(closest) + slopes(2 * closest)[0::2][: n - closest]


class Plain:
    """The model written down from the papers, without a kernel and in the dtype of the weights."""

    def __init__(self, config: ModelConfig, state: dict[str, Tensor]) -> None:
        self.config, self.state = config, state

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state.get(f"{name}.bias", 0.0)

    def norm(self, x: Tensor, name: str, kind: str | None = None) -> Tensor:
        if (kind or self.config.norm) == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()
        return x * self.state[f"{name}.weight"] + self.state.get(f"{name}.bias", 0.0)

    def rotate(self, x: Tensor) -> Tensor:
        c, width = self.config, self.config.rotary_width
        turned, rest = x[..., :width], x[..., width:]
        order = torch.arange(width).view(-1, 2) if c.rope_interleaved else torch.arange(width).view(2, -1).T
        frequencies = c.rope_base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequencies
        pairs = torch.view_as_complex(turned[..., order].contiguous()) * torch.polar(torch.ones_like(angle), angle)
        turned = torch.empty_like(turned)
        turned[..., order] = torch.view_as_real(pairs)
        return torch.cat([turned, rest], -1)

    def attention(self, x: Tensor, name: str) -> Tensor:
        c = self.config
        q, k, v = (
            self.linear(x, f"{name}.{w}").unflatten(-1, (-1, c.head_width)).transpose(1, 2) for w in ("wq", "wk", "wv")
        )
        if c.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm", "rms_norm"), self.norm(k, f"{name}.k_norm", "rms_norm")
        if c.positions == "rope":
            q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(c.n_heads // c.kv_heads, 1) for t in (k, v))
        scores = q @ k.mT / c.head_width**0.5
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        if c.positions == "alibi":
            scores = scores - torch.tensor(slopes(c.n_heads), dtype=torch.float64)[:, None, None] * distance
        hidden = (distance < 0) | (distance >= (c.sliding_window or len(distance)))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.linear((weights @ v).transpose(1, 2).flatten(2), f"{name}.wo")

    def experts(self, x: Tensor, name: str) -> Tensor:
        c, state = self.config, self.state
        logits = self.linear(x, f"{name}.router")
        scores = logits.softmax(-1) if c.router_scoring == "softmax" else logits.sigmoid()
        weights = scores * torch.zeros_like(scores).scatter(-1, scores.topk(c.top_k, -1).indices, 1.0)
        weights = c.router_scale * weights / (weights.sum(-1, keepdim=True) if c.router_renormalize else 1.0)
        shared = self.feed_forward(x, f"{name}.shared") if c.shared_expert_dim else 0.0
        total = shared * self.linear(x, f"{name}.shared_gate").sigmoid() if c.shared_expert_gate else shared
        for e in range(c.n_experts or 0):
            packed, down = (state[f"{name}.experts.{n}_proj"][e] for n in ("gate_up", "down"))
            bias = [state[f"{name}.experts.{n}_proj_bias"][e] if c.mlp_bias else 0.0 for n in ("gate_up", "down")]
            gate, up = (x @ packed.T + bias[0]).chunk(2, -1)
            total = total + weights[..., e, None] * (GATES[c.activation](gate) * up @ down.T + bias[1])
        return total

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        if self.config.n_experts and not name.endswith("shared"):
            return self.experts(x, name)
        up, activation = self.linear(x, f"{name}.w1"), self.config.activation
        up = GATES[activation](up) * self.linear(x, f"{name}.w3") if activation in GATES else PLAIN[activation](up)
        return self.linear(up, f"{name}.w2")

    def __call__(self, tokens: Tensor) -> Tensor:
        c, state = self.config, self.state
        x = state["tok_embeddings.weight"][tokens]
        if c.positions == "learned":
            x = x + state["pos_embeddings.weight"][: tokens.shape[1]]
        if c.positions == "sinusoidal":
            position = torch.arange(tokens.shape[1], dtype=torch.float64)[:, None]
            angle = position / 10000.0 ** (torch.arange(0, c.dim, 2, dtype=torch.float64) / c.dim)
            x = x + torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
        if c.embedding_norm:
            x = self.norm(x, "embedding_norm")
        for n in range(c.n_layers):
            attend, feed = f"layers.{n}.attention", f"layers.{n}.feed_forward"
            norms = f"layers.{n}.attention_norm", f"layers.{n}.ffn_norm"
            if c.norm_placement == "post":
                x = self.norm(x + self.attention(x, attend), norms[0])
                x = self.norm(x + self.feed_forward(x, feed), norms[1])
            elif c.parallel_residual:
                second = norms[0 if c.shared_attention_norm else 1]
                x = x + self.attention(self.norm(x, norms[0]), attend) + self.feed_forward(self.norm(x, second), feed)
            else:
                x = x + self.attention(self.norm(x, norms[0]), attend)
                x = x + self.feed_forward(self.norm(x, norms[1]), feed)
        if c.norm_placement == "pre":
            x = self.norm(x, "norm")
        return self.linear(x, "tok_embeddings" if c.tie_embeddings else "output")


@pytest.mark.parametrize("name", MODELS)
def test_a_choice_is_its_formula(name):
    model, tokens = make(config(name)).double(), draw()
    expected = Plain(model.config, model.state_dict())(tokens)
    # Tables of positions stay float32, which bounds the agreement.
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert model.config.n_parameters == sum(p.numel() for p in model.parameters())


def test_every_value_of_every_choice_is_in_a_model():
    from foundry_kernels.models.config import CHOICES

    seen = {field: {getattr(TINY, field)} | {getattr(config(name), field) for name in MODELS} for field in CHOICES}
    assert {field: set(values) for field, values in CHOICES.items()} == seen | {
        "ffn_rule": seen["ffn_rule"] | {"two_thirds_of_4d"}
    }


@pytest.mark.parametrize("name", MODELS)
def test_generation_with_a_cache_is_the_argmax_of_the_whole_model(name):
    """Prompts of different lengths, so that positions, windows and slopes begin where the cache ends."""
    model = make(config(name))
    prompts = [draw(1, length, seed=length)[0] for length in (6, 2, 4)]
    for prompt, row in zip(prompts, model.generate(prompts, 9), strict=True):
        expected = prompt
        with torch.no_grad():
            for _ in range(9):
                expected = torch.cat([expected, model(expected[None])[0, -1:].argmax(-1)])
        assert torch.equal(row, expected)
    with torch.no_grad():
        cache = model.make_cache(3)
        parts = [model(part, cache=cache) for part in draw(3, 11).split((5, 1, 5), 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(draw(3, 11)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon", "vaswani", "qk-norm"])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_backends_agree_with_the_reference(name, backend):
    def step(model: Transformer) -> dict[str, Tensor]:
        logits, loss = model(draw(), draw().roll(-1, 1), return_logits=True)
        loss.backward()
        return {"logits": logits, "loss": loss} | {n: p.grad for n, p in model.named_parameters()}

    absent = [op for op in Transformer(config(name)).backends if OPS[op].impl("native") is None]
    if backend == "native" and absent:
        pytest.skip(f"no native kernel of {', '.join(absent)}")
    model = make(config(name), backend)
    for op, served in model.serving().items():
        if (reason := OPS[op].why_not(served, "cpu", torch.float32)) is not None:
            pytest.skip(f"{op}: {reason}")
    actual, reference, oracle = step(model), step(make(config(name))), step(make(config(name)).double())
    for key, tensor in actual.items():
        # The softmax's gradient, and so that of queries and keys, is a difference of terms as large as the values'.
        terms = re.sub(r"attention\.(w[qk]|[qk]_norm)\.", "attention.wv.", key).replace("wv.bias", "wv.weight")
        compare(key, tensor, reference[key], oracle[key], float(oracle[terms].detach().abs().max()))


@pytest.mark.parametrize("name", ["gpt2", "qk-norm-alibi"])
def test_compiles_whole(name):
    model = make(config(name, n_layers=1))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for length in (5, 9):
        logits, loss = compiled(draw(2, length), draw(2, length), return_logits=True)
        torch.testing.assert_close(logits, model(draw(2, length)))
    loss.backward()


@pytest.mark.parametrize("name", ["gpt2", "neox", "vaswani"])
def test_autocast_keeps_the_stream_in_float32(name):
    model = make(config(name))
    streams: list[torch.dtype] = []
    for block in model.layers:
        block.register_forward_hook(lambda module, inputs, outputs: streams.append(outputs[1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(draw(), draw(), return_logits=True)
    loss.backward()
    assert streams == [torch.float32] * 2
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    expected = model(draw())
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_tables_are_neither_cast_nor_left_on_the_meta_device():
    for name, table in (("bloom", "layers.0.attention.alibi.slopes"), ("vaswani", "pos_embeddings.weight")):
        whole = make(config(name))
        with torch.device("meta"):
            late = Transformer(config(name), "reference")
        late.to_empty(device="cpu").load_state_dict(whole.state_dict())
        assert torch.equal(late(draw()), whole(draw()))
        assert table not in whole.state_dict()
        low = late.to(torch.bfloat16)
        assert low.get_buffer(table).dtype == torch.float32
        assert low(draw()).dtype == torch.bfloat16


def test_initialisation():
    for module in Transformer(config("gpt2", tie_embeddings=False, output_bias=True)).modules():
        if isinstance(module, nn.LayerNorm):
            assert torch.equal(module.weight, torch.ones(16))
        if isinstance(module, nn.LayerNorm | nn.Linear):
            assert module.bias.count_nonzero() == 0


# --- positions --------------------------------------------------------------------------------------------------------


def test_slopes_are_those_of_the_paper_for_any_number_of_heads():
    assert fk.nn.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    for n in range(1, 72):
        torch.testing.assert_close(fk.nn.alibi_slopes(n), torch.tensor(slopes(n)), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="n_heads must be >= 1"):
        fk.nn.alibi_slopes(0)


def test_positions_beyond_the_table():
    with pytest.raises(ValueError, match="max_seq_len is 24, the length of the table of learned positions"):
        make(config("gpt2"))(draw(1, 25))
    with pytest.raises(ValueError, match="positions 20 to 24 do not fit max_positions=24"):
        fk.nn.SinusoidalEmbedding(6, 24)(torch.zeros(1, 5, 6), 20)
    longer = Transformer(config("bloom", max_seq_len=48), "reference")  # no table has a length here
    longer.load_state_dict(make(config("bloom")).state_dict())
    assert longer(draw(1, 40)).shape == (1, 40, 11)


# --- widths and presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 48),  # int(8 * 16 / 3) = 42, up to a multiple of 8
        ({"activation": "relu"}, 64),
        ({"ffn_rule": "4d"}, 64),
        ({"activation": "gelu", "ffn_rule": "two_thirds_of_4d", "multiple_of": 5}, 45),
        ({"activation": "gelu", "ffn_dim_multiplier": 1.3}, 83),
        ({"activation": "gelu", "hidden_dim": 7}, 7),
    ],
)
def test_widths_of_the_feed_forward_part(changes, width):
    assert dataclasses.replace(TINY, **changes).ffn_width == width


COUNTS = {
    "gpt2": {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200},
    "llama": {
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-2-70b": 68_976_648_192,
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
    },
    "bloom": {
        "560m": 559_214_592,
        "1b1": 1_065_314_304,
        "1b7": 1_722_408_960,
        "3b": 3_002_557_440,
        "7b1": 7_069_016_064,
        "176b": 176_247_271_424,
    },
    # Of checkpoints that store the tied head too, 65024 times the width less.
    "falcon": {"7b": 6_921_720_704, "40b": 41_303_293_952, "180b": 179_522_565_120 - 65024 * 14848},
    "mixtral": {"8x7b": 46_702_792_704, "8x22b": 140_620_634_112},
}
DEFAULTS = {"gpt2": "small", "llama": "llama-2-7b", "bloom": "7b1", "falcon": "7b", "mixtral": "8x7b"}
KV_HEADS = {"mixtral": {"n_kv_heads": 2}}  # it has 8, too many for the small one of the test


@pytest.mark.parametrize("family", SIZES)
def test_presets_have_their_parameters(family):
    preset = getattr(ModelConfig, family)
    assert {size: preset(size).n_parameters for size in SIZES[family]} == COUNTS[family]
    assert preset() == preset(DEFAULTS[family])
    with torch.device("meta"):
        built = Transformer(preset())
    assert sum(p.numel() for p in built.parameters()) == COUNTS[family][DEFAULTS[family]]
    small = preset(n_layers=2, dim=64, n_heads=4, vocab_size=11, multiple_of=8, **KV_HEADS.get(family, {}))
    width = {"llama": 176, "mixtral": 224}.get(family, 256)
    assert (small.n_layers, small.head_width, small.ffn_width) == (2, 16, width)
    assert Transformer(small)(draw()).shape == (3, 7, 11)
    with pytest.raises(ValueError, match=f"size must be one of {DEFAULTS[family] if family == 'gpt2' else ''}.*'tiny'"):
        preset("tiny")


# --- dropout ----------------------------------------------------------------------------------------------------------

KINDS = ("embedding_dropout", "residual_dropout", "attention_dropout")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "falcon", "vaswani"])
def test_dropout_is_of_training_alone_and_repeats_with_its_seed(name, kind):
    model = make(config(name, **{kind: 0.5}))
    plain = make(config(name))(draw())

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(draw())

    assert torch.equal(model.eval()(draw()), plain)
    model.train()
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.allclose(drawn(0), drawn(1))
    drawn(0).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_residual_dropout_drops_whole_elements_of_both_branches():
    """With all of it dropped but a part, the stream is the embedding plus twice some elements of the branches."""
    block, following = make(config("no-bias", residual_dropout=0.5)).layers[:2].train()
    seen: list[Tensor] = []
    for part in (block.attention, block.feed_forward):
        part.register_forward_hook(lambda module, inputs, output: seen.append(output))
    stream = torch.randn(2, 5, 16)
    branch, after = block(None, stream)
    sums: list[Tensor] = []  # the second branch is dropped out where it is added: in the pass of the next norm
    following.attention_norm.register_forward_hook(lambda module, inputs, output: sums.append(output[1]))
    following(branch, after)
    for before, dropped in zip(seen, (after - stream, sums[0] - after), strict=True):
        kept = dropped.abs() > 1e-6
        assert 0.2 < kept.float().mean() < 0.8
        torch.testing.assert_close(dropped, 2.0 * before * kept, rtol=1e-4, atol=1e-5)


def test_each_block_drops_a_branch_once():
    """With nearly all of it dropped, the stream that reaches the last norm is nearly the embedding: a branch that was
    forgotten, the last one too, would be there whole."""
    torch.manual_seed(0)
    for name in ("no-bias", "gpt2", "falcon"):
        model = make(config(name, residual_dropout=1.0 - 2.0**-30)).train()
        streams: list[Tensor] = []
        model.norm.register_forward_hook(lambda module, inputs, output, seen=streams: seen.append(output[1]))
        model.tok_embeddings.register_forward_hook(lambda module, inputs, output, seen=streams: seen.append(output))
        model.layers[0].register_forward_pre_hook(lambda module, inputs, seen=streams: seen.append(inputs[1]))
        model(draw())
        _, first, last = streams
        assert torch.equal(first, last), name
        assert not torch.equal(model.eval()(draw()), model.train()(draw()))


def attend_with_dropout(q, k, v, dropout_p, *, window=(None, None), alibi_slopes=None):
    options = AttentionOptions(
        None, None, q.shape[2], k.shape[2], q.shape[3] ** -0.5, *window, None, alibi_slopes, None,
        bottom_right=True, deterministic=True, return_lse=False, return_stats=False,
    )  # fmt: skip
    return attention_with_dropout(q, k, v, options, dropout_p)


def test_attention_with_dropout_of_nothing_is_attention():
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 5)
    for options in (
        {"window": (None, 0)},
        {"window": (2, 2)},
        {"window": (1, 0), "alibi_slopes": fk.nn.alibi_slopes(6)},
    ):
        torch.testing.assert_close(attend_with_dropout(q, k, v, 0.0, **options), fk.flash_attention(q, k, v, **options))
    # The heads that are kept whole: of one query and key, the value is kept and doubled, or gone.
    out = attend_with_dropout(torch.ones(1, 400, 1, 4), torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), 0.5)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert abs(out.mean().item() - 1.0) < 0.25  # five standard deviations


def test_attention_dropout_of_packed_sequences_sees_no_other():
    torch.manual_seed(0)
    attention = fk.nn.Attention(16, 4, 2, sliding_window=3, dropout=1e-9, rope=fk.nn.RotaryEmbedding(4))
    x, cu_seqlens = torch.randn(1, 9, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = attention(x, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(packed, attention.eval()(x, cu_seqlens=cu_seqlens))
    with pytest.raises(ValueError, match="return_lse and return_stats need attention without dropout"):
        attention.train()(x, return_lse=True)


def test_a_named_kernel_has_no_attention_dropout():
    if (reason := OPS["flash_attention"].why_not("native", "cpu", torch.float32)) is not None:
        pytest.skip(reason)
    ops = {"flash_attention": "native"}
    model = make(config("gpt2", attention_dropout=0.1), ops)  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailable, match=r"'native' has no dropout of attention's weights; got dropout=0\.1"):
        model(draw())
    assert torch.isfinite(model.eval()(draw())).all()


# --- contradictions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "rotary"}, "positions must be one of 'rope', 'alibi', .* got 'rotary'"),
        ({"activation": "silu"}, "activation must be one of 'swiglu', .*'relu'; got 'silu'"),
        ({"positions": "alibi", "rope_scaling": fk.RopeScaling("linear", 2.0)}, "rope_scaling needs positions='rope'"),
        ({"positions": "learned", "rope_base": 5e5}, "rope_base needs positions='rope'; got 500000.0 .*'learned'"),
        ({"positions": "none", "rope_dim": 2}, "rope_dim needs positions='rope'; got 2"),
        ({"positions": "alibi", "rope_interleaved": False}, "rope_interleaved needs positions='rope'; got False"),
        ({"rope_dim": 3}, "rope_dim must be even and at most head_dim=4; got 3"),
        ({"rope_dim": 6}, "rope_dim must be even and at most head_dim=4; got 6"),
        ({"norm_placement": "post", "parallel_residual": True}, "parallel_residual needs norm_placement='pre'"),
        ({"shared_attention_norm": True}, "shared_attention_norm needs parallel_residual=True"),
        ({"norm_bias": True}, "norm_bias needs norm='layer_norm'"),
        ({"norm": "layer_norm", "norm_round_before_weight": True}, "norm_round_before_weight needs norm='rms_norm'"),
        ({"tie_embeddings": True, "output_bias": True}, "output_bias needs tie_embeddings=False"),
        ({"sliding_window": 0}, "sliding_window must be at least 1; got 0"),
        ({"residual_dropout": 1.0}, r"residual_dropout must be in \[0, 1\); got 1.0"),
        ({"attention_dropout": -0.1}, r"attention_dropout must be in \[0, 1\); got -0.1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_types_and_modules_are_refused():
    with pytest.raises(TypeError, match="qk_norm must be a bool; got int"):
        dataclasses.replace(TINY, qk_norm=1)
    with pytest.raises(TypeError, match="sliding_window must be an int; got float"):
        dataclasses.replace(TINY, sliding_window=4.0)
    assert dataclasses.replace(TINY, positions="none", head_dim=5).head_width == 5  # odd without pairs
    with pytest.raises(ValueError, match="alibi must have a slope for each of n_heads=2; got 4"):
        fk.nn.Attention(8, 2, alibi=fk.nn.AlibiSlopes(4))
    with pytest.raises(ValueError, match="sliding_window must be None or at least 1; got 0"):
        fk.nn.Attention(8, 2, sliding_window=0)
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\); got 1.5"):
        fk.nn.Attention(8, 2, dropout=1.5)
    with pytest.raises(ValueError, match="activation must be one of gelu, gelu_tanh, relu; got 'swiglu'"):
        fk.nn.MLP(8, 16, activation="swiglu")
    with pytest.raises(ValueError, match="recompute must be one of none, product; got 'projections'"):
        fk.nn.MLP(8, 16, recompute="projections")
