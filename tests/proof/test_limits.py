"""Processes are ended for what they do, and never because others have the processor."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import limits
import pytest

pytestmark = pytest.mark.skipif(not limits.PROC.is_dir(), reason="the system has no /proc")


def test_a_process_that_waits_for_ever_is_ended() -> None:
    with pytest.raises(TimeoutError, match="in 2 s no thread was running"):
        limits.run([sys.executable, "-c", "import time; time.sleep(1000)"], idle=2.0)


def test_a_process_that_computes_for_ever_is_ended_and_what_it_said_is_kept() -> None:
    code = "import sys; print('begun', file=sys.stderr, flush=True)\nwhile True: pass"
    with pytest.raises(TimeoutError, match=r"(?s)s of processor time.*begun"):
        limits.run([sys.executable, "-c", code], processor=0.5)


def test_one_that_others_keep_from_the_processor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ready to run all the time and gets nothing; by the clock it is far beyond both limits."""
    clock = iter(range(0, 10**6, 2))
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    state = ["R", "0", *["0"] * 20]
    monkeypatch.setattr(limits, "_stat", lambda process: state)
    monkeypatch.setattr(limits, "_entries", lambda folder: [1])
    watch = limits.Watch([1], processor=1.0, idle=3.0)
    assert [watch.over() for _ in range(100)] == [None] * 100
    state[0] = "S"
    assert any(watch.over() for _ in range(3))


def test_what_a_process_started_counts_too() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'], timeout=3)"
    before = limits.processor_seconds(os.getpid())
    with pytest.raises(TimeoutError, match="processor time"):
        limits.run([sys.executable, "-c", code], processor=0.3)
    assert limits.processor_seconds(os.getpid()) > before


def test_progress_begins_anew() -> None:
    watch = limits.Watch([os.getpid()], processor=0.2, idle=60.0)
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass
    watch.sampled -= 2.0
    assert "processor time" in str(watch.over())
    watch.progress()
    watch.sampled -= 2.0
    assert watch.over() is None
