"""What fla's layers have beside linear attention: the short convolution and the gated RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.core.checks import check_bool, check_float, check_rank, check_shape
from foundry_kernels.ops.gated_rms_norm import gated_rms_norm
from foundry_kernels.ops.short_conv1d import ACTIVATIONS, short_conv1d, short_conv1d_step


def refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            what = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} is not supported; got {what}")


def _own(backend: str) -> str:
    return "auto" if backend in ("cuda", "mix") else backend


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, activation: str | None = None,
    backend: str = "auto", cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None, cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``fla.modules.convolution.causal_conv1d`` on :func:`foundry_kernels.short_conv1d`.

    Args:
        x, weight, bias, residual, activation, cu_seqlens: as for :func:`foundry_kernels.short_conv1d`.
        initial_state: ``[N, C, W]``, the W inputs before the first token, of which the oldest has no effect on y; N is
            the batch or the number of documents. None for zeros.
        output_final_state: also return the last W inputs, ``[N, C, W]``.
        backend: "auto", "reference", "triton" or "native"; fla's "cuda" and "mix" mean "auto".
        cu_seqlens_cpu, chunk_indices: have no effect.
        cp_context: must be None.

    Returns:
        ``(y, final_state)``, the state None unless `output_final_state`.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    refuse(cp_context=cp_context)
    check_bool("output_final_state", output_final_state)
    options: dict[str, Any] = {"backend": _own(backend), "residual": residual, "cu_seqlens": cu_seqlens}
    if initial_state is not None:
        check_float("initial_state", initial_state)
        check_rank("initial_state", initial_state, 3, "[N, C, W]")
        options["initial_state"] = initial_state[..., 1:]
    found: Any = short_conv1d(x, weight, bias, activation, return_final_state=output_final_state, **options)
    if not output_final_state:
        return found, None
    y, final = found
    return y, torch.cat([_oldest(x, weight.shape[1], initial_state, cu_seqlens)[..., None], final], -1)


def _oldest(x: Tensor, taps: int, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """``[N, C]``: the input `taps` tokens before the end of each document, or what the state has there."""
    before = x.new_zeros(()) if initial_state is None else initial_state
    if cu_seqlens is None:
        length = x.shape[1]
        if length >= taps:
            return x[:, length - taps]
        return before[..., length].expand(x.shape[0], x.shape[2]) if before.dim() else before.expand(x[:, 0].shape)
    ends, lengths = cu_seqlens[1:].long(), cu_seqlens.diff().long()
    inside = x[0, (ends - taps).clamp(0)] if x.shape[1] else x.new_zeros(len(ends), x.shape[2])
    if before.dim():
        at = lengths.clamp(max=taps - 1)[:, None, None].expand(-1, x.shape[2], 1)
        before = before.gather(2, at)[..., 0]
    return torch.where((lengths >= taps)[:, None], inside, before)


def _one_each(x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether x ``[B, T, C]`` holds one token of each sequence."""
    if cu_seqlens is None:
        return x.shape[1] == 1
    return x.shape[:2] == (1, len(cu_seqlens) - 1) and bool((cu_seqlens.diff() == 1).all())


class ShortConvolution(nn.Conv1d):
    """``fla.modules.ShortConvolution``: a causal convolution with a filter of `kernel_size` taps for each channel, and
    an activation, None or "silu". Its parameters are those of ``nn.Conv1d(groups=hidden_size)``.

    backend: as for :func:`causal_conv1d`.
    """

    def __init__(
        self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu",
        backend: str = "auto", device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be None, 'silu' or 'swish'; got {activation!r}")
        super().__init__(
            hidden_size, hidden_size, kernel_size, padding=kernel_size - 1, groups=hidden_size, bias=bias,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def forward(  # type: ignore[override]  # fla's arguments
        self, x: Tensor, residual: Tensor | None = None, mask: Tensor | None = None, cache: Tensor | None = None,
        output_final_state: bool = False, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Args:
            x: ``[B, T, C]``; B is 1 with `cu_seqlens`.
            residual: as x, added to the result.
            mask: ``[B, T]``, which multiplies x; not with `cu_seqlens`.
            cache: ``[N, C, W]``, the inputs before x. Without gradients and with one token for each sequence it is
                overwritten.
            output_final_state: also return the inputs to go on from, `cache` itself if it was overwritten.
            chunk_indices, cu_seqlens_cpu: have no effect.

        Returns:
            ``(y, cache)``, the cache None unless `output_final_state`.
        """
        check_float("x", x)
        check_rank("x", x, 3, "[B, T, C]")
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask must be None with cu_seqlens; got both")
            check_shape("mask", mask, tuple(x.shape[:2]), "[B, T]")
            x = x * mask[..., None].to(x.dtype)
        weight = self.weight.squeeze(1)
        if cache is not None and not torch.is_grad_enabled() and _one_each(x, cu_seqlens):
            check_bool("output_final_state", output_final_state)
            added = None if residual is None else residual.flatten(0, 1)
            y = short_conv1d_step(
                x.flatten(0, 1), cache, weight, self.bias, self.activation, residual=added, backend=_own(self.backend)
            )
            return y.view(x.shape), cache if output_final_state else None
        return causal_conv1d(
            x, weight, self.bias, residual, cache, output_final_state, self.activation, self.backend, cu_seqlens
        )

    @property
    def state_size(self) -> int:
        """The numbers of a sequence's cache."""
        return self.hidden_size * self.kernel_size[0]


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish",
    residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6, *,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """``fla.modules.fused_norm_gate.rms_norm_gated`` on :func:`foundry_kernels.gated_rms_norm`.

    x, g ``[..., N]``, weight ``[N]`` or None. activation: "swish", "silu" or "sigmoid". bias and residual must be None,
    prenorm and residual_in_fp32 False.
    """
    refuse(bias=bias, residual=residual, prenorm=prenorm, residual_in_fp32=residual_in_fp32)
    activation = "silu" if activation == "swish" else activation
    return gated_rms_norm(x, g, weight, eps, activation=activation, backend=backend)


class FusedRMSNormGated(nn.Module):
    """``fla.modules.FusedRMSNormGated``: ``rms_norm(x) * weight * activation(g)`` of rows of `hidden_size`, with a
    weight if `elementwise_affine`. activation: as for :func:`rms_norm_gated`."""

    weight: nn.Parameter | None

    def __init__(
        self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, activation: str = "swish",
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"activation must be 'swish', 'silu' or 'sigmoid'; got {activation!r}")
        self.hidden_size, self.eps, self.activation = hidden_size, eps, activation
        self.elementwise_affine = elementwise_affine
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def forward(
        self, x: Tensor, g: Tensor, residual: Tensor | None = None, prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor:  # fmt: skip
        """The norm of x ``[..., hidden_size]`` times the activation of g, of x's shape. The other arguments must be as
        they are by default."""
        return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps)
