"""The loss of any model with a head, without the logits.

In training only the loss needs the logits. The class's own forward runs, but its head returns `DeferredLogits`, which
the loss takes (`deferred.py`). Any other call (in eval mode, without labels, with a head that must be called) has its
logits; the `loss_function` of a model of transformers is `cross_entropy` of this package there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.compiler import is_compiling

from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.integrations.adapters import log_probs
from foundry_kernels.integrations.adapters.base import REPLACED, Adapter, names_of, split_names
from foundry_kernels.integrations.adapters.deferral import Deferral
from foundry_kernels.integrations.adapters.deferred import DeferredLogits
from foundry_kernels.integrations.adapters.deferred_head import finished, head_property
from foundry_kernels.integrations.adapters.head import head_at, path_of_head, readable_matrix_of
from foundry_kernels.integrations.adapters.packed_model import own_class, reads_documents
from foundry_kernels.integrations.attention.call import current
from foundry_kernels.integrations.modules import is_model
from foundry_kernels.losses.tokens import over_items
from foundry_kernels.ops.cross_entropy import cross_entropy

#: The report's text for a model whose loss does not compute logits.
NO_LOGITS = "logits of a call with labels are None in training mode; return_logits=True keeps them"

#: How the report's text begins for a model with a head whose loss is left.
LOSS_STAYS = "its loss stays, with the logits: "
#: The operations of a loss.
LOSSES = ("linear_cross_entropy", "cross_entropy")

#: The arguments of the loss of transformers, and of the function that it calls; of `kwargs` both read nothing.
LOSS = split_names("logits labels source target vocab_size num_items_in_batch ignore_index shift_labels kwargs")
#: What a forward calls that computes a loss of logits.
_LOSS_NAMES = ("loss_function", "cross_entropy", "CrossEntropyLoss")


@dataclass(frozen=True)
class LanguageModel(Adapter):
    """A model whose forward computes a loss of the logits of its head.

    head: the path of the head in it. of_transformers: whether it is a model of transformers, or made for it.
    """

    head: str
    of_transformers: bool = True

    transparent: ClassVar[bool] = True

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        kind: Any = type(module)
        if not self.of_transformers or "loss_function" not in forward_names(kind):
            return LOSSES[:1]
        losses = importlib.import_module("transformers.loss.loss_utils")
        others = [loss for loss in losses.LOSS_MAPPING.values() if loss is not losses.ForCausalLMLoss]
        return LOSSES[:1] if module.loss_function in others else LOSSES

    def why_not_without_logits(self, module: nn.Module) -> str | None:
        """Returns the reason why logits are always computed, or None."""
        if head_at(module, self.head) is None:
            kind = type(module.get_submodule(self.head)).__name__
            return f"its {self.head} is no plain linear layer ({kind}) or has hooks, so its logits are made"
        return None

    def members(self, original: Any) -> dict[str, Any]:
        signature = inspect.signature(original.forward)
        forward = _forward_of(signature)
        members: dict[str, Any] = {"_foundry_makes_its_loss": "CrossEntropyLoss" in forward_names(original)}
        if "." not in self.head:
            members[self.head] = head_property(self.head)
        if not self.of_transformers:
            return members | {"forward": forward}
        losses = importlib.import_module("transformers.loss.loss_utils")
        return members | {
            "forward": reads_documents(forward, signature),
            "loss_function": property(_get_loss_function, _set_loss_function),
            "_foundry_get_loss": original.loss_function.fget,  # which the compiler cannot look up
            "_foundry_their_loss": staticmethod(losses.ForCausalLMLoss),
            "_foundry_known_losses": tuple(losses.LOSS_MAPPING.values()),
        }


@dataclass(frozen=True)
class HeadOwner(Adapter):
    """A module that holds the head of a model around it, and has no loss of its own."""

    head: str

    transparent: ClassVar[bool] = True

    def members(self, original: type) -> dict[str, Any]:
        return {self.head: head_property(self.head)}


def language_model(module: nn.Module) -> LanguageModel | str | None:
    """Returns the adapter of a model with a loss of its head's logits, or the reason why its loss is left; None where
    there is no such loss."""
    cls: Any = type(module)
    of_transformers = is_model(module)
    if of_transformers and not _takes_labels(cls):
        return None
    if not of_transformers and not set(_LOSS_NAMES) & forward_names(cls):
        return None
    path = path_of_head(module)
    if path is None:
        return None
    if any("_foundry_class" in vars(base) for base in cls.__mro__):
        return f"{LOSS_STAYS}its class was derived from a patched one"
    if "forward" in vars(module):
        return REPLACED
    if not cls.__module__.startswith("transformers.models.") and (reason := why_unknown_loss(cls)):
        return LOSS_STAYS + reason
    if of_transformers and (reason := _why_changed()):
        return reason
    return LanguageModel(path, of_transformers)


def _takes_labels(cls: type) -> bool:
    """Returns whether the forward of a model takes labels, or hands on what it gets to one that does."""
    found = [inspect.signature(vars(base)["forward"]).parameters for base in cls.__mro__ if "forward" in vars(base)]
    own = found[0] if found else {}
    return "labels" in own or ("kwargs" in own and any("labels" in taken for taken in found))


def _why_changed() -> str | None:
    """Returns the reason why the loss of transformers is not the one that `_loss_of_logits` knows, or None."""
    losses = importlib.import_module("transformers.loss.loss_utils")
    for loss in (losses.ForCausalLMLoss, losses.fixed_cross_entropy):
        if unknown := sorted(inspect.signature(loss).parameters.keys() - LOSS):
            return f"its loss takes {', '.join(unknown)}: another version of it than this package knows"
    return None


@functools.cache
def forward_names(cls: type) -> frozenset[str]:
    """Returns the names that the forward of a class uses, also where it calls a base's, or a method or function of the
    same module."""
    waiting = [inspect.unwrap(vars(base)["forward"]) for base in cls.__mro__ if "forward" in vars(base)]
    seen: set[Any] = set()
    names: set[str] = set()
    while waiting:
        function = waiting.pop()
        if not inspect.isfunction(function) or function in seen:
            continue
        seen.add(function)
        new = names_of(function.__code__)
        names |= new
        called = [inspect.getattr_static(cls, name, None) for name in new]
        called += [function.__globals__.get(name) for name in new]
        called += inspect.getclosurevars(function).nonlocals.values()
        own = [found for found in called if getattr(found, "__module__", None) == function.__module__]
        waiting += [inspect.unwrap(found) for found in own if callable(found)]
    return frozenset(names)


@functools.cache
def why_unknown_loss(cls: type) -> str | None:
    """Returns the reason why a class that is not transformers' own may do with logits what cannot be seen, or None."""
    if not set(_LOSS_NAMES) & forward_names(cls):
        return "its forward computes no cross-entropy that this package knows"
    if "apply" in forward_names(cls):
        return "its forward calls apply, of a torch.autograd.Function perhaps"
    for base in cls.__mro__:
        home = sys.modules.get(base.__module__)
        for name, theirs in (("CrossEntropyLoss", nn.CrossEntropyLoss), ("cross_entropy", nn.functional.cross_entropy)):
            if "forward" in vars(base) and getattr(home, name, theirs) is not theirs:
                return f"its {name} is not that of torch"
    return None


