"""What the pictures show: the arrays that are drawn, against computations that are made here or by transformers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from examples import reverse
from foundry_kernels import RopeScaling, rope_table
from foundry_kernels.diagnostics import attention_maps, encoder_decoder_maps, pictures
from foundry_kernels.diagnostics.__main__ import main
from foundry_kernels.diagnostics.pictures import commands
from foundry_kernels.diagnostics.tokens import spell_byte, spell_bytes_of, visible
from foundry_kernels.models import EncoderDecoder, ModelConfig, Transformer
from foundry_kernels.models.presets import FAMILIES

WRITTEN: list[Path] = []
PROMPT = "to be,\n$or\tnot"


def make_model(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 256, "max_seq_len": 64, "init_std": 0.2}
    return Transformer(ModelConfig(**{**shape, **changes}))


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command, and returns the figure that it writes: the first one of all really, for that takes longest."""
    figures: list[Any] = []
    save = commands.save

    def keep(figure: Any, path: Path) -> None:
        figures.append(figure)
        if not WRITTEN:
            save(figure, path)
            WRITTEN.append(path)

    monkeypatch.setattr(commands, "save", keep)

    def run(*arguments: str) -> Any:
        out = tmp_path / "pictures" / f"{len(figures)}.png"
        assert main([*arguments, "--out", str(out)]) == 0
        assert out not in WRITTEN or out.read_bytes()[:4] == b"\x89PNG"
        return figures[-1]

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[str, Transformer]:
    return saved(make_model(n_kv_heads=2), tmp_path)


def saved(model: Transformer, folder: Path) -> tuple[str, Transformer]:
    path = folder / "model.pt"
    torch.save({"config": dataclasses.asdict(model.config), "model": model.state_dict()}, path)
    return str(path), model


def shown(axis: Any) -> torch.Tensor:
    """What a heat map shows; NaN where it is blank."""
    return torch.from_numpy(axis.images[0].get_array().filled(math.nan))


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=1e-5, atol=1e-6, equal_nan=True)


def blank_future(weights: torch.Tensor) -> torch.Tensor:
    return weights.masked_fill(torch.ones(weights.shape[-2:]).triu(1).bool(), math.nan)


def labels(axis: Any, which: str) -> list[str]:
    return [label.get_text() for label in getattr(axis, f"get_{which}ticklabels")()]


# --- weights of attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["encoder", "decoder", "cross"])
def test_maps_of_an_encoder_with_a_decoder(part: str) -> None:
    """From what the module itself projects."""
    torch.manual_seed(0)
    config = ModelConfig(
        dim=32, n_layers=2, n_heads=4, vocab_size=29, max_seq_len=16, positions="sinusoidal", init_std=0.3
    )
    model = EncoderDecoder(config).train()
    source, tokens = torch.randint(29, (1, 7)), torch.randint(29, (1, 5))
    block = (model.encoder if part == "encoder" else model.decoder).layers[1]
    attention = block.cross_attention if part == "cross" else block.attention
    found: dict[Any, torch.Tensor] = {}
    for projection in (attention.wq, attention.wk):
        projection.register_forward_hook(lambda of, _, y: found.update({of: y.view(-1, 4, 8).transpose(0, 1)}))
    maps = encoder_decoder_maps(model, source, tokens, part, [(1, 3), (1, 0)])
    scores = found[attention.wq] @ found[attention.wk].mT / math.sqrt(8)
    if part == "decoder":
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    assert list(maps) == [(1, 3), (1, 0)]
    for (_, head), weights in maps.items():
        torch.testing.assert_close(weights, scores.softmax(-1)[head], rtol=1e-4, atol=1e-5)
    assert model.training
    with pytest.raises(ValueError, match="part must be one of encoder, decoder, cross; got 'both'"):
        encoder_decoder_maps(model, source, tokens, "both", [(0, 0)])
    with pytest.raises(ValueError, match=r"heads must be \(layer, head\) of (2 layers|4 heads)"):
        encoder_decoder_maps(model, source, tokens, part, [(2, 0)])
    with pytest.raises(TypeError, match="EncoderDecoder; got Transformer"):
        encoder_decoder_maps(model.decoder, source, tokens, part, [(0, 0)])  # type: ignore[arg-type]


def test_alignment_of_the_example() -> None:
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 29, "max_seq_len": 12, "init_std": 0.3}
    model = EncoderDecoder(ModelConfig(**shape, positions="learned"), start_token=reverse.START)
    axis = reverse.alignment(model, [2, 0, 1], [1, 0, 2, reverse.STOP]).axes[0]
    read, written = torch.tensor([[2, 0, 1]]), torch.tensor([[reverse.START, 1, 0, 2]])
    maps = encoder_decoder_maps(model, read, written, "cross", [(1, head) for head in range(4)])
    near(shown(axis), sum(maps.values()) / 4)  # type: ignore[arg-type]
    assert (labels(axis, "x"), labels(axis, "y")) == (["c", "a", "b"], ["b", "a", "c", "STOP"])


