"""Adapters make modules of other packages run on this package's operations.

Patching gives a module another class (`swap.py`), whose methods are here. A table (`table.py`) has the differences
between classes of modules.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.activations import activation
from foundry_kernels.integrations.modules import taken_by
from foundry_kernels.nn import LayerNorm, RMSNorm
from foundry_kernels.nn._head import count_hooks
from foundry_kernels.nn._linear_layers import Layers, products_for
from foundry_kernels.ops.rms_norm import layer_norm, rms_norm
from foundry_kernels.ops.rope import qk_norm_rope, rope
from foundry_kernels.ops.swiglu import geglu, glu, reglu, swiglu

#: The valid names in `ops` of `patch`. "flash_attention" includes its packed form, "grouped_mm" the weighted sum after
#: it, "gated_delta_rule" the convolution before it.
PATCHABLE = (
    "rms_norm", "swiglu", "geglu", "rope", "qk_norm_rope", "flash_attention", "cross_entropy", "linear_cross_entropy",
    "layer_norm", "grouped_mm", "bias_gelu", "gated_delta_rule", "glu", "reglu", "bias_silu", "bias_relu",
)  # fmt: skip


#: The reason for a module whose forward is its own.
REPLACED = "its forward was replaced on the instance, by a hook of another library perhaps"


def nothing(module: Any) -> dict[str, Any]:
    return {}


def split_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def names_of(code: CodeType) -> set[str]:
    """Returns the globals and attributes that a function uses, including its inner functions."""
    inner = (names_of(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*inner)


@dataclass
class State:
    """The state of a patched module: the backend of each operation, and what `undo` needs."""

    backends: dict[str, str]
    #: "backends" of this package's modules, "attention" of a config.
    previous: dict[str, Any] = field(default_factory=dict)
    gelu: str = "none"  # the approximation of geglu
    dense_masks: str = "kernels"  # as in `patch`
    mixing: tuple[str, ...] = ()  # the model's classes of layers that may mix packed documents
    masked: tuple[str, ...] = ()  # those of them that get masks of transformers
    hands_on: bool = False  # whether the model gives its layers the documents of a call as an argument


@dataclass(frozen=True)
class Adapter:
    """One class of modules: its operations, and the replaced method.

    names: all names that the overridden method may use. A method that uses other names is of an unknown version and is
    not patched.
    """

    method: ClassVar[str] = "forward"
    names: ClassVar[frozenset[str]] = frozenset()
    #: The arguments that the method may have; empty if the class's own method stays.
    arguments: ClassVar[frozenset[str]] = frozenset()
    #: Whether a module that has the subclass but is no longer patched behaves like the original class.
    transparent: ClassVar[bool] = False

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        """Returns the operations that `module` can run on."""
        raise NotImplementedError

    def why_not(self, module: nn.Module) -> str | None:
        """Returns the reason why this one module is not supported, or None."""
        return None

    def members(self, original: type) -> dict[str, Any]:
        """Returns what the subclass of `original` defines."""
        raise NotImplementedError

    def bases(self, original: type) -> tuple[type, ...]:
        return (original,)

    def known(self) -> frozenset[str]:
        return self.names

    def why_changed(self, original: type) -> str | None:
        """Returns the reason why `original` is not the class that the row describes, or None."""
        taken = taken_by(getattr(original, self.method))
        if self.arguments and (unknown := sorted({*taken} - self.arguments)):
            return f"its {self.method} takes {', '.join(unknown)}: another version of it than this package knows"
        code = getattr(inspect.unwrap(getattr(original, self.method)), "__code__", None)
        unknown = sorted(names_of(code) - self.known()) if code else ["something that is not Python"]
        if self.known() and unknown:
            return f"its {self.method} uses {', '.join(unknown)}: another version of it than this package knows"
        return None


@dataclass(frozen=True)
class Norm(Adapter):
    """A norm over the last dimension.

    op: "rms_norm" or "layer_norm". eps: the attribute that has it, as "config.eps" too, or the number. weight, bias:
    their names; "" for none. weight_offset, round_before_weight: as for `rms_norm`. one_dtype: a call with another
    dtype than the weight's is the class's own. takes: the name of the argument.
    """

    eps: str | float | None = "variance_epsilon"
    weight_offset: float = 0.0
    round_before_weight: bool = False
    op: str = "rms_norm"
    weight: str = "weight"
    bias: str = ""
    one_dtype: bool = False
    takes: str = "hidden_states"

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return (self.op,)

    def eps_of(self, module: nn.Module) -> float | None:
        return at(module, self.eps) if isinstance(self.eps, str) else self.eps

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": taking(_norm_forward, self.takes)}


def at(module: Any, path: str) -> Any:
    """Returns the attribute of a module at a path such as "config.eps"."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def taking(forward: Any, name: str) -> Any:
    """Returns a forward of one argument, by whose name it is called too."""
    code = forward.__code__
    own, taken, *others = code.co_varnames
    if taken == name:
        return forward
    made = FunctionType(code.replace(co_varnames=(own, name, *others)), forward.__globals__, forward.__name__)
    made.__module__, made.__doc__ = forward.__module__, forward.__doc__
    return made


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    row: Norm = self._foundry_row
    backend = self._foundry.backends.get(row.op)
    weight = getattr(self, row.weight) if row.weight else None
    own = row.one_dtype and weight is not None and weight.dtype != hidden_states.dtype
    if backend is None or own:  # without a backend only qk_norm_rope is patched, and this call is outside of it
        return self._foundry_original.forward(self, hidden_states)
    eps = row.eps_of(self)
    if row.op == "layer_norm":
        assert eps is not None
        weight = weight + row.weight_offset if weight is not None and row.weight_offset else weight
        bias = getattr(self, row.bias) if row.bias else None
        return layer_norm(hidden_states, weight, bias, eps, backend=backend)
    return rms_norm(
        hidden_states,
        weight,
        eps,
        weight_offset=row.weight_offset,
        round_before_weight=row.round_before_weight,
        backend=backend,
    )


