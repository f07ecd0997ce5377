"""Adapters of linear attention by the gated delta rule: Qwen3-Next, Qwen3.5 and OLMo Hybrid.

A layer computes what transformers' own computes, with the same cache. In addition it keeps packed documents apart. The
model gives them to its layers as an argument (`packed_model.py`), which a recomputation for the gradient repeats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.integrations.adapters.base import Adapter, at, layers_of, split_names
from foundry_kernels.integrations.attention.call import current
from foundry_kernels.integrations.attention.documents import LENGTHS, ONE_A_ROW, Documents, from_lengths, once
from foundry_kernels.nn._delta import (
    Gates,
    continues_in_place,
    delta_rule_of,
    delta_rule_step_of,
    gated,
    taps_of,
)
from foundry_kernels.nn._linear_layers import Layers
from foundry_kernels.ops.gated_rms_norm import gated_rms_norm
from foundry_kernels.ops.rms_norm import rms_norm
from foundry_kernels.ops.short_conv1d import ACTIVATIONS, short_conv1d, short_conv1d_step
from foundry_kernels.ops.swiglu import glu


@dataclass(frozen=True)
class GatedNorm(Adapter):
    """``rms_norm(x) * weight * act(gate)``, rounded before the weight multiplies, unless `once`, and at the end.

    eps: the attribute that has it, or the number. weight: its name. act: "swiglu", whose activation is SiLU, or "glu",
    whose is the sigmoid.
    """

    eps: str | float | None = "variance_epsilon"
    weight: str = "weight"
    once: bool = False
    act: str = "swiglu"

    arguments = split_names("self hidden_states gate")

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("rms_norm", self.act)

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _gated_norm_forward}


def _gated_norm_forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    row, backends = self._foundry_row, self._foundry.backends
    if "rms_norm" not in backends:
        result: Tensor = self._foundry_original.forward(self, hidden_states, gate)
        return result
    x, weight, dtype = hidden_states, getattr(self, row.weight), hidden_states.dtype
    if row.once:
        x, weight = x.to(wide_dtype(dtype)), weight.to(wide_dtype(dtype))
    eps = at(self, row.eps) if isinstance(row.eps, str) else row.eps
    backend = backends["rms_norm"]
    if backends.get(row.act) == backend and gate.dtype == dtype and not (backend == "native" and x.is_cuda):
        act = "silu" if row.act == "swiglu" else "sigmoid"
        weight, once = getattr(self, row.weight), row.once
        return gated_rms_norm(
            hidden_states, gate, weight, eps, activation=act, round_before_weight=not once, backend=backend
        )
    y = rms_norm(x, weight, eps, round_before_weight=not row.once, backend=backends["rms_norm"])
    if row.act == "swiglu" and "swiglu" in backends:
        return gated(y, gate, dtype, backends["swiglu"])
    wide = torch.promote_types(y.dtype, wide_dtype(gate.dtype))
    if row.act == "glu" and "glu" in backends:
        return glu(gate.to(wide), y.to(wide), backend=backends["glu"]).to(dtype)
    return (y * (silu if row.act == "swiglu" else torch.sigmoid)(gate.to(wide))).to(dtype)


Project = Callable[[Any, Layers, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


def separate(self: Any, layers: Layers, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Qwen3.5's projections: queries, keys and values in one, and one each for the gate, the step and the decay."""
    qkv, z, b, a = layers.each(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
    return qkv, z, b, a


def by_key_head(self: Any, layers: Layers, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Qwen3-Next's projections, whose parts lie together for each head of keys."""
    q, k, v, z, b, a = self.fix_query_key_value_ordering(*layers.each(x, self.in_proj_qkvz, self.in_proj_ba))
    return torch.cat((q.flatten(2), k.flatten(2), v.flatten(2)), -1), z.flatten(2), b, a


def one_each(self: Any, layers: Layers, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """OLMo Hybrid's projections."""
    q, k, v, z, b, a = layers.each(x, self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.b_proj, self.a_proj)
    return torch.cat((q, k, v), -1), z, b, a


@dataclass(frozen=True)
class DeltaNet(Adapter):
    """A layer of the gated delta rule.

    project: its projections. norm, out: the names of the norm of its result and of the last projection. uses: names
    that only this row's forward uses.
    """

    project: Project = separate
    norm: str = "norm"
    out: str = "out_proj"
    uses: tuple[str, ...] = field(default=())

    names = split_names(
        "apply_mask_to_padding_states shape get_conv_state get_recurrent_state layer_idx transpose reshape head_v_dim "
        "head_k_dim is_recording_past causal_conv1d_update causal_conv1d_fn conv1d weight squeeze bias activation "
        "update_conv_state conv_kernel_size torch split key_dim value_dim sigmoid A_log float exp F softplus dt_bias "
        "torch_recurrent_gated_delta_rule torch_chunk_gated_delta_rule pop update_recurrent_state"
    )
    arguments = split_names("self hidden_states cache cache_params attention_mask kwargs")

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("gated_delta_rule",)

    def known(self) -> frozenset[str]:
        return self.names | {*self.uses, self.norm, self.out}

    def why_not(self, module: Any) -> str | None:
        if module.activation not in ACTIVATIONS:
            return f"its activation is {module.activation}, which the convolution's kernel does not have"
        return None

    def members(self, original: type) -> dict[str, Any]:
        # Its weight is used without a call of the convolution, so accelerate's hooks of it must be called.
        hooks = getattr(sys.modules[original.__module__], "force_accelerate_hooks", None)
        return {"forward": _delta_forward if hooks is None else hooks("conv1d")(_delta_forward)}


def _delta_forward(
    self: Any,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    row, backends = self._foundry_row, self._foundry.backends
    cache = kwargs.get("cache_params") if cache is None else cache  # its name before transformers 5.24
    batch, tokens = hidden_states.shape[:2]
    conv_state: Any = None
    state: Tensor | None = None
    if cache is not None:
        conv_state = cache.get_conv_state(self.layer_idx, state_idx=0)
        state = cache.get_recurrent_state(self.layer_idx, state_idx=0)
    documents = _documents(kwargs, batch, tokens, state is not None)
    hidden_states = self._foundry_home.apply_mask_to_padding_states(hidden_states, attention_mask)
    layers = layers_of(self, hidden_states)
    qkv, z, b, a = row.project(self, layers, hidden_states)
    filters, bias, backend = taps_of(self.conv1d.weight), self.conv1d.bias, backends["short_conv1d"]
    totals = None if documents is None else documents.totals_q
    # One token of each sequence, whose states are overwritten.
    steps = (
        tokens == 1
        and conv_state is not None
        and state is not None
        and not cache.is_recording_past(self.layer_idx)
        and continues_in_place(qkv, a, b, filters, bias, self.A_log, self.dt_bias, conv_state, state)
    )
    if steps:
        mixed = short_conv1d_step(qkv.squeeze(1), conv_state, filters, bias, self.activation, backend=backend)
    else:
        before = qkv
        if cache is not None:  # which returns the inputs since the state's first
            kernel = {"conv_kernel_size": self.conv_kernel_size}
            before = cache.update_conv_state(qkv.transpose(1, 2), self.layer_idx, **kernel).transpose(1, 2)
        if totals is not None:
            before, a, b = (x.reshape(1, batch * tokens, -1) for x in (qkv, a, b))
        mixed = short_conv1d(before, filters, bias, self.activation, cu_seqlens=totals, backend=backend)
        if totals is None and before.shape[1] != tokens:
            mixed = mixed[:, -tokens:]
    doubled = getattr(self, "allow_neg_eigval", False)
    a, b, gates = a.transpose(1, 2), b.transpose(1, 2), Gates(self.A_log, self.dt_bias, 2.0 if doubled else 1.0)
    heads, dims = (self.num_k_heads, self.num_v_heads), (self.head_k_dim, self.head_v_dim)
    if state is not None and steps:
        out = delta_rule_step_of(mixed, a, b, gates, heads, dims, backends, state)
    else:
        out, final = delta_rule_of(
            mixed,
            a,
            b,
            gates,
            heads,
            dims,
            backends,
            cu_seqlens=totals,
            initial_state=state,
            return_final_state=cache is not None,
        )
        if cache is not None and final is not None:
            if documents is not None:  # the last one of each row
                final = final[documents.of_queries()[:, -1].long()]
            cache.update_recurrent_state(final, self.layer_idx)
    normed = getattr(self, row.norm)(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
    return layers.linear(normed.reshape(batch, tokens, -1), getattr(self, row.out))


def _documents(given: dict[str, Any], batch: int, tokens: int, continues: bool) -> Documents | None:
    """Returns the documents of the rows; None where each row is one.

    Raises:
        ValueError: they do not fit the tokens, or continue a cache.
    """
    documents: Documents | None = None
    if (call := current()) is not None:
        documents = call.documents
    elif any(given.get(name) is not None for name in LENGTHS):  # computed again, or called by itself
        sizes = batch, tokens, tokens
        documents = once(given.get("cu_seq_lens_q"), sizes, lambda: from_lengths(given, *sizes))
    if documents is None:
        return None
    if (documents.batch, documents.queries) != (batch, tokens):
        raise ValueError(
            f"{documents.given_by} gives documents of {[documents.batch, documents.queries]} tokens, and linear "
            f"attention got {[batch, tokens]}; {ONE_A_ROW}"
        )
    if len(documents.totals_q) == batch + 1:  # each row begins one
        return None
    if continues:
        raise ValueError(
            f"{documents.given_by} begins a document on a cache that is not empty, which linear attention does not "
            "support; pass one document per row"
        )
    return documents
