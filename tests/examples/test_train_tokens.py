"""Token files: what is in them, that they are mapped and not read, training on them, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("tqdm", reason="the example needs tqdm")
pytest.importorskip("tokenizers", reason="trains an encoding")

from examples import prepare_tokens, train
from examples.training import loop as train_loop
from examples.training import memory as train_memory
from examples.training import text as train_text
from examples.training import tokens as train_tokens
from foundry_kernels.diagnostics import checkpoint as diagnosed

TEXT = "The quick brown fox jümps over the lazy dog,\r\n\n  and 東京 is far – naïvely speaking. 🦊\n" * 60
OPTIONS = ["--dim", "16", "--layers", "1", "--heads", "2", "--batch", "2", "--seq-len", "16", "--device", "cpu"]
OPTIONS += ["--steps", "4", "--sample-tokens", "5", "--backend", "reference"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text.txt, text.bin and text.json."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_bytes(TEXT.encode())
    assert prepare(folder, "text.bin", "--vocab", "300") == 0
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def prepare(folder: Path, out: str, *more: str, text: str = "text.txt") -> int:
    return prepare_tokens.main(["--text", str(folder / text), "--out", str(folder / out), *more])


def test_tokens_are_the_text(prepared: Path) -> None:
    text = train_tokens.open_tokens(prepared / "text.bin", 16)
    assert text.train.dtype == torch.uint16
    assert text.vocabulary.size == 300
    everything = torch.cat([text.train.int(), text.held_out.int()])
    assert text.vocabulary.decode(everything.tolist()) == TEXT
    assert text.vocabulary.count_bytes(everything) == len(TEXT.encode())
    assert len(everything) < 0.7 * len(TEXT.encode())
    assert text.vocabulary.decode(text.vocabulary.encode("Not in it: ŵ\x00")) == "Not in it: ŵ\x00"
    assert prepare(prepared, "again.bin", "--vocab", "300") == 0
    for suffix in ("bin", "json"):
        assert (prepared / f"again.{suffix}").read_bytes() == (prepared / f"text.{suffix}").read_bytes()


def test_encoding_has_not_seen_what_may_be_held_out(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abab " * 900 + "xyxy " * 100)
    encoding = train_tokens.train_byte_pairs(tmp_path / "text.txt", 258)
    assert len(encoding.encode("ababab")) < 6
    assert len(encoding.encode("xyxyxy")) == 6


def test_bytes_as_tokens(folder: Path) -> None:
    assert prepare(folder, "bytes.bin") == 0
    assert (folder / "bytes.bin").read_bytes() == TEXT.encode()
    ours, theirs = train_tokens.open_tokens(folder / "bytes.bin", 16), train_text.read_text(folder / "text.txt", 16)
    assert torch.equal(ours.train, theirs.train)
    assert torch.equal(ours.held_out, theirs.held_out)
    for a, b in zip(ours.batch(3, 16, torch.Generator()), theirs.batch(3, 16, torch.Generator()), strict=True):
        assert torch.equal(a, b)


def test_a_large_vocabulary_takes_four_bytes_a_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = train_text.Bytes()
    vocabulary.size = 70_000
    monkeypatch.setattr(train_tokens, "_encoded", lambda text, vocabulary: iter([range(69_000, 70_000)]))
    train_tokens.write_tokens(folder / "text.txt", folder / "wide.bin", vocabulary)
    text = train_tokens.open_tokens(folder / "wide.bin", 16)
    assert text.train.dtype == torch.uint32
    tokens, targets = text.held_out_batch(2, 16)
    assert int(tokens[0, 0]) == 69_900
    assert int(targets[-1, -1]) == 69_999


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_file_is_mapped_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(32 << 20))
    memory = train_memory.PeakMemory(torch.device("cpu"))
    assert prepare(tmp_path, "large.bin") == 0
    text = train_tokens.open_tokens(tmp_path / "large.bin", 128)
    text.batch(8, 128, torch.Generator().manual_seed(0))
    assert memory.bytes() < 16 << 20
    text.train.sum()  # now its pages are read
    assert memory.bytes() > 28 << 20


def test_training_on_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluation against whole logits; bits a byte by what tokens decode to; the checkpoint has the encoding."""
    (folder / "ascii.txt").write_bytes(TEXT.encode("ascii", "ignore"))
    tokens, out = folder / "ascii.bin", folder / "out"
    assert prepare(folder, "ascii.bin", "--vocab", "300", text="ascii.txt") == 0
    assert train.main([*OPTIONS, "--tokens", str(tokens), "--out", str(out), "--prompt", "The fox"]) == 0
    printed = capsys.readouterr().out
    assert "| The fox" in printed
    assert "300 byte pairs as tokens" in printed
    assert "bits a byte (reference)" in printed
    assert "5 tokens, temperature" in printed

    text = train_tokens.open_tokens(tokens, 16)
    recipe = train.make_recipe(train.parse([*OPTIONS, "--tokens", str(tokens)]), 2, 300)
    run = train_loop.train(recipe, "reference", text, None, progress=False)
    windows, targets = text.held_out_batch(train_loop.HELD_OUT_WINDOWS, 16)
    assert run.model is not None
    with torch.no_grad():
        expected = F.cross_entropy(run.model(windows).flatten(0, 1), targets.flatten()).item()
    assert run.held_out == pytest.approx(expected, rel=1e-5)
    [last] = run.evaluations
    assert last.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    held = sum(len(text.vocabulary.decode(row)) for row in targets.tolist())  # of ASCII
    assert last.bits_per_byte == pytest.approx(expected * targets.numel() / held / math.log(2), rel=1e-5)

    state = torch.load(out / "checkpoint-reference.pt", weights_only=True)["state"]
    assert state["losses"] == run.losses
    model, encode = diagnosed.load(out / "checkpoint-reference.pt")
    assert model.config == recipe.model
    assert encode(TEXT[:300]) == text.vocabulary.encode(TEXT[:300])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(diagnosed.CheckpointError, match="tokenizers is missing; pip install"):
        diagnosed.load(out / "checkpoint-reference.pt")