@dataclass(frozen=True)
class TorchNorm(Adapter):
    """`torch.nn.RMSNorm` or `torch.nn.LayerNorm`, which becomes the one of `foundry_kernels.nn`."""

    op: str = "rms_norm"

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return (self.op,)

    def bases(self, original: type) -> tuple[type, ...]:
        return (RMSNorm if self.op == "rms_norm" else LayerNorm, original)

    def members(self, original: type) -> dict[str, Any]:
        options = {"round_before_weight": False} if self.op == "rms_norm" else {}
        return options | {"backends": property(_backends)}


def _backends(self: Any) -> Mapping[str, str]:
    return {f"add_{self._foundry_row.op}": "auto", **self._foundry.backends}


@dataclass(frozen=True)
class Gated(Adapter):
    """A gated MLP or a mixture of experts. Its activation must be supported."""

    def activation(self, module: nn.Module) -> tuple[str, str] | None:
        """Returns the same as the function of this name."""
        return activation(getattr(module, "act_fn", None))

    def why_not(self, module: nn.Module) -> str | None:
        if self.activation(module) is None:
            return f"its activation is {type(getattr(module, 'act_fn', None)).__name__}, which no gated kernel has"
        return None

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        found = self.activation(module)
        return () if found is None else (found[0],)


@dataclass(frozen=True)
class MLP(Gated):
    """``outer(down(inner(act(gate(x)) * up(x))))``.

    gate, up, down: the names of the layers; without `up`, `gate` computes both, the gate first unless `up_first`.
    kernel: the operation that the activation is, and the approximation of GELU.
    inner, outer: the names of its dropouts; "" for none. casts: the input of `down` gets the dtype of its weight, which
    may be kept in float32, or be quantised. gate_scale, scale: the attributes that multiply the gate, before its
    activation, and the result; "" for none. takes: the name of the argument.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    up_first: bool = False
    kernel: tuple[str, str] | None = None
    inner: str = ""
    outer: str = ""
    casts: bool = False
    gate_scale: str = ""
    scale: str = ""
    takes: str = "x"

    def activation(self, module: nn.Module) -> tuple[str, str] | None:
        return self.kernel

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": taking(_mlp_forward, self.takes)}


def layers_of(module: Any, x: Tensor) -> Layers:
    """The calls of a patched module's linear layers on `x`."""
    return products_for(x, *module._foundry.backends.values())


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    row: MLP = self._foundry_row
    layers = layers_of(self, x)
    up: Tensor | None = None
    if row.up:
        gate, up = layers.each(x, getattr(self, row.gate), getattr(self, row.up))
    else:
        gate = layers.linear(x, getattr(self, row.gate))
        if row.up_first:
            up, gate = gate.chunk(2, dim=-1)
    if row.gate_scale:
        gate = gate * getattr(self, row.gate_scale)
    x = second(self, layers, gated(self._foundry, gate, up))
    return x * getattr(self, row.scale) if row.scale else x


