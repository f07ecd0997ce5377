"""`patch`: makes an existing model run on the operations here, and undoes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from foundry_kernels.core.checks import check_bool
from foundry_kernels.integrations.adapters.attention import Attention
from foundry_kernels.integrations.adapters.base import PATCHABLE, Adapter, Gated, Norm, State, with_companions
from foundry_kernels.integrations.adapters.causal_lm import LOSS_STAYS, LOSSES, NO_LOGITS, HeadOwner, LanguageModel
from foundry_kernels.integrations.adapters.linear_attention import LinearAttention
from foundry_kernels.integrations.adapters.own_attention import OwnAttention
from foundry_kernels.integrations.adapters.packed_model import PackedModel
from foundry_kernels.integrations.adapters.rotating import Rotating
from foundry_kernels.integrations.adapters.table import adapter_for, has_row
from foundry_kernels.integrations.modules import holders_of, is_model, models_around
from foundry_kernels.integrations.patching import swap, tuner_layers
from foundry_kernels.integrations.patching.arguments import Arguments
from foundry_kernels.integrations.patching.configs import Configs
from foundry_kernels.integrations.patching.handle import PatchHandle, handle_of, keep
from foundry_kernels.integrations.patching.mixing import gets_masks, lines, mixers, names_in
from foundry_kernels.integrations.patching.report import NOT_NAMED, Entry, Findings
from foundry_kernels.integrations.recognise.tables import Tables
from foundry_kernels.integrations.release import check_release_of
from foundry_kernels.nn import Attention as OurAttention
from foundry_kernels.nn import Experts as OurExperts
from foundry_kernels.nn import LayerNorm, MultiheadAttention, RMSNorm, RotaryEmbedding, SwiGLU
from foundry_kernels.nn._backend import Backend, plan

OURS = (RMSNorm, LayerNorm, RotaryEmbedding, SwiGLU, MultiheadAttention, OurExperts, OurAttention)


def _is_ours(module: nn.Module) -> bool:
    """Whether it is a module of this package. Transformer is not imported for that: a model of it implies that it
    is."""
    models = sys.modules.get("foundry_kernels.models.transformer")
    return isinstance(module, OURS) or (models is not None and isinstance(module, models.Transformer))


#: What `dense_masks` may be, and the attention of transformers that it means where a model may have SDPA, and else.
DENSE_MASKS = {
    "kernels": ("foundry", "foundry"),
    "refuse": ("foundry_or_error", "foundry_or_error"),
    "sdpa": ("foundry_or_sdpa", "foundry_or_eager"),
}


def patch(
    model: nn.Module,
    *,
    backend: Backend = "auto",
    ops: Iterable[str] | None = None,
    dense_masks: str = "kernels",
    return_logits: bool = False,
    recognise: bool = True,
) -> PatchHandle:
    """Replaces the supported norms, gated activations, rotations, attention, linear attention and loss of `model` in
    place.

    A layer is known by what its code computes (see `recognise`). So models of transformers 5.4 and newer, of remote
    code and of one's own are supported; ``torch.nn.MultiheadAttention``, torch.nn's transformer around it, its norms
    and this package's own modules too. Every module stays the same object with its parameters, buffers, names and
    hooks, and its class keeps its name; the state dict, optimizers and wrappers (PEFT, FSDP) are not affected. A
    patched model can be deep-copied and pickled. Other models in the process are not affected: transformers' files only
    get private names (``_foundry_...``) beside their rotation functions. Packed documents do not see each other in a
    patched model of transformers, or the call raises ValueError; `report` names layers that mix them. A LayerNorm's
    result has its input's dtype, where PyTorch's is float32 under autocast on a GPU.

    A class that computes its own softmax keeps its forward, whose scores are not computed where `flash_attention` can
    take their place. Other attention goes through the model's config: it is set to "foundry" there (see
    :mod:`foundry_kernels.integrations.attention.functions`). Because models may share a config object, the model gets a
    copy of its own, which stays after `undo` with the attention that it had. A config with an explicit
    ``attn_implementation="eager"`` keeps it, which the report says, unless `ops` names flash_attention. (Gemma 2 and
    GPT-OSS have no other default than "eager", so that an explicit one cannot be told from it and is replaced.)

    Args:
        model: any module; those inside of it are found wherever they are. Of a model of transformers, the whole: masks
            are made at its top, and a layer that is patched by itself refuses the dense ones that it then gets.
        backend: a backend's name, or a mapping of operations to names (as for `foundry_kernels.nn`).
        ops: the operations to use, of rms_norm, swiglu, geglu, rope, qk_norm_rope, flash_attention, cross_entropy,
            linear_cross_entropy, layer_norm, grouped_mm, bias_gelu, gated_delta_rule, ssd, glu, reglu,
            bias_silu, bias_relu and lora_linear (PEFT's LoRA); None for all but an attention that is "eager" by choice.
            qk_norm_rope is the norm of queries and keys and the rotation in one; without it the two are done one after
            the other. linear_cross_entropy is the loss of a call with labels in training mode, cross_entropy that of
            any other. gated_delta_rule and ssd (Mamba-2) are linear attention with its convolution.
        dense_masks: what happens where a mask is dense, as one that is not causal, a window or padding is: "kernels"
            has the kernels read it, "refuse" raises ValueError with the reason in the forward pass, "sdpa" runs that
            call on torch's scaled_dot_product_attention, or on the model's own eager attention where there is a soft
            cap or sinks, which SDPA lacks. A class that computes its own softmax reads its masks in any case.
        return_logits: whether a call of a language model with labels also returns the logits in training
            mode, where only its loss needs them. They are the largest tensor of a training step. By default they are
            None there, and never exist as a whole (:func:`foundry_kernels.linear_cross_entropy`); without labels or in
            eval mode they are returned as usual. A loss over no labels at all is 0, not NaN.
        recognise: whether a class that has no row in the package's table may be recognised. The code that its forward
            reaches must use nothing beyond what norms and MLPs use, and a small copy of the module with random weights
            must compute what the package's operation does, with gradients, in every dtype. The model itself is not
            run; the answer is kept in the user's cache.

    Returns:
        A handle: `report()` tells what was replaced, what was left and why; `undo()` undoes it, as
        :func:`foundry_kernels.unpatch` does without it. A model that is patched already by the same arguments stays as
        it is, modules that it got since included, and its handle is returned. Layers that PEFT adds to a patched model
        are patched when they are added.

    Raises:
        TypeError: `model` is no module, `ops` is a string or no iterable of strings, a flag is no bool.
        ValueError: an unknown name in `ops`, `backend` or `dense_masks`; the model is patched already, by other
            arguments, which the message names, or in part.
        ImportError: transformers is older than 5.4.
        BackendUnavailable: a mapping names a backend of which the operation has no kernel.

    A model without supported modules is not an error; the report says so. After an error the model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    asked = _wanted(ops)
    wanted = tuple(op for op in asked if op != "linear_cross_entropy" or not return_logits)
    if dense_masks not in DENSE_MASKS:
        raise ValueError(f"dense_masks must be one of {', '.join(DENSE_MASKS)}; got {dense_masks!r}")
    check_bool("return_logits", return_logits)
    check_bool("recognise", recognise)
    check_release_of(model)
    arguments = Arguments(
        dict(backend) if isinstance(backend, Mapping) else backend,
        None if ops is None else tuple(op for op in PATCHABLE if op in asked),
        dense_masks,
        return_logits,
        recognise,
    )
    if (handle := handle_of(model, arguments)) is not None:
        return handle
    everything = list(model.named_modules())
    taken = [name for name, module in everything if swap.is_patched(module)]
    if taken:
        raise ValueError(f"model is patched already ({taken[0] or 'itself'} is); undo that first")
    named = [(name, module) for name, module in everything if not tuner_layers.is_one(module)]
    tables = Tables(model)
    adapters = {m: None if _is_ours(m) else adapter_for(m, recognise) for _, m in named}
    adapters = {m: a.settled(m, tables) if isinstance(a, Rotating) else a for m, a in adapters.items()}
    fused = _fused_norms(adapters) if "qk_norm_rope" in wanted else set()
    found = [(module, *_line(name, module, adapters[module], wanted, fused, ops is not None)) for name, module in named]
    found = [(module, adapter, _known(module, adapter, entry)) for module, adapter, entry in found]
    entries = tuple([entry for _, _, entry in found if entry is not None])
    changes = [(module, adapter, entry) for module, adapter, entry in found if entry is not None and entry.ops]
    used = {op for _, _, entry in changes for op in entry.ops}
    backends = plan(backend, with_companions([op for op in PATCHABLE if op in used]))
    states = [_state(module, adapter, entry, backends) for module, adapter, entry in changes]
    for state in states:
        state.dense_masks = dense_masks
    attending = [
        (module, adapter, state)
        for (module, adapter, entry), state in zip(changes, states, strict=True)
        if isinstance(adapter, Attention) and "flash_attention" in entry.ops
    ]
    dense = {adapter.runs_dense_masks(module) for module, adapter, _ in attending} if dense_masks == "sdpa" else ()
    linear = [module for module, adapter, _ in changes if isinstance(adapter, LinearAttention)]
    # Without attention only linear attention reads documents.
    attends = "flash_attention" in wanted
    around = [m for _, m in named if is_model(m)] if attends else models_around(model, linear)
    found_mixing, untold = mixers(model, {module for module, _, _ in attending}, set(linear)) if attends else ([], [])
    known = {module for module, _, _ in changes}
    heads = _heads_of_others(changes)
    more: dict[nn.Module, Adapter] = {module: HeadOwner(head) for module, head in heads.items()}
    for module in around:
        if "forward" not in vars(module):
            more[module] = PackedModel(heads.get(module, ""))
    for module, other in more.items():
        if module not in known:
            changes.append((module, other, Entry("", "")))
            states.append(State({}))
    holders = holders_of(linear, around)
    for (module, adapter, _), state in zip(changes, states, strict=True):
        if isinstance(adapter, (LanguageModel, PackedModel)):
            state.mixing, state.hands_on = names_in(module, found_mixing), module in holders
            state.masked = names_in(module, [m for m in found_mixing if gets_masks(m)])
    mixing = lines(found_mixing, untold)
    findings = Findings(entries, backends, " and ".join(sorted(dense)), mixing)
    done: list[nn.Module] = []
    configs = Configs(model)
    try:
        if attending:
            configs.switch(attending, DENSE_MASKS[dense_masks])
        for (module, adapter, _), state in zip(changes, states, strict=True):
            swap.apply(module, adapter, state)
            done.append(module)
        for _, module in everything:
            if tuner_layers.patch(module, arguments):
                done.append(module)
    except BaseException:
        for module in done:
            swap.revert(module)
        tuner_layers.forget(model)
        configs.restore()
        raise
    return keep(model, done, findings, arguments)


def _wanted(ops: Iterable[str] | None) -> tuple[str, ...]:
    if ops is None:
        return PATCHABLE
    if isinstance(ops, str) or not isinstance(ops, Iterable):
        raise TypeError(f"ops must be a list of names or None; got {ops!r}")
    wanted = tuple(ops)
    for op in wanted:
        if op not in PATCHABLE:
            raise ValueError(f"ops names an unknown operation {op!r}; there are {', '.join(PATCHABLE)}")
    return wanted


def _fused_norms(adapters: Mapping[nn.Module, Adapter | str | None]) -> set[nn.Module]:
    """Returns the norms of queries and keys that are done together with the rotation."""
    norms: set[nn.Module] = set()
    for module, adapter in adapters.items():
        if isinstance(adapter, Attention) and "qk_norm_rope" in adapter.ops(module):
            both = [child for name, child in module.named_children() if name in ("q_norm", "k_norm")]
            norms |= set(both) if all(isinstance(adapters.get(norm), Norm) for norm in both) else set()
    return norms


def _line(
    name: str,
    module: nn.Module,
    found: Adapter | str | None,
    wanted: tuple[str, ...],
    fused: set[nn.Module],
    asked: bool,
) -> tuple[Adapter | None, Entry | None]:
    """Returns the adapter of `module`, None for one of ours; and the line of the report, None where there is none.

    found: what `adapter_for` says. asked: whether the caller named the operations.
    """
    cls = type(module).__name__
    ours: Any = module if _is_ours(module) else None
    if isinstance(found, str):
        stays = not found.startswith(LOSS_STAYS) or any(op in wanted for op in LOSSES)
        return None, Entry(name, cls, reason=found) if stays else None
    if ours is not None:
        ops: tuple[str, ...] = tuple(op for op in ours.backends if op in PATCHABLE)
    elif found is None:
        return None, None
    else:
        ops = ("qk_norm_rope",) if module in fused else found.ops(module)
        if "qk_norm_rope" in wanted and isinstance(found, Attention) and "qk_norm_rope" in ops:
            norm = getattr(module, "q_norm", None)  # norms that stay are called, and the rotation is then by itself
            ops = ops if norm in fused else ("rope", *ops[1:])
    chosen = tuple(op for op in ops if op in wanted)
    if isinstance(found, Attention) and "qk_norm_rope" in ops and "qk_norm_rope" not in wanted and "rope" in wanted:
        chosen = ("rope", *chosen)
    if isinstance(found, (Attention, OwnAttention)) and not asked and (reason := found.why_not_attend(module)):
        rest = () if getattr(found, "whole", False) else tuple(op for op in chosen if op != "flash_attention")
        return found, Entry(name, cls, rest, reason)
    if isinstance(found, Attention) and found.whole and "flash_attention" not in chosen:
        chosen = ()
    if not chosen and isinstance(found, LanguageModel) and not asked:
        return None, Entry(name, cls, reason=f"{LOSS_STAYS}return_logits=True")
    if not chosen:
        return None, Entry(name, cls, reason=f"{NOT_NAMED} {' or '.join(ops)}")
    if isinstance(found, LanguageModel) and "linear_cross_entropy" in chosen:
        reason = found.why_not_without_logits(module)
        chosen = chosen if reason is None else tuple(op for op in chosen if op != "linear_cross_entropy")
        return found, Entry(name, cls, chosen, reason or NO_LOGITS)
    if isinstance(found, Rotating) and "rope" in wanted:
        return found, Entry(name, cls, chosen, found.stays or None)
    return found, Entry(name, cls, chosen)


def _known(module: nn.Module, adapter: Adapter | None, entry: Entry | None) -> Entry | None:
    """Returns the line of the report with what a module that is replaced was known by."""
    if entry is None or not entry.ops:
        return entry
    return replace(entry, by="own" if adapter is None else "row" if has_row(module, adapter) else "recognised")


def _heads_of_others(changes: list[tuple[nn.Module, Adapter | None, Entry]]) -> dict[nn.Module, str]:
    """Returns the modules that hold the head of a model around them, and its name there."""
    found: dict[nn.Module, str] = {}
    for module, adapter, entry in changes:
        if isinstance(adapter, LanguageModel) and LOSSES[0] in entry.ops and "." in adapter.head:
            owner, _, name = adapter.head.rpartition(".")
            found[module.get_submodule(owner)] = name
    return found


def _state(module: Any, adapter: Adapter | None, entry: Entry, backends: dict[str, str]) -> State:
    mine = {op: backends[op] for op in with_companions(entry.ops)}
    if adapter is None:
        return State({**module.backends, **{op: b for op, b in mine.items() if op in module.backends}})
    if isinstance(adapter, Norm) and "qk_norm_rope" in entry.ops:
        mine = {op: b for op, b in backends.items() if op == "rms_norm"}  # where it is called by itself after all
    gelu = adapter.activation(module) if isinstance(adapter, Gated) else None
    return State(mine, gelu=gelu[1] if gelu else "none")
