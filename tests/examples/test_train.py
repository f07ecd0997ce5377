"""The demo: what it prints and leaves behind, that an interrupted run goes on exactly, what it refuses."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytest.importorskip("tqdm", reason="the demo needs tqdm")

from examples import train  # noqa: E402
from examples.training import checkpoint as train_checkpoint  # noqa: E402
from examples.training import loop as train_loop  # noqa: E402
from examples.training import memory as train_memory  # noqa: E402
from examples.training import progress as train_progress  # noqa: E402
from examples.training import report as train_report  # noqa: E402
from examples.training import text as train_text  # noqa: E402
from examples.training.parallel import Parallel, ParallelError  # noqa: E402
from foundry_kernels.models import ModelConfig, Transformer  # noqa: E402
from foundry_kernels.nn import Router  # noqa: E402

SHAPE = ["--dim", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--batch", "2", "--seq-len", "16"]
TINY = [*SHAPE, "--device", "cpu", "--steps", "6", "--sample-tokens", "5"]
FINISHED = ("--backend", "reference", "--sample-tokens", "0")


TEXT = b"the quick brown fox jumps over the lazy dog\n\xff\xfe" * 30  # not UTF-8, on purpose


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_bytes(TEXT)
    with contextlib.chdir(folder):
        assert run(*FINISHED, "--text", "text.txt", "--out", "out") == 0
    return folder


@pytest.fixture
def finished(run_once, tmp_path, monkeypatch, capsys):
    """The current folder has a text and the results of a run with it; the run's arguments."""
    shutil.copytree(run_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    return (*FINISHED, "--text", "text.txt", "--out", "out")


def run(*arguments) -> int:
    return train.main([*TINY, *map(str, arguments)])


def recipe(**changes) -> train_loop.Recipe:
    options = train.parse([*TINY, *changes.pop("arguments", [])])
    return train.make_recipe(options, 5)


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_run_reports_and_leaves_what_it_says(text_file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    assert run("--text", text_file, "--out", out, "--backend", "reference", "auto", "--prompt", "the ") == 0
    printed = capsys.readouterr().out
    assert "Losses of auto and reference differ by" in printed
    assert "held-out" in printed
    assert "| the " in printed
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    settings = recipe().settings("auto", train_text.read_text(text_file, 16))
    losses = {name: train_checkpoint.load(out / f"checkpoint-{name}.pt", settings | {"--backend": name})["losses"]
              for name in ("reference", "auto")}  # fmt: skip
    assert len(losses["auto"]) == 6
    assert losses["auto"] == pytest.approx(losses["reference"], abs=1e-5)
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint-auto.pt", "checkpoint-reference.pt", "log-auto.jsonl", "log-reference.jsonl", "loss.png"
    ]  # fmt: skip


def test_a_log_gets_a_line_every_few_seconds(text_file, capsys, monkeypatch):
    """The line has the time that is left; the last step is shown however soon it comes."""
    clock = itertools.count(0.0, 3.0)  # a step takes three seconds
    monkeypatch.setattr(train_progress.time, "perf_counter", lambda: next(clock))
    longer = recipe(arguments=["--steps", "10", "--evaluate-every", "0"])
    text = train_text.read_text(text_file, 16)
    with train_progress.Progress("reference", 10, 4, True) as shown:
        for _ in range(6):
            shown.step(1.5)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "reference: step 7 of 10, loss 1.500, 9 s, 9 s left",
        "reference: step 10 of 10, loss 1.500, 18 s",
    ]
    monkeypatch.undo()
    train_loop.train(longer, "reference", text, None)
    assert re.search(r"^reference: step 10 of 10, loss \d\.\d{3}, \d+ s$", capsys.readouterr().err, re.MULTILINE)


