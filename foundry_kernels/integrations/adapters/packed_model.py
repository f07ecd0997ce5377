"""Models of transformers that read what their arguments say of packed documents, before they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from foundry_kernels.integrations.adapters.base import Adapter
from foundry_kernels.integrations.adapters.deferred_head import head_property
from foundry_kernels.integrations.attention.call import TELLING, Call, current, read, running, tokens_of
from foundry_kernels.integrations.attention.documents import LENGTHS, Documents, refuse_other_names
from foundry_kernels.integrations.modules import ROWS, goes_on


@dataclass(frozen=True)
class PackedModel(Adapter):
    """A model of transformers, patched or in one that is. head: the name of its head, if that is of a model around it
    that is patched; else empty."""

    head: str = ""

    transparent: ClassVar[bool] = True

    def members(self, original: Any) -> dict[str, Any]:
        head = {self.head: head_property(self.head)} if self.head else {}
        return head | {"forward": reads_documents(_own, inspect.signature(original.forward))}


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
        call = None  # for images or sound: its rows are not those of a model around it
        if tokens is not None:
            refuse_other_names(given, names)
            sizes = tokens.shape[0], tokens.shape[1]
            told = tuple(given.get(name) for name in TELLING)
            call = outer if outer is not None and outer.repeats(*sizes, told) else None
            if call is None:
                around = None if outer is None else outer.documents  # of which it may hand on nothing
                if around is not None and not around.fits(*sizes):
                    raise ValueError(
                        f"{around.given_by} gives several documents per row, and {type(self).__name__} gets other rows "
                        "in that call, which may mix them; pass one document per row"
                    )
                documents, mask = read(given, *sizes, tokens.device)
                if documents is not None:
                    _check_model(self, state, documents, given)
                if mask is not None and "attention_mask" in kwargs:
                    kwargs = {**kwargs, "attention_mask": mask}
                elif mask is not None:
                    at = names.index("attention_mask")
                    args = (*args[:at], mask, *args[at + 1 :])
                told = told if mask is None else (*told[:-1], mask)
                call = Call(*sizes, told, around if documents is None else documents)
            if call.documents is not None and state.hands_on:
                # To layers of linear attention, by names that transformers has: one that is computed again for its
                # gradient, outside of the call, gets them again.
                totals = call.documents.totals_q, call.documents.totals_k
                kwargs = {**kwargs, **dict(zip(LENGTHS, totals, strict=False))}
        running.call = call
        try:
            out = theirs(self, *args, **kwargs)
        finally:
            running.call = outer
        if call is not None and call is not outer and call.documents is not None:
            _remember(out)
        return out

    made: Any = forward
    made.__signature__ = signature  # trainers and `generate` look at it
    return made


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
    names = ("attention_mask", "cache", "past_key_values", "seq_idx", *LENGTHS)
    caches, positions = given.get("use_cache"), given.get("position_ids")
    if caches is None and config is not None:
        caches = getattr(config.get_text_config(), "use_cache", False)
    mixing = set(state.mixing)
    if not caches and positions is not None and positions.dim() == 2 and all(given.get(n) is None for n in names):
        # Transformers' own masks keep documents apart that position_ids alone give, without a cache.
        mixing -= set(state.masked)
    if mixing:
        layers = ", ".join(sorted(mixing))
        raise ValueError(
            f"{documents.given_by} gives several documents per row, which {layers} may mix; pass one document per row, "
            "or patch with ops that do not name flash_attention, which leaves documents to the model"
        )
