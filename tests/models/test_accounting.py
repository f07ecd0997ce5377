"""What a configuration says that a model costs, against models: parameters, caches, operations, memory."""

from __future__ import annotations

import contextlib
import dataclasses
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from slow import rest_slow
from tiny_model import MODELS, TINY, config, draw
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from foundry_kernels.diagnostics import size
from foundry_kernels.models import EncoderDecoder, ModelConfig, Transformer, presets
from foundry_kernels.models.count import flops_by_part

#: Choices that none of `MODELS` has.
ODD = {
    "context": {"context_dim": 12, "norm": "layer_norm", "attention_bias": True, "qk_norm": True},
    "encoder": {"causal": False, "head": False, "token_types": 3, "positions": "learned", "embedding_norm": True},
    "head bias": {"output_bias": True, "attention_out_bias": True, "final_norm": False, "head_dim": 6},
    "dense layer": {"n_experts": 3, "dense_layers": (1,), "shared_expert_dim": 5, "shared_expert_gate": True},
    "window encoder": {"causal": False, "sliding_window": 5, "token_types": 2},
}
CONFIGS = {name: config(name) for name in MODELS} | {n: dataclasses.replace(TINY, **v) for n, v in ODD.items()}
B, T = 2, 24


def part_of(name: str) -> str:
    if "norm" in name:
        return "norms"
    first = name.split(".")[0]
    if first == "layers":
        return "feed_forward" if "feed_forward" in name else "attention"
    return {"output": "head", "relative_bias": "attention"}.get(first, "embedding")


@pytest.mark.parametrize("name", [*CONFIGS, *rest_slow([*presets.names()], 2)])
def test_parameters_by_part_are_those_of_the_model(name):
    of = CONFIGS[name] if name in CONFIGS else size.config_of(name)
    with torch.device("meta"):
        model = Transformer(of, "reference")
    found = dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "head"), 0)
    for key, parameter in model.named_parameters():
        found[part_of(key)] += parameter.numel()
    parts = of.parameters_by_part()
    assert parts == found
    assert parts.total == of.n_parameters == sum(p.numel() for p in model.parameters())
    assert sum(parts.shares.values()) == pytest.approx(1.0)


def test_known_numbers():
    llama = ModelConfig.llama("llama-2-7b")
    shares = llama.parameters_by_part().shares
    assert [round(100 * shares[name], 1) for name in ("attention", "feed_forward")] == [31.9, 64.2]
    assert round(100 * (shares["embedding"] + shares["head"]), 1) == 3.9
    assert llama.cache_bytes(1, 4096, torch.float16) == 2 * 2**30
    active = ModelConfig.mixtral("8x7b").parameters_by_part(active=True).total
    assert active == 12_879_925_248  # "uses 13B active parameters" (Jiang et al., 2024)
    # 6 N of a dense model, N without the embedding, and 12 n_layers dim of scores a token, half of them seen.
    matrices = llama.n_parameters - llama.vocab_size * llama.dim - llama.parameters_by_part()["norms"]
    assert llama.flops_per_token(4096, training=True) == 6 * matrices + 6 * 32 * 4096 * 4097


@pytest.mark.parametrize("name", ["qkv-bias", "qk-norm", "groups", "gpt2", "post-rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_has_the_bytes_that_it_is_said_to_have(name, dtype):
    model = Transformer(CONFIGS[name], "reference", dtype=dtype)
    for batch, length in ((1, 1), (3, 17), (2, 24)):
        cache = model.make_cache(batch, length)
        held = sum(x.untyped_storage().nbytes() for x in (*cache.k, *cache.v))
        assert model.config.cache_bytes(batch, length, dtype) == held


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_operations_are_those_that_are_counted_as_they_run(name):
    """The reference computes hidden scores too, which the formula leaves out."""
    of = CONFIGS[name]
    model = Transformer(of, "reference").eval()
    context = None if of.context_dim is None else torch.randn(B, 9, of.context_dim)
    with FlopCounterMode(display=False) as counter:
        model(draw(B, T), context=context)
    parts = flops_by_part(of, T, None if context is None else 9)
    cross = 0.0 if context is None else of.n_layers * 4.0 * of.n_heads * of.head_width * 9
    own = of.n_layers * 4.0 * of.n_heads * of.head_width * T  # all scores, seen or not
    expected = sum(parts.values()) - parts["attention_scores"] + own + cross
    if of.n_experts is not None and of.mlp_bias:  # which experts add by a product with a one-hot matrix
        expected += of.n_layers * 2 * of.top_k * of.n_experts * (2 * of.ffn_width + of.dim)
    assert counter.get_total_flops() == B * T * expected
    if of.sliding_window is None:
        seen = own * (T + 1) / (2 * T) if of.causal else own
        assert parts["attention_scores"] == pytest.approx(seen + cross)
    assert of.flops_per_token(T, None if context is None else 9) == sum(parts.values())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 24, 99])
def test_keys_seen_with_a_window(causal, window):
    of = dataclasses.replace(TINY, causal=causal, sliding_window=window)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    reach = T if window is None else window - 1
    seen = (j >= i - reach) & (j <= i + (0 if causal else reach))
    scores = flops_by_part(of, T)["attention_scores"]
    assert scores == pytest.approx(of.n_layers * 4 * of.n_heads * of.head_width * seen.sum().item() / T)


