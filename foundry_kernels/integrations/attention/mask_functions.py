"""The mask functions of "foundry" and its variants for transformers.

transformers calls them once in a forward pass, with a function of (batch, head, query, key), a padding mask and sizes.
Models of the table's families pass a mask on unchanged. For these, they return a form with which kernels can skip keys
(`masks.py`), or otherwise a dense mask. Other models may read their masks, so they get the mask of "sdpa". Both
separate the documents of the running call of a patched model (`calls.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from foundry_kernels.integrations.attention.call import documents_of_mask
from foundry_kernels.integrations.attention.documents import Documents, cut, within
from foundry_kernels.integrations.attention.plan import (
    DENSE,
    UNREAD,
    DenseMask,
    as_mask,
    blocks_in_window,
    keeps_apart,
    kind_of,
    marked,
    neighbours,
    packed_layout,
    padding_layout,
    present_keys,
    totals_of,
    unpacked,
)
from foundry_kernels.integrations.families import FAMILIES, text_type
from foundry_kernels.ops.flash_attention.attention_mask import TILE, AttentionMask

#: The `model_type` of models that pass a mask on unchanged.
PASSED_ON = frozenset({*FAMILIES, *map(text_type, FAMILIES)})


def is_passed_on(config: Any) -> bool:
    """Returns whether the models of this config pass their mask to attention unchanged, so that it may be any tensor.
    This is also true without a config."""
    return config is None or getattr(config, "model_type", None) in PASSED_ON


def mask(**kwargs: Any) -> Tensor | None:
    """The mask function of "foundry"; the arguments are those that transformers passes.

    Returns:
        None for a mask that is causal or a window, with the last query aligned with the last key, or hides nothing;
        else a layout or the keys that are no padding (see `masks.py`), or, for any other mask, a dense one ``[B, 1, T,
        S]``, bool, True where a query sees a key. Where values cannot be read, ``[1, 1, 1, 1]``: the number of tokens
        at which packed sequences begin, not counting the first, to be checked to be 0.

    Raises:
        ValueError: the model is a BLOOM that is not patched.
    """
    config = kwargs.get("config")
    _refuse_unnamed(config)
    documents = _documents(kwargs)
    if not is_passed_on(config):
        return _dense(documents, **kwargs) if documents is not None else _with_tiles(_like_sdpa(**kwargs))
    if _is_traced(kwargs):
        return _of_unread(documents, **kwargs)
    try:
        return _skippable(documents=documents, **kwargs)
    except DenseMask as refused:
        if refused.present is not None and documents is None and not _adds_to_masks(config):
            return refused.present
    return _of_tokens(documents, **kwargs)


def _like_sdpa(**kwargs: Any) -> Tensor | None:
    """Returns the mask of "sdpa". There None may mean that query 0 is aligned with key 0, which attention cannot know:
    such a mask is dense here."""
    unlike = kwargs["q_length"] > 1 and kwargs["q_length"] != kwargs["kv_length"]
    return _seen(None, **kwargs) if unlike else sdpa_mask(**kwargs)


def _documents(kwargs: dict[str, Any]) -> Documents | None:
    """Returns the documents that a mask must separate; not for queries on another model's keys."""
    documents = documents_of_mask(kwargs["batch_size"], kwargs["q_length"])
    crosses = _is_bidirectional(kwargs) and kwargs["q_length"] != kwargs["kv_length"]
    return None if crosses else documents


def _is_traced(kwargs: dict[str, Any]) -> bool:
    return bool(is_tracing(kwargs.get("attention_mask")) or is_tracing(kwargs.get("q_offset")))


def _of_unread(documents: Documents | None, **kwargs: Any) -> Tensor | None:
    """:func:`mask` for a family of the table if values cannot be read."""
    padding, function = kwargs.get("attention_mask"), kwargs.get("mask_function", causal_mask_function)
    local, config = kwargs.get("local_size"), kwargs.get("config")
    # An outermost or_mask lets tokens see later ones; an and_mask separates packed sequences.
    other = kwargs.get("use_vmap") or getattr(function, "__name__", "") == "or_mask"
    if other or _is_chunked(kwargs) or (_is_bidirectional(kwargs) and (local is not None or padding is not None)):
        return _of_tokens(documents, **kwargs)
    first, queries = kwargs.get("q_offset", 0), kwargs["q_length"]
    begin, keys = kwargs.get("kv_offset", 0), kwargs["kv_length"]
    unlike = isinstance(first, Tensor) or first + queries != begin + keys
    if padding is None and not (unlike and documents is not None):
        return _skippable(documents=documents, **kwargs)
    if documents is not None or unlike or _adds_to_masks(config):
        return _of_tokens(documents, **kwargs)
    assert padding is not None  # or it is skippable, or there are documents
    return present_keys(padding, begin, keys)


