"""Registers this package as an implementation of flash attention that `torch.nn.attention` can activate.

``torch.nn.attention.activate_flash_attention_impl("foundry")`` replaces the kernels below PyTorch's own dispatch: its
`scaled_dot_product_attention` still chooses between flash attention and its other kernels, and its autograd keeps what
the backward pass needs. It also applies to code that was compiled before, because the operators are the same. A call
that no kernel here supports (float64, a scale that is not positive, a build without the extension) runs on the previous
kernel, if there is one.

The lse of these operators does not require a gradient, because PyTorch's autograd has no formula for it. That of
`torch.nn.attention.varlen.varlen_attn` has its gradient while these kernels serve it.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor
from torch.library import Library

from foundry_kernels.compat.segments import segments
from foundry_kernels.core import dropout
from foundry_kernels.ops.flash_attention.checks import dense_options, make_options
from foundry_kernels.ops.flash_attention.options import AttentionArguments, AttentionOptions
from foundry_kernels.ops.flash_attention.passes import backend_of, backward, forward

NAME = "foundry"
_DEVICES = ("CPU", "CUDA")


def register() -> None:
    """Registers `NAME` if this PyTorch has such a registry; nothing changes until it is activated."""
    offer = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if offer is not None:
        offer(NAME, register_fn=activate)


def activate() -> Handle:
    """What `activate_flash_attention_impl` calls, and whose result it keeps until another one is activated."""
    library = Library("aten", "IMPL")
    places = [(name, device) for name in _KERNELS for device in _DEVICES if device == "CPU" or "_for_cpu" not in name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # to override them is the aim
        for name, device in places:
            if hasattr(torch.ops.aten, name):  # one of them is not in PyTorch 2.11
                kernel = _Kernel(name, device, _KERNELS[name])
                library.impl(name, kernel, device, with_keyset=True, allow_override=True)
    return Handle(library, _lse_with_gradient())


class Handle:
    def __init__(self, library: Library, restore: Callable[[], None]) -> None:
        self.library: Library | None = library
        self.restore = restore

    def remove(self) -> None:
        """PyTorch's own kernels are back."""
        if self.library is not None:
            self.library._destroy()
            self.library = None
            self.restore()


def _lse_with_gradient() -> Callable[[], None]:
    """Gives the lse of `torch.nn.attention.varlen.varlen_attn` its gradient, which PyTorch's own backward pass drops.
    Where a call runs on PyTorch's kernel, lse requires no gradient, as with PyTorch itself since 2.15. Returns what
    undoes it."""
    try:
        operator: Any = importlib.import_module("torch.nn.attention.varlen")._varlen_attn
        own = operator._setup_context_fn, operator._backward_fn
    except (ImportError, AttributeError):
        return _nothing
    if None in own:
        return _nothing

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        own[0](ctx, inputs=inputs, output=output)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2 if _serves(inputs[0], getattr(ctx, "scale", None)) else 1 :])

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
        if dlse is None:
            return own[1](ctx, dout, dlse, *others)
        query, key, value, cu_seq_q, cu_seq_k, out, lse, rng_state = ctx.saved_tensors
        left, right = getattr(ctx, "window_size", None) or (-1, -1)
        grads = torch.ops.aten._flash_attention_backward(
            torch.zeros_like(out) if dout is None else dout, query, key, value, out, lse, cu_seq_q, cu_seq_k, ctx.max_q,
            ctx.max_k, 0.0, ctx.is_causal, rng_state, dlse, scale=getattr(ctx, "scale", None), window_size_left=left,
            window_size_right=right,
        )  # fmt: skip
        return *grads, *[None] * (len(ctx.needs_input_grad) - 3)

    def restore() -> None:
        if operator._setup_context_fn is setup_context:  # otherwise it was replaced again
            operator._setup_context_fn, operator._backward_fn = own

    operator._setup_context_fn, operator._backward_fn = setup_context, backward
    return restore


def _nothing() -> None:
    pass


def _serves(q: Tensor, scale: float | None) -> bool:
    return backend_of(q) is not None and (scale is None or 0.0 < scale < math.inf)


class _Kernel:
    """Calls our kernel if a backend supports the call, else the kernel that was registered before."""

    def __init__(self, name: str, device: str, ours: Callable[..., Any]) -> None:
        self.name, self.ours, self.before = name, ours, None
        self.__name__ = name
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device):
            self.before = torch.library.get_kernel(f"aten::{name}", device)

    def __call__(self, keyset: Any, first: Tensor, *args: Any, **options: Any) -> Any:
        scale = options.get("scale")
        if _serves(first, scale):
            return self.ours("auto", first, *args, **options)
        if self.before is not None:
            return self.before.call_boxed(keyset, first, *args, **options)
        raise RuntimeError(
            f"aten::{self.name}: no backend has a kernel for {first.dtype} on {first.device.type} and scale {scale}"
        )


# --- dense, on the CPU ------------------------------------------------------------------------------------------------


