"""Which modules of a model of transformers mix the tokens of a row, and do not keep its packed documents apart.

No class is named here: what a module takes tells it. A mask of tokens, or a memory of earlier ones (a cache, a state),
is of use only to a module that mixes tokens, and such a module needs one, or padding and generation would be wrong. A
module that takes neither may still shift or transform a row, which what it calls tells. Of all these, attention and
linear attention of this package keep documents apart, and attention that was left where `gets_masks` says.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from foundry_kernels.integrations.adapters.base import names_of
from foundry_kernels.integrations.adapters.interface import source_of
from foundry_kernels.integrations.modules import arguments_of, goes_on, is_model, makes_masks, reads_rows

#: The arguments of a module that are a mask of tokens or a memory of earlier ones.
MEMORY = re.compile(
    r"((attention|attn|padding|key_padding|conv|input)_)?mask|(padding_)?cache|cache_params|(layer_)?past"
    r"|past_(?!.*length)\w+|mems|state|hx"
)
#: What a class calls to shift or transform a row.
SHIFTS = frozenset(("pad", "roll", "flip", "unfold", "conv1d", "fft", "fft2", "fftn", "rfft"))


def mixers(
    model: nn.Module, attending: Collection[nn.Module], linear: Collection[nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Returns the modules of `model` that mix the documents of a row, innermost ones only; and those of `attending`
    that may get no mask of ours, so that a call with documents raises an error if they get them in no other way.

    attending: attention that keeps documents apart by masks and arguments. linear: linear attention that does, with all
    that it holds.
    """
    found: list[nn.Module] = []
    untold: list[nn.Module] = []
    handing: set[type] = set()  # classes whose modules hand what they take to others

    def visit(module: nn.Module, rows: str) -> bool:
        """Returns whether `module`, or one that it holds, takes a mask or a memory. rows: "all" in a model of
        transformers that reads rows of tokens, "some" if another such model in it gets them, else ""."""
        if module in linear:
            return True
        if is_model(module):
            if reads_rows(module):
                nested = any(is_model(m) and reads_rows(m) for m in module.modules() if m is not module)
                rows = "some" if nested else "all"
            elif not goes_on(arguments_of(module)):
                rows = ""
        before = len(found)
        held = [visit(child, rows) for child in module.children()]
        takes = any(held)
        if takes:
            handing.add(type(module))
        if module in attending:
            if rows == "all" and not makes_masks(type(module)):
                untold.append(module)
            return True
        if is_model(module) or not rows:
            return takes
        innermost = not takes and _takes_memory(module, rows)
        if module not in found and (innermost or (rows == "all" and _shifts(module))):
            found[before:] = [module]
        return takes or innermost

    visit(model, "")
    # A layer with an MLP alone is of the class of one with attention, which does nothing else with what it takes.
    return [m for m in found if type(m) not in handing or _shifts(m)], untold


def _takes_memory(module: nn.Module, rows: str) -> bool:
    """Where only some modules of a model get rows of tokens, these are called hidden states; the others are for
    images."""
    first, *others = (*arguments_of(module), "")
    return (rows == "all" or first == "hidden_states") and any(MEMORY.fullmatch(name) for name in others)


def _shifts(module: nn.Module) -> bool:
    wide = isinstance(module, nn.Conv1d) and module.kernel_size != (1,)
    cls: Any = type(module)
    return wide or not SHIFTS.isdisjoint(_calls(cls))


@functools.cache
def _calls(cls: type) -> frozenset[str]:
    """Returns the names that the methods of a class use; none for one of torch."""
    own = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    methods = [inspect.unwrap(value) for base in own for value in vars(base).values() if callable(value)]
    return frozenset().union(*(names_of(method.__code__) for method in methods if hasattr(method, "__code__")))


def gets_masks(attention: nn.Module) -> bool:
    """Returns whether transformers makes the masks of attention that was left, from the positions too. They keep
    documents apart that `position_ids` alone give, in a call without a cache."""
    cls: Any = type(attention)
    if "ALL_ATTENTION_FUNCTIONS" not in _calls(cls) or not makes_masks(cls):
        return False
    if any(_takes_memory(m, "all") for m in attention.modules() if m is not attention):
        return False  # a part of it mixes tokens by itself, which masks of its scores do not tell
    source = source_of(sys.modules[next(c.__module__ for c in cls.__mro__ if "forward" in vars(c))])
    calls = re.findall(r"\b(?:create_\w*mask\w*|mask_function)\(([^()]*)", source)
    named = '"position_ids": position_ids' in source  # in the arguments that several calls share
    return bool(calls) and all("position_ids=" in call or ("**" in call and named) for call in calls)


def names_in(model: nn.Module, found: Collection[nn.Module]) -> tuple[str, ...]:
    """Returns the names of the classes of those of `found` that `model` holds."""
    return tuple(sorted({type(m).__name__ for m in set(found).intersection(model.modules())})) if found else ()


def lines(found: Iterable[nn.Module], untold: Iterable[nn.Module]) -> tuple[str, ...]:
    """Returns what the report says of packed documents."""
    texts = {"may mix documents: such calls raise": found, "gets no document boundaries: such calls raise": untold}
    counts = [(text, Counter(type(m).__name__ for m in modules)) for text, modules in texts.items()]
    return tuple(f"{n:>4}  {name}  {text}" for text, count in counts for name, n in count.items())
