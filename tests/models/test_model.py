"""The model: shape, mathematics, checkpoints, cache, compilation, backends, refusals."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tiny_model import TINY, draw, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_kernels import OPS, BackendUnavailable, RopeScaling
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.testing import compare

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
#: The operations that a model of the default choices, LLaMA's, calls.
OPERATIONS = (
    "rms_norm", "add_rms_norm", "rope", "swiglu", "flash_attention", "cross_entropy", "linear_cross_entropy"
)  # fmt: skip


# --- shape ------------------------------------------------------------------------------------------------------------


def count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


def test_llama_2_7b_has_its_parameters():
    config = ModelConfig(dim=4096, n_layers=32, n_heads=32, vocab_size=32000, multiple_of=256)
    assert config.ffn_width == 11008
    assert count(config) == 6_738_415_616


def test_llama_3_8b_and_llama_2_70b_have_their_parameters():
    eight = ModelConfig(4096, 32, 32, 8, vocab_size=128256, multiple_of=1024, ffn_dim_multiplier=1.3)
    assert (eight.ffn_width, count(eight)) == (14336, 8_030_261_248)
    seventy = ModelConfig(8192, 80, 64, 8, vocab_size=32000, multiple_of=4096, ffn_dim_multiplier=1.3)
    assert (seventy.ffn_width, count(seventy)) == (28672, 68_976_648_192)


def test_small_shape_by_hand():
    config = ModelConfig(dim=256, n_layers=4, n_heads=8, n_kv_heads=4, vocab_size=8192)
    embeddings = 8192 * 256
    attention = 256 * 256 + 2 * 256 * (4 * 32) + 256 * 256  # wq, wk and wv of 4 heads of width 32, wo
    feed_forward = 3 * 256 * 688  # int(2 * 4 * 256 / 3) = 682, up to a multiple of 8
    layer = attention + feed_forward + 2 * 256
    by_hand = 2 * embeddings + 4 * layer + 256
    assert by_hand == 7_096_576
    assert count(config) == by_hand
    assert count(dataclasses.replace(config, tie_embeddings=True)) == by_hand - embeddings


def test_names_and_shapes_are_metas():
    expected = {"tok_embeddings.weight": (11, 16), "norm.weight": (16,), "output.weight": (11, 16)}
    for n in range(2):
        expected |= {
            f"layers.{n}.attention_norm.weight": (16,),
            f"layers.{n}.attention.wq.weight": (16, 16),
            f"layers.{n}.attention.wk.weight": (8, 16),
            f"layers.{n}.attention.wv.weight": (8, 16),
            f"layers.{n}.attention.wo.weight": (16, 16),
            f"layers.{n}.ffn_norm.weight": (16,),
            f"layers.{n}.feed_forward.w1.weight": (48, 16),
            f"layers.{n}.feed_forward.w2.weight": (16, 48),
            f"layers.{n}.feed_forward.w3.weight": (48, 16),
        }
    assert {name: tuple(t.shape) for name, t in Transformer(TINY).state_dict().items()} == expected


# --- mathematics ------------------------------------------------------------------------------------------------------


def plain_llama(config: ModelConfig, state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The model written down from the papers in float64, rotating by complex numbers."""
    state = {name: value.double() for name, value in state.items()}
    batch, length = tokens.shape
    width = config.head_width

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

    def turn(x: Tensor) -> Tensor:
        frequencies = config.rope_base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)

    hidden = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)
    x = state["tok_embeddings.weight"][tokens]
    for n in range(config.n_layers):
        layer = {key.removeprefix(f"layers.{n}."): value for key, value in state.items()}
        y = norm(x, layer["attention_norm.weight"])
        q, k, v = (
            (y @ layer[f"attention.{w}.weight"].T).view(batch, length, -1, width).transpose(1, 2)
            for w in ("wq", "wk", "wv")
        )
        groups = config.n_heads // config.kv_heads
        q, k, v = turn(q), turn(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ k.mT / width**0.5 + hidden).softmax(-1)
        x = x + (scores @ v).transpose(1, 2).flatten(2) @ layer["attention.wo.weight"].T
        y = norm(x, layer["ffn_norm.weight"])
        gate = F.silu(y @ layer["feed_forward.w1.weight"].T)
        x = x + (gate * (y @ layer["feed_forward.w3.weight"].T)) @ layer["feed_forward.w2.weight"].T
    return norm(x, state["norm.weight"]) @ state.get("output.weight", state["tok_embeddings.weight"]).T


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_kv_heads": 1}, {"n_kv_heads": None}, {"tie_embeddings": True}, {"head_dim": 6, "hidden_dim": 10}],
    ids=["GQA", "MQA", "MHA", "tied", "widths"],
)
def test_model_is_llama(changes):
    config = dataclasses.replace(TINY, rope_interleaved=True, **changes)
    model, tokens = make(config).double(), draw()
    expected = plain_llama(config, model.state_dict(), tokens)
    # The rotary tables stay float32, which bounds the agreement.
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_rope_options_reach_the_tables():
    scaling = RopeScaling("linear", 2.0)
    config = dataclasses.replace(TINY, rope_base=500.0, rope_scaling=scaling, rope_interleaved=True)
    model = make(config)
    embedding = model.layers[0].attention.rope
    assert (embedding.base, embedding.scaling, embedding.interleaved) == (500.0, scaling, True)
    assert embedding is model.layers[1].attention.rope
    assert not torch.allclose(model(draw()), make()(draw()))


