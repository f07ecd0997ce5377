"""Whether the process asks for the same bits in any batch: what `foundry_kernels.batch_invariant` switches on.

Operations read it when they are called and keep what they read for their backward passes; torch.compile guards on it.
"""

from __future__ import annotations

on: bool = False
