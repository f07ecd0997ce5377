"""The arguments by which a model was patched, which it keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call of `patch`; `ops` in the order of PATCHABLE."""

    backend: Any
    ops: tuple[str, ...] | None
    dense_masks: str
    return_logits: bool
    recognise: bool = True

    def differences(self, other: Arguments) -> Iterator[str]:
        for field in dataclasses.fields(self):
            mine, others = (getattr(each, field.name) for each in (self, other))
            if mine != others:
                yield f"{field.name}={_shown(mine)} where this call has {_shown(others)}"


def _shown(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
