"""What the kernels of attention get for its options. Nowhere else on the host do these become numbers and constants
of a launch."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any, NamedTuple

from foundry_kernels.ops.flash_attention.options import AttentionOptions

_POSITIONS = AttentionOptions._make(range(len(AttentionOptions._fields)))
_NUMBERS_AT = tuple(at for at in _POSITIONS.operator_args() if at not in _POSITIONS.tensors())

#: The options of the operators that are no tensors: launches are planned by these, and `without_tensors` costs 1 µs.
numbers_of = itemgetter(*_NUMBERS_AT)


def options_of(numbers: tuple[Any, ...]) -> AttentionOptions:
    """Returns the options that `numbers_of` took these from, with None in place of all others."""
    given = dict(zip(_NUMBERS_AT, numbers, strict=True))
    return AttentionOptions._make(map(given.get, _POSITIONS))


class KernelOptions(NamedTuple):
    """The options by the names of the parameters of the kernels that compute scores."""

    numbers: dict[str, Any]
    constants: dict[str, bool]
    needs_registers: bool  # as the table of configurations has it


def kernel_options(options: AttentionOptions, stride_alibi: int | None, reach: int) -> KernelOptions:
    """Returns what the kernels get for the options, of which it reads no tensors. `stride_alibi` leads from one
    sequence's slopes to the next one's, None where there are no slopes. A window that extends as far as `reach` bounds
    nothing."""
    sides = (options.window_left, options.window_right)
    left, right = (None if side is None or side >= reach else side for side in sides)
    softcap, has_alibi, log2e = options.softcap, stride_alibi is not None, math.log2(math.e)
    numbers = {
        "stride_alibi": stride_alibi or 0,
        "scale": options.scale * log2e if softcap is None else options.scale / softcap,
        "softcap": 1.0 if softcap is None else softcap * log2e,
        "left": left or 0,
        "right": right or 0,
    }
    constants = {
        "BOTTOM_RIGHT": options.bottom_right,
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_ALIBI": has_alibi,
    }
    return KernelOptions(numbers, constants, softcap is not None or has_alibi)
