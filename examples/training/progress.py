"""Progress of a run: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

#: Seconds between two lines of a log.
SECONDS = 8.0


class Progress:
    """Shows the steps of a run on stderr, from `done` to `total`, if `shown`."""

    def __init__(self, name: str, total: int, done: int, shown: bool) -> None:
        self._name, self._total, self._step = name, total, done
        self._first, self._start = done, time.perf_counter()
        self._shown = self._start
        terminal = sys.stderr.isatty()
        self._lines = shown and not terminal
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=name,
            unit="step",
            disable=not (shown and terminal),
            mininterval=0.2,
            ncols=88,
            file=sys.stderr,
        )

    def step(self, loss: float) -> None:
        """Counts one more step."""
        self._step += 1
        self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self._bar.update()
        now = time.perf_counter()
        if self._lines and (self._step == self._total or now - self._shown >= SECONDS):
            self._shown, seconds = now, now - self._start
            left = seconds / (self._step - self._first) * (self._total - self._step)
            line = f"{self._name}: step {self._step} of {self._total}, loss {loss:.3f}, {seconds:.0f} s"
            print(f"{line}, {left:.0f} s left" if left else line, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()
