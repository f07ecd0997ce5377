"""A switch that replaces PyTorch's attention with this package's for all callers in a process."""

from __future__ import annotations

from typing import Any, ClassVar, SupportsFloat

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from foundry_kernels.compat._replace import Replacement, Switch
from foundry_kernels.compat.sdpa import TORCHS, no_kernel, scaled_dot_product_attention
from foundry_kernels.core.registry import FLOATS, check_backend

_DEVICES = ("cpu", "cuda", "meta")

#: The backend of the last active switch, or None while no switch is on. torch.compile guards on it.
_backend: str | None = None


def use_sdpa(backend: str = "auto") -> SdpaSwitch:
    """Routes `torch.nn.functional.scaled_dot_product_attention` to this package's function of that name.

    It applies from the call on, to every thread of the process, until :meth:`SdpaSwitch.undo`; or for a block::

        with fk.compat.use_sdpa():
            loss = model(tokens)

    Callers reach it as ``F.scaled_dot_product_attention`` (with `torch.nn.MultiheadAttention` and transformers' "sdpa"
    among them) and by a name that their module imported from there, before or after. `torch.compile` traces the switch;
    code that was compiled before is recompiled. Other ways to call PyTorch's C++ function are not routed: TorchScript
    (`torch.jit.script` compiles PyTorch's own, as it does without the switch), the fused fast path of
    `torch.nn.TransformerEncoderLayer`, an object that keeps the function as an attribute.

    Nested tensors, other devices than CPUs and CUDA's, dtypes other than float32, bfloat16, float16 and float64, and
    heads wider than 512 run on PyTorch. Tensors and modes with their own `__torch_function__` see the call first, as
    they do without the switch.

    Args:
        backend: "auto", "reference", "triton" or "native". If several switches are on, the last one applies.

    Returns:
        A handle, which is a context manager.

    Raises:
        ValueError: `backend` is unknown.
    """
    return SdpaSwitch(backend)


def routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: SupportsFloat = 0.0,
    is_causal: bool = False,
    *,
    scale: SupportsFloat | None = None,
    enable_gqa: bool = False,
) -> Any:
    """This package's function while a switch is on. A module that imports it then keeps it afterwards, so it checks the
    switch."""
    tensors = (query, key, value, attn_mask)
    if _backend is None or stays(query, key, value):
        return TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if has_torch_function(tensors):
        return handle_torch_function(
            routed, tensors, query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend=_backend
    )


def stays(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's function is called, which then raises its own errors."""
    if not isinstance(query, Tensor) or no_kernel(query, key, value):
        return True
    return query.dtype not in FLOATS or query.device.type not in _DEVICES


class SdpaSwitch(Switch):
    """The handle that :func:`use_sdpa` returns; it is active when it is created."""

    replacement = Replacement(TORCHS, routed)
    active: ClassVar[list[Any]] = []

    def __init__(self, backend: str) -> None:
        check_backend(backend)
        self.backend = backend
        super().__init__()

    @classmethod
    def changed(cls) -> None:
        global _backend
        _backend = cls.active[-1].backend if cls.active else None