def second(self: Any, layers: Layers, x: Tensor) -> Tensor:
    """The second matmul of an MLP, with its dropouts."""
    row = self._foundry_row
    if row.inner:
        x = getattr(self, row.inner)(x)
    down = getattr(self, row.down)
    if row.casts:
        weight = getattr(down, "weight", None)
        if isinstance(weight, Tensor) and weight.dtype not in (x.dtype, torch.int8, torch.uint8):
            x = x.to(weight.dtype)
    x = layers.linear(x, down)
    return getattr(self, row.outer)(x) if row.outer else x


def gated(state: State, gate: Tensor, up: Tensor | None, **options: Any) -> Tensor:
    backends = state.backends
    if "swiglu" in backends:
        return swiglu(gate, up, backend=backends["swiglu"], **options)
    if "glu" in backends:
        return glu(gate, up, backend=backends["glu"])
    if "reglu" in backends:
        return reglu(gate, up, backend=backends["reglu"])
    return geglu(gate, up, approximate=state.gelu, backend=backends["geglu"])


#: The arguments of transformers' attention functions that "foundry" supports.
ATTENTION_ARGUMENTS = split_names(
    "module query key value attention_mask scaling dropout is_causal softcap s_aux sliding_window position_bias kwargs"
)


@dataclass(frozen=True)
class Attention(Adapter):
    """Projections, norms of queries and keys, rotation, cache, and the attention function of the model's config.

    norms: "" for none, "heads" before the rotation and over a head, "projection" over all heads at once.
    packed: one `qkv_proj`. interleaved: pairs (2i, 2i + 1). half_tables: cos and sin have no second half, which would
    be equal. optional_rope: `use_rope` is whether the layer rotates; optional_tables: whether it gets cos and sin.
    gated: `q_proj` makes a gate for the result of each head too, behind its query. passes: the attention function's
    arguments besides mask, scaling and dropout. uses: names that only this row's forward uses.
    """

    norms: str = ""
    packed: bool = False
    interleaved: bool = False
    half_tables: bool = False
    optional_rope: bool = False
    optional_tables: bool = False
    gated: bool = False
    passes: Callable[[Any], dict[str, Any]] = nothing
    uses: tuple[str, ...] = field(default=())
    #: Whether the whole forward is replaced.
    whole: ClassVar[bool] = False

    names = split_names(
        "shape head_dim q_proj k_proj v_proj o_proj view transpose apply_rotary_pos_emb update layer_idx "
        "ALL_ATTENTION_FUNCTIONS get_interface config _attn_implementation eager_attention_forward training "
        "attention_dropout scaling reshape contiguous"
    )
    #: The cache has two names, depending on the release.
    arguments = split_names("self hidden_states position_embeddings attention_mask past_key_values cache kwargs")

    def known(self) -> frozenset[str]:
        norms = ("q_norm", "k_norm") if self.norms else ()
        packed = ("qkv_proj", "num_attention_heads", "num_key_value_heads") if self.packed else ()
        gate = ("torch", "chunk", "sigmoid") if self.gated else ()
        return self.names | {*self.uses, *norms, *packed, *gate} | ({"use_rope"} if self.optional_rope else set())

    def why_not(self, module: nn.Module) -> str | None:
        eager = getattr(sys.modules[self.home(module)], "eager_attention_forward", None)
        if eager and (unknown := sorted({*taken_by(eager)} - ATTENTION_ARGUMENTS)):
            return f"its attention function takes {', '.join(unknown)}, which this package does not know"
        if getattr(module.config, "output_attentions", False):
            return (
                "its config has output_attentions=True, which transformers has for 'eager' alone; as an argument of a "
                "call it is supported"
            )
        return None

    def why_not_attend(self, module: nn.Module) -> str | None:
        """Returns the reason why the attention function is not replaced although the rest is supported, or None.

        "eager" is an explicit choice (for weights, or for dropout) if transformers would have used "sdpa" by default.
        Otherwise an explicit choice cannot be detected.
        """
        config: Any = module.config
        if config._attn_implementation != "eager" or not self.may_be_sdpa(module):
            return None
        return (
            "flash_attention left, its config has attn_implementation='eager'; name flash_attention in ops to have it"
        )

    def may_be_sdpa(self, module: nn.Module) -> bool:
        """Returns whether transformers lets the models of this module's family have an attention with "sdpa" in its
        name."""
        home = sys.modules[self.home(module)]
        own = (c for n, c in vars(home).items() if n.endswith("PreTrainedModel") and c.__module__ == home.__name__)
        return all(getattr(model, "_supports_sdpa", False) for model in own)

    def home(self, module: nn.Module) -> str:
        """Returns the name of the Python module that this module's forward is from."""
        return next(c for c in type(module).__mro__ if self.method in vars(c)).__module__

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        if self.optional_rope and not module.use_rope:
            return ("flash_attention",)
        return ("qk_norm_rope" if self.norms == "heads" else "rope", "flash_attention")

    def runs_dense_masks(self, module: nn.Module) -> str:
        """Returns what ``dense_masks="sdpa"`` means for this module."""
        passed = self.passes(module)  # SDPA has neither a soft cap nor sinks
        own = passed.get("softcap") is not None or passed.get("s_aux") is not None
        return "SDPA" if self.may_be_sdpa(module) and not own else "the model's own eager attention"

    def members(self, original: Any) -> dict[str, Any]:
        named = "cache" in taken_by(original.forward)
        return {"forward": _attention_forward, "_foundry_cache": named}


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    row: Attention = self._foundry_row
    home = self._foundry_home
    tokens = hidden_states.shape[:-1]
    layers = layers_of(self, hidden_states)
    q, k, v = _project(self, row, layers, hidden_states)
    if row.norms == "projection":
        q, k = self.q_norm(q), self.k_norm(k)
    heads = (*tokens, -1, self.head_dim)
    gate = None
    if row.gated:
        q, gate = q.view(*tokens, -1, 2 * self.head_dim).chunk(2, dim=-1)
    q, k, v = q if row.gated else q.view(heads), k.view(heads), v.view(heads)
    rotates = not row.optional_rope or self.use_rope
    rotates = rotates and not (row.optional_tables and position_embeddings is None)
    fused = rotates and "qk_norm_rope" in self._foundry.backends and _fusable(self.q_norm, self.k_norm)
    if row.norms == "heads" and not fused:
        q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if rotates:
        assert position_embeddings is not None
        q, k = _rotate(self, row, q, k, *position_embeddings, fused)
    past, told = past_key_values, {}
    if self._foundry_cache:  # since transformers 5.24; an argument `cache` of before is for the attention function
        past, told = kwargs.pop("cache", past), {"kwargs": kwargs}
    if past is not None:
        k, v = past.update(k, v, self.layer_idx, **told)
    attend = home.ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, home.eager_attention_forward)
    dropout = self.attention_dropout if self.training else 0.0
    options = {"dropout": dropout, "scaling": self.scaling, **row.passes(self), **kwargs}
    out, weights = attend(self, q, k, v, attention_mask, **options)
    out = out.reshape(*tokens, -1)
    if gate is not None:
        out = out * gate.reshape(*tokens, -1).sigmoid()
    return layers.linear(out, self.o_proj), weights


