"""Observes a model's attention, whether it runs on this package's kernels, in SDPA, or as a softmax of scores.

The kernels return their statistics. In plain PyTorch, a dispatch mode sees the operators below autograd, with masks,
caps, biases and shared heads already applied, and the statistics are computed from their arguments. Hooks on modules
with children find the module that runs.
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
COMPOSED = {aten.scaled_dot_product_attention, aten.softmax, aten.matmul}  # in inference mode, these are not decomposed
MATMULS = {aten.bmm: 0, aten.baddbmm: 1}  # and the index of the first factor


class Frame:
    """A call of a module. seen: the attention in this module itself, not in its children."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attends = is_attention(module)
        self.seen: Any = None
        self.product: tuple[Tensor, Tensor] | None = None  # the last factors: q and k if a softmax follows
        self.joined: tuple[Tensor, Tensor] | None = None  # the last scores that were concatenated with sinks


@dataclass(frozen=True)
class Seen:
    """One call of attention: `q` ``[B, H, T, D]`` and `k` ``[B, Hk, S, D]``, or None if they are unknown."""

    rows: Rows
    q: Tensor | None
    k: Tensor | None


class Watch(TorchDispatchMode):
    """Calls `attended` for each attention, with the frames of all running modules, the attention's frame and its
    `Seen`. Calls `left` at the end of each module's call, with all frames (the module's is the last one) and the
    result."""

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
        """Watches `model` in this block. Compiled code runs uncompiled."""
        with ExitStack() as undo:
            undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)  # one operator would compute a whole layer
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
        while self.frames and self.frames[-1].module is not module:  # left by an error
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
        """The innermost call of an attention module. If there is none and the operator is `known` to be attention, the
        innermost call of any module."""
        recomputes = torch._C._current_graph_task_id() != -1  # recomputation in a backward pass
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
        elif packet in SOFTMAX or packet in MATMULS or packet is aten.cat:
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
        if packet in MATMULS:
            first = MATMULS[packet]
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
            # The maximum may have been subtracted from the scores.
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
    """The number of heads in the first dimension of scores ``[B * H, T, S]``, from the module's attributes."""
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "nh"):
        count = getattr(module, name, None)
        if isinstance(count, int) and count > 0 and rows % count == 0:
            return count
    return 1
