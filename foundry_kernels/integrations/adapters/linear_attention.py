"""Adapters of linear attention by the gated delta rule: Qwen3-Next, Qwen3.5, OLMo Hybrid and Kimi Linear.

A layer computes what transformers' own computes, with the same cache. In addition it keeps packed documents apart. The
model gives them to its layers as an argument (`packed_model.py`), which a recomputation for the gradient repeats.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.integrations.adapters.base import Adapter, at, layers_of, names_of, split_names
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
from foundry_kernels.nn._layers import is_observed
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
    # The kernel does not round the product with the weight, as a product of 16 bits is.
    exact = row.once or weight.dtype == wide_dtype(dtype)
    if backends.get(row.act) == backend and gate.dtype == dtype and exact and not (backend == "native" and x.is_cuda):
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


def by_channel(self: Any, layers: Layers, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kimi Linear's projections, of which the gate's and the decay's are products of two; the gate's may be one."""
    decay, inside = self.forget_gate, _in_kernel(self.forget_gate)
    gates = [self.g_a_proj, self.g_b_proj] if hasattr(self, "g_a_proj") else [self.g_proj]
    first = self.q_proj, self.k_proj, self.v_proj, self.b_proj, gates[0]
    q, k, v, b, z, *a = layers.each(x, *first, *([decay.f_a_proj] if inside else []))
    for layer in gates[1:]:
        z = layers.linear(z, layer)
    g = layers.linear(a[0], decay.f_b_proj) if inside else decay(x)
    return torch.cat((q, k, v), -1), z, b, g.reshape(*x.shape[:2], self.num_heads, self.head_dim)


#: Kimi Linear's module of the decay, whose arithmetic the rule's kernels have, and the names that it may use.
_KIMI_DECAY = "KimiLinearForgetGate"
_KIMI_DECAY_NAMES = split_names("shape head_dim f_b_proj f_a_proj float dt_bias view A_log torch exp where log")


def _in_kernel(decay: nn.Module) -> bool:
    """Whether the rule's kernels compute the decay. Another module is called, as one whose decay has a lower bound."""
    return type(decay).__qualname__ == _KIMI_DECAY and not is_observed(decay)


@dataclass(frozen=True)
class LinearAttention(Adapter):
    """A layer with a short convolution and a state for each head, whose forward is ours.

    uses: names that only this row's forward uses.
    """

    uses: tuple[str, ...] = field(default=(), kw_only=True)

    arguments = split_names("self hidden_states cache cache_params attention_mask kwargs")

    def known(self) -> frozenset[str]:
        return self.names | {*self.uses}

    def why_not(self, module: Any) -> str | None:
        if module.activation not in ACTIVATIONS:
            return f"its activation is {module.activation}, which the convolution's kernel does not have"
        return None

    def forward(self) -> Callable[..., Tensor]:
        raise NotImplementedError

    def members(self, original: type) -> dict[str, Any]:
        # Its weight is used without a call of the convolution, so accelerate's hooks of it must be called.
        hooks = getattr(sys.modules[original.__module__], "force_accelerate_hooks", None)
        return {"forward": self.forward() if hooks is None else hooks("conv1d")(self.forward())}


