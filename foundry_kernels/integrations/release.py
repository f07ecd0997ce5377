"""The releases of transformers that this package knows."""

from __future__ import annotations

import re

from torch import nn

OLDEST = (5, 4)


def check_release(version: str | None = None) -> None:
    """Raises ImportError where the transformers that is installed, or `version`, is too old."""
    if version is None:
        import transformers

        version = transformers.__version__
    found = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        raise ImportError(f"foundry_kernels needs transformers {'.'.join(map(str, OLDEST))} or newer; found {version}")


def check_release_of(model: nn.Module) -> None:
    """Calls `check_release` if a module of `model` is one of transformers."""
    if any(c.__module__.startswith("transformers.") for m in model.modules() for c in type(m).__mro__):
        check_release()
