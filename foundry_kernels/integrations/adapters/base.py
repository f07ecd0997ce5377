"""Adapters make modules of other packages run on this package's operations.

Patching gives a module another class (`swap.py`), whose methods are here. A table (`table.py`) has the differences
between classes of modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.activations import activation
from foundry_kernels.integrations.adapters.lora_layers import each_of, remade
from foundry_kernels.integrations.modules import taken_by
from foundry_kernels.nn import LayerNorm, RMSNorm
from foundry_kernels.nn._linear_layers import Layers, products_for
from foundry_kernels.ops.rms_norm import layer_norm, rms_norm
from foundry_kernels.ops.swiglu import geglu, glu, reglu, swiglu

#: The valid names in `ops` of `patch`. "flash_attention" includes its packed form, "grouped_mm" the weighted sum after
#: it, "gated_delta_rule" and "ssd" the convolution before them.
PATCHABLE = (
    "rms_norm", "swiglu", "geglu", "rope", "qk_norm_rope", "flash_attention", "cross_entropy", "linear_cross_entropy",
    "layer_norm", "grouped_mm", "bias_gelu", "gated_delta_rule", "glu", "reglu", "bias_silu", "bias_relu",
    "lora_linear", "ssd",
)  # fmt: skip

#: Operations that go with another one and are not named by themselves.
COMPANIONS = {
    "rms_norm": ("add_rms_norm",),
    "layer_norm": ("add_layer_norm",),
    "flash_attention": ("flash_attention_varlen",),
    "qk_norm_rope": ("rope",),
    "grouped_mm": ("combine_experts",),
    "gated_delta_rule": ("gated_delta_rule_step", "short_conv1d"),
    "ssd": ("ssd_step", "short_conv1d"),
}


def with_companions(ops: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for op in ops for name in (op, *COMPANIONS.get(op, ()))))


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
        gate, up = each_of(layers, x, getattr(self, row.gate), getattr(self, row.up))
    else:
        gate = layers.linear(x, getattr(self, row.gate))
        if row.up_first:
            up, gate = gate.chunk(2, dim=-1)
    if row.gate_scale:
        gate = gate * getattr(self, row.gate_scale)
    x = gated(self._foundry, gate, up)
    with remade(x, getattr(self, row.down), gated, self._foundry, gate, up):
        x = second(self, layers, x)
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