def rewrite(spoilt: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / "text.bin").write_bytes(spoilt((folder / "text.bin").read_bytes()))


def change(**fields: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        about = json.loads((folder / "text.json").read_text())
        (folder / "text.json").write_text(json.dumps({**about, **fields}))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (rewrite(lambda data: data[:99] + b"\x00\xff" + data[101:]), "is damaged, or not the file that text.json"),
        (rewrite(lambda data: data[:-2]), "text.bin is damaged"),
        (lambda folder: (folder / "text.bin").unlink(), "cannot read the tokens"),
        (lambda folder: (folder / "text.json").unlink(), "text.bin is not a token file: prepare_tokens.py makes"),
        (lambda folder: (folder / "text.json").write_text("{"), "cannot read"),
        (lambda d: (d / "text.json").write_text('["tokens"]'), "text.json was not written by prepare_tokens.py"),
        (change(format="other"), "text.json was not written by prepare_tokens.py"),
        (change(version=2), "text.json has version 2; this program reads 1"),
        (change(dtype="float32"), "text.json is damaged: it has no dtype"),
        (change(tokenizer={"model": None}), "text.json is damaged: its tokenizer does not load"),
    ],
)
def test_bad_token_files_are_refused(
    spoil: Callable[[Path], object], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(folder)
    assert train.main([*OPTIONS, "--tokens", str(folder / "text.bin"), "--out", str(folder / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "text.txt"], "text.txt is not a token file"),
        (["--tokens", "text.bin", "--text", "text.txt"], "--tokens and --text cannot be combined"),
        (["--tokens", "text.bin", "--seq-len", "5000"], "is too short: "),
    ],
    ids=["a text", "both", "short"],
)
def test_bad_options_for_tokens_are_refused(
    arguments: list[str],
    message: str,
    prepared: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(prepared)
    assert train.main([*OPTIONS, *arguments, "--out", "out"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text.txt", "new.tokens"], "--out must end in .bin; got "),
        (["text.txt", "text.bin"], "text.bin exists; choose another --out"),
        (["text.txt", "new.bin", "--vocab", "256"], "--vocab must be above 256, the number of bytes; got 256"),
        (["missing.txt", "new.bin"], "cannot read the text "),
        (["missing.txt", "new.bin", "--vocab", "300"], "missing.txt: No such file"),
        (["empty.txt", "new.bin"], "empty.txt is empty"),
        (["latin.txt", "new.bin", "--vocab", "300"], "latin.txt is not UTF-8 (invalid continuation byte)"),
        (["cut.txt", "new.bin", "--vocab", "300"], "cut.txt is not UTF-8 (unexpected end of data)"),
        (["text.txt", "missing/new.bin"], "cannot write the tokens "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_preparation_refuses(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes("naïve ".encode("latin-1") * 9)
    (folder / "cut.txt").write_bytes("enough text, and then 京".encode()[:-1])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    text, out, *more = arguments
    assert prepare(folder, out, *more, text=text) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_without_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert prepare(folder, "bytes.bin") == 0
    assert prepare(folder, "new.bin", "--vocab", "300") == 2
    assert train.main([*OPTIONS, "--tokens", str(folder / "text.bin"), "--out", str(folder / "out")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["error: tokenizers is missing; pip install 'foundry-kernels[tokenizers]'"] * 2
