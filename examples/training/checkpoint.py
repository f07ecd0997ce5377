"""Checkpoints of `train.py`. They are written atomically, and rejected if they do not match the run."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

FORMAT, VERSION = "foundry_kernels/examples/train", 2


class CheckpointError(Exception):
    """A checkpoint cannot be written, read or continued from."""


def save(path: Path, settings: dict[str, Any], state: dict[str, Any]) -> None:
    """Writes a temporary file next to `path`, flushes and renames it, so that `path` is always complete."""
    content = {"format": FORMAT, "version": VERSION, "settings": settings, "state": state}
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name + ".", delete=False) as file:
            temporary = Path(file.name)
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError):
            raise CheckpointError(f"cannot write the checkpoint {path}: {_one_line(error)}") from None
        raise


def load(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The state in `path`, if it is a checkpoint of a run with these settings.

    Raises:
        CheckpointError: it is unreadable, corrupt, from another program, or from a run with other settings.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about foreign pickles before it raises
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None
    except Exception as error:  # a corrupt file may raise any exception
        raise CheckpointError(f"{path} is corrupt or not a checkpoint: {_one_line(error)}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this program")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has checkpoint version {content.get('version')}; this program reads {VERSION}: "
            "finish that run with the program that started it, or start again"
        )
    theirs, state = content.get("settings"), content.get("state")
    if not isinstance(theirs, dict) or not isinstance(state, dict):
        raise CheckpointError(f"{path} is incomplete")
    for name in sorted(settings.keys() | theirs.keys()):
        if settings.get(name) != theirs.get(name):
            raise CheckpointError(f"{path} belongs to a run with {name} {theirs.get(name)}, not {settings.get(name)}")
    return state


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
