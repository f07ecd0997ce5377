"""Adapters of the experts of transformers' mixtures: see `base.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.integrations.adapters.base import Adapter, Gated, State, gated, nothing, split_names
from foundry_kernels.integrations.adapters.lora_layers import only_adapter
from foundry_kernels.nn.moe import dispatch, run_experts


@dataclass(frozen=True)
class Experts(Gated):
    """The experts of a mixture: their matmuls, the gated activation between them and the weighted sum of a token's
    choices.

    Where grouped_mm is not asked for, the activation alone is replaced, which `_apply_gate` is.

    passes: what the gated activation gets besides, of a module.
    """

    passes: Callable[[Any], dict[str, Any]] = nothing

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("grouped_mm", *super().ops(module))

    def why_not(self, module: nn.Module) -> str | None:
        chosen = _implementation(module)
        if chosen == "eager":
            return (
                "experts_implementation='eager' has its activation inside a loop; 'grouped_mm' and 'batched_mm' do not"
            )
        if chosen not in SERVED:
            return f"experts_implementation={chosen!r} explicitly chooses other kernels"
        if not all(hasattr(module, name) for name in LAYOUT):
            return f"it has no {', '.join(LAYOUT)}: another version of it than this package knows"
        return super().why_not(module)

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _experts_forward, "_apply_gate": _apply_gate}


@dataclass(frozen=True)
class ClampedExperts(Experts):
    """Experts that have no activation module: `passes` says which form of `swiglu` their `_apply_gate` is."""

    names = split_names(
        "torch zeros_like dtype device no_grad nn functional one_hot num_experts permute greater sum nonzero where "
        "gate_up_proj gate_up_proj_bias _apply_gate down_proj down_proj_bias index_add_ to"
    )
    #: Called by position, with other names than others have for the last two.
    arguments = split_names("self hidden_states router_indices routing_weights top_k_index top_k_weights")
    gate: ClassVar[frozenset[str]] = split_names("clamp limit torch sigmoid alpha")

    def activation(self, module: nn.Module) -> tuple[str, str] | None:
        return "swiglu", ""

    def why_changed(self, original: Any) -> str | None:
        unknown = sorted(set(original._apply_gate.__code__.co_names) - self.gate)
        if unknown:
            return f"its _apply_gate uses {', '.join(unknown)}: another version of it than this package knows"
        return super().why_changed(original)


@dataclass(frozen=True)
class OwnGateExperts(Experts):
    """Experts whose gate, or activation where they have no gate, is their class's own: their matmuls and the weighted
    sum alone."""

    def activation(self, module: nn.Module) -> tuple[str, str] | None:
        return "", ""

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("grouped_mm",)

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _experts_forward}


@dataclass(frozen=True)
class SortedExperts(Gated):
    """Llama 4's: each expert gets as many rows, which are sorted by expert. Its gated activation is replaced."""

    names = split_names("view gate_up_proj shape hidden_size torch bmm chunk act_fn down_proj")
    arguments = split_names("self hidden_states")

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _sorted_forward}


def _sorted_forward(self: Any, hidden_states: Tensor) -> Tensor:
    rows = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
    y = torch.bmm(gated(self._foundry, torch.bmm(rows, self.gate_up_proj), None), self.down_proj)
    return y.view(-1, self.hidden_size)


def decorated_experts(module: Any) -> Experts | None:
    """Returns the adapter of experts that have no row, None for anything else.

    A decorator makes transformers run them by one function for all classes (unless `experts_implementation` is
    "eager"), which attributes of the module tell the layout. It calls the class's `_apply_gate`, and not its forward.
    """
    forward = type(module).forward
    code, home = getattr(forward, "__code__", None), getattr(forward, "__globals__", {}).get("__name__")
    if (
        code is None
        or home != "transformers.integrations.moe"
        or code.co_freevars != ("experts_interface", "original_forward")
    ):
        return None
    if not hasattr(module, "has_gate") or getattr(module, "has_post_expert_norm", False):
        return None
    if forward.__closure__[0].cell_contents is not forward.__globals__.get("ALL_EXPERTS_FUNCTIONS"):
        return None
    usual = type(module)._apply_gate is forward.__globals__.get("_default_apply_gate")
    found = Experts() if module.has_gate and usual else OwnGateExperts()
    return found if found.activation(module) else OwnGateExperts()