def test_a_terminal_gets_a_bar(text_file, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    train_loop.train(recipe(), "reference", train_text.read_text(text_file, 16), None)
    assert "6/6" in terminal.getvalue()
    assert "step 6 of 6" not in terminal.getvalue()


def test_training_learns(text_file):
    text = train_text.read_text(text_file, 16)
    longer = recipe(arguments=["--steps", "60", "--lr", "0.01"])
    done = train_loop.train(longer, "reference", text, None, progress=False)
    assert done.losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: nothing known
    assert done.held_out < 3.2


def test_bfloat16_trains_float32_parameters(text_file):
    low = recipe(arguments=["--dtype", "bfloat16"])
    done = train_loop.train(low, "reference", train_text.read_text(text_file, 16), None, progress=False)
    assert {p.dtype for p in done.model.parameters()} == {torch.float32}
    full = train_loop.train(recipe(), "reference", train_text.read_text(text_file, 16), None, progress=False)
    assert done.losses != full.losses
    assert done.losses == pytest.approx(full.losses, abs=0.05)


def test_a_selection_bias_is_moved_by_one_process_alone(text_file):
    biased = recipe(arguments=["--set", "n_experts=4", "selection_bias=true"])
    done = train_loop.train(biased, "reference", train_text.read_text(text_file, 16), None, progress=False)
    routers = [m for m in done.model.modules() if isinstance(m, Router)]
    assert all(router.selection_bias.abs().max() > 0.0 for router in routers)
    with pytest.raises(ParallelError, match="selection_bias: each process would update it with only its own tokens"):
        Parallel.check(SimpleNamespace(kind="ddp", size=2), biased.model, 4, 16)


# --- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_saves_and_says_how_to_go_on(text_file, tmp_path):
    out = tmp_path / "out"
    arguments = [*SHAPE, "--device", "cpu", "--steps", "1000000", "--checkpoint-every", "1"]
    arguments += ["--backend", "reference", "--text", str(text_file), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "train.py"), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        while not (out / "checkpoint-reference.pt").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert f"--resume --out {out}" in errors
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-reference.pt", "log-reference.jsonl"]


def test_resume_of_a_finished_run_only_reports(finished, capsys):
    before = Path("out/checkpoint-reference.pt").read_bytes()
    assert run(*finished, "--resume") == 0
    assert "held-out" in capsys.readouterr().out
    assert Path("out/checkpoint-reference.pt").read_bytes() == before


def test_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    train_checkpoint.save(path, {}, {"losses": [1.0]})

    def fill_the_disk(content, file):
        file.write(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fill_the_disk)
    with pytest.raises(train_checkpoint.CheckpointError, match="No space left"):
        train_checkpoint.save(path, {}, {"losses": [2.0]})
    assert train_checkpoint.load(path, {}) == {"losses": [1.0]}
    assert list(tmp_path.iterdir()) == [path]


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(capsys, *arguments) -> str:
    """The one line that a refused run prints."""
    assert run(*arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


CORRUPT = "is corrupt or not a checkpoint"
OF_VERSION_1 = "has checkpoint version 1; this program reads 2: finish that run with the program that started it"


def inside(state: dict, **changes) -> dict:
    """A checkpoint with another value, or none, of the run's state."""
    return state | {"state": {k: v for k, v in (state["state"] | changes).items() if v is not None}}


#: What becomes of a checkpoint: bytes, or what `torch.save` writes; and what is said of it.
DAMAGED = {
    "corrupt": (lambda content, state: b"PK\x03\x04 this was a checkpoint once", CORRUPT),
    "truncated": (lambda content, state: content[: len(content) // 2], CORRUPT),
    "empty": (lambda content, state: b"", CORRUPT),
    "pickled": (lambda content, state: {"format": train_checkpoint.FORMAT, "state": Path("code")}, CORRUPT),
    "foreign": (lambda content, state: {"model": {"weight": torch.zeros(3)}}, "is not a checkpoint of this program"),
    "newer": (lambda content, state: state | {"version": 99}, "has checkpoint version 99; this program reads 2"),
    "older": (lambda content, state: state | {"version": 1}, OF_VERSION_1),
    "without a model": (lambda content, state: inside(state, model=None), "is damaged: KeyError"),
    "other weights": (
        lambda content, state: inside(state, model={name: x[:1] for name, x in state["state"]["model"].items()}),
        "is damaged: RuntimeError",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_bad_checkpoint_is_refused_and_kept(what, finished, capsys):
    path, picture = Path("out/checkpoint-reference.pt"), Path("out/loss.png").stat().st_mtime_ns
    damage, message = DAMAGED[what]
    spoilt = damage(path.read_bytes(), torch.load(path, weights_only=True))
    path.write_bytes(spoilt) if isinstance(spoilt, bytes) else torch.save(spoilt, path)
    before = path.read_bytes()
    line = refused(capsys, *finished, "--resume")
    assert message in line
    assert str(path) in line
    assert path.read_bytes() == before
    assert Path("out/loss.png").stat().st_mtime_ns == picture


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--lr", "0.5"), "--lr 0.001, not 0.5"),
        (("--dim", "32"), "model dim 16, not 32"),
        (("--dtype", "bfloat16"), "--dtype float32, not bfloat16"),
        (("--steps", "9"), "--steps 6, not 9"),
        (("--text", "other.txt"), "belongs to a run with --text"),
        (("--backend", "auto"), "belongs to a run with --backend reference, not auto"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_checkpoint_of_another_run_is_refused(changed, message, finished, capsys):
    Path("other.txt").write_bytes(TEXT[::-1])
    shutil.copy("out/checkpoint-reference.pt", "out/checkpoint-auto.pt")
    assert message in refused(capsys, *finished, *changed, "--resume")


def test_present_run_is_not_overwritten(finished, capsys):
    assert "exists; continue it with --resume" in refused(capsys, *finished)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "missing.txt"), "cannot read the text missing.txt: No such file"),
        (("--text", "."), "cannot read the text ."),
        (("--text", "empty.txt"), "the text empty.txt is empty"),
        (("--text", "short.txt"), "the text short.txt is too short: 20 bytes"),
        (("--resume",), "--resume needs --out"),
        (("--resume", "--out", "nowhere"), "nothing to resume: no checkpoint-reference.pt"),
        (("--steps", "0"), "--steps must be at least 1; got 0"),
        (("--kv-heads", "3"), "n_heads must be a multiple of n_kv_heads=3"),
        (("--lr", "nan"), "--lr must be above 0"),
        (("--device", "gpu"), "--device gpu"),
        (("--device", "meta"), "--device must be cpu or cuda"),
        (("--prompt", ""), "--prompt must not be empty"),
        (("--out", "short.txt"), "cannot create the folder short.txt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_options_are_refused_before_anything_is_written(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_bytes(b"x" * 20)
    assert message in refused(capsys, "--backend", "reference", *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "short.txt"]


# --- the parts --------------------------------------------------------------------------------------------------------


def test_standard_library_is_a_text_of_fixed_order():
    first, second = train_text.read_text(None, 128), train_text.read_text(None, 128)
    assert first.digest == second.digest
    assert len(first.train) + len(first.held_out) == train_text.STDLIB_BYTES
    assert b"import" in bytes(first.train.tolist())


def test_batches_are_windows_of_their_part(text_file):
    text = train_text.read_text(text_file, 16)
    tokens, targets = text.batch(4, 16, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    data = bytes(text.train.tolist())
    assert all(bytes(row.tolist()) in data for row in torch.cat([tokens, targets[:, -1:]], 1))
    held, after = text.held_out_batch(3, 16)
    assert bytes(held[0].tolist()) == bytes(text.held_out[:16].tolist())
    assert int(after[-1, -1]) == int(text.held_out[-1])


def test_shortest_text_that_is_accepted(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(51)))
    assert len(train_text.read_text(path, 16).held_out) == 17
    path.write_bytes(bytes(range(50)))
    with pytest.raises(train_text.TextError, match="too short: 50 bytes; sequences of 16 need at least 51"):
        train_text.read_text(path, 16)


def test_sample_lets_no_control_sequence_through():
    model = Transformer(ModelConfig(dim=8, n_layers=1, n_heads=1, vocab_size=256, max_seq_len=64), "reference")
    written, _ = train_report.sample(model, b"a\x1b[2J\tb\n", 40, 1.0, seed=0)
    assert written.startswith("a\N{REPLACEMENT CHARACTER}[2J")
    assert all(c.isprintable() or c == "\n" for c in written)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_sees_what_came_and_went():
    before = train_memory.PeakMemory(torch.device("cpu"))
    torch.ones(16 << 20)  # 64 MiB
    assert 60 << 20 < before.bytes() < 160 << 20
    again = train_memory.PeakMemory(torch.device("cpu"))
    assert again.bytes() < 32 << 20
