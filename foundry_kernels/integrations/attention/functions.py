"""Attention of Hugging Face transformers. Four names for ``attn_implementation``, which are registered where
`foundry_kernels` and transformers are both imported:

- "foundry": `flash_attention` with any mask. Masks that are causal, a sliding window, padding on either side, packed
  sequences (`position_ids` that restart) or the unused end of a static cache are handled without materializing a mask;
  padding between tokens is a mask of the keys alone; any other mask is read by the kernels as it is.
- "foundry_or_error": the same, but a mask that would have to be materialized raises ValueError with the reason.
- "foundry_or_sdpa": the same, but a call with such a mask runs on transformers' own "sdpa"; where there is a soft cap
  or sinks, which that lacks, on the model's own eager attention.
- "foundry_or_eager": the same, but such a call runs on the model's own eager attention in any case. (transformers
  refuses every name with "sdpa" in it for Gemma 2 and GPT-OSS.)

::

    import foundry_kernels
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="foundry")

`patch` gives "foundry_as_eager" to families that run on eager attention alone: their masks are those of "eager".

Under ``torch.compile``, where the values of a mask cannot be read, packed sequences must be given by `cu_seq_lens_q`,
`cu_seq_lens_k`, `max_length_q` and `max_length_k`, as transformers' data collators do; without these, position ids that
restart fail when the graph runs. Padding is a mask of the keys there.

Dropout in attention is the kernels', with a seed from torch's generator. ``output_attentions=True`` has the weights of
each layer computed beside its output (`foundry_kernels.ops.flash_attention.weights`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from foundry_kernels.integrations.release import check_release

check_release()  # before an import fails that says less

# ruff: noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foundry_kernels.integrations.attention.call import documents_of_layer
from foundry_kernels.integrations.attention.documents import longest, refuse_other_names
from foundry_kernels.integrations.attention.mask_functions import (
    is_passed_on,
    mask,
    mask_as_eager,
    mask_or_error,
    mask_or_sdpa,
)
from foundry_kernels.integrations.attention.plan import AttentionPlan, DenseMask, seen_in
from foundry_kernels.integrations.modules import makes_masks
from foundry_kernels.ops.flash_attention import flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.weights import attention_weights, through_weights

try:  # what a call of a model collects from its layers
    from transformers.utils.output_capturing import _active_collector as collector
except ImportError:  # a transformers whose models tell their layers
    collector = None  # type: ignore[assignment]

#: What other attention functions of transformers take and this one does not: paged caches, blocks, a mask of heads.
#: Whatever else comes along is no attention's (what the model returns, its loss) and is ignored, as "sdpa" ignores it.
OF_OTHERS = frozenset(["cache", "block_table", "block_indices", "k_cache", "v_cache", "head_mask", "sinks", "indices"])
#: What transformers' "sdpa" does not know.
LACKING_IN_SDPA = frozenset(("softcap", "s_aux", "alibi_slopes"))


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
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function "foundry"; the arguments are those that transformers passes.

    Args:
        query: ``[B, H, T, D]``. key, value: ``[B, Hk, S, D]``, the cached ones included.
        attention_mask: None, where query T - 1 is aligned with key S - 1 (query 0 with key 0, as "sdpa" has it, in a
            family without a row of the table that does not have its masks made by transformers), or what :func:`mask`
            gave, or any mask that broadcasts to ``[B, H, T, S]``: bool, or floating and then added. Such a mask says
            all that a query sees.
        scaling, softcap: as `scale` and `softcap` of :func:`foundry_kernels.flash_attention`.
        dropout: of the weights, its `dropout_p`; transformers passes 0 in evaluation.
        sliding_window: how many keys a token sees, itself included; None for the module's own.
        s_aux: ``[H]``, the sinks.
        alibi_slopes: ``[H]``, as of :func:`foundry_kernels.flash_attention`.
        position_bias: ``[1 or B, H, T, S]``, added to the scores; it gets a gradient.

    Returns:
        ``(out [B, T, H, D], weights)``; the weights ``[B, H, T, S]`` are None unless the call of the model asks for
        `output_attentions`. With dropout, they are those that the values were summed by. Where gradients are recorded,
        that of the output goes through them, as in eager attention, so that they may have one.

    Raises:
        ValueError: an argument of another attention function (`OF_OTHERS`); what is said of packed documents
            contradicts itself or the batch. TypeError: the mask is neither bool nor floating.
    """
    _refuse(kwargs)
    plan = AttentionPlan.of(attention_mask)
    if query.shape[0] == 1 != key.shape[0]:  # learned queries, the same for the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    causal, window = _pattern(module, is_causal, sliding_window)
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout,
    }
    wanted = wants_weights(module, kwargs)
    if plan.totals is not None or plan.keys is not None:
        causal = True  # they are of causal masks, whatever the module says
    if plan.documents is None:
        plan = plan.separated(documents_of_layer(module, plan, kwargs, batch, queries, keys), keys, causal, window)
    plan.check_begins()
    sides = window, 0 if causal else window
    within = {"causal": causal, "window": None if window is None else sides}
    if plan.totals is not None and not wanted and position_bias is None:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        most_q, most_k = longest(kwargs, "max_length_q", queries), longest(kwargs, "max_length_k", keys)
        options |= {**within, "backend": _backend(module, "flash_attention_varlen")}
        out = flash_attention_varlen(q, k, v, plan.totals[0], plan.totals[1], most_q, most_k, **options)
        return out.view(batch, queries, *out.shape[1:]), None
    if plan.totals is not None:
        plan = AttentionPlan(dense=seen_in(plan.totals, batch, queries, keys, *sides))
    elif not plan.is_dense and causal and queries != keys and not is_passed_on(getattr(module, "config", None)):
        # A model whose masks say so has cut its first queries off.
        options["align"] = "bottom_right" if queries == 1 or makes_masks(type(module)) else "top_left"
    if plan.dense is None:
        options |= within
    options |= {"attn_mask": plan.combined(position_bias), "backend": _backend(module, "flash_attention")}
    weights = None
    if not wanted:
        out = flash_attention(query, key, value, **options)
    else:
        if dropout:
            options["dropout_seed"] = torch.randint(2**63 - 1, (), device=query.device)
        out, lse = flash_attention(query, key, value, **options, return_lse=True)
        del options["backend"]
        weights = attention_weights(query, key, lse, **options).to(query.dtype)
        if weights.requires_grad:
            out = through_weights(out, weights, value)
    if plan.keys is not None:  # a query that is padding gives 0
        hidden = ~plan.keys[:, :, 0, -queries:, None]
        out = out.masked_fill(hidden, 0.0)
        weights = None if weights is None else weights.masked_fill(hidden, 0.0)
    return out.transpose(1, 2).contiguous(), weights


