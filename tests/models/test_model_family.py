"""The choices of a model, each against plain mathematics in float64: positions, norms, activations, blocks."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
from tiny_model import EVERY, MODELS, TINY, config, draw, make
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import OPS
from foundry_kernels.models import HybridCache, KVCache, ModelConfig, Transformer
from foundry_kernels.testing import compare

# --- mathematics ------------------------------------------------------------------------------------------------------

GATES = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "glu": lambda x: 1 / (1 + (-x).exp()),
    "reglu": F.relu,
}
PLAIN = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": GATES["geglu_tanh"],
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}


def slopes(n: int) -> list[float]:
    """Computes slopes as the authors of ALiBi do."""
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
        offset = self.config.norm_weight_offset if kind is None else 0.0
        return x * (self.state[f"{name}.weight"] + offset) + self.state.get(f"{name}.bias", 0.0)

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
        q, k, v = (self.linear(x, f"{name}.{w}") for w in ("wq", "wk", "wv"))
        if c.qk_norm_over == "projection":
            q, k = self.norm(q, f"{name}.q_norm", "rms_norm"), self.norm(k, f"{name}.k_norm", "rms_norm")
        q, k, v = (t.unflatten(-1, (-1, c.head_width)).transpose(1, 2) for t in (q, k, v))
        if c.qk_norm and c.qk_norm_over == "head":
            q, k = self.norm(q, f"{name}.q_norm", "rms_norm"), self.norm(k, f"{name}.k_norm", "rms_norm")
        if c.positions == "rope":
            q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(c.n_heads // c.kv_heads, 1) for t in (k, v))
        scale = c.attention_scale or c.head_width**-0.5
        scores = q @ k.mT * scale
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        if c.positions == "alibi":
            slope = torch.tensor(slopes(c.n_heads), dtype=torch.float64)
            slope = slope.bfloat16().double() * scale if c.alibi_scaled else slope
            scores = scores - slope[:, None, None] * distance
        if c.positions == "relative":  # buckets of 0, 1, 2, 3, then powers of the ratio between
            exact = c.relative_buckets // 2
            far = exact + (distance.clamp_min(1) / exact).log() / math.log(c.relative_max_distance / exact) * exact
            bucket = torch.where(distance < exact, distance, far.floor()).clamp(0, c.relative_buckets - 1).long()
            scores = scores + self.state["relative_bias.weight"][bucket].permute(2, 0, 1)
        hidden = (distance < 0) | (distance >= (c.sliding_window or len(distance)))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.linear((weights @ v).transpose(1, 2).flatten(2), f"{name}.wo")

    def experts(self, x: Tensor, name: str) -> Tensor:
        c, state = self.config, self.state
        logits = self.linear(x, f"{name}.router")
        scores = logits.softmax(-1) if c.router_scoring == "softmax" else logits.sigmoid()
        choice = scores + state.get(f"{name}.router.selection_bias", 0.0)
        if c.router_groups:
            groups = choice.unflatten(-1, (c.router_groups, -1))
            least = groups.topk(2).values.sum(-1).topk(c.router_top_groups).values[..., -1:]
            out = groups.topk(2).values.sum(-1) < least
            choice = groups.masked_fill(out[..., None], -torch.inf).flatten(-2)
        weights = scores * torch.zeros_like(scores).scatter(-1, choice.topk(c.top_k, -1).indices, 1.0)
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
        dense = f"{name}.router.weight" not in self.state
        if self.config.n_experts and not dense:
            return self.experts(x, name)
        c, up, activation = self.config, self.linear(x, f"{name}.w1"), self.config.activation
        if activation in GATES:
            up = GATES[activation](c.gate_alpha * up) / c.gate_alpha * self.linear(x, f"{name}.w3")
        else:
            up = PLAIN[activation](up)
        return self.linear(up, f"{name}.w2")

    def __call__(self, tokens: Tensor) -> Tensor:
        c, state = self.config, self.state
        x = state["tok_embeddings.weight"][tokens] * c.embedding_scale
        if c.positions == "learned":
            x = x + state["pos_embeddings.weight"][: tokens.shape[1]]
        if c.positions == "sinusoidal":
            position = torch.arange(tokens.shape[1], dtype=torch.float64)[:, None]
            angle = position / 10000.0 ** (torch.arange(0, c.dim, 2, dtype=torch.float64) / c.dim)
            x = x + torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
        if c.embedding_norm:
            x = self.norm(x, "embedding_norm")
        for n in range(c.n_layers):
            attend, feed = (
                lambda x, of=of, name=f"layers.{n}.{part}", scale=c.residual_scale * scale: scale * of(x, name)
                for of, part, scale in (
                    (self.attention, "attention", c.branch_scales[0]),
                    (self.feed_forward, "feed_forward", c.branch_scales[2]),
                )
            )
            norms = f"layers.{n}.attention_norm", f"layers.{n}.ffn_norm"
            if c.norm_placement == "post":
                x = self.norm(x + attend(x), norms[0])
                x = self.norm(x + feed(x), norms[1])
            elif c.parallel_residual:
                second = norms[0 if c.shared_attention_norm else 1]
                x = x + attend(self.norm(x, norms[0])) + feed(self.norm(x, second))
            else:
                x = x + attend(self.norm(x, norms[0]))
                x = x + feed(self.norm(x, norms[1]))
        if c.ends_with_norm:
            x = self.norm(x, "norm")
        return c.logit_scale * self.linear(x, "tok_embeddings" if c.tie_embeddings else "output")


#: LLaMA's form as its authors publish it.
LLAMAS = {
    "llama": {"rope_interleaved": True},
    "llama-MQA": {"rope_interleaved": True, "n_kv_heads": 1, "rope_base": 500.0},
    "llama-MHA": {"rope_interleaved": True, "n_kv_heads": None, "tie_embeddings": True},
    "llama-widths": {"rope_interleaved": True, "head_dim": 6, "hidden_dim": 10},
}


@pytest.mark.parametrize("name", [*MODELS, *LLAMAS])
def test_a_choice_is_its_formula(name):
    of = config(name) if name in MODELS else dataclasses.replace(TINY, **LLAMAS[name])
    model, tokens = make(of).double(), draw()
    expected = Plain(model.config, model.state_dict())(tokens)
    # Tables of positions stay float32, which bounds the agreement.
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert model.config.n_parameters == sum(p.numel() for p in model.parameters())


def test_every_value_of_every_choice_is_in_a_model():
    from foundry_kernels.models.config import CHOICES

    seen = {field: {getattr(TINY, field)} | {getattr(of, field) for of in EVERY.values()} for field in CHOICES}
    assert {field: set(values) for field, values in CHOICES.items()} == seen | {
        "ffn_rule": seen["ffn_rule"] | {"two_thirds_of_4d"}
    }


def test_the_names_of_choices_are_those_that_modules_have():
    from foundry_kernels.core import choices
    from foundry_kernels.models import mixers
    from foundry_kernels.nn import mlp

    assert (*mlp.GATES,) == choices.GATES
    assert (*mlp.ACTIVATIONS,) == choices.ACTIVATIONS
    assert mixers.MIXERS.keys() == choices.MIXERS.keys()


@pytest.mark.parametrize("name", EVERY)
def test_generation_with_a_cache_is_the_argmax_of_the_whole_model(name):
    """Prompts of different lengths, so that positions, windows and slopes begin where the cache ends."""
    model = make(EVERY[name]).eval()
    prompts = [draw(1, length, seed=length)[0] for length in (6, 2, 4)]
    for prompt, row in zip(prompts, model.generate(prompts, 6), strict=True):
        expected = prompt
        with torch.no_grad():
            for _ in range(6):
                expected = torch.cat([expected, model(expected[None])[0, -1:].argmax(-1)])
        assert torch.equal(row, expected)
    with torch.no_grad():
        cache = model.make_cache(3)
        assert type(cache) is (HybridCache if model.config.linear_layers else KVCache)
        for _ in range(2):
            parts = [model(part, cache=cache) for part in draw(3, 11).split((5, 1, 5), 1)]
            torch.testing.assert_close(torch.cat(parts, 1), model(draw(3, 11)), rtol=1e-4, atol=1e-4)
            cache.length = 0


@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon", "vaswani", "qk-norm", "no-bias", "qkv-bias"])
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
    for op, chosen in model.serving().items():
        if (reason := OPS[op].why_not(chosen, "cpu", torch.float32)) is not None:
            pytest.skip(f"{op}: {reason}")
    actual, reference, oracle = step(model), step(make(config(name))), step(make(config(name)).double())
    for key, tensor in actual.items():
        # The softmax's gradient, and so that of queries and keys, is a difference of terms as large as the values'.
        terms = re.sub(r"attention\.(w[qk]|[qk]_norm)\.", "attention.wv.", key).replace("wv.bias", "wv.weight")
        compare(key, tensor, reference[key], oracle[key], float(oracle[terms].detach().abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qk-norm-alibi"])
def test_compiles_whole(name):
    model = make(config(name, n_layers=1))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for length in (5, 9):
        logits, loss = compiled(draw(2, length), draw(2, length), return_logits=True)
        torch.testing.assert_close(logits, model(draw(2, length)))
    loss.backward()


@pytest.mark.parametrize("name", ["gpt2", "neox", "vaswani", "qk-norm"])
def test_autocast_keeps_the_stream_in_float32(name):
    model = make(config(name))
    streams: list[torch.dtype] = []
    for block in model.layers:
        block.register_forward_hook(lambda module, inputs, outputs: streams.append(outputs[1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(draw(), draw(), return_logits=True)
    assert loss.dtype == torch.float32
    loss.backward()
    assert streams == [torch.float32] * 2
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    expected = model(draw())
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_tables_are_neither_cast_nor_left_on_the_meta_device():
    for name, table in (
        ("bloom", "layers.0.attention.alibi.slopes"),
        ("vaswani", "pos_embeddings.weight"),
        ("qk-norm", "layers.1.attention.rope.cos"),
    ):
        whole = make(config(name))
        with torch.device("meta"):
            late = Transformer(config(name), "reference")
        late.to_empty(device="cpu").load_state_dict(whole.state_dict())
        assert torch.equal(late(draw()), whole(draw()))
        assert table not in whole.state_dict()
        low = late.to(torch.bfloat16)
        assert low.get_buffer(table).dtype == torch.float32
        assert low(draw()).dtype == torch.bfloat16


# --- positions --------------------------------------------------------------------------------------------------------


def test_slopes_are_those_of_the_paper_for_any_number_of_heads():
    assert fk.nn.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    for n in range(1, 72):
        torch.testing.assert_close(fk.nn.alibi_slopes(n), torch.tensor(slopes(n)), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="n_heads must be >= 1"):
        fk.nn.alibi_slopes(0)
