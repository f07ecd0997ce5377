"""Sees the attention that a model computes, whichever way it does: by our kernels, by SDPA, or by a softmax of scores.

Our kernels are asked for their statistics. What plain PyTorch runs is seen as the operators that it comes down to,
below autograd, where masks, caps, biases and shared heads are as attention has them; the statistics are computed beside
it. Hooks on the modules that have parts tell which module it is that runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_kernels.core.registry import OPS, override
from foundry_kernels.diagnostics.projections import is_attention
from foundry_kernels.diagnostics.statistics import Rows, of_kernel, of_queries, of_scores

aten = torch.ops.aten
_SDPA = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
SDPA = {getattr(aten, name) for name in _SDPA if hasattr(aten, name)}
SOFTMAX = {aten._softmax, aten._safe_softmax}
COMPOSED = {aten.scaled_dot_product_attention, aten.softmax, aten.matmul}  # as inference mode has them
PRODUCTS = {aten.bmm: 0, aten.baddbmm: 1}  # and the place of the first factor


class Frame:
    """A call of a module. seen: what attention was seen in it by itself, not in a module inside of it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attends = is_attention(module)
        self.seen: Any = None
        self.product: tuple[Tensor, Tensor] | None = None  # the last one: queries and keys, where a softmax follows
        self.joined: tuple[Tensor, Tensor] | None = None  # the last scores that sinks were put beside


@dataclass(frozen=True)
class Seen:
    """One call of attention: `q` ``[B, H, T, D]`` and `k` ``[B, Hk, S, D]``, or None where they are not known."""

    rows: Rows
    q: Tensor | None
    k: Tensor | None


class Watch(TorchDispatchMode):
    """Calls `attended` with the frames of all modules that run, the frame whose attention it is, and what was seen;
    `left` with the frames before a module's call ends, that of the module the last of them, and its result."""

    supports_higher_order_operators = True

    def __init__(
        self, attended: Callable[[list[Frame], Frame, Seen], None], left: Callable[[list[Frame], Any], None]
    ) -> None:
        super().__init__()
        self._attended, self._left = attended, left
        self.frames: list[Frame] = []
        self._paused = False

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Watches `model` in this block. What was compiled runs uncompiled."""
        with ExitStack() as undo:
            undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)  # its one operator has all of a layer in it
            if "torch._dynamo" in sys.modules:
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            for name in ("flash_attention", "flash_attention_varlen"):
                for impl in OPS[name].impls:
                    undo.enter_context(override(OPS[name], impl.backend, fn=self._kernel(impl.fn)))
            for module in model.modules():
                if next(module.children(), None) is not None:
                    hook = module.register_forward_pre_hook(self._enter)
                    undo.callback(hook.remove)
                    undo.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            undo.enter_context(self)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.frames.append(Frame(module))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        while self.frames and self.frames[-1].module is not module:  # those that an error ended
            self.frames.pop()
        if self.frames:
            if result is not None:
                with self._pause():
                    self._left(self.frames, result)
            self.frames.pop()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _frame(self, known: bool) -> Frame | None:
        """The innermost call of an attention; where there is none, and only that of one is `known` to be attention,
        that of any module."""
        recomputes = torch._C._current_graph_task_id() != -1  # what was checkpointed, in a backward pass
        if self._paused or not self.frames or recomputes:
            return None
        found = next((frame for frame in reversed(self.frames) if frame.attends), None)
        return self.frames[-1] if found is None and known else found

    def _saw(self, frame: Frame, rows: Rows, q: Tensor | None = None, k: Tensor | None = None) -> None:
        self._attended(self.frames, frame, Seen(rows, q, k))

    def _kernel(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def attend(q: Tensor, k: Tensor, v: Tensor, options: Any) -> Any:
            frame = self._frame(known=True)
            if frame is None:
                return fn(q, k, v, options)
            with self._pause():
                out, *rows = fn(q, k, v, options._replace(return_stats=True))
                with torch.no_grad():
                    q, k = q.detach(), k.detach()
                    if options.packed:
                        q, k = (x.transpose(0, 1)[None] for x in (q, k))
                    found = of_kernel(rows[-2], rows[-1], (*q.shape[:3], k.shape[2]), options)
                    self._saw(frame, found, q, k)
            if options.return_stats:
                return out, *rows
            return (out, rows[0]) if options.return_lse else out

        return attend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet in COMPOSED:
            with self:
                return func.decompose(*args, **kwargs)
        if packet in SDPA:
            frame = self._frame(known=True)
            if frame is not None:
                self._sdpa(frame, _bound(func, args, kwargs))
        elif packet in SOFTMAX or packet in PRODUCTS or packet is aten.cat:
            frame = self._frame(known=False)
            if frame is not None:
                self._scores(frame, packet, args)
        return func(*args, **kwargs)

    @torch.no_grad()
    def _sdpa(self, frame: Frame, given: dict[str, Any]) -> None:
        q, k, mask = given["query"], given["key"], given.get("attn_mask", given.get("attn_bias"))
        if not q.is_nested:
            found = of_queries(q, k, mask, given.get("is_causal", False), given.get("scale"))
            self._saw(frame, found, q, k)

    @torch.no_grad()
    def _scores(self, frame: Frame, packet: Any, args: Any) -> None:
        if packet in PRODUCTS:
            first = PRODUCTS[packet]
            frame.product = args[first], args[first + 1].mT
            return
        if packet is aten.cat:
            if getattr(frame.module, "sinks", None) is not None and len(args[0]) == 2 and args[0][1].shape[-1:] == (1,):
                frame.joined = args[0]
            return
        x, dim = args[:2]
        if x.dim() not in (3, 4) or dim not in (-1, x.dim() - 1) or x.is_nested:
            return
        sinks = None
        if frame.joined is not None and x.shape == (*frame.joined[0].shape[:-1], frame.joined[0].shape[-1] + 1):
            # Of scores that the largest may have been taken from since.
            x, sinks = frame.joined
        heads = x.shape[1] if x.dim() == 4 else _heads(frame.module, x.shape[0])
        scores = x if x.dim() == 4 else x.unflatten(0, (-1, heads))
        q = k = None
        if frame.product is not None:
            q, k = frame.product
            fits = q.shape[0] == k.shape[0] == scores.shape[0] * heads
            fits = fits and (q.shape[1], k.shape[1]) == scores.shape[2:]
            q, k = (each.unflatten(0, (-1, heads)) if fits else None for each in (q, k))
        frame.product = frame.joined = None
        self._saw(frame, of_scores(scores, sinks), q, k)


def _bound(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def _heads(module: Any, rows: int) -> int:
    """How many heads the first dimension of scores ``[B * H, T, S]`` has, by what the module says of itself."""
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "nh"):
        count = getattr(module, name, None)
        if isinstance(count, int) and count > 0 and rows % count == 0:
            return count
    return 1