def _backend(module: nn.Module, op: str) -> str:
    state = getattr(module, "_foundry", None)
    return "auto" if state is None else str(state.backends.get(op, "auto"))


def _refuse(kwargs: dict[str, Any]) -> None:
    """Raises ValueError for arguments of other attention functions, and for lengths by names of another package."""
    refuse_other_names(kwargs)
    for name, value in kwargs.items():
        if name in OF_OTHERS and value is not None and value is not False:
            raise ValueError(f"{name} must be None, attention here does not know it; {OTHERS}")


OTHERS = "use attn_implementation='sdpa' or 'eager', and patch with ops that do not name flash_attention"


def _pattern(module: nn.Module, is_causal: bool | None, sliding_window: int | None) -> tuple[bool, int | None]:
    """Returns whether attention is causal, and how many keys before itself a token sees, where no mask says so."""
    config = getattr(module, "config", None)
    causal = bool(getattr(module, "is_causal", True) and getattr(config, "is_causal", True))
    if is_causal is not None:
        causal = is_causal
    if not is_passed_on(config):  # whose windows are in their masks
        return causal, None
    if sliding_window is None:  # Qwen2-MoE's own forward does not pass what its masks are made by
        sliding_window = getattr(module, "sliding_window", None)
    return causal, None if sliding_window is None else sliding_window - 1