def test_no_position_sees_a_later_one():
    model, tokens = make(), draw()
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % TINY.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert ((before[:, 4:] - after[:, 4:]).abs().amax(-1) > 1e-4).all()


def test_last_only_and_int32():
    model, tokens = make(), draw()
    last = model(tokens, last_only=True)
    assert last.shape == (3, 1, 11)
    torch.testing.assert_close(last, model(tokens.int())[:, -1:])


def test_autocast_keeps_the_residual_stream_in_float32():
    model, tokens = make(), draw()
    streams = []
    for block in model.layers:
        block.register_forward_hook(lambda module, inputs, outputs: streams.append(outputs[1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens, tokens, return_logits=True)
    assert streams == [torch.float32] * 2
    assert loss.dtype == torch.float32
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    expected = model(tokens)
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_initialisation():
    model = Transformer(dataclasses.replace(TINY, dim=128, vocab_size=512))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones(128)), name
        else:
            assert abs(parameter.std().item() - 0.02) < 0.001, name
            assert abs(parameter.mean().item()) < 0.001, name


# --- devices, dtypes, checkpoints -------------------------------------------------------------------------------------


def test_meta_device_then_init_is_a_whole_model():
    built = Transformer(TINY, "reference")
    built.init_weights(torch.Generator().manual_seed(3))
    with torch.device("meta"):
        late = Transformer(TINY, "reference")
    late.to_empty(device="cpu").init_weights(torch.Generator().manual_seed(3))
    assert torch.equal(built(draw()), late(draw()))
    loaded = Transformer(TINY, "reference", device="meta").to_empty(device="cpu")
    loaded.load_state_dict(built.state_dict())
    assert torch.equal(built(draw()), loaded(draw()))
    assert torch.equal(built(draw()), copy.deepcopy(built)(draw()))


def test_low_precision_keeps_exact_rotary_tables():
    model = make().to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.layers[1].attention.rope.cos.dtype == torch.float32
    assert model(draw()).dtype == torch.bfloat16
    assert Transformer(TINY, dtype=torch.bfloat16).output.weight.dtype == torch.bfloat16


def test_checkpoint_with_what_meta_stores_besides():
    model = make()
    state = model.state_dict()
    Transformer(TINY, "reference").load_state_dict(state | {"rope.freqs": torch.zeros(2)})
    tied = make(dataclasses.replace(TINY, tie_embeddings=True))
    assert "output.weight" not in tied.state_dict()
    embeddings = tied.state_dict()["tok_embeddings.weight"]
    tied.load_state_dict(tied.state_dict() | {"output.weight": embeddings.clone()})
    with pytest.raises(RuntimeError, match=r"output\.weight"):
        tied.load_state_dict(tied.state_dict() | {"output.weight": embeddings + 1})


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m([[1]]), TypeError, "tokens must be a torch.Tensor; got list"),
        (lambda m: m(draw().float()), TypeError, "tokens must be int32 or int64"),
        (lambda m: m(draw()[0]), ValueError, r"tokens must be \[B, T\]; got shape \(7,\)"),
        (lambda m: m(draw()[:, :0]), ValueError, "tokens must hold at least one position"),
        (lambda m: m(draw() + 5), ValueError, r"tokens must be in 0 .. 10; got 15"),
        (lambda m: m(draw() - 11), ValueError, r"tokens must be in 0 .. 10; got -11"),
        (lambda m: m(draw().to("meta")), ValueError, "tokens must be on the model's device cpu; got meta"),
        (lambda m: m(draw(), draw()[:, 1:]), ValueError, r"targets must have tokens' shape \(3, 7\)"),
        (lambda m: m(draw(), draw().float()), TypeError, "targets must be int32 or int64"),
        (lambda m: m(draw(), draw() + 5), ValueError, r"targets must be in 0 .. 10; got 15"),
        (lambda m: m(draw(), draw(), last_only=True), ValueError, "targets need the logits of all positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_model_refuses_before_it_computes(call, error, message, monkeypatch):
    model = make()
    monkeypatch.setattr(model.tok_embeddings, "forward", lambda *_: pytest.fail("the model began to compute"))
    with pytest.raises(error, match=message):
        call(model)


# --- backends ---------------------------------------------------------------------------------------------------------


def test_repr_and_serving_name_the_backends():
    assert "backend='reference'" in repr(make())
    model = Transformer(TINY, {"rms_norm": "native"})
    assert model.backends == dict.fromkeys(OPERATIONS, "auto") | {"rms_norm": "native"}
    assert model.layers[0].ffn_norm.backends["rms_norm"] == "native"
    assert model.layers[0].attention.rope.backends == {"rope": "auto"}
    assert set(model.serving("cpu", torch.float64)) == set(OPERATIONS)
    assert "auto" not in model.serving().values()


def gradients(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    logits, loss = model(tokens, tokens.roll(-1, 1), return_logits=True)
    loss.backward()
    return {"logits": logits, "loss": loss} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:backend .* has no kernel yet")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["native", "triton", "auto"])
def test_backend_equals_reference(backend, device):
    model = make(TINY, backend).to(device)
    for op, name in model.serving().items():
        if (reason := OPS[op].why_not(name, device, torch.float32)) is not None:
            pytest.skip(f"{op}: {reason}")
    tokens = draw().to(device)
    actual = gradients(model, tokens)
    reference = gradients(make().to(device), tokens)
    oracle = gradients(make().double().to(device), tokens)
    for name, tensor in actual.items():
        compare(name, tensor, reference[name], oracle[name], 0.0)


@pytest.mark.filterwarnings("ignore:backend .* has no kernel yet")
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_rotation_gate_and_norm_are_one_launch_each_in_a_block(backend):
    """No transposition, no chunk, no repetition around them: the kernels take the tensors as they lie."""
    ops = {name: backend if OPS[name].why_not(backend, "cpu", torch.float32) is None else "auto" for name in OPERATIONS}
    if ops["rope"] == "auto":
        pytest.skip(str(OPS["rope"].why_not(backend, "cpu", torch.float32)))
    model, launched, shuffled = make(backend=ops), [], []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.split("::")[1]
            if func.namespace == "foundry_kernels":
                launched.append(name.removeprefix("triton_"))
            elif name in ("cat", "chunk", "split", "clone", "copy_", "repeat_interleave"):
                shuffled.append(name)
            return func(*args, **(kwargs or {}))

    with Count(), torch.no_grad():
        model(draw())
    per_block = [name for name in launched if "attention" not in name]
    assert sum("rope" in name for name in per_block) == TINY.n_layers
    assert sum("glu" in name for name in per_block) == TINY.n_layers
    assert sum("norm" in name for name in per_block) == 2 * TINY.n_layers + 1
    if ops["flash_attention"] == backend:
        assert not shuffled


def test_named_backend_that_cannot_serve_raises():
    model = make(TINY, "native").double()
    with pytest.raises(BackendUnavailable, match="backend 'native' does not support float64"):
        model(draw())