def allocations(run) -> list[int]:
    """Bytes that are held after each allocation and release while `run` runs, what it returns still there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = run()  # noqa: F841
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


MEASURED = [("llama", "auto", None), ("llama", "reference", None), ("llama", "auto", torch.bfloat16)]
MEASURED += [
    pytest.param(name, backend, None, marks=pytest.mark.slow)
    for name in ("gpt2", "bloom", "falcon", "vaswani", "qk-norm", "experts", "groups", "t5")
    for backend in ("auto", "reference")
]


@pytest.mark.parametrize(("name", "backend", "autocast"), MEASURED)
def test_memory_of_a_training_step(name, backend, autocast):
    """Weights, gradients and state are exact, activations within 1 %; the peak of the step is less than 20 % above."""
    widths = {"n_layers": 4, "dim": 96, "n_heads": 6, "n_kv_heads": None, "vocab_size": 1000, "max_seq_len": 128}
    widths |= {"hidden_dim": 64} if "hidden_dim" in MODELS.get(name, {}) else {}
    of = dataclasses.replace(TINY, **{**MODELS.get(name, {}), **widths})
    model = Transformer(of, backend)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(1000, (2, 128))

    def forward():
        with contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast):
            return model(tokens, tokens)[1]

    forward().backward()
    optimizer.step()
    memory = of.training_bytes(2, 128, backend=backend, autocast=autocast)
    parameters = list(model.parameters())
    assert memory.weights.total == sum(p.nbytes for p in parameters)
    assert memory.gradients.total == sum(p.grad.nbytes for p in parameters)
    state = sum(x.nbytes for of in optimizer.state.values() for x in of.values() if x.dim())
    assert memory.optimizer.total == state
    assert memory.activations.total == pytest.approx(allocations(forward)[-1], rel=0.01)
    peak = memory.total - memory.activations.total + max(allocations(lambda: forward().backward()))
    assert memory.total <= peak <= 1.2 * memory.total
    assert min(memory.activations[part] for part in ("attention", "feed_forward", "norms", "head")) > 0


def test_activations_grow_as_they_must():
    of = dataclasses.replace(TINY, dim=32, vocab_size=64)
    once, twice = (of.training_bytes(b, 16, backend="reference").activations.total for b in (1, 2))
    assert 1.9 < twice / once <= 2.0
    half = of.training_bytes(2, 16, dtype=torch.bfloat16, backend="reference", optimizer=12)
    assert half.optimizer.total == 12 * of.n_parameters
    assert half.weights.total == 2 * of.n_parameters
    pair = EncoderDecoder(TINY)
    assert pair.config.training_bytes(2, 8, context_length=5).activations["attention"] > 0
    assert pair.encoder.config.training_bytes(2, 8).total > 0


def test_refusals():
    for call, message in (
        (lambda: TINY.cache_bytes(0, 4, torch.float32), "batch_size must be >= 1; got 0"),
        (lambda: TINY.cache_bytes(1, 4, "float16"), "dtype must be a torch.dtype; got 'float16'"),
        (lambda: config("gpt2").cache_bytes(1, 25, torch.float32), "max_len must be at most max_seq_len=24"),
        (lambda: CONFIGS["encoder"].cache_bytes(1, 4, torch.float32), "a cache needs causal=True"),
        (lambda: TINY.flops_per_token(0), "length must be >= 1; got 0"),
        (lambda: TINY.flops_per_token(4, 4), "context_length needs a model with context_dim; got 4"),
        (lambda: TINY.training_bytes(1, 4, optimizer="lion"), "optimizer must be one of adamw, adam, sgd"),
        (lambda: TINY.training_bytes(1, 4, optimizer=-1), "optimizer must be at least 0 bytes"),
        (lambda: TINY.training_bytes(1, 4, autocast=1), "autocast must be a torch.dtype; got 1"),
    ):
        with pytest.raises(TypeError if "a torch.dtype" in message else ValueError, match=message):
            call()


def test_the_command(tmp_path: Path, capsys):
    assert size.main(["llama-2-7b", "--length", "4096", "--dtype", "float16"]) == 0
    said = capsys.readouterr().out
    assert "6,738,415,616 parameters, 12.55 GiB in float16" in said
    assert "key-value cache of 1 x 4096 tokens in float16: 2.00 GiB" in said
    model = Transformer(config("groups"), "reference")
    path = tmp_path / "model.pt"
    torch.save({"config": dataclasses.asdict(model.config), "model": model.state_dict()}, path)
    assert size.main([str(path), "--batch", "2", "--length", "12", "--training", "--backend", "reference"]) == 0
    said = capsys.readouterr().out
    assert f"{model.config.n_parameters:,} parameters" in said
    assert "of a training step of 2 x 12 tokens" in said
    assert size.main(["nothing"]) == 2
    assert "nothing is neither a checkpoint nor a preset: gpt2-small" in capsys.readouterr().err


def test_the_command_reads_folders_of_transformers(tmp_path: Path, capsys):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=48,
        vocab_size=64, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    assert size.main([str(tmp_path), "--length", "8"]) == 0
    count = sum(p.numel() for p in transformers.LlamaForCausalLM(theirs).parameters())
    assert f"{count:,} parameters" in capsys.readouterr().out
