"""The options of one call of attention: made and checked in the public functions, read by every backend.

A new option is a field here, its type in `SCHEMA_TYPES`, its check in `checks.py` and what the kernels do with it. A
backend that does not name it in its `SERVED` refuses calls that set it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from foundry_kernels.core.registry import BackendUnavailable


class AttentionOptions(NamedTuple):
    cu_seqlens_q: Tensor | None  # None: dense, q is [B, H, T, D]; else packed, q is [total, H, D]
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    window_left: int | None
    window_right: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    bottom_right: bool
    deterministic: bool
    return_lse: bool
    return_stats: bool

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def operator_args(self) -> tuple[Tensor | int | float | bool | None, ...]:
        """The values for `SCHEMA`, in its order."""
        return self[: len(SCHEMA_TYPES)]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd has to save of the options."""
        values: tuple[Any, ...] = self
        return tuple(values[at] for at in _TENSORS_AT)

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> AttentionOptions:
        values: list[Any] = list(self)
        for at, tensor in zip(_TENSORS_AT, tensors, strict=True):
            values[at] = tensor
        return AttentionOptions._make(values)

    def without_tensors(self) -> AttentionOptions:
        return self.with_tensors([None] * len(_TENSORS_AT))

    def select(self, out: Tensor, lse: Tensor, entropy: Tensor, max_logit: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the caller asked for of all that attention can return."""
        if self.return_lse:
            return (out, lse, entropy, max_logit) if self.return_stats else (out, lse)
        return (out, entropy, max_logit) if self.return_stats else out


def refuse_others(options: AttentionOptions, served: tuple[str, ...], backend: str) -> None:
    """Refuse a call in which an option is set that is not among those that the backend serves.

    Raises:
        BackendUnavailable: the message names the option.
    """
    if options._fields == served:
        return
    for name, value in zip(options._fields, options, strict=True):
        if name not in served and value is not None and value is not False:
            raise BackendUnavailable(f"flash_attention: backend {backend!r} does not serve {name}; got {value!r}")


#: The options that the forward and the backward operators take, in the order of the fields. What a call returns is
#: theirs to spell: forward and backward differ in it.
SCHEMA_TYPES = {
    "cu_seqlens_q": "Tensor?",
    "cu_seqlens_k": "Tensor?",
    "max_seqlen_q": "SymInt",
    "max_seqlen_k": "SymInt",
    "scale": "float",
    "window_left": "SymInt?",
    "window_right": "SymInt?",
    "softcap": "float?",
    "alibi_slopes": "Tensor?",
    "sinks": "Tensor?",
    "bottom_right": "bool",
    "deterministic": "bool",
}
SCHEMA = ", ".join(f"{kind} {name}" for name, kind in SCHEMA_TYPES.items())
TENSORS = tuple(name for name, kind in SCHEMA_TYPES.items() if kind.startswith("Tensor"))
_TENSORS_AT = tuple(AttentionOptions._fields.index(name) for name in TENSORS)


def from_operator_args(args: Sequence[Any]) -> tuple[AttentionOptions, tuple[bool, ...]]:
    """The options among an operator's arguments from `SCHEMA` on, and the flags that follow them there."""
    count = len(SCHEMA_TYPES)
    return_nothing = (False, False)  # an operator's flags say what it returns
    return AttentionOptions._make((*args[:count], *return_nothing)), tuple(args[count:])


assert AttentionOptions._fields[: len(SCHEMA_TYPES)] == tuple(SCHEMA_TYPES)
