"""Programs of a machine that is not at hand."""

from __future__ import annotations

from pathlib import Path


def fake(folder: Path, name: str, script: str) -> Path:
    """A program of this name that runs `script` in sh."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program
