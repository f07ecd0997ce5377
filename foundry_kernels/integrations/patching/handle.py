"""The handle of a patch, and what the patched model itself keeps: by which arguments it was patched."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, overload

from torch import Tensor, nn

from foundry_kernels.integrations.adapters import log_probs
from foundry_kernels.integrations.patching import swap
from foundry_kernels.integrations.patching.report import Report

#: The attribute of the model that was given to `patch` where it keeps them.
KEPT = "_foundry_patch"


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


class Kept:
    """What a patched model keeps. It refers to the handle weakly: a model that nobody uses is freed at once, without
    the garbage collector, though its handle refers to it."""

    def __init__(self, arguments: Arguments, handle: PatchHandle, count: int) -> None:
        self.arguments, self.report, self.count = arguments, handle.report(), count
        self.handle: weakref.ref[PatchHandle] | None = weakref.ref(handle)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"handle": None}  # a copy of the model has a handle of its own


class PatchHandle:
    """What :func:`patch` returns. As a context manager it leaves the model at the end of the block as that call of
    `patch` found it: not patched, or patched already by the same arguments."""

    def __init__(self, model: nn.Module, modules: list[nn.Module], report: Report) -> None:
        self._model, self._modules, self._report = model, modules, report
        self._undone = False
        self._repeated = 0  # calls of `patch` that found the model patched, and whose block has not ended

    def report(self) -> Report:
        """Returns what was replaced, and what was left and why: ``print(handle.report())``."""
        return self._report

    def undo(self) -> None:
        """Gives every module its own class, and the model's config its attention, back.

        Raises:
            RuntimeError: it was undone before, or a module has been changed since so that it is impossible.
                Nothing is undone then.
        """
        if self._undone:
            raise RuntimeError("this patch has been undone already")
        _revert(self._modules)
        vars(self._model).pop(KEPT, None)
        self._undone = True

    @overload
    def log_probs(
        self,
        input_ids: Tensor | None,
        labels: Tensor,
        *,
        return_entropy: Literal[False] = False,
        return_lse: Literal[False] = False,
        temperature: float = 1.0,
        ignore_index: int = -100,
        model: nn.Module | None = None,
        **inputs: Any,
    ) -> Tensor: ...
    @overload
    def log_probs(
        self,
        input_ids: Tensor | None,
        labels: Tensor,
        *,
        return_entropy: bool = False,
        return_lse: bool = False,
        temperature: float = 1.0,
        ignore_index: int = -100,
        model: nn.Module | None = None,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, ...]: ...
    def log_probs(
        self,
        input_ids: Tensor | None,
        labels: Tensor,
        *,
        return_entropy: bool = False,
        return_lse: bool = False,
        temperature: float = 1.0,
        ignore_index: int = -100,
        model: nn.Module | None = None,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Returns the log-probability of each label given the tokens before it, of a causal language model, without
        logits (:func:`foundry_kernels.linear_log_probs`).

        The result has the shape of `labels`: position t is ``log p(labels[:, t] | input_ids[:, :t])``. It is 0 where
        the label is `ignore_index`, at position 0, and at the first token of each packed document. So with ``labels =
        input_ids`` the last n columns are what TRL's ``selective_log_softmax(logits[:, -n - 1 : -1], input_ids[:,
        -n:])`` returns. Tokens that `attention_mask` hides have values too, which mean nothing: give them the label
        `ignore_index`.

        Args:
            input_ids: ``[B, T]``, or None with ``inputs_embeds=``.
            labels: ``[B, T]`` int32 or int64, not shifted: usually the tokens themselves.
            return_entropy: also return the entropy of the distribution from which each label would be drawn.
            return_lse: also return the log of its normalizer.
            temperature: the logits, with the model's scale and soft cap, are divided by it.
            ignore_index: the label of positions that do not count.
            model: the wrapper that is called in place of the patched model: DistributedDataParallel,
                ``torch.compile``, PEFT. Not needed for ``fully_shard``, which changes the model in place.
            inputs: other arguments of the model: `attention_mask`, `position_ids`, those of packed documents.
                `use_cache` is False by default.

        Returns:
            float32 (float64 for a float64 model); with a `return_` option a tuple ``(log_probs, [entropy], [lse])``.
            All are differentiable, in training and in evaluation mode. If the head is no plain ``nn.Linear`` (LoRA on
            it, quantised, with hooks) it is called, and its logits exist.

        Raises:
            RuntimeError: the patch was undone.
            TypeError: labels are no int32 or int64 tensor, or an argument has another type.
            ValueError: the model has no head or its loss is not patched; labels have another shape; temperature is not
                positive; an argument says what the model returns; or a wrapper changes the tokens.
        """
        if self._undone:
            raise RuntimeError("this patch has been undone already")
        request = log_probs.Request(return_entropy, return_lse, temperature, ignore_index)
        found: Tensor | tuple[Tensor, ...] = log_probs.call(
            self._model, self._modules, model, input_ids, labels, request, inputs
        )
        return found

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._repeated:
            self._repeated -= 1
        elif not self._undone:
            self.undo()

    def __repr__(self) -> str:
        report = self._report
        found = len(report.replaced) + len(report.left)
        what = f"{len(report.replaced)} of {found} modules replaced"
        return f"<PatchHandle of {report.model_class}: {'undone' if self._undone else what}>"


def keep(model: nn.Module, modules: list[nn.Module], report: Report, arguments: Arguments) -> PatchHandle:
    """Returns the handle of what was done to `model`, which remembers it, if anything was."""
    handle = PatchHandle(model, modules, report)
    if modules:
        vars(model)[KEPT] = Kept(arguments, handle, len(modules))
    return handle


def handle_of(model: nn.Module, arguments: Arguments) -> PatchHandle | None:
    """Returns the handle of a model that was patched as a whole by these arguments; None of one that was not patched,
    or of which a part has been undone.

    Raises:
        ValueError: it was patched by other arguments; the message names them.
    """
    kept: Kept | None = vars(model).get(KEPT)
    modules = _patched(model) if kept is not None else []
    if kept is None or len(modules) != kept.count:
        return None
    if differences := ", ".join(kept.arguments.differences(arguments)):
        raise ValueError(f"model is patched already, with {differences}; undo it first: foundry_kernels.unpatch(model)")
    handle = None if kept.handle is None else kept.handle()
    if handle is None:
        handle = PatchHandle(model, modules, kept.report)
        kept.handle = weakref.ref(handle)
    handle._repeated += 1
    return handle


def _patched(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if swap.is_patched(module)]


def _revert(modules: list[nn.Module]) -> None:
    for module in modules:
        reason = swap.why_not_revertible(module)
        if reason is not None:
            raise RuntimeError(f"cannot undo: a {type(module).__name__} {reason}")
    for module in modules:
        swap.revert(module)


def unpatch(model: nn.Module) -> None:
    """Undoes the patch of a model, without its handle: of one whose handle was thrown away, of a deep copy of a patched
    model, of one that was loaded.

    Raises:
        ValueError: no module of it is patched. RuntimeError: as :meth:`PatchHandle.undo`.
    """
    modules = _patched(model)
    if not modules:
        raise ValueError("model is not patched")
    _revert(modules)
    for module in model.modules():
        kept: Kept | None = vars(module).pop(KEPT, None)
        handle = None if kept is None or kept.handle is None else kept.handle()
        if handle is not None:
            handle._undone = True
