"""Peak memory of a part of a run."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Starts when it is created; `bytes()` is the peak since then minus the memory in use at the start.

    On CUDA this is the allocator's own count. On Linux it is the peak resident set, which the kernel resets on request.
    Elsewhere the peak of a process cannot be reset, so a part that stays below an earlier peak shows 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.meaning = "the peak of CUDA's allocator, above what it held before the model was built"
        elif self._reset():
            self.meaning = "the peak resident set, above that of the process before the model was built"
        else:
            self.meaning = "the growth of the process's peak resident set, which cannot be reset on this system"
        self._start = self._held()

    def bytes(self) -> int:
        return max(0, self._peak() - self._start)

    def _reset(self) -> bool:
        """Returns free memory to the system, so that its next use counts, and resets the kernel's peak."""
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        try:
            CLEAR.write_text("5")
            return _status("VmHWM") is not None
        except OSError:
            return False

    def _held(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else self._peak()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _status("VmHWM") or _lifetime_peak()


def _status(field: str) -> int | None:
    """A field of /proc/self/status, in bytes."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def _lifetime_peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