def wants_weights(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Returns whether the model returns this layer's weights: it says so to its layers, or collects what they give."""
    if kwargs.get("output_attentions"):
        return True
    if collector is None:
        return False
    if is_dynamo_compiling() and not collector.compiling:  # the compiler cannot look into the ContextVar
        return False
    collected: Any = collector.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


def attention_as_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function "foundry_as_eager": as :func:`attention`, for models whose masks are those of eager
    attention: added to the scores, and None where every key is seen.

    Raises:
        ValueError: as :func:`attention`.
    """
    return attention(module, query, key, value, attention_mask, **(kwargs | {"is_causal": False}))


def attention_or_error(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function "foundry_or_error": as :func:`attention`, but a dense mask is refused.

    Raises:
        DenseMask: there is one. ValueError: as :func:`attention`.
    """
    if attention_mask is not None and AttentionPlan.of(attention_mask).is_dense:
        raise DenseMask(f"is dense, {tuple(attention_mask.shape)} {attention_mask.dtype}")
    return attention(module, query, key, value, attention_mask, **kwargs)


def attention_or_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function "foundry_or_sdpa": as :func:`attention`, but a call with a dense mask runs on SDPA, unless
    weights are asked for, which that does not have.

    With an argument that SDPA does not know, such as a soft cap or sinks, it runs on the eager attention of the model
    that `module` is part of.

    Raises:
        ValueError: as :func:`attention`; a dense mask with a soft cap or sinks, and no eager attention to be found.
    """
    if attention_mask is None or not AttentionPlan.of(attention_mask).is_dense:
        return attention(module, query, key, value, attention_mask, **kwargs)
    attention_mask = _dense_apart(module, query, key, attention_mask, kwargs)
    if any(kwargs.get(name) is not None for name in LACKING_IN_SDPA):
        return attention_or_eager(module, query, key, value, attention_mask, **kwargs)
    if wants_weights(module, kwargs):
        return attention(module, query, key, value, attention_mask, **kwargs)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def _dense_apart(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Returns a dense mask that keeps documents apart."""
    _refuse(kwargs)
    plan = AttentionPlan.of(mask)
    batch, queries, keys = key.shape[0], query.shape[2], key.shape[2]
    if plan.documents is not None or (told := documents_of_layer(module, plan, kwargs, batch, queries, keys)) is None:
        return mask
    seen = plan.separated(told, keys).mask()
    assert seen is not None
    return seen


def attention_or_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function "foundry_or_eager": as :func:`attention`, but a call with a dense mask runs on the eager
    attention of the model that `module` is part of.

    Raises:
        ValueError: as :func:`attention`; a dense mask, and no eager attention to be found.
    """
    if attention_mask is None or not AttentionPlan.of(attention_mask).is_dense:
        return attention(module, query, key, value, attention_mask, **kwargs)
    attention_mask = _dense_apart(module, query, key, attention_mask, kwargs)
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
    out, weights = eager(module, query, key, value, attention_mask, **kwargs)
    return out, weights if wants_weights(module, kwargs) else None


def _own_eager(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Returns the function that `module` takes for "eager": each modeling module of transformers has its own, which
    knows the soft cap or the sinks of its family."""
    for cls in type(module).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None and "forward" in vars(cls):
            return found
    return None


for _name, _attention, _mask in (
    ("foundry", attention, mask),
    ("foundry_as_eager", attention_as_eager, mask_as_eager),
    ("foundry_or_error", attention_or_error, mask_or_error),
    ("foundry_or_sdpa", attention_or_sdpa, mask_or_sdpa),
    ("foundry_or_eager", attention_or_eager, mask_or_sdpa),
):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _mask)