# --- attention, drawn -------------------------------------------------------------------------------------------------


def test_one_head_with_its_tokens(checkpoint: tuple[str, Transformer], drawn: Any) -> None:
    path, model = checkpoint
    axis = drawn("attention", path, "--prompt", PROMPT, "--head", "1.2").axes[0]
    tokens = torch.tensor([list(PROMPT.encode())])
    near(shown(axis), blank_future(attention_maps(model, tokens, [(1, 2)])[1, 2]))
    spelled = ["t", "o", "␣", "b", "e", ",", "↵", "$", "o", "r", "⇥", "n", "o", "t"]
    assert labels(axis, "x") == labels(axis, "y") == spelled
    figure = drawn("attention", path, "--prompt", PROMPT, "--head", "1.2", "--tokens", "5")
    assert labels(figure.axes[0], "x") == spelled[:5]
    assert "model.pt: attention of layer 1, head 2" in figure.get_suptitle()


def test_all_heads(checkpoint: tuple[str, Transformer], drawn: Any, tmp_path: Path) -> None:
    path, model = checkpoint
    (tmp_path / "text.txt").write_text(PROMPT)
    axes = drawn("attention", path, "--text", str(tmp_path / "text.txt")).axes
    pairs = [(layer, head) for layer in range(2) for head in range(4)]
    maps = attention_maps(model, torch.tensor([list(PROMPT.encode())]), pairs)
    for pair, axis in zip(pairs, axes, strict=False):
        near(shown(axis), blank_future(maps[pair]))
        assert axis.images[0].get_clim() == (0.0, 1.0), "one scale for all"


def test_causal_beside_bidirectional(checkpoint: tuple[str, Transformer], drawn: Any) -> None:
    path, model = checkpoint
    axes = drawn("attention", path, "--prompt", PROMPT, "--head", "1.0", "--compare").axes
    tokens = torch.tensor([list(PROMPT.encode())])
    other = Transformer(dataclasses.replace(model.config, causal=False))
    other.load_state_dict(model.state_dict())
    near(shown(axes[0]), blank_future(attention_maps(model, tokens, [(1, 0)])[1, 0]))
    near(shown(axes[1]), attention_maps(other, tokens, [(1, 0)])[1, 0])
    assert axes[0].images[0].get_clim() == axes[1].images[0].get_clim()


def test_keys_outside_a_window_are_blank(drawn: Any, tmp_path: Path) -> None:
    path, model = saved(make_model(sliding_window=3, causal=False), tmp_path)
    axis = drawn("attention", path, "--prompt", PROMPT, "--head", "0.1").axes[0]
    weights = attention_maps(model, torch.tensor([list(PROMPT.encode())]), [(0, 1)])[0, 1]
    place = torch.arange(14)
    outside = (place[:, None] - place).abs() >= 3
    assert (weights[outside] == 0).all()
    near(shown(axis), weights.masked_fill(outside, math.nan))


def test_given_queries_and_keys(drawn: Any, tmp_path: Path) -> None:
    q, k = torch.randn(3, 6, 8), torch.randn(3, 6, 8)
    torch.save({"q": q, "k": k}, tmp_path / "qk.pt")
    scores = q @ k.mT / math.sqrt(8)
    causal = blank_future(scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf).softmax(-1))
    given = ("attention", "--qk", str(tmp_path / "qk.pt"))
    for head, axis in enumerate(drawn(*given, "--causal").axes[:3]):
        near(shown(axis), causal[head])
    near(shown(drawn(*given, "--head", "2").axes[0]), scores.softmax(-1)[2])
    both = drawn(*given, "--head", "1", "--compare").axes
    near(shown(both[0]), causal[1])
    near(shown(both[1]), scores.softmax(-1)[1])


# --- models of transformers -------------------------------------------------------------------------------------------


