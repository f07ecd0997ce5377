"""The log of a run: one line of JSON per event; a resumed run continues it.

`start` has the settings; `step` has loss, lr, grad_norm, tokens_per_second and peak_bytes (memory so far); `health` has
the layers' health in the step and the concerns; `evaluation` has loss, perplexity and bits_per_byte on held-out text;
`summary` has the results of the run. Numbers that are not finite are null. With `--tensorboard` the numbers of steps
and evaluations are also written for TensorBoard.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO


class LogError(Exception):
    """A log cannot be read or written; the message is for the user."""


def tensorboard() -> Any:
    """Returns the class that writes for TensorBoard.

    Raises:
        LogError: TensorBoard is not installed.
    """
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        raise LogError("--tensorboard needs TensorBoard: pip install tensorboard") from None


class Log:
    """Appends to `path` after `step`, and first removes the lines that a killed run wrote after its checkpoint. None:
    no log.

    board: a folder for TensorBoard, or None. A resumed run replaces its later steps there too.
    """

    def __init__(self, path: Path | None, step: int, board: Path | None = None) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._board = None if board is None else tensorboard()(str(board), purge_step=step + 1)
        if path is None:
            return
        kept = [] if step == 0 or not path.exists() else [e for e in read(path) if _precedes(e, step)]
        try:
            new = path.with_name(path.name + ".new")
            new.write_text("".join(map(_line, kept)))
            os.replace(new, path)
            self._file = path.open("a")
        except OSError as error:
            raise LogError(f"cannot write the log {path}: {error.strerror or error}") from None

    def write(self, event: str, **values: Any) -> None:
        if self._board is not None and event in ("step", "evaluation"):
            for name, value in values.items():
                if name != "step":
                    self._board.add_scalar(f"{event}/{name}", value, values["step"])
        if self._file is None:
            return
        try:
            self._file.write(_line({"event": event, **values}))
            self._file.flush()  # so that a killed run does not lose steps
        except OSError as error:
            raise LogError(f"cannot write the log {self._path}: {error.strerror or error}") from None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._board is not None:
            self._board.close()
        if self._file is not None:
            self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a log, without an incomplete last line.

    Raises:
        LogError: the file cannot be read, or is not a log.
    """
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"cannot read the log {path}: {error}") from None
    events = []
    for number, line in enumerate(lines[:-1], 1):  # a complete line ends with a newline
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event or not isinstance(event.get("step"), int):
            raise LogError(f"{path} is damaged or not a log of this program: line {number}; move it away to continue")
        events.append(event)
    return events


def _precedes(event: dict[str, Any], step: int) -> bool:
    return event["step"] <= step and event["event"] != "summary"


def _line(event: dict[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
