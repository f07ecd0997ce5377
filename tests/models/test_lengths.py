"""Sequences beyond `max_seq_len`: tables of positions grow, and only learned ones end."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_model import TINY, draw, make
from torch._dynamo.testing import CompileCounterWithBackend

from foundry_kernels import RopeScaling, nn, rope_table
from foundry_kernels.models import EncoderDecoder, KVCache, ModelConfig, Transformer

SHORT, LONG = 8, 40
DYNAMIC = RopeScaling("dynamic", 2.0, SHORT)
KINDS = {
    "rope": {},
    "qk_norm": {"qk_norm": True},
    "yarn": {"rope_scaling": RopeScaling("yarn", 4.0, SHORT)},
    "sinusoidal": {"positions": "sinusoidal"},
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative"},
    "none": {"positions": "none"},
}


def pair(kind: str, backend: str = "auto", **changes) -> tuple[Transformer, Transformer]:
    """A model of few positions and one of many, with the same weights."""
    config = dataclasses.replace(TINY, max_seq_len=SHORT, **KINDS[kind], **changes)
    short = make(config, backend)
    long = Transformer(dataclasses.replace(config, max_seq_len=LONG), backend)
    long.load_state_dict(short.state_dict())
    return short.eval(), long.eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_as_one_whose_tables_were_longer(kind):
    for backend in ("reference", "auto"):
        short, long = pair(kind, backend)
        tokens = draw(2, 30)
        for length in (SHORT + 1, 30, 5):
            assert torch.equal(short(tokens[:, :length]), long(tokens[:, :length]))
        assert all(map(torch.equal, short.generate(tokens[:, :6], 20), long.generate(tokens[:, :6], 20)))
        short, long = pair(kind, backend)
        caches = [model.make_cache(2, 34) for model in (short, long)]
        for part in tokens.split([6, 1, 1, 1, 1, 20], 1):
            assert torch.equal(*(m(part, cache=cache) for m, cache in zip((short, long), caches, strict=True)))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["rope", "qk_norm", "sinusoidal", "alibi"])
def test_packed_sequences(kind):
    tokens, starts = draw(1, 30), torch.tensor([0, 3, 23, 30])
    for options in ({}, {"max_seqlen": 20}):
        short, long = pair(kind)
        packed = short(tokens, cu_seqlens=starts, **options)
        assert torch.equal(packed, long(tokens, cu_seqlens=starts, **options))
        torch.testing.assert_close(packed[:, 3:23], long(tokens[:, 3:23]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "kind", ["rope", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qk_norm", "sinusoidal"))]
)
def test_compiles_whole_beyond_the_tables(kind):
    """One graph for lengths that the tables have rows for, and one for all others: no table grows while compiling."""
    short, long = pair(kind, n_layers=1)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(short, fullgraph=True, dynamic=True, backend=counter)
    compilations = []
    for length in (5, 7, 20, 33, 9):
        tokens = draw(2, length)
        torch.testing.assert_close(compiled(tokens), long(tokens), rtol=1e-4, atol=1e-5)
        compilations.append(counter.frame_count)
    first = compilations[0]
    assert compilations == [first, first, first + 1, first + 1, first + 1]
    tokens, starts = draw(1, 30), torch.tensor([0, 3, 23, 30])
    expected = long(tokens, cu_seqlens=starts)
    torch.testing.assert_close(compiled(tokens, cu_seqlens=starts, max_seqlen=20), expected, rtol=1e-4, atol=1e-5)
    assert short.layers[0].attention.rope is None or short.layers[0].attention.rope.cos.shape[0] == SHORT
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rope", "sinusoidal"])
def test_compiled_steps_of_generation_beyond_the_tables(kind):
    short, long = pair(kind, n_layers=1)
    torch._dynamo.reset()
    prompts = draw(2, 6)
    got = short.generate(prompts, 20, compile={"backend": "eager"})
    assert all(map(torch.equal, got, long.generate(prompts, 20)))
    torch._dynamo.reset()


def test_an_encoder_and_its_decoder():
    config = dataclasses.replace(TINY, max_seq_len=SHORT, positions="sinusoidal")
    short, long = EncoderDecoder(config), EncoderDecoder(dataclasses.replace(config, max_seq_len=LONG))
    long.load_state_dict(short.state_dict())
    assert torch.equal(short(draw(2, 30), draw(2, 20)), long(draw(2, 30), draw(2, 20)))
    assert torch.equal(short.extended(LONG)(draw(2, 30), draw(2, 20)), long(draw(2, 30), draw(2, 20)))


@torch.no_grad()
def test_dynamic_frequencies_follow_the_length_of_a_call():
    """A call beyond `max_seq_len` is rotated by the table of its own length, and leaves shorter ones what they were."""
    config = dataclasses.replace(TINY, n_layers=1, max_seq_len=SHORT, rope_scaling=DYNAMIC)
    model = make(config, "auto").eval()

    def exact(length: int) -> Transformer:
        other = Transformer(dataclasses.replace(config, max_seq_len=length), "auto")
        other.load_state_dict(model.state_dict())
        return other

    tokens = draw(2, 30)
    for length in (20, 5, 30, SHORT):
        assert torch.equal(model(tokens[:, :length]), exact(max(length, SHORT))(tokens[:, :length]))
    starts = torch.tensor([0, 8, 28, 30])
    assert torch.equal(model(tokens[:1], cu_seqlens=starts), exact(20)(tokens[:1], cu_seqlens=starts))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (20, 30):
        torch.testing.assert_close(compiled(tokens[:, :length]), exact(length)(tokens[:, :length]))
    cache, reference = model.make_cache(2, 30), Transformer(config, "reference")
    reference.load_state_dict(model.state_dict())
    expected = reference.make_cache(2, 30)
    for part in tokens.split([6, *[1] * 6, 18], 1):
        got, want = model(part, cache=cache), reference(part, cache=expected)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert model.layers[0].attention.rope.cos.shape[0] == SHORT


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_grown_table_is_one_that_was_made_so_long():
    table = nn.RotaryEmbedding(8, SHORT).to(torch.bfloat16)
    before = table.cos.clone()
    with torch.inference_mode():
        table.reserve(20)
    assert torch.equal(table.cos[:SHORT], before)
    assert all(map(torch.equal, (table.cos, table.sin), rope_table(8, 20)))
    assert (table.cos.dtype, table.cos.is_inference(), dict(table.state_dict())) == (torch.float32, False, {})
    q = torch.randn(1, 2, 12, 8, requires_grad=True)
    table(q, q, 5)[0].sum().backward()  # which saves the rows
    for other in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        other.reserve(50)
        assert all(map(torch.equal, (other.cos, other.sin), rope_table(8, 50)))
    assert table.cos.shape[0] == 20
    assert table.to("meta").to_empty(device="cpu").cos.shape[0] == SHORT
    table.reserve(2 * SHORT + 1)
    assert table.reserve(2 * SHORT + 2)[0].shape[0] >= 2 * SHORT + 2
    positions = torch.tensor([3, 60])
    assert torch.equal(nn.SinusoidalEmbedding(6, SHORT)(torch.zeros(1, 2, 6), positions=positions)[0],
                       nn.SinusoidalEmbedding(6, 61).weight[positions])  # fmt: skip


def test_tables_grow_by_doubling_and_under_threads():
    table, sizes = nn.SinusoidalEmbedding(4, SHORT), set()
    for stop in range(1, 100):
        table.rows(stop - 1, stop)
        sizes.add(table.weight.shape[0])
    assert sizes == {8, 16, 32, 64, 128}
    rope = nn.RotaryEmbedding(8, 1)
    expected = rope_table(8, 400)

    def ask(stop: int) -> bool:
        return all(torch.equal(got, whole[:stop]) for got, whole in zip(rope.rows(0, stop), expected, strict=True))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(1, 400)))


def test_the_operator_of_rows():
    table = nn.RotaryEmbedding(8, SHORT)
    operator = torch.ops.foundry_kernels.position_rows.default
    torch.library.opcheck(operator, ([table.cos, table.sin], table._text, 3, 20, 20))
    assert torch.equal(operator([table.cos, table.sin], table._text, 3, 20, 20)[0], rope_table(8, 20)[0][3:])


# --- learned positions, and models that are extended ------------------------------------------------------------------


def test_learned_positions_end_with_their_table():
    model = make(dataclasses.replace(TINY, positions="learned", max_seq_len=SHORT))
    end = "max_seq_len is 8, the length of the table of learned positions"
    with pytest.raises(ValueError, match=f"tokens hold 9 positions; {end}"):
        model(draw(1, 9))
    with pytest.raises(ValueError, match=f"cu_seqlens hold a sequence of 9 positions; {end}"):
        model(draw(1, 12), cu_seqlens=torch.tensor([0, 3, 12]))
    with pytest.raises(ValueError, match=f"prompts of up to 3 tokens and max_new_tokens=6 do not fit; {end}"):
        model.generate([[1, 2, 3], [1]], 6)
    assert len(model.generate([[1, 2, 3]], 5)[0]) == 8
    with pytest.raises(ValueError, match="max_len must be at most max_seq_len=8, the length of the table of learned"):
        model.make_cache(1, 9)
    with torch.no_grad():
        cache = model.make_cache(1)
        model(draw(1, 7), cache=cache)
        with pytest.raises(ValueError, match=f"tokens hold 2 positions behind 7 cached ones; {end}"):
            model(draw(1, 2), cache=cache)
    with pytest.raises(ValueError, match="max_seq_len must be 8, the length of the table of learned positions"):
        model.extended(9)
    assert KVCache(TINY, 1, 99).max_len == 99


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "llama3"])
def test_an_extended_model_shares_its_parameters(name):
    model = make(dataclasses.replace(TINY, max_seq_len=SHORT))
    called: list[int] = []
    model.layers[0].register_forward_hook(lambda *_: called.append(1))
    expected = model(draw(2, SHORT))
    longer = model.extended(LONG, name)
    assert longer.config == dataclasses.replace(
        model.config, max_seq_len=LONG, rope_scaling=RopeScaling.to_length(name, SHORT, LONG)
    )
    assert [(n, id(p)) for n, p in longer.named_parameters()] == [(n, id(p)) for n, p in model.named_parameters()]
    rope = longer.layers[0].attention.rope
    assert rope is longer.layers[1].attention.rope is not model.layers[0].attention.rope
    scaled = RopeScaling(name, 1.0 if name == "dynamic" else 5.0, SHORT,
                         *((1.0, 4.0) if name == "llama3" else ()))  # fmt: skip
    assert all(map(torch.equal, (rope.cos, rope.sin), rope_table(4, LONG, scaling=scaled)))
    built = Transformer(longer.config, "reference")
    built.load_state_dict(model.state_dict())
    assert torch.equal(longer(draw(2, 30)), built(draw(2, 30)))
    assert torch.equal(model(draw(2, SHORT)), expected)
    assert len(called) == 3, "hooks are kept"


def test_what_cannot_be_extended():
    model = make(dataclasses.replace(TINY, max_seq_len=SHORT))
    with pytest.raises(ValueError, match="max_seq_len must be at least the model's 8; got 7"):
        model.extended(7)
    with pytest.raises(ValueError, match="rope_type must be one of linear, dynamic, yarn, llama3; got 'ntk'"):
        model.extended(16, "ntk")
    with pytest.raises(TypeError, match="rope_scaling must be a RopeScaling, its type or None; got float"):
        model.extended(16, 2.0)
    with pytest.raises(ValueError, match="rope_scaling must be a RopeScaling where the model has one"):
        model.extended(16, "yarn").extended(32, "yarn")
    with pytest.raises(ValueError, match="rope_scaling needs positions='rope'"):
        make(dataclasses.replace(TINY, positions="alibi")).extended(48, "linear")
    assert isinstance(model.extended(16).config, ModelConfig)
