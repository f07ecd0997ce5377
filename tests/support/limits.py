"""Limits on processes that a busy machine does not reach: on the processor time that they use, and on how long they
wait for anything but a processor. The clock alone decides only where the system has no /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PROC = Path("/proc")
#: Seconds by the clock, where nothing else is known of a process.
LONGEST = 3600.0
#: In this part of the samples processes that wait may be seen running: they poll, or threads of a library wake. One
#: that has work is seen so in nearly all, whether it has a processor or not.
WAKES = 0.3


class Watch:
    """Says of some processes, with those that they started, why they should be ended."""

    def __init__(self, pids: Iterable[int], processor: float, idle: float) -> None:
        """processor: seconds of processor time, all together. idle: seconds in which no thread runs or is ready to."""
        self.pids = list(pids)
        self.processor = processor
        self.samples: deque[bool] = deque(maxlen=max(1, round(idle)))
        self.begun = self.sampled = time.monotonic()
        self.used_before = 0.0

    def progress(self) -> None:
        """Something was finished: limits count from here."""
        self.begun = time.monotonic()
        self.used_before = sum(processor_seconds(pid) for pid in self.pids)
        self.samples.clear()

    def over(self) -> str | None:
        """Why they should be ended, or None. To be asked often: it looks once a second."""
        now = time.monotonic()
        if now - self.sampled < 1.0:
            return None
        self.sampled = now
        if not PROC.is_dir():
            return f"nothing was finished in {LONGEST:.0f} s" if now - self.begun > LONGEST else None
        used = sum(processor_seconds(pid) for pid in self.pids) - self.used_before
        if used > self.processor:
            return f"nothing was finished in {used:.0f} s of processor time"
        self.samples.append(any(map(is_running, self.pids)))
        if len(self.samples) == self.samples.maxlen and sum(self.samples) <= WAKES * len(self.samples):
            return f"in {len(self.samples)} s no thread was running, or ready to run"
        return None


def run(command: Sequence[str], processor: float = 300.0, idle: float = 60.0, **options: Any) -> Any:
    """`subprocess.run` with its output as text, and with these limits in place of a timeout.

    Raises:
        TimeoutError: the process was ended; with the reason, and what it printed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, text=True, start_new_session=True, **options)
        watch = Watch([process.pid], processor, idle)
        while process.poll() is None:
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                if why := watch.over():
                    os.killpg(process.pid, signal.SIGKILL)  # with what it started
                    process.wait()
                    err.seek(0)
                    raise TimeoutError(f"{why}: {command}\n{err.read()}") from None
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())


def processor_seconds(pid: int) -> float:
    """Used by a process and by all that it started, the ended ones too."""
    return sum(sum(map(int, fields[11:15])) for fields in map(_stat, _tree(pid)) if fields) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """Whether a thread of these processes uses a processor or a disk, or waits for its turn."""
    for each in _tree(pid):
        for thread in _entries(PROC / str(each) / "task"):
            fields = _stat(f"{each}/task/{thread}")
            if fields and fields[0] in "RD":
                return True
    return False


def _tree(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for each in _entries(PROC):
        if fields := _stat(each):
            children.setdefault(int(fields[1]), []).append(each)
    found = [pid]
    for each in found:
        found += children.get(each, ())
    return found


def _entries(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:  # it has ended meanwhile
        return []


def _stat(process: int | str) -> list[str]:
    """What follows the name in a process's `stat`: its state, its parent, ...; nothing if it has ended."""
    try:
        return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
