"""The handle of a patch, and what the patched model itself keeps: by which arguments it was patched."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Literal, overload

from torch import Tensor, nn

from foundry_kernels.integrations.adapters import log_probs
from foundry_kernels.integrations.patching import swap, tuner_layers
from foundry_kernels.integrations.patching.arguments import Arguments
from foundry_kernels.integrations.patching.report import Findings, Report

#: The attribute of the model that was given to `patch` where it keeps them.
KEPT = "_foundry_patch"


class Kept:
    """What a patched model keeps. It refers to the handle weakly: a model that nobody uses is freed at once, without
    the garbage collector, though its handle refers to it."""

    def __init__(self, arguments: Arguments, handle: PatchHandle, findings: Findings, count: int) -> None:
        self.arguments, self.findings, self.count = arguments, findings, count
        self.handle: weakref.ref[PatchHandle] | None = weakref.ref(handle)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"handle": None}  # a copy of the model has a handle of its own


class PatchHandle:
    """What :func:`patch` returns. As a context manager it leaves the model at the end of the block as that call of
    `patch` found it: not patched, or patched already by the same arguments."""

    def __init__(self, model: nn.Module, modules: list[nn.Module], findings: Findings, arguments: Arguments) -> None:
        self._model, self._modules, self._findings, self._arguments = model, modules, findings, arguments
        self._last: Report | None = None  # when it was undone
        self._repeated = 0  # calls of `patch` that found the model patched, and whose block has not ended

    def report(self) -> Report:
        """Returns what was replaced, and what was left and why: ``print(handle.report())``. Layers of PEFT are listed
        as they are now: they come and go, and run PEFT's own forward while their adapters are merged, for example."""
        if self._last is not None:
            return self._last
        more = list(tuner_layers.entries(self._model, self._arguments))
        backends = {op: backend for _, each in more for op, backend in each.items()}
        return self._findings.report(self._model, [entry for entry, _ in more], backends)

    def undo(self) -> None:
        """Gives every module its own class, and the model's config its attention, back.

        Raises:
            RuntimeError: it was undone before, or a module has been changed since so that it is impossible.
                Nothing is undone then.
        """
        if self._last is not None:
            raise RuntimeError("this patch has been undone already")
        report = self.report()
        _revert(list(dict.fromkeys([*self._modules, *_patched(self._model)])))
        tuner_layers.forget(self._model)
        vars(self._model).pop(KEPT, None)
        self._last = report

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
            All are differentiable, in training and in evaluation mode. If the head is no plain ``nn.Linear`` (DoRA on
            it, quantised, with hooks) it is called, and its logits exist.

        Raises:
            RuntimeError: the patch was undone.
            TypeError: labels are no int32 or int64 tensor, or an argument has another type.
            ValueError: the model has no head or its loss is not patched; labels have another shape; temperature is not
                positive; an argument says what the model returns; or a wrapper changes the tokens.
        """
        if self._last is not None:
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
        elif self._last is None:
            self.undo()

    def __repr__(self) -> str:
        report = self.report()
        found = len(report.replaced) + len(report.left)
        what = f"{len(report.replaced)} of {found} modules replaced"
        return f"<PatchHandle of {report.model_class}: {'undone' if self._last else what}>"


def keep(model: nn.Module, modules: list[nn.Module], findings: Findings, arguments: Arguments) -> PatchHandle:
    """Returns the handle of what was done to `model`, which remembers it."""
    handle = PatchHandle(model, modules, findings, arguments)
    vars(model)[KEPT] = Kept(arguments, handle, findings, _count(modules))
    return handle


def handle_of(model: nn.Module, arguments: Arguments) -> PatchHandle | None:
    """Returns the handle of a model that was patched as a whole by these arguments; None of one that was not patched,
    or of which a part has been undone.

    Raises:
        ValueError: it was patched by other arguments; the message names them.
    """
    kept: Kept | None = vars(model).get(KEPT)
    modules = _patched(model) if kept is not None else []
    if kept is None or not modules or _count(modules) != kept.count:
        return None
    if differences := ", ".join(kept.arguments.differences(arguments)):
        raise ValueError(f"model is patched already, with {differences}; undo it first: foundry_kernels.unpatch(model)")
    handle = None if kept.handle is None else kept.handle()
    if handle is None:
        handle = PatchHandle(model, modules, kept.findings, kept.arguments)
        kept.handle = weakref.ref(handle)
    handle._repeated += 1
    return handle


def _patched(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if swap.is_patched(module)]


def _count(modules: list[nn.Module]) -> int:
    """The number of modules without PEFT's layers, which come and go."""
    return sum(not tuner_layers.is_one(module) for module in modules)


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
    kept: list[Kept] = [vars(module)[KEPT] for module in model.modules() if KEPT in vars(module)]
    if not modules and not kept:
        raise ValueError("model is not patched")
    handles = [handle for each in kept if each.handle is not None and (handle := each.handle()) is not None]
    reports = [handle.report() for handle in handles]
    _revert(modules)
    tuner_layers.forget(model)
    for module in model.modules():
        vars(module).pop(KEPT, None)
    for handle, report in zip(handles, reports, strict=True):
        handle._last = report
