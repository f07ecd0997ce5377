"""The mask functions of "foundry" and its variants for transformers.

transformers calls them once in a forward pass, with a function of (batch, head, query, key), a padding mask and sizes.
Models of the table's families pass a mask on unchanged. For these, they return a plan with which kernels can skip keys
(`plan.py`), or otherwise a dense mask. Other models may read their masks, so they get the mask of "sdpa". Both separate
the documents of the running call of a patched model (`call.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from foundry_kernels.integrations.attention.call import current
from foundry_kernels.integrations.attention.documents import Documents
from foundry_kernels.integrations.attention.patterns import (
    MaskFunction,
    blocks_in_window,
    neighbours,
    unpacked,
    within,
)
from foundry_kernels.integrations.attention.plan import AttentionPlan, DenseMask
from foundry_kernels.integrations.families import FAMILIES, text_type

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
        else an `AttentionPlan` as a mask. Where values cannot be read, it is checked in attention that no packed
        sequences begin.

    Raises:
        ValueError: the model is a BLOOM that is not patched.
    """
    asked = Asked.of(kwargs)
    if not is_passed_on(asked.config):
        return asked.dense(asked.like_sdpa() if asked.documents is None else asked.seen())
    if asked.is_traced:
        return asked.unread()
    try:
        return asked.skippable().mask(asked.dims)
    except DenseMask as refused:
        if refused.present is not None and asked.documents is None and not asked.adds_to_masks:
            return refused.present.mask()
    return asked.of_tokens()


def mask_as_eager(**kwargs: Any) -> Tensor | None:
    """The mask function of "foundry_as_eager": the mask of "eager", with separated documents."""
    asked, dtype = Asked.of(kwargs), kwargs.get("dtype", torch.float32)
    seen = asked.seen()
    if seen is None:
        return None
    return torch.where(seen, torch.zeros((), device=seen.device, dtype=dtype), torch.finfo(dtype).min)


def mask_or_error(**kwargs: Any) -> Tensor | None:
    """The mask function of "foundry_or_error": as :func:`mask`, but it never makes a dense mask.

    Raises:
        DenseMask: the mask is not causal, a window, padding outside of the tokens, or packed sequences; or the model
            looks into its masks, perhaps, and its is not plainly causal.
        ValueError: the model is a BLOOM that is not patched.
    """
    asked = Asked.of(kwargs)
    if is_passed_on(asked.config):
        return asked.skippable().mask(asked.dims)
    if asked.documents is not None or asked.like_sdpa() is not None:
        raise DenseMask("has padding, a window or another pattern, in a family that has no row")
    return None


def mask_or_sdpa(**kwargs: Any) -> Tensor | None:
    """The mask function of "foundry_or_sdpa" and "foundry_or_eager": as :func:`mask_or_error`, with the dense mask of
    "sdpa" instead of an error."""
    asked = Asked.of(kwargs)
    unread = asked.is_traced and (asked.attention_mask is not None or not asked.allow_is_causal_skip)
    if is_passed_on(asked.config) and not unread:
        try:
            return asked.skippable().mask(asked.dims)
        except DenseMask:
            pass
    if asked.documents is None:
        return sdpa_mask(**kwargs) if is_passed_on(asked.config) else asked.like_sdpa()
    seen = asked.seen()
    return None if seen is None else AttentionPlan(dense=seen, documents=asked.documents).mask()


