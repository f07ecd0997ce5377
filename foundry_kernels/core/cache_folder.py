"""Where what was measured on this machine is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """This package's folder in the user's cache, which may not exist.

    Raises:
        RuntimeError: the user has no home.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "foundry_kernels"