def _project(self: Any, row: Attention, layers: Layers, x: Tensor) -> tuple[Tensor, ...]:
    if not row.packed:
        return layers.each(x, self.q_proj, self.k_proj, self.v_proj)
    shared = self.num_key_value_heads * self.head_dim
    qkv = layers.linear(x, self.qkv_proj)
    q, k, v = qkv.split((qkv.shape[-1] - 2 * shared, shared, shared), dim=-1)
    return q, k, v


def _rotate(
    self: Any, row: Attention, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, fused: bool
) -> tuple[Tensor, Tensor]:
    backends = self._foundry.backends
    backend = backends.get("qk_norm_rope" if fused else "rope")
    if backend is None:
        return self._foundry_home.apply_rotary_pos_emb(q, k, cos, sin)
    if not row.half_tables:
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
    if not fused:
        return rope(q, k, cos, sin, interleaved=row.interleaved, backend=backend)
    norm: Norm = self.q_norm._foundry_row
    return qk_norm_rope(
        q,
        k,
        getattr(self.q_norm, norm.weight),
        getattr(self.k_norm, norm.weight),
        cos,
        sin,
        eps=norm.eps_of(self.q_norm),
        weight_offset=norm.weight_offset,
        round_before_weight=norm.round_before_weight,
        interleaved=row.interleaved,
        backend=backend,
    )


def _fusable(q_norm: Any, k_norm: Any) -> bool:
    """Returns whether both are plain calls of equal norms: without hooks, without their own forward (with which
    transformers' `tp_plan` sums the weights' gradients), and without wrappers."""
    for norm in (q_norm, k_norm):
        if getattr(type(norm), "_foundry_class", None) is not type(norm):
            return False
        if "forward" in vars(norm) or count_hooks(norm):
            return False
    row = q_norm._foundry_row
    if type(q_norm) is not type(k_norm) or not isinstance(row, Norm) or row.op != "rms_norm" or not row.weight:
        return False
    return not row.one_dtype and row.eps_of(q_norm) == row.eps_of(k_norm)