@dataclass(eq=False)
class Asked:
    """What transformers asks a mask function for: `given`, of which the other fields are those that are read here.

    documents: those that the mask must separate.
    """

    given: dict[str, Any]
    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    mask_function: MaskFunction
    attention_mask: Tensor | None
    allow_is_causal_skip: bool
    local_size: int | None
    config: Any
    documents: Documents | None = None

    @staticmethod
    def of(given: dict[str, Any]) -> Asked:
        get = given.get
        asked = Asked(
            given,
            given["batch_size"],
            given["q_length"],
            given["kv_length"],
            get("q_offset", 0),
            get("kv_offset", 0),
            get("mask_function", causal_mask_function),
            get("attention_mask"),
            get("allow_is_causal_skip", True),
            get("local_size"),
            get("config"),
        )
        _refuse_unnamed(asked.config)
        call, crosses = current(), asked.is_bidirectional and asked.q_length != asked.kv_length
        if call is not None and call.documents is not None and call.documents.fits(asked.batch_size, asked.q_length):
            call.masked = True
            asked.documents = None if crosses else call.documents  # not for queries on another model's keys
        return asked

    @property
    def is_traced(self) -> bool:
        return bool(is_tracing(self.attention_mask) or is_tracing(self.q_offset))

    @property
    def is_bidirectional(self) -> bool:
        skips = self.given.get("allow_is_bidirectional_skip", False)
        return bool(skips or self.mask_function is bidirectional_mask_function)

    @property
    def is_chunked(self) -> bool:
        return self.local_size is not None and self.local_size == getattr(self.config, "attention_chunk_size", None)

    @property
    def adds_to_masks(self) -> bool:
        """BLOOM and Falcon add ALiBi to a mask of four dimensions."""
        kind = getattr(self.config, "model_type", None)
        return kind == "bloom" or (kind == "falcon" and bool(getattr(self.config, "alibi", False)))

    @property
    def dims(self) -> int:
        """Falcon adds ALiBi to masks with four dimensions, so its sequences have five."""
        return 5 if self.adds_to_masks and self.config.model_type == "falcon" else 4

    # Dense masks ----------------------------------------------------------------------------------------------------

    def like_sdpa(self) -> Tensor | None:
        """Returns the mask of "sdpa". There None may mean that query 0 is aligned with key 0, which attention cannot
        know: such a mask is dense here."""
        unlike = self.q_length > 1 and self.q_length != self.kv_length
        return self.seen() if unlike else sdpa_mask(**self.given)

    def seen(self) -> Tensor | None:
        """Returns the mask of "sdpa" with separated documents."""
        changed: dict[str, Any] = {"allow_is_causal_skip": False}
        if self.documents is not None:
            function = unpacked(self.mask_function) if self.is_chunked else self.mask_function
            places = self.q_offset, self.kv_offset, self.kv_length
            changed["mask_function"] = within(function, self.documents, *places, self.is_chunked)
            changed["allow_is_bidirectional_skip"] = False
        return sdpa_mask(**{**self.given, **changed})

    def dense(self, seen: Tensor | None) -> Tensor | None:
        """Returns a dense mask with its tiles."""
        if seen is None or seen.dtype != torch.bool:
            return seen
        plan = AttentionPlan(dense=seen, documents=self.documents)
        return (plan if is_tracing(seen) else plan.with_tiles()).mask()

    def of_tokens(self) -> Tensor | None:
        """Returns a dense mask in which padded queries see no key, as in other plans, so that their outputs do not
        depend on other rows of the batch."""
        seen, padding = self.seen(), self.attention_mask
        if seen is None or padding is None or self.is_bidirectional:  # the padding may be an encoder's
            return self.dense(seen)
        tokens = torch.arange(self.q_length, device=padding.device) + self.q_offset
        real = padding[:, tokens.clamp_max(padding.shape[1] - 1)]
        return self.dense(seen & real[:, None, :, None])

    def unread(self) -> Tensor | None:
        """Returns what :func:`mask` does for a family of the table if values cannot be read."""
        # An outermost or_mask lets tokens see later ones; an and_mask separates packed sequences.
        other = self.given.get("use_vmap") or getattr(self.mask_function, "__name__", "") == "or_mask"
        local = self.local_size is not None or self.attention_mask is not None
        if other or self.is_chunked or (self.is_bidirectional and local):
            return self.of_tokens()
        end = self.kv_offset + self.kv_length
        unlike = isinstance(self.q_offset, Tensor) or self.q_offset + self.q_length != end
        if self.attention_mask is None and not (unlike and self.documents is not None):
            return self.skippable().mask(self.dims)
        if self.documents is not None or unlike or self.adds_to_masks:
            return self.of_tokens()
        assert self.attention_mask is not None  # or it is skippable, or there are documents
        return AttentionPlan.of_present(self.attention_mask, self.kv_offset, self.kv_length).mask()

    # What kernels skip ----------------------------------------------------------------------------------------------

    def skippable(self) -> AttentionPlan:
        """Returns a plan with which kernels can skip keys. Raises DenseMask for any other mask."""
        traced, local, padding = self.is_traced, self.local_size, self.attention_mask
        if self.given.get("use_vmap"):
            if traced:
                raise DenseMask(
                    "is combined with a mask function of the model or the caller, into which torch.compile cannot look "
                    "(pass no token_type_ids where there is text alone)"
                )
            local = _window_without_blocks(self.mask_function, self.config)
        if self.is_bidirectional:
            full = padding is None or (not traced and bool(padding.all()))
            if local is None and self.documents is None and full:
                return AttentionPlan()
            raise DenseMask("is bidirectional, with a window or padding")
        if local is not None and local == getattr(self.config, "attention_chunk_size", None):
            raise DenseMask("is chunked")
        device, queries, keys = self.given.get("device", "cpu"), self.q_length, self.kv_length
        if not self.allow_is_causal_skip and queries > 1:
            before, after = neighbours(self.mask_function, self.batch_size, queries, self.q_offset, device)
            one_row = padding is None and queries == keys
            if traced:
                unlike = ((~before).sum() + after.sum()).to(torch.int32)
                if one_row and self.documents is None:
                    return AttentionPlan(begins=unlike[None, None])
                if not one_row:
                    torch._assert_async(unlike == 0, "attention_mask is not causal")
            elif after.any() or not (one_row or before.all()):
                raise DenseMask("is not causal: a block of tokens sees later ones, perhaps")
            elif one_row:
                return AttentionPlan.of_packed(before).separated(self.documents, keys)
        if padding is not None:
            present = padding[:, self.kv_offset : self.kv_offset + keys]
            padding = torch.nn.functional.pad(present, (0, keys - present.shape[1]))
        first = self.q_offset - self.kv_offset
        plan = AttentionPlan.of_padding(padding, self.batch_size, queries, keys, first, device, traced)
        if traced and self.documents is not None and not plan.hides_nothing:
            raise DenseMask("has padding beside documents, and torch.compile cannot read it")
        return plan.separated(self.documents, keys)


def _refuse_unnamed(config: Any) -> None:
    """BLOOM does not choose its attention by name. Its own attention would add one of these masks (None for a causal
    one) to the scores."""
    name = getattr(config, "_attn_implementation_internal", None)  # the name without a patch
    if getattr(config, "model_type", None) == "bloom" and str(name).startswith("foundry"):
        raise ValueError(
            f"attn_implementation={name!r} does not reach the attention of bloom; use the default, and "
            "foundry_kernels.patch(model)"
        )


def _window_without_blocks(mask_function: MaskFunction, config: Any) -> int:
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