@pytest.fixture
def byte_pairs(tmp_path: Path) -> Any:
    """A byte-level tokenizer of transformers that is trained on a line."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(["the cat, the mat\n" * 9], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found)


def test_a_language_model_and_its_tokenizer(byte_pairs: Any, drawn: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    shape |= {"bos_token_id": 0, "eos_token_id": 0}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, attn_implementation="eager")).eval()
    theirs.save_pretrained(tmp_path / "gpt2")
    byte_pairs.save_pretrained(tmp_path / "gpt2")
    axis = drawn("attention", str(tmp_path / "gpt2"), "--prompt", "the cat\né", "--head", "1.3").axes[0]
    assert labels(axis, "y") == ["the", "␣cat", "↵", "\\xc3", "\\xa9"]
    with torch.no_grad():
        expected = theirs(torch.tensor([byte_pairs("the cat\né")["input_ids"]]), output_attentions=True).attentions
    near(shown(axis), blank_future(expected[1][0, 3]))


def test_an_encoder(drawn: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved with a head for masked tokens, as BERT is; the command that needs a loss refuses it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {
        "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "initializer_range": 0.3,
    }  # fmt: skip
    config = transformers.BertConfig(**shape, attn_implementation="eager", architectures=["BertForMaskedLM"])
    theirs = transformers.BertForMaskedLM(config).eval()
    theirs.save_pretrained(tmp_path / "bert")
    axis = drawn("attention", str(tmp_path / "bert"), "--prompt", PROMPT, "--head", "1.1").axes[0]
    with torch.no_grad():
        expected = theirs(torch.tensor([list(PROMPT.encode())]), output_attentions=True).attentions[1][0, 1]
    near(shown(axis), expected)
    (tmp_path / "text.txt").write_text(PROMPT * 40)
    assert main([str(tmp_path / "bert"), "--text", str(tmp_path / "text.txt")]) == 2
    assert "is an encoder without a head" in capsys.readouterr().err


def test_an_encoder_with_a_decoder(drawn: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**shape, decoder_start_token_id=0, attn_implementation="eager")
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "t5")
    given = ("attention", str(tmp_path / "t5"), "--prompt", PROMPT, "--head", "1.1")
    source, target = (torch.tensor([list(text.encode())]) for text in (PROMPT, "nay"))
    with torch.no_grad():
        expected = theirs(source, decoder_input_ids=target, output_attentions=True)
    cross = drawn(*given, "--target", "nay").axes[0]
    near(shown(cross), expected.cross_attentions[1][0, 1])
    assert (len(labels(cross, "x")), labels(cross, "y")) == (14, ["n", "a", "y"])
    near(shown(drawn(*given, "--part", "encoder").axes[0]), expected.encoder_attentions[1][0, 1])
    own = drawn(*given, "--part", "decoder", "--target", "nay").axes[0]
    near(shown(own), blank_future(expected.decoder_attentions[1][0, 1]))
    (tmp_path / "text.txt").write_text(PROMPT * 40)
    for arguments, message in (
        (given, "--part cross needs --target"),
        ((*given, "--compare"), "--compare needs a single Transformer"),
        ((str(tmp_path / "t5"), "--text", str(tmp_path / "text.txt")), "is an encoder with a decoder"),
    ):
        assert main(list(arguments)) == 2
        assert message in capsys.readouterr().err


def test_how_tokens_are_spelled() -> None:
    assert visible("▁a b\r\n\x00\u200b") == "␣a␣b␍↵\\x00\\u200b"
    assert [spell_byte(token) for token in (65, 233, 300)] == ["A", "\\xe9", "<300>"]
    assert spell_bytes_of("ĠcafÃ©Ċ") == " café\n"
    assert spell_bytes_of("Ã") == "\\xc3"
    assert spell_bytes_of("<東>") == "<東>"
    wide = pictures.attention_map(torch.eye(2), ["東", "a"]).axes[0]
    assert labels(wide, "x")[1] == "a"
    assert labels(wide, "x")[0] in ("東", "\\u6771"), "an escape where the font has no such character"


# --- positions --------------------------------------------------------------------------------------------------------


def test_the_sinusoidal_table(drawn: Any) -> None:
    table, products = drawn("positions", "sinusoidal", "--dim", "6", "--positions", "9", "--base", "100").axes[:2]
    place = torch.arange(9, dtype=torch.float64)[:, None]
    angles = place / 100.0 ** (torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64) / 6)
    expected = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    near(shown(table), expected)
    near(shown(products), expected @ expected.T / 3.0)


def test_rotary_tables_and_scores(drawn: Any) -> None:
    """The score of equal queries and keys of ones is the sum of 2 cos(d theta) over the pairs."""
    given = ("positions", "rope", "--dim", "8", "--positions", "20")
    names = ("linear", "yarn")
    figure = drawn(*given, "--scaling", *names, "--factor", "2", "--trained", "10")
    axes = [axis for axis in figure.axes if axis.get_title()]
    scalings = [None, RopeScaling("linear", 2.0), RopeScaling("yarn", 2.0, 10)]
    assert len(axes) == 3 * len(scalings)
    random = []
    for row, scaling in enumerate(scalings):
        cos, sin = rope_table(8, 20, scaling=scaling)
        near(shown(axes[3 * row]), cos)
        near(shown(axes[3 * row + 1]), sin)
        ones, drawn_at_random, _ = axes[3 * row + 2].lines
        factor = cos[0, 0]  # yarn's, of queries and of keys
        near(torch.tensor(ones.get_ydata()), 2.0 * factor * cos.sum(-1) / math.sqrt(8))
        random.append(drawn_at_random.get_ydata())
    for of in random[1:]:
        assert max(abs(a - b) for a, b in zip(of, random[0], strict=True)) > 1e-3


def test_alibi(drawn: Any) -> None:
    figure = drawn("positions", "alibi", "--heads", "4", "--positions", "6", "--shown", "1", "3")
    place = torch.arange(6.0)
    distance = blank_future(place[:, None] - place)
    for axis, slope in zip(figure.axes, (2.0**-4, 2.0**-8), strict=False):
        near(shown(axis), -slope * distance)
    assert figure.axes[2].lines[0].get_ydata().tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]


# --- initialisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"norm_placement": "post"}, {"parallel_residual": True}], ids=str)
def test_scales_of_layers(changes: dict[str, Any]) -> None:
    """Against gradients of zeros that are added to the stream behind each layer."""
    config = ModelConfig(dim=32, n_layers=3, n_heads=4, vocab_size=64, max_seq_len=16, **changes)
    tokens, targets = torch.randint(64, (2, 2, 9), generator=torch.Generator().manual_seed(1))
    found = pictures.layer_scales(config, tokens, targets, seed=3)

    model = Transformer(config, "reference").eval()
    model.init_weights(torch.Generator().manual_seed(3))
    streams, zeros = [], []

    def add(_: Any, __: Any, result: Any) -> Any:
        branch, stream = result
        streams.append(stream if branch is None else stream + branch)
        zeros.append(torch.zeros_like(stream, requires_grad=True))
        return branch, stream + zeros[-1]

    for block in model.layers:
        block.register_forward_hook(add)
    model(tokens, targets)[1].backward()

    def rms(x: torch.Tensor | None) -> float:
        assert x is not None
        return float(x.detach().square().mean().sqrt())

    near = {"rel": 1e-4}
    assert found.activations[0] == pytest.approx(rms(model.tok_embeddings(tokens)), **near)
    assert found.activations[1:] == pytest.approx([rms(s) for s in streams], **near)
    assert found.activation_gradients[1:] == pytest.approx([rms(z.grad) for z in zeros], **near)
    for layer, block in enumerate(model.layers):
        every = torch.cat([p.grad.flatten() for p in block.parameters() if p.dim() > 1 and p.grad is not None])
        assert found.weight_gradients[layer] == pytest.approx(rms(every), **near)


def test_initialisations_beside_each_other(drawn: Any) -> None:
    shape = {"dim": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 8}
    figure = drawn("initialization", "--dim", "32", "--layers", "3", "--seq-len", "8", "--batch", "2", "--seed", "5")
    tokens = torch.randint(1024, (2, 9), generator=torch.Generator().manual_seed(5))
    parts = ("activations", "activation_gradients", "weight_gradients")
    for line, scheme in enumerate(("normal", "xavier", "depth_scaled")):
        config = ModelConfig(**FAMILIES["llama"], **shape, vocab_size=1024, init=scheme)
        expected = pictures.layer_scales(config, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), seed=5)
        for axis, part in zip(figure.axes, parts, strict=True):
            assert list(axis.lines[line].get_ydata()) == pytest.approx(getattr(expected, part))
            assert axis.lines[line].get_label().startswith(scheme)
    xavier, scaled = (figure.axes[0].lines[line].get_ydata()[-1] for line in (1, 2))
    assert scaled < xavier


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_the_model_does_not_have(
    checkpoint: tuple[str, Transformer], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.save({"q": torch.randn(2, 3, 8), "k": torch.randn(2, 3, 4)}, tmp_path / "qk.pt")
    torch.save({"q": torch.randn(2, 3, 8), "k": torch.randn(2, 3, 8)}, tmp_path / "fine.pt")
    for arguments, message in (
        ([checkpoint[0], "--prompt", "a b", "--head", "2.0"], "a layer from 0 to 1 and a head from 0 to 3; got 2.0"),
        ([checkpoint[0], "--prompt", "a b", "--head", "0.4"], "a layer from 0 to 1 and a head from 0 to 3; got 0.4"),
        ([checkpoint[0], "--prompt", "a"], "the text must have at least 2 tokens; got 1"),
        ([checkpoint[0], "--prompt", "a b", "--part", "cross"], "--part needs an encoder with a decoder"),
        (["--qk", str(tmp_path / "qk.pt")], "k must"),
        (["--qk", str(tmp_path / "fine.pt"), "--head", "2"], "--head must be from 0 to 1; got 2"),
    ):
        assert main(["attention", *arguments]) == 2
        assert message in capsys.readouterr().err
