"""Limits on processes that do not depend on the load of the machine: limits on their processor time, and on the time
that they wait for anything except a processor. Without /proc, wall-clock time is limited instead."""

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
#: Seconds of wall-clock time, if nothing else is known about a process.
LONGEST = 3600.0
#: Waiting processes may be running in this fraction of samples, because they poll, or because threads of a library wake
#: up. A process with work is runnable in nearly all samples, even without a processor.
WAKES = 0.3


class Watch:
    """Watches processes and their children, and returns the reason why they should be ended."""

    def __init__(self, pids: Iterable[int], processor: float, idle: float) -> None:
        """processor: seconds of processor time in total. idle: seconds in which no thread is running or runnable."""
        self.pids = list(pids)
        self.processor = processor
        self.samples: deque[bool] = deque(maxlen=max(1, round(idle)))
        self.begun = self.sampled = time.monotonic()
        self.used_before = 0.0

    def progress(self) -> None:
        """Restarts the limits, because something has finished."""
        self.begun = time.monotonic()
        self.used_before = sum(processor_seconds(pid) for pid in self.pids)
        self.samples.clear()

    def over(self) -> str | None:
        """The reason to end them, or None. Call it often; it takes a sample once a second."""
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
    """`subprocess.run` with text output, and with these limits in place of a timeout.

    Raises:
        TimeoutError: the process was ended; with the reason and its output.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, text=True, start_new_session=True, **options)
        watch = Watch([process.pid], processor, idle)
        while process.poll() is None:
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                if why := watch.over():
                    os.killpg(process.pid, signal.SIGKILL)  # also its children
                    process.wait()
                    err.seek(0)
                    raise TimeoutError(f"{why}: {command}\n{err.read()}") from None
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())


def processor_seconds(pid: int) -> float:
    """The processor time of a process and all of its children, including ended ones."""
    return sum(sum(map(int, fields[11:15])) for fields in map(_stat, _tree(pid)) if fields) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """Whether a thread of these processes uses a processor or a disk, or is runnable."""
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
    """The fields after the name in a process's `stat`: its state, its parent, ...; empty if it has ended."""
    try:
        return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
