"""Shows a command's progress on stderr: a tqdm bar on a terminal, or plain lines."""

from __future__ import annotations

import importlib
import math
import sys
import threading
import time
from types import TracebackType
from typing import Any


class Progress:
    """Shows the progress of its block, also during a long step.

    The bar shows the time if it is limited, since many steps may not be reached; otherwise it shows the steps. Without
    a bar there is a line every ten seconds.
    """

    def __init__(self, total: int, seconds: float = math.inf) -> None:
        self.total, self.seconds, self.done, self.now = total, seconds, 0, ""
        self._start, self._over = time.monotonic(), threading.Event()
        self._bar = self._make_bar() if sys.stderr.isatty() else None
        self._writing, self._thread = threading.Lock(), threading.Thread(target=self._show, daemon=True)

    def _make_bar(self) -> Any:
        try:
            tqdm = importlib.import_module("tqdm").tqdm
        except ImportError:
            return None
        total, unit = (self.total, "cases") if self.seconds == math.inf else (self.seconds, "s")
        shown = "{percentage:3.0f}%|{bar:20}| {n:.0f} of {total:.0f} " + unit + "{postfix}"
        return tqdm(total=total, leave=False, file=sys.stderr, dynamic_ncols=True, bar_format=shown)

    def at(self, now: str, done: int) -> None:
        self.now, self.done = now, done

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        with self._writing:
            if self._bar is not None:
                self._bar.clear()
            print(text, flush=True)

    def _show(self) -> None:
        while not self._over.wait(10.0 if self._bar is None else 0.2):
            with self._writing:
                self._show_once()

    def _show_once(self) -> None:
        elapsed = time.monotonic() - self._start
        if self._bar is None:
            text = f"{elapsed:.0f} s: {self.done} of {self.total} cases, at {self.now}"
            print(text[:79], file=sys.stderr, flush=True)
            return
        self._bar.n = self.done if self.seconds == math.inf else min(elapsed, self.seconds)
        done = "" if self.seconds == math.inf else f"{self.done} cases, "
        self._bar.set_postfix_str(f"{done}at {self.now}"[:50])

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.close()