#: Of transformers' implementations of experts, those that mean no more than what is fastest with PyTorch alone.
SERVED = (None, "grouped_mm", "batched_mm")
#: What says how weights are laid out.
LAYOUT = ("is_transposed", "has_bias", "_is_expert_parallel")


def _implementation(module: Any) -> str | None:
    found: str | None = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return found


def _experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    name, gate = ("gate_up_proj", self._apply_gate) if getattr(self, "has_gate", True) else ("up_proj", self.act_fn)
    backends, gate_up, down = self._foundry.backends, getattr(self, name), self.down_proj
    if not _runs_here(self):
        original = self._foundry_original.forward
        result: Tensor = original(self, hidden_states, top_k_index, top_k_weights)
        return result
    pairs = getattr(self, "_foundry_pairs", {})
    if not self.is_transposed:
        gate_up, down = gate_up.mT, down.mT
        pairs = {of: (b.mT, a.mT) for of, (a, b) in pairs.items()}
    return run_experts(
        hidden_states,
        top_k_weights,
        dispatch(top_k_index, self.num_experts, partial=self._is_expert_parallel),
        gate_up,
        down,
        gate,
        backends,
        gate_up_bias=getattr(self, f"{name}_bias") if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        pairs=(pairs.get(name), pairs.get("down_proj")),
    )


def _runs_here(self: Any) -> bool:
    """Returns whether the experts' matmuls run on grouped_mm."""
    return "grouped_mm" in self._foundry.backends and _implementation(self) in SERVED and not is_dtensor(self.down_proj)


@dataclass(frozen=True)
class LoraExperts(Adapter):
    """PEFT's adapter of a parameter of experts, which multiplies by its factors and not by a sum with the weight."""

    names = split_names(
        "ValueError __class__ __name__ _activate_lora _check_forward_args active_adapters base_layer disable_adapters "
        "merged pop unmerge"
    )
    arguments = split_names("self x args kwargs")
    transparent: ClassVar[bool] = True

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("grouped_mm",)

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _param_forward}

    def why_own(self, module: nn.Module) -> str | None:
        """Returns the reason why PEFT's own forward runs while the adapters are as they are, or None."""
        return _adapter(module)[1] or None


def _adapter(self: Any) -> tuple[str, str]:
    """Returns the name of the adapter, or "" and the reason why PEFT's own forward must run."""
    base = self.get_base_layer()
    if type(base).forward is not _experts_forward or not hasattr(base, "_foundry") or not _runs_here(base):
        return "", "the layer below does not run on grouped_mm"
    if self.num_experts < 2 or self.get_param().dtype not in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    ):
        return "", "its parameter is of one expert, or not floating-point"
    return only_adapter(self)


def _factors(self: Any) -> tuple[Tensor, Tensor] | None:
    """Returns the factors of what PEFT adds to the parameter, the scale in the first; None where its own forward must
    run."""
    name = _adapter(self)[0] if hasattr(self, "_foundry") else ""
    if not name:
        return None
    left, right, scale = self.get_delta_factors(name)
    return left * scale, right


def _param_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    pair = None if kwargs.get("adapter_names") else _factors(self)
    if pair is None:
        return self._foundry_original.forward(self, x, *args, **kwargs)
    base = self.get_base_layer()
    others = getattr(base, "_foundry_pairs", {})
    base._foundry_pairs = {**others, self.parameter_name: pair}
    try:
        return self.base_layer(x, *args, **kwargs)
    finally:
        base._foundry_pairs = others


def _apply_gate(self: Any, gate_up: Tensor) -> Tensor:
    state: State = self._foundry
    if not state.backends.keys() & {"swiglu", "geglu"}:
        result: Tensor = self._foundry_original._apply_gate(self, gate_up)
        return result
    return gated(state, gate_up, None, **self._foundry_row.passes(self))
