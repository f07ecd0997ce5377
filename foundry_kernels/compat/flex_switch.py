"""A switch that replaces PyTorch's flex_attention with this package's for all callers in a process."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from foundry_kernels.compat._replace import Replacement, Switch
from foundry_kernels.compat.flex import flex_attention
from foundry_kernels.compat.sdpa_switch import stays
from foundry_kernels.core.registry import check_backend

#: PyTorch's own function, also while it is replaced.
TORCHS: Any = torchs.flex_attention

#: The backend of the last active switch, or None while no switch is on. torch.compile guards on it.
_backend: str | None = None


def use_flex_attention(backend: str = "auto") -> FlexSwitch:
    """Routes `torch.nn.attention.flex_attention.flex_attention` to this package's function of that name.

    It applies from the call on, to every thread of the process, until :meth:`FlexSwitch.undo`; or for a block::

        with fk.compat.use_flex_attention():
            loss = model(tokens)

    Callers reach it by its name in that module and in modules that imported it from there, before or after;
    transformers' ``attn_implementation="flex_attention"`` is among them. What ``torch.compile(flex_attention)`` has
    returned before stays PyTorch's, except that of transformers. Nested tensors, other devices than CPUs and CUDA's,
    other dtypes than float32, bfloat16, float16 and float64, and heads wider than 512 run on PyTorch.

    Args:
        backend: "auto", "reference", "triton" or "native". If several switches are on, the last one applies.

    Returns:
        A handle, which is a context manager.

    Raises:
        ValueError: `backend` is unknown.
    """
    return FlexSwitch(backend)


def routed(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """This package's function while a switch is on. A module that imports it then keeps it afterwards, so it checks the
    switch."""
    if _backend is None or stays(query, key, value):
        return TORCHS(query, key, value, *args, **kwargs)
    return flex_attention(query, key, value, *args, **kwargs, backend=_backend)


class FlexSwitch(Switch):
    """The handle that :func:`use_flex_attention` returns; it is active when it is created."""

    replacement = Replacement(TORCHS, routed, torchs)
    active: ClassVar[list[Any]] = []

    def __init__(self, backend: str) -> None:
        check_backend(backend)
        self.backend = backend
        super().__init__()

    @classmethod
    def changed(cls) -> None:
        global _backend
        before, _backend = _backend, cls.active[-1].backend if cls.active else None
        holder = sys.modules.get("transformers.integrations.flex_attention")
        if holder is not None and (before is None) != (_backend is None):
            holder.WrappedFlexAttention._instance = None  # which keeps a compiled copy of what it found