@dataclass(frozen=True)
class DeltaNet(LinearAttention):
    """A layer of the gated delta rule.

    project: its projections. norm, out: the names of the norm of its result and of the last projection.
    """

    project: Project = separate
    norm: str = "norm"
    out: str = "out_proj"

    names = split_names(
        "apply_mask_to_padding_states shape get_conv_state get_recurrent_state layer_idx transpose reshape head_v_dim "
        "head_k_dim is_recording_past causal_conv1d_update causal_conv1d_fn conv1d weight squeeze bias activation "
        "update_conv_state conv_kernel_size torch split key_dim value_dim sigmoid A_log float exp F softplus dt_bias "
        "torch_recurrent_gated_delta_rule torch_chunk_gated_delta_rule pop update_recurrent_state"
    )

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("gated_delta_rule",)

    def known(self) -> frozenset[str]:
        return super().known() | {self.norm, self.out}

    def forward(self) -> Callable[..., Tensor]:
        return _delta_forward

    def heads(self, layer: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        """(H_k, H_v) and (D_k, D_v)."""
        return (layer.num_k_heads, layer.num_v_heads), (layer.head_k_dim, layer.head_v_dim)

    def gates(self, layer: Any) -> Gates:
        return Gates(layer.A_log, layer.dt_bias, 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0)


@dataclass(frozen=True)
class KimiDelta(DeltaNet):
    """A layer whose decay, of each dimension of a key, is a module of its own."""

    project: Project = by_channel
    norm: str = "o_norm"
    out: str = "o_proj"

    names = split_names(
        "apply_mask_to_padding_states shape head_dim torch cat q_proj k_proj v_proj transpose get_conv_state layer_idx "
        "get_recurrent_state causal_conv1d_update conv1d weight squeeze bias activation update_conv_state reshape view "
        "conv_kernel_size causal_conv1d_fn split qkv_dim forget_gate sigmoid b_proj recurrent_kimi_delta_attention "
        "chunk_kimi_delta_attention update_recurrent_state float32 to g_a_proj g_b_proj g_proj"
    )

    def why_not(self, module: Any) -> str | None:
        used = names_of(inspect.unwrap(type(module.forget_gate).forward).__code__)
        if _in_kernel(module.forget_gate) and (unknown := sorted(used - _KIMI_DECAY_NAMES)):
            return f"its {_KIMI_DECAY} uses {', '.join(unknown)}: another version of it than this package knows"
        return super().why_not(module)

    def heads(self, layer: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        return (layer.num_heads, layer.num_heads), (layer.head_dim, layer.head_dim)

    def gates(self, layer: Any) -> Gates:
        gate = layer.forget_gate
        if not _in_kernel(gate):
            return Gates(None, None)
        return Gates(gate.A_log.flatten(), gate.dt_bias.view(layer.num_heads, layer.head_dim))


@dataclass
class Call:
    """What a call of a layer has besides its input: the cache, which may be None, its two states and the documents."""

    layer: Any
    cache: Any
    conv_state: Any
    state: Tensor | None
    documents: Documents | None
    tokens: int

    @classmethod
    def of(cls, layer: Any, x: Tensor, cache: Any, kwargs: dict[str, Any]) -> Call:
        cache = kwargs.get("cache_params") if cache is None else cache  # its name before transformers 5.24
        conv_state = state = None
        if cache is not None:
            conv_state = cache.get_conv_state(layer.layer_idx, state_idx=0)
            state = cache.get_recurrent_state(layer.layer_idx, state_idx=0)
        documents = _documents(kwargs, x.shape[0], x.shape[1], state is not None)
        return cls(layer, cache, conv_state, state, documents, x.shape[1])

    @property
    def totals(self) -> Tensor | None:
        return None if self.documents is None else self.documents.totals_q

    def steps(self, x: Tensor, *tensors: Tensor | None) -> bool:
        """Whether there is one token of each sequence, whose states are overwritten. tensors: what it is made of."""
        if self.tokens != 1 or self.conv_state is None or self.state is None:
            return False
        if self.state.dtype != wide_dtype(x.dtype):
            return False
        if self.cache.is_recording_past(self.layer.layer_idx):
            return False
        return continues_in_place(x, *tensors, self.conv_state, self.state)

    def convolved(self, x: Tensor, steps: bool) -> Tensor:
        """The convolution's result of ``[B, T, C]``; ``[1, B T, C]`` of packed documents, ``[B, C]`` of a step."""
        layer, backend = self.layer, self.layer._foundry.backends["short_conv1d"]
        filters, bias = taps_of(layer.conv1d.weight), layer.conv1d.bias
        if steps:
            return short_conv1d_step(x.squeeze(1), self.conv_state, filters, bias, layer.activation, backend=backend)
        before = x
        if self.cache is not None:  # which returns the inputs since the state's first
            kernel = {"conv_kernel_size": layer.conv_kernel_size}
            before = self.cache.update_conv_state(x.transpose(1, 2), layer.layer_idx, **kernel).transpose(1, 2)
        if self.totals is not None:
            before = self.in_one_row(x)
        y = short_conv1d(before, filters, bias, layer.activation, cu_seqlens=self.totals, backend=backend)
        return y[:, -self.tokens :] if self.totals is None and before.shape[1] != self.tokens else y

    def in_one_row(self, x: Tensor) -> Tensor:
        """``[B, T, ...]``, or ``[1, B T, ...]`` of packed documents."""
        return x if self.documents is None else x.flatten(0, 1).unsqueeze(0)

    def keep(self, final: Tensor | None) -> None:
        """Puts the states after the last tokens into the cache."""
        if self.cache is not None and final is not None:
            if self.documents is not None:  # the last one of each row
                final = final[self.documents.of_queries()[:, -1].long()]
            self.cache.update_recurrent_state(final, self.layer.layer_idx)


def _delta_forward(
    self: Any,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    row, backends = self._foundry_row, self._foundry.backends
    batch, tokens = hidden_states.shape[:2]
    call = Call.of(self, hidden_states, cache, kwargs)
    hidden_states = self._foundry_home.apply_mask_to_padding_states(hidden_states, attention_mask)
    layers = layers_of(self, hidden_states)
    qkv, z, b, a = row.project(self, layers, hidden_states)
    (heads, dims), gates = row.heads(self), row.gates(self)
    steps = call.steps(qkv, a, b, self.conv1d.weight, self.conv1d.bias, gates.A_log, gates.dt_bias)
    mixed = call.convolved(qkv, steps)
    if not steps:
        a, b = call.in_one_row(a), call.in_one_row(b)
    a, b = a.transpose(1, 2), b.transpose(1, 2)
    if call.state is not None and steps:
        out = delta_rule_step_of(mixed, a, b, gates, heads, dims, backends, call.state)
    else:
        out, final = delta_rule_of(
            mixed,
            a,
            b,
            gates,
            heads,
            dims,
            backends,
            cu_seqlens=call.totals,
            initial_state=None if call.state is None else call.state.to(wide_dtype(mixed.dtype)),
            return_final_state=call.cache is not None,
        )
        call.keep(final)
    normed = getattr(self, row.norm)(out.reshape(-1, dims[1]), z.reshape(-1, dims[1]))
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