def _forward_of(signature: inspect.Signature) -> Callable[..., Any]:
    """Returns a forward with this signature, which calls that of the class."""
    names = tuple(p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
    takes_labels = "labels" in names

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.pop(log_probs.KEYWORD, None)
        theirs = own_class(self).forward
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if request is not None:
            return _answer(self, theirs, request, given, names)
        head = None if takes_labels and given.get("labels") is None else _deferred_head(self)
        if head is None:
            return theirs(self, *args, **kwargs)
        out = Deferral(head, _backend(self)).run(theirs, self, *args, **kwargs)
        return finished(out, self._foundry_row.of_transformers)

    made: Any = forward
    made.__signature__ = signature  # trainers and `generate` look at it
    return made


def _deferred_head(self: Any) -> nn.Module | None:
    """Returns the head whose logits a call defers, or None."""
    state = getattr(self, "_foundry", None)  # none once the patch is undone, if a wrapper has derived its own class
    if state is None or not self.training or "linear_cross_entropy" not in state.backends:
        return None
    if self._foundry_makes_its_loss and is_compiling():  # the compiler calls cross_entropy in its own way there
        return None
    row: LanguageModel = self._foundry_row
    if row.of_transformers:
        theirs = self._foundry_get_loss()
        if not any(theirs is known for known in self._foundry_known_losses):
            return None
    return _readable_head(self)


def _readable_head(self: Any) -> nn.Module | None:
    head = head_at(self, self._foundry_row.head)
    return None if readable_matrix_of(head) is None else head


def _answer(self: Any, theirs: Any, request: log_probs.Request, given: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Returns the log-probabilities of a call's labels."""
    labels: Any = given.pop("labels")
    row: LanguageModel = self._foundry_row
    before = not log_probs.is_encoder_decoder(self)
    if row.of_transformers:
        given["labels"] = None if before else labels
    else:  # it may compute the last logits alone, without targets
        if "input_ids" not in names:
            given[names[0]] = given.pop("input_ids")
            given.pop("use_cache", None)
        given |= {name: labels for name in names if name in ("labels", "targets", "target")}
    head = _readable_head(self)
    run: Any = theirs if head is None else partial(Deferral(head, _backend(self), asked=True).run, theirs)
    out = run(self, **given)
    values = list(out.values()) if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else [out]
    logits = next((x for x in values if isinstance(x, (Tensor, DeferredLogits)) and x.ndim == 3), None)
    if logits is None or logits.shape[:2] != labels.shape:
        raise ValueError(f"{type(self).__name__} returns no logits for each of labels, {list(labels.shape)}")
    inputs = logits.inputs() if isinstance(logits, DeferredLogits) else None
    if inputs is not None:
        return request.of_hidden(inputs, _targets(request, labels, inputs["hidden"], before), before)
    made = logits.tensor() if isinstance(logits, DeferredLogits) else logits
    return request.of_logits(made, _targets(request, labels, made, before), _backend(self), before)


def _backend(self: Any) -> str:
    backends: dict[str, str] = self._foundry.backends
    return backends.get("linear_cross_entropy") or backends["cross_entropy"]


def _targets(request: log_probs.Request, labels: Tensor, hidden: Tensor, before: bool) -> Tensor:
    """Returns the target of each position of a call that is running."""
    if not before:
        return labels.to(hidden.device)
    call = current()
    documents = None if call is None or call.queries != labels.shape[1] else call.documents
    return request.targets(labels.to(hidden.device), documents)


def _set_loss_function(self: Any, value: Any) -> None:
    self._foundry_original.loss_function.fset(self, value)


def _get_loss_function(self: Any) -> Any:
    """Returns the next-token loss on the kernels; any other loss runs as before."""
    theirs = self._foundry_get_loss()
    state = getattr(self, "_foundry", None)
    if state is None or theirs is not self._foundry_their_loss:
        return theirs
    return partial(_loss_of_logits, theirs, state.backends.get("cross_entropy"))


def _loss_of_logits(
    theirs: Any,
    backend: str | None,
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    if logits.shape[-1] == vocab_size:  # or it is a matter of `view`
        targets = _next_tokens(labels, shift_labels, ignore_index).to(logits.device)
        options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": "mean" if num_items_in_batch is None else "sum",
        }
        if isinstance(logits, DeferredLogits):
            loss: Any = logits.loss(targets, **options)
            if loss is not None:
                return _by_items(loss.full_tensor() if is_dtensor(loss) else loss, num_items_in_batch)
            logits = logits.tensor()
        if backend is not None and not is_dtensor(logits):
            loss = cross_entropy(logits.reshape(-1, vocab_size), targets, backend=backend, **options)
            return _by_items(loss, num_items_in_batch)
    given = {"ignore_index": ignore_index, "shift_labels": shift_labels, **kwargs}
    found: Tensor = theirs(logits, labels, vocab_size, num_items_in_batch, **given)
    return found


def _next_tokens(labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """Returns the label of each position: the token that follows it, and none for the last."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def _by_items(loss: Tensor, num_items_in_batch: Any) -> Tensor:
    """Returns a sum over the number of items, where that is given: float32 whatever the model's dtype. Over 0 items it
    is 0 or infinite; without a patch 0 / 0 is NaN."""
    return loss.float() if num_items_in_batch is None else over_items(loss.float(), num_items_in_batch)
