"""Runs named checks in worker processes, each within a limit of time. A check that hangs, or that ends its process,
fails alone: the others run in a new process.

A worker reads the name of a check from its standard input, and answers with a line of JSON. Before the first, it
answers with what it knows about itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

#: Seconds in which a worker must have begun: it imports torch and initialises the GPU.
START = 90.0


class Worker:
    """One process. `about` is what it says about itself."""

    def __init__(self, command: Sequence[str], log: IO[str], env: Mapping[str, str], start: float) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        self._process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
        self.about = self._answer(start)
        if "error" in self.about:
            self.close()

    def ask(self, name: str, seconds: float) -> dict[str, Any]:
        """Returns the answer to a name, which has "error" if the check failed. Afterwards it may no longer run."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        answer = self._answer(seconds)
        if answer.pop("last", False):
            self.close()
        return answer

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        began = time.monotonic()
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        while (line := self._process.stdout.readline()) and not line.startswith("{"):
            pass  # printed by a program around it
        timer.cancel()
        if line:
            return dict(json.loads(line))
        code, took = self._process.wait(), time.monotonic() - began
        error = f"stopped after {seconds:.0f} s" if took >= seconds else f"its process ended with {code}"
        return {"error": error, "seconds": round(took, 1)}

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def _kill(self) -> None:
        """Also ends the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, seconds: float = 20.0) -> int:
        """Lets it end, and returns its exit status."""
        assert self._process.stdin is not None
        try:
            self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._kill()
        return self._process.wait()


class Pool:
    """Up to `most` workers, which are started as they are needed and stay until `close`."""

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, start: float = START
    ) -> None:
        self._command, self._env, self._log = command, os.environ if env is None else env, log.open("a")
        self._start = start
        self._idle: list[Worker] = []

    def worker(self) -> Worker:
        """An idle worker, or a new one."""
        return self._idle.pop() if self._idle else Worker(self._command, self._log, self._env, self._start)

    def give_back(self, worker: Worker) -> None:
        if worker.runs:
            self._idle.append(worker)

    def run(
        self, names: Sequence[str], each: float, deadline: float, most: int
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields names and answers as they come, until `deadline` (by `time.monotonic`), which has no answer of those
        that then run."""
        left, answers = iter(names), queue.Queue[tuple[str, dict[str, Any]] | None]()
        lock = threading.Lock()

        def work() -> None:
            worker = None
            try:
                while (remaining := deadline - time.monotonic()) > 0:
                    with lock:
                        name = next(left, None)
                    if name is None:
                        break
                    worker = worker if worker is not None and worker.runs else self.worker()
                    if not worker.runs:  # it could not begin, nor would another
                        answers.put((name, worker.about))
                        break
                    answer = worker.ask(name, min(each, max(remaining, 1)))
                    if worker.runs or time.monotonic() < deadline:  # else it was not given its time
                        answers.put((name, answer))
            finally:
                if worker is not None:
                    self.give_back(worker)
                answers.put(None)

        count = max(1, min(most, len(names)))
        with ThreadPoolExecutor(count) as threads:
            done = [threads.submit(work) for _ in range(count)]
            for _ in range(count):
                while (found := answers.get()) is not None:
                    yield found
            for each_of in done:
                each_of.result()

    def close(self) -> int:
        """Ends the idle workers; returns the largest of their exit statuses."""
        codes = [worker.close() for worker in self._idle]
        self._idle.clear()
        return max(map(abs, codes), default=0)


def serve(about: Mapping[str, Any], check: Callable[[str], Any], broken: Callable[[], bool] = lambda: False) -> None:
    """The worker's side: answers each name with what `check` returns, or its error. What a check prints goes to the
    standard error. If the process is `broken` after an error, it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write(json.dumps(about) + "\n")
    for line in sys.stdin:
        name, began = line.rstrip("\n"), time.monotonic()
        print(f"--- {name}", flush=True)
        try:
            answer = {"found": check(name)}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            place = "" if where is None else f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}: "
            answer = {"error": f"{place}{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        answer |= {"seconds": round(time.monotonic() - began, 1)}
        last = "error" in answer and broken()
        answers.write(json.dumps(answer | ({"last": True} if last else {})) + "\n")
        if last:
            return
