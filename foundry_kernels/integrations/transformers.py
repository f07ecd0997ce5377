"""Attention of Hugging Face transformers. Importing this module registers three names for ``attn_implementation``:

- "foundry": `flash_attention`. Masks that are causal, a sliding window, padding on either side, packed sequences
  (`position_ids` that restart) or the unused end of a static cache are handled without materializing a mask. Any
  other mask raises ValueError with the reason.
- "foundry_or_sdpa": the same, but a call with another mask runs on transformers' own "sdpa"; where there is a soft cap
  or sinks, which that lacks, on the model's own eager attention.
- "foundry_or_eager": the same, but such a call runs on the model's own eager attention in any case. (transformers
  refuses every name with "sdpa" in it for Gemma 2 and GPT-OSS.)

::

    import foundry_kernels.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="foundry")

Under ``torch.compile``, where the values of a mask cannot be read, packed sequences must be given by `cu_seq_lens_q`,
`cu_seq_lens_k`, `max_length_q` and `max_length_k`, as transformers' data collators do; without these, position ids that
restart, and padding between the tokens of a row, fail when the graph runs. "foundry_or_sdpa" materializes the mask
there instead.

Dropout in attention is the kernels', with a seed from torch's generator. Returned attention weights are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from foundry_kernels.integrations.adapters import words
from foundry_kernels.integrations.masks import (
    ADVICE,
    DenseMask,
    blocks_in_window,
    dense_causal,
    neighbours,
    packed_layout,
    padding_layout,
)
from foundry_kernels.ops.flash_attention import flash_attention, flash_attention_varlen

#: Arguments besides those in the signature of `attention`: how a batch is packed, and what is no concern of attention's
#: but comes with the rest (positions that are in the mask or in the queries, what the model returns, its loss).
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
UNCONCERNED = words(
    "position_ids cache_position seq_idx use_cache return_dict output_hidden_states output_router_logits "
    "num_items_in_batch ignore_index shift_labels"
)
#: What transformers' "sdpa" knows of an argument that is set; the window is in its mask.
SDPA = UNCONCERNED | {*PACKING, "scaling", "dropout", "is_causal", "sliding_window"}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function "foundry"; the arguments are those that transformers passes.

    Args:
        query: ``[B, H, T, D]``. key, value: ``[B, Hk, S, D]``, the cached ones included.
        attention_mask: None, where query T - 1 is aligned with key S - 1, or what :func:`mask` gave.
        scaling, softcap: as `scale` and `softcap` of :func:`foundry_kernels.flash_attention`.
        dropout: of the weights, its `dropout_p`; transformers passes 0 in evaluation.
        sliding_window: how many keys a token sees, itself included; None for the module's own.
        s_aux: ``[H]``, the sinks.
        alibi_slopes: ``[H]``, as of :func:`foundry_kernels.flash_attention`.

    Returns:
        ``(out [B, T, H, D], None)``.

    Raises:
        ValueError: a dense mask, `output_attentions`, or an argument of another attention function.
    """
    _refuse(kwargs)
    if attention_mask is not None and attention_mask.dtype != torch.int32:
        raise DenseMask(f"is dense, {tuple(attention_mask.shape)} {attention_mask.dtype}")
    state = getattr(module, "_foundry", None)
    backends = {} if state is None else state.backends
    causal = _is_causal(module) if is_causal is None else is_causal
    if sliding_window is None:  # Qwen2-MoE's own forward does not pass what its masks are made by
        sliding_window = getattr(module, "sliding_window", None)
    options: dict[str, Any] = {
        "causal": causal,
        "scale": scaling,
        "window": None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1),
        "softcap": softcap,
        "sinks": s_aux,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout,
    }
    layout = _layout(attention_mask, kwargs)
    if layout is None:
        out = flash_attention(query, key, value, **options, backend=backends.get("flash_attention", "auto"))
        return out.transpose(1, 2), None
    batch, heads, queries, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    max_seqlen_q, max_seqlen_k = kwargs.get("max_length_q") or queries, kwargs.get("max_length_k") or key.shape[2]
    backend = backends.get("flash_attention_varlen", "auto")
    out = flash_attention_varlen(q, k, v, *layout, max_seqlen_q, max_seqlen_k, **options, backend=backend)
    return out.view(batch, queries, heads, value.shape[-1]), None


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions must be False, no weights are ever formed; use attn_implementation='eager', and patch "
            "with ops that do not name flash_attention"
        )
    for name in kwargs.keys() - UNCONCERNED - {"output_attentions", *PACKING}:
        if kwargs[name] is not None and kwargs[name] is not False:
            raise ValueError(f"{name} must be None, attention here does not know it; {ADVICE}")


