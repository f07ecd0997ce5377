"""Models of transformers that read what their arguments say of packed documents, before they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from foundry_kernels.integrations.adapters.base import Adapter
from foundry_kernels.integrations.attention.call import DOCUMENTS, TELLING, Call, current, read, run_in, tokens_of
from foundry_kernels.integrations.attention.documents import LENGTHS, Documents, refuse_other_names
from foundry_kernels.integrations.modules import ROWS, goes_on


@dataclass(frozen=True)
class PackedModel(Adapter):
    """A model of transformers, patched or in one that is."""

    transparent: ClassVar[bool] = True

    def members(self, original: Any) -> dict[str, Any]:
        return {"forward": reads_documents(_own, inspect.signature(original.forward))}


def _own(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The current forward of the class, which may have been replaced."""
    return own_class(self).forward(self, *args, **kwargs)


def own_class(module: Any) -> Any:
    """Returns the class that a module has without a patch. A bound forward, as accelerate keeps it for autocast, is
    called after the patch is undone too: then it is the module's class."""
    return getattr(module, "_foundry_original", type(module))


def reads_documents(theirs: Callable[..., Any], signature: inspect.Signature) -> Any:
    """Returns `theirs`, the forward of a model, which reads what its arguments say of documents before it runs."""
    names = tuple(p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
    of_text = not ROWS.isdisjoint(names) or goes_on(names)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self, "_foundry", None)  # none once the patch is undone, if a wrapper has derived its own class
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens, outer = tokens_of(given), current()
        if state is None or (tokens is None and of_text):
            return theirs(self, *args, **kwargs)
        if tokens is None:  # of images or sound: its rows are not those of a model around it
            return run_in(None, theirs, self, args, kwargs)
        refuse_other_names(given, names)
        sizes = tokens.shape[0], tokens.shape[1]
        told = tuple(given.get(name) for name in TELLING)
        if outer is not None and (outer.batch, outer.queries) == sizes and _same(outer.told, told):
            # a model inside of one that has read them
            return theirs(self, *args, **_handed_on(state, outer.documents, kwargs))
        around = None if outer is None else outer.documents  # of which it may hand on nothing
        if around is not None and not around.fits(*sizes):
            raise ValueError(
                f"{around.given_by} gives several documents per row, and {type(self).__name__} gets other rows in that "
                "call, which may mix them; pass one document per row"
            )
        documents, mask = read(given, *sizes, tokens.device)
        if documents is not None:
            _check_model(self, state, documents, given)
        documents = around if documents is None else documents
        if mask is not None and "attention_mask" in kwargs:
            kwargs = {**kwargs, "attention_mask": mask}
        elif mask is not None:
            at = names.index("attention_mask")
            args = (*args[:at], mask, *args[at + 1 :])
        told = told if mask is None else (*told[:-1], mask)
        out = run_in(Call(*sizes, told, documents), theirs, self, args, _handed_on(state, documents, kwargs))
        if documents is not None:
            _remember(out)
        return out

    made: Any = forward
    made.__signature__ = signature  # trainers and `generate` look at it
    return made


def _handed_on(state: Any, documents: Documents | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a model, with `documents` for its layers."""
    return kwargs if documents is None or not state.hands_on else {**kwargs, DOCUMENTS: documents}


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(one, other, strict=True))


def _remember(out: Any) -> None:
    """Marks the caches that a model returns as holding packed documents."""
    for value in out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else ():
        if hasattr(value, "get_seq_length"):
            value._foundry_packed = True


def _check_model(model: nn.Module, state: Any, documents: Documents, given: Mapping[str, Any]) -> None:
    """Raises ValueError if a layer of `model` may mix documents."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{documents.given_by} gives several documents per row, which an encoder-decoder does not keep apart; pass "
            "one document a row"
        )
    mixing = set(state.mixing)
    if _is_separated(config, given):
        mixing -= set(state.masked)
    if mixing:
        layers = ", ".join(sorted(mixing))
        raise ValueError(
            f"{documents.given_by} gives several documents per row, which {layers} may mix; pass one document per row, "
            "or patch with ops that do not name flash_attention, which leaves documents to the model"
        )


def _is_separated(config: Any, given: Mapping[str, Any]) -> bool:
    """Returns whether transformers' own masks keep the documents of a call apart: those that position_ids alone give,
    without a cache."""
    names = ("attention_mask", "cache", "past_key_values", "seq_idx", *LENGTHS)
    caches, positions = given.get("use_cache"), given.get("position_ids")
    if caches is None and config is not None:
        caches = getattr(config.get_text_config(), "use_cache", False)
    return not caches and positions is not None and positions.dim() == 2 and all(given.get(n) is None for n in names)