def _seen(documents: Documents | None, **kwargs: Any) -> Tensor | None:
    """Returns the mask of "sdpa" with separated documents; never None."""
    kwargs = {**kwargs, "allow_is_causal_skip": False}
    if documents is not None:
        function = kwargs.get("mask_function", causal_mask_function)
        first, begin = kwargs.get("q_offset", 0), kwargs.get("kv_offset", 0)
        anew = _is_chunked(kwargs)
        if anew:
            function = unpacked(function)
        kwargs["mask_function"] = within(function, documents, first, begin, kwargs["kv_length"], anew)
        kwargs["allow_is_bidirectional_skip"] = False
    return sdpa_mask(**kwargs)


def _dense(documents: Documents | None, **kwargs: Any) -> Tensor | None:
    return _with_tiles(_seen(documents, **kwargs), documents is not None)


def _of_tokens(documents: Documents | None, **kwargs: Any) -> Tensor | None:
    """A dense mask in which padded queries see no key, as in the other forms, so that their outputs do not depend on
    other rows of the batch."""
    padding, first = kwargs.get("attention_mask"), kwargs.get("q_offset", 0)
    if padding is None or _is_bidirectional(kwargs):  # the padding may be an encoder's
        return _dense(documents, **kwargs)
    seen = _seen(documents, **kwargs)
    tokens = torch.arange(kwargs["q_length"], device=padding.device) + first
    real = padding[:, tokens.clamp_max(padding.shape[1] - 1)]
    return seen if seen is None else _with_tiles(seen & real[:, None, :, None], documents is not None)


def _is_chunked(kwargs: dict[str, Any]) -> bool:
    local, config = kwargs.get("local_size"), kwargs.get("config")
    return local is not None and local == getattr(config, "attention_chunk_size", None)


def _is_bidirectional(kwargs: dict[str, Any]) -> bool:
    function = kwargs.get("mask_function", causal_mask_function)
    return bool(kwargs.get("allow_is_bidirectional_skip") or function is bidirectional_mask_function)


def _adds_to_masks(config: Any) -> bool:
    """BLOOM and Falcon add ALiBi to a mask of four dimensions."""
    kind = getattr(config, "model_type", None)
    return kind == "bloom" or (kind == "falcon" and bool(getattr(config, "alibi", False)))


def _with_tiles(seen: Tensor | None, apart: bool = False) -> Tensor | None:
    """Returns the same mask with its empty and full tiles as an attribute, if there are any, so that they are computed
    once for all layers. If the model derives another mask from it, the attribute is lost, which is harmless.

    apart: whether it separates documents.
    """
    if seen is not None and seen.dtype == torch.bool:
        seen = marked(seen, DENSE, apart)
    if seen is None or torch.compiler.is_compiling() or is_tracing(seen) or seen.dtype != torch.bool:
        return seen
    if seen.shape[-1] < 2 * TILE or seen.shape[-2] < TILE or _is_captured(seen):
        return seen
    part = seen[: 1 if seen.stride(0) == 0 else None, :, : 1 if seen.stride(2) == 0 else None]
    seen._foundry_tiles = AttentionMask(part)  # type: ignore[attr-defined]
    return seen


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def mask_or_error(**kwargs: Any) -> Tensor | None:
    """The mask function of "foundry_or_error": as :func:`mask`, but it never makes a dense mask.

    Raises:
        DenseMask: the mask is not causal, a window, padding outside of the tokens, or packed sequences; or the model
            looks into its masks, perhaps, and its is not plainly causal.
        ValueError: the model is a BLOOM that is not patched.
    """
    config = kwargs.get("config")
    _refuse_unnamed(config)
    documents = _documents(kwargs)
    if is_passed_on(config):
        return _skippable(documents=documents, **kwargs)
    if documents is not None or _like_sdpa(**kwargs) is not None:
        raise DenseMask("has padding, a window or another pattern, in a family that has no row")
    return None


