"""Why there is no GPU that the kernels are for, in a sentence."""

from __future__ import annotations

import warnings
from functools import cache

import torch

OLDEST = (8, 0)


@cache
def why_not() -> str | None:
    """The reason, or None where torch sees a GPU that serves. That a driver is too old torch says in a warning, once in
    a process: be the first to ask."""
    if torch.version.cuda is None:
        return "no CUDA device; torch is a CPU build"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        capability = torch.cuda.get_device_capability()
        if capability >= OLDEST:
            return None
        found = f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
        return f"{found}, and the kernels are for {OLDEST[0]}.{OLDEST[1]} and newer"
    about = [str(w.message) for w in said if "driver" in str(w.message)]
    return "no CUDA device" + (f": {about[0].partition(' (Triggered')[0]}" if about else "")
