"""What the commands and functions that draw pictures refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from foundry_kernels import diagnostics
from foundry_kernels.diagnostics import pictures
from foundry_kernels.diagnostics.__main__ import main
from foundry_kernels.models import ModelConfig, Transformer

CONFIG = ModelConfig(32, 2, 4, vocab_size=256, max_seq_len=64)

#: Options that are refused before the checkpoint, which there is not, is opened.
EARLY = [
    (["attention"], "give either a checkpoint or --qk"),
    (["attention", "absent.pt"], "give a text with --text FILE or --prompt TEXT"),
    (["attention", "absent.pt", "--text", "absent.txt"], "cannot read the text absent.txt"),
    (["attention", "absent.pt", "--prompt", "a b", "--head", "first"], "--head must be LAYER.HEAD"),
    (["attention", "absent.pt", "--prompt", "a b", "--head", "0.x"], "--head must be LAYER.HEAD"),
    (["attention", "absent.pt", "--prompt", "a b", "--tokens", "1"], "--tokens must be at least 2; got 1"),
    (["attention", "absent.pt", "--prompt", "a b", "--compare"], "--compare needs --head"),
    (["attention", "absent.pt", "--prompt", "a b", "--causal"], "--causal is for --qk"),
    (["attention", "absent.pt", "--prompt", "a b", "--out", "a.jpeg"], "--out must end in .png, .svg, .pdf"),
    (["attention", "--qk", "absent.pt", "--prompt", "a b"], "--prompt needs a checkpoint"),
    (["attention", "--qk", "absent.pt"], "--qk must be a file of"),
    (["positions", "sinusoidal", "--dim", "0"], "--dim must be"),
    (["positions", "rope", "--dim", "5"], "--dim must be even"),
    (["positions", "rope", "--positions", "0"], "--positions must be"),
    (["positions", "rope", "--scaling", "yarn", "--factor", "0.5"], "--factor must be >= 1"),
    (["positions", "alibi", "--heads", "0"], "--heads must be"),
    (["positions", "alibi", "--heads", "4", "--shown", "4"], "--shown must be numbers of heads from 0 to 3; got [4]"),
    (["initialization", "--layers", "0"], "--layers must be at least 1"),
    (["initialization", "--seq-len", "0"], "--seq-len must be at least 1"),
    (["initialization", "--init-std", "0"], "--init-std must be"),
]


@pytest.mark.parametrize(("arguments", "message"), EARLY, ids=[" ".join(a) for a, _ in EARLY])
def test_options_that_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_labels_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="queries must have a label for each of 3 tokens; got 2"):
        pictures.attention_map(torch.eye(3), ["a", "b"])
    with pytest.raises(ValueError, match="weights must"):
        pictures.attention_map(torch.zeros(2, 2, 2))
    with pytest.raises(TypeError, match="weights must"):
        pictures.attention_grid(torch.zeros(1, 1, 2, 2, dtype=torch.int64))


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["attention", "absent.pt", "--prompt", "a b"]) == 2
    assert "pictures need matplotlib, which does not import" in capsys.readouterr().err
    with pytest.raises(ImportError, match=r"pip install 'foundry-kernels\[diagnostics\]'"):
        pictures.sinusoidal()
    assert diagnostics.attention_maps(Transformer(CONFIG), torch.tensor([[1, 2]]), [(0, 0)])