def _skippable(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    local_size: int | None = None,
    device: Any = "cpu",
    config: Any = None,
    documents: Documents | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Returns a form with which kernels can skip keys. Raises DenseMask for any other mask."""
    traced = is_tracing(attention_mask) or is_tracing(q_offset)
    if use_vmap:
        if traced:
            raise DenseMask(
                "is combined with a mask function of the model or the caller, into which torch.compile cannot look "
                "(pass no token_type_ids where there is text alone)"
            )
        local_size = _window_without_blocks(mask_function, config)
    if allow_is_bidirectional_skip or mask_function is bidirectional_mask_function:
        full = attention_mask is None or (not traced and bool(attention_mask.all()))
        if local_size is None and documents is None and full:
            return None
        raise DenseMask("is bidirectional, with a window or padding")
    if _is_chunked({"local_size": local_size, "config": config}):
        raise DenseMask("is chunked")
    if not allow_is_causal_skip and q_length > 1:
        before, after = neighbours(mask_function, batch_size, q_length, q_offset, device)
        one_row = attention_mask is None and q_length == kv_length
        if traced:
            unlike = ((~before).sum() + after.sum()).to(torch.int32)
            if one_row and documents is None:
                return _hidden(marked(unlike[None, None, None, None], UNREAD), config)
            if not one_row:
                torch._assert_async(unlike == 0, "attention_mask is not causal")
        elif after.any() or not (one_row or before.all()):
            raise DenseMask("is not causal: a block of tokens sees later ones, perhaps")
        elif one_row:
            return _hidden(_apart(packed_layout(before), documents, kv_length), config)
    if attention_mask is not None:
        present = attention_mask[:, kv_offset : kv_offset + kv_length]
        attention_mask = torch.nn.functional.pad(present, (0, kv_length - present.shape[1]))
    layout = padding_layout(attention_mask, batch_size, q_length, kv_length, q_offset - kv_offset, device, traced)
    if traced and layout is not None and documents is not None:
        raise DenseMask("has padding beside documents, and torch.compile cannot read it")
    return _hidden(_apart(layout, documents, kv_length), config)


def _apart(layout: Tensor | None, documents: Documents | None, keys: int) -> Tensor | None:
    """Returns the layout of the intersections of `layout`'s sequences and the documents."""
    if documents is None:
        return layout
    totals = cut(None if layout is None else totals_of(layout), documents, keys)
    return as_mask(torch.stack(totals), apart=True)


def mask_or_sdpa(**kwargs: Any) -> Tensor | None:
    """The mask function of "foundry_or_sdpa" and "foundry_or_eager": as :func:`mask_or_error`, with the dense mask of
    "sdpa" instead of an error."""
    config = kwargs.get("config")
    _refuse_unnamed(config)
    documents = _documents(kwargs)
    unread = _is_traced(kwargs) and (
        kwargs.get("attention_mask") is not None or not kwargs.get("allow_is_causal_skip", True)
    )
    if is_passed_on(config) and not unread:
        try:
            return _skippable(documents=documents, **kwargs)
        except DenseMask:
            pass
    if documents is None:
        return sdpa_mask(**kwargs) if is_passed_on(config) else _like_sdpa(**kwargs)
    seen = _seen(documents, **kwargs)
    return None if seen is None else marked(seen, DENSE, apart=True)


def _refuse_unnamed(config: Any) -> None:
    """BLOOM does not choose its attention by name. Its own attention would add one of these masks (None for a causal
    one) to the scores."""
    name = getattr(config, "_attn_implementation_internal", None)  # the name without a patch
    if getattr(config, "model_type", None) == "bloom" and str(name).startswith("foundry"):
        raise ValueError(
            f"attn_implementation={name!r} does not reach the attention of bloom; use the default, and "
            "foundry_kernels.patch(model)"
        )


def _hidden(layout: Tensor | None, config: Any) -> Tensor | None:
    """Falcon adds ALiBi to masks with four dimensions, so its layouts have five."""
    kind = kind_of(layout)
    if layout is None or kind is None:
        return None
    if getattr(config, "model_type", None) == "falcon" and getattr(config, "alibi", False):
        return marked(layout[None], kind, keeps_apart(layout))
    return layout


def _window_without_blocks(mask_function: Any, config: Any) -> int:
    """Returns the window of Gemma 3's mask from `token_type_ids` without an image.

    Raises:
        DenseMask: there is an image, or it is another mask.
    """
    found = blocks_in_window(mask_function)
    if found is None or found[1] != getattr(config, "sliding_window", None):
        raise DenseMask("is combined with a mask function of the model or the caller")
    blocks, window = found
    if (blocks >= 0).any():
        raise DenseMask("is not causal: the tokens of an image see each other")
    return window