def _options_on_cpu(
    q: Tensor, k: Tensor, dropout_p: float, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> AttentionOptions:
    if dropout_p:
        raise RuntimeError("PyTorch's flash attention on the CPU has no dropout")
    return dense_options(q, k, causal=is_causal, scale=scale, attn_mask=attn_mask, align="top_left")


def _on_cpu(
    backend: str, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = _options_on_cpu(q, k, dropout_p, is_causal, attn_mask, scale)
    out, lse = forward(backend, q, k, v, options)
    return _laid_out(out, torch.empty_like(q)), lse.transpose(1, 2).contiguous().transpose(1, 2)


def _on_cpu_backward(
    backend: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = _options_on_cpu(q, k, dropout_p, is_causal, attn_mask, scale)
    grads = backward(backend, dout, q, k, v, out, lse.contiguous(), options)
    return tuple(g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads)


# --- dense, with heads first ------------------------------------------------------------------------------------------


def _dense(
    backend: str, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _refuse_debug_mask(return_debug_mask)
    rng_state, seed = _draw(q, dropout_p)
    options = _aligned_last(q, k, is_causal, scale, dropout_p, seed)
    out, lse = forward(backend, q, k, v, options)
    out, nothing = _laid_out(out, torch.empty_like(q)), q.new_empty(0)
    return out, lse, None, None, q.shape[2], k.shape[2], rng_state, _no_offset(q), nothing


def _dense_backward(
    backend: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
    philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = _aligned_last(q, k, is_causal, scale, dropout_p, _seed_in(philox_seed))
    grads = backward(backend, dout, q, k, v, out, lse, options)
    return tuple(_laid_out(g, torch.empty_like(x)) for g, x in zip(grads, (q, k, v), strict=True))


def _aligned_last(
    q: Tensor, k: Tensor, is_causal: bool, scale: float | None, dropout_p: float, seed: Tensor | None,
    window: tuple[int | None, int | None] | None = None, alibi_slopes: Tensor | None = None,
) -> AttentionOptions:  # fmt: skip
    return dense_options(
        q, k, causal=is_causal, scale=scale, window=window, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=seed if dropout_p else None,
    )  # fmt: skip


# --- dense or packed, with tokens first: what varlen_attn calls -------------------------------------------------------


def _tokens_first(
    q: Tensor, k: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, seed: Tensor | None, scale: float | None, left: int | None, right: int | None,
    seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None,
) -> AttentionOptions:  # fmt: skip
    window = (None if left in (None, -1) else left, None if right in (None, -1) else right)
    if cum_seq_q is None or cum_seq_k is None:
        if seqused_k is not None:
            raise RuntimeError("seqused_k must be None without cum_seq_q and cum_seq_k")
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return _aligned_last(q, k, is_causal, scale, dropout_p, seed, window, alibi_slopes)
    if seqused_k is not None:
        if alibi_slopes is not None and alibi_slopes.dim() == 2:
            raise RuntimeError("alibi_slopes must be [H] with seqused_k")
        cum_seq_q, cum_seq_k = segments(cum_seq_q, cum_seq_k, max_k, None, seqused_k, 0)
    given = AttentionArguments(
        causal=is_causal, scale=scale, window=window, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=seed if dropout_p else None,
    )  # fmt: skip
    return make_options(q, (cum_seq_q, cum_seq_k, max_q, max_k), given)


def _forward(
    backend: str, q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse_debug_mask(return_debug_mask)
    if block_table is not None:
        raise RuntimeError("block_table must be None: paged key-value caches are not supported")
    rng_state, seed = _draw(q, dropout_p)
    options = _tokens_first(
        q, k, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, scale, window_size_left,
        window_size_right, seqused_k, alibi_slopes,
    )  # fmt: skip
    if options.packed:
        out, lse = forward(backend, q, k, v, options)
    else:
        out, lse = forward(backend, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), options)
        out = out.transpose(1, 2)
    return _laid_out(out, torch.empty_like(q)), lse, rng_state, _no_offset(q), q.new_empty(0)


def _forward_into(backend: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    found, lse, *_ = _forward(backend, q, k, v, *args, **options)
    out.copy_(found)
    return lse


def _backward(
    backend: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor,
    unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`unused` is the gradient of lse where `_lse_with_gradient` has put it; elsewhere it is empty or an integer."""
    options = _tokens_first(
        q, k, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, _seed_in(rng_state), scale, window_size_left,
        window_size_right,
    )  # fmt: skip
    given = (dout, q, k, v, out)
    if options.packed:
        dlse = unused if unused.is_floating_point() and unused.shape == lse.shape else None
        grads = backward(backend, dout, q, k, v, out, lse, options, dlse)
    else:
        dout, q, k, v, out = (x.transpose(1, 2) for x in given)
        dq, dk, dv = backward(backend, dout, q, k, v, out, lse, options)
        grads = (dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))
    return tuple(_laid_out(g, torch.empty_like(x)) for g, x in zip(grads, given[1:4], strict=True))


_KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _on_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _on_cpu_backward,
    "_scaled_dot_product_flash_attention": _dense,
    "_scaled_dot_product_flash_attention_backward": _dense_backward,
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_into,
    "_flash_attention_backward": _backward,
}


def _laid_out(x: Tensor, wanted: Tensor) -> Tensor:
    """x with the strides that PyTorch's fake of the operator told the compiler."""
    return x if x.stride() == wanted.stride() else wanted.copy_(x)


def _draw(q: Tensor, dropout_p: float) -> tuple[Tensor, Tensor | None]:
    """What autograd keeps as the state of the generator, and the seed that is in it."""
    drop = dropout.arguments(q, dropout_p, None, "query")
    seed = drop[1] if drop else torch.zeros((), dtype=torch.int64, device=q.device)
    return torch.stack((seed, torch.zeros_like(seed))).view(torch.uint64), seed


def _seed_in(rng_state: Tensor) -> Tensor:
    return rng_state.view(torch.int64)[0]


def _no_offset(q: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.uint64, device=q.device)


def _refuse_debug_mask(wanted: bool) -> None:
    if wanted:
        raise RuntimeError("return_debug_mask must be False: the probabilities are never computed")
