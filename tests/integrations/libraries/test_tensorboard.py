"""`examples/train.py --tensorboard` writes what the log has; a resumed run replaces what came after its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tqdm", reason="the example needs tqdm")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

# ruff: noqa: E402
from examples import train
from examples.training import log as train_log

OPTIONS = ["--dim", "16", "--layers", "1", "--heads", "2", "--batch", "2", "--seq-len", "16", "--device", "cpu"]
OPTIONS += ["--steps", "6", "--sample-tokens", "0", "--backend", "reference", "--evaluate-every", "3", "--tensorboard"]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """The last value of each step, by tag."""
    events = accumulator.EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_the_numbers_of_the_log(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 30)
    arguments = [*OPTIONS, "--text", str(text), "--out", str(out), "--checkpoint-every", "4"]
    assert train.main(arguments) == 0
    logged = train_log.read(out / "log-reference.jsonl")
    shown = scalars(out / "tensorboard" / "reference")
    for event, names in (
        ("step", ("loss", "lr", "grad_norm", "tokens_per_second", "peak_bytes")),
        ("evaluation", ("loss", "perplexity", "bits_per_byte")),
    ):
        for name in names:
            expected = {e["step"]: pytest.approx(e[name], rel=1e-6) for e in logged if e["event"] == event}
            assert shown.pop(f"{event}/{name}") == expected
    assert not shown


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    with train_log.Log(None, 0, tmp_path) as log:
        for step in range(1, 6):
            log.write("step", step=step, loss=float(step))
    with train_log.Log(None, 3, tmp_path) as log:
        log.write("step", step=4, loss=40.0)
    assert scalars(tmp_path) == {"step/loss": {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}}