def as_dense(mask: Tensor | None, batch: int, queries: int, keys: int, device: Any) -> Tensor:
    """What :func:`mask` gave as a mask ``[B or 1, 1, T, S]``, True where a query sees a key; a dense one as it is."""
    if mask is not None and mask.dtype != torch.int32:
        return mask
    layout = _layout(mask, {})
    if layout is not None:
        return dense_causal(layout, batch, queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]


def _is_causal(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True) and getattr(config, "is_causal", True))


def _layout(mask: Tensor | None, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Returns the running totals of the sequences' lengths, of queries and of keys; None for one sequence a row."""
    if mask is not None and mask.dim() == 5:
        mask = mask[0]
    if mask is not None and mask.shape[2] == 2:
        return mask[0, 0, 0], mask[0, 0, 1]
    if kwargs.get("cu_seq_lens_q") is not None:
        return kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    if mask is not None:
        torch._assert_async((mask == 0).all(), "position_ids restart: torch.compile must be given cu_seq_lens_q")
    return None


def attention_or_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function "foundry_or_sdpa": as :func:`attention`, but a call with a dense mask runs on SDPA.

    With an argument that SDPA does not know, such as a soft cap or sinks, it runs on the eager attention of the model
    that `module` is part of.

    Raises:
        ValueError: as :func:`attention`; a dense mask with a soft cap or sinks, and no eager attention to be found.
    """
    if attention_mask is None or attention_mask.dtype == torch.int32:
        return attention(module, query, key, value, attention_mask, **kwargs)
    _refuse_weights(kwargs)
    if any(value is not None and value is not False and name not in SDPA for name, value in kwargs.items()):
        return attention_or_eager(module, query, key, value, attention_mask, **kwargs)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def attention_or_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function "foundry_or_eager": as :func:`attention`, but a call with a dense mask runs on the eager
    attention of the model that `module` is part of.

    Raises:
        ValueError: as :func:`attention`; a dense mask, and no eager attention to be found.
    """
    if attention_mask is None or attention_mask.dtype == torch.int32:
        return attention(module, query, key, value, attention_mask, **kwargs)
    _refuse_weights(kwargs)
    eager = _own_eager(module)
    if eager is None:
        lacking = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
        refused = f"{lacking[0]} must be None where attention_mask is dense" if lacking else "attention_mask is dense"
        raise ValueError(
            f"{refused}: there is no eager_attention_forward beside {type(module).__name__}; use "
            "attn_implementation='eager'"
        )
    if attention_mask.dtype == torch.bool:  # eager attention adds its mask
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
    return eager(module, query, key, value, attention_mask, **kwargs)[0], None


def _refuse_weights(kwargs: dict[str, Any]) -> None:
    _refuse({"output_attentions": kwargs.get("output_attentions")})


def _own_eager(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Returns the function that `module` takes for "eager": each modeling module of transformers has its own, which
    knows the soft cap or the sinks of its family."""
    for cls in type(module).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None and "forward" in vars(cls):
            return found
    return None


def mask(
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
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of "foundry"; the arguments are those that transformers passes.

    Returns:
        None for a causal mask or a window with the last query aligned with the last key, else a layout (see
        `masks.py`). Where values cannot be read, ``[1, 1, 1, 1]``: the number of tokens at which packed sequences
        begin, not counting the first, to be checked to be 0.

    Raises:
        DenseMask: any other mask. ValueError: the model is a BLOOM that is not patched.
    """
    _refuse_unnamed(config)
    traced = is_tracing(attention_mask) or is_tracing(q_offset)
    if use_vmap:
        if traced:
            raise DenseMask(
                "is combined with a mask function of the model or the caller, into which torch.compile cannot look "
                "(pass no token_type_ids where there is text alone)"
            )
        local_size = _window_without_blocks(mask_function, config)
    if allow_is_bidirectional_skip or mask_function is bidirectional_mask_function:
        if local_size is None and (attention_mask is None or (not traced and bool(attention_mask.all()))):
            return None
        raise DenseMask("is bidirectional, with a window or padding")
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        raise DenseMask("is chunked")
    if not allow_is_causal_skip and q_length > 1:
        before, after = neighbours(mask_function, batch_size, q_length, q_offset, device)
        one_row = attention_mask is None and q_length == kv_length
        if traced:
            unlike = ((~before).sum() + after.sum()).to(torch.int32)
            if one_row:
                return _hidden(unlike[None, None, None, None], config)
            torch._assert_async(unlike == 0, "attention_mask is not causal")
        elif after.any() or not (one_row or before.all()):
            raise DenseMask("is not causal: a block of tokens sees later ones, perhaps")
        elif one_row:
            return _hidden(packed_layout(before), config)
    if attention_mask is not None:
        present = attention_mask[:, kv_offset : kv_offset + kv_length]
        attention_mask = torch.nn.functional.pad(present, (0, kv_length - present.shape[1]))
    layout = padding_layout(attention_mask, batch_size, q_length, kv_length, q_offset - kv_offset, device, traced)
    return _hidden(layout, config)


def _refuse_unnamed(config: Any) -> None:
    """BLOOM chooses no attention by name. Its own would take one of our masks, None for a causal one, for what it adds
    to the scores."""
    name = getattr(config, "_attn_implementation_internal", None)  # not what a patch shows to its layers
    if getattr(config, "model_type", None) == "bloom" and str(name).startswith("foundry"):
        raise ValueError(
            f"attn_implementation={name!r} does not reach the attention of bloom; use the default, and "
            "foundry_kernels.patch(model)"
        )


def _hidden(layout: Tensor | None, config: Any) -> Tensor | None:
    """Falcon adds ALiBi to what it takes for a mask, which has four dimensions: there a layout has five."""
    if layout is not None and getattr(config, "model_type", None) == "falcon" and getattr(config, "alibi", False):
        return layout[None]
    return layout


def _window_without_blocks(mask_function: Any, config: Any) -> int:
    """Returns the window of a mask that Gemma 3 makes of `token_type_ids`, where these say that there is no image.

    Raises:
        DenseMask: there is one, or the mask is another.
    """
    found = blocks_in_window(mask_function)
    if found is None or found[1] != getattr(config, "sliding_window", None):
        raise DenseMask("is combined with a mask function of the model or the caller")
    blocks, window = found
    if (blocks >= 0).any():
        raise DenseMask("is not causal: the tokens of an image see each other")
    return window


def mask_or_sdpa(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask function of "foundry_or_sdpa" and "foundry_or_eager": as :func:`mask`, but where that raises, the dense
    mask of "sdpa"."""
    _refuse_unnamed(kwargs.get("config"))
    unread = is_tracing(kwargs.get("attention_mask")) or is_tracing(kwargs.get("q_offset"))
    if not (unread and (kwargs.get("attention_mask") is not None or not kwargs.get("allow_is_causal_skip", True))):
        try:
            return mask(*args, **kwargs)
        except DenseMask:
            pass
    return sdpa_mask(*args, **kwargs)


for _name, _attention, _mask in (
    ("foundry", attention, mask),
    ("foundry_or_sdpa", attention_or_sdpa, mask_or_sdpa),
    ("foundry_or_eager", attention_or_eager, mask_or_sdpa),
):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _mask)
