"""The adapter of Mamba-2's layer: Mamba 2, Bamba, Granite 4, Nemotron-H, Zamba 2 and Falcon-H1.

A layer computes what transformers' own computes, with the same cache. In addition it keeps packed documents apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.integrations.adapters.base import layers_of, split_names
from foundry_kernels.integrations.adapters.linear_attention import Call, LinearAttention
from foundry_kernels.ops.gated_delta_rule.checks import MAX_HEAD_DIM, MAX_VALUE_DIM
from foundry_kernels.ops.ssd import ssd, ssd_step


@dataclass(frozen=True)
class Mamba2(LinearAttention):
    """A layer of state-space duality.

    scaled: whether its input and its projection are multiplied by `ssm_in_multiplier` and `mup_vector`, and whether it
    may have no norm, as in Falcon-H1.
    """

    scaled: bool = False

    names = split_names(
        "shape dtype get_conv_state get_recurrent_state layer_idx apply_mask_to_padding_states in_proj torch exp A_log "
        "float time_step_limit training mamba2_split_conv1d_scan_combined conv1d weight squeeze bias dt_bias D "
        "chunk_size activation norm variance_epsilon out_proj head_dim n_groups split intermediate_size conv_dim "
        "num_heads transpose is_recording_past causal_conv1d_update update_conv_state conv_kernel_size ssm_state_size "
        "causal_conv1d_fn view expand mamba2_selective_state_update mamba2_chunk_scan update_recurrent_state reshape to"
    )

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("ssd",)

    def why_not(self, module: Any) -> str | None:
        for name, size, most in (
            ("ssm_state_size", module.ssm_state_size, MAX_HEAD_DIM),
            ("head_dim", module.head_dim, MAX_VALUE_DIM),
        ):
            if size > most:
                return f"its {name} is {size}, and the kernels have at most {most}"
        return super().why_not(module)

    def forward(self) -> Callable[..., Tensor]:
        return _mamba_forward


def _mamba_forward(
    self: Any,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    backends, scaled = self._foundry.backends, self._foundry_row.scaled
    masked, dtype = self._foundry_home.apply_mask_to_padding_states, hidden_states.dtype
    batch, tokens = hidden_states.shape[:2]
    call = Call.of(self, hidden_states, cache, kwargs)
    hidden_states = masked(hidden_states, attention_mask)
    layers = layers_of(self, hidden_states)
    if scaled:
        hidden_states = hidden_states * self.ssm_in_multiplier
    projected = layers.linear(hidden_states, self.in_proj)
    if scaled:
        projected = projected * self.mup_vector
    gate, mixed, dt = projected.split((self.intermediate_size, self.conv_dim, self.num_heads), -1)
    state = call.state
    steps = call.steps(projected, self.conv1d.weight, self.conv1d.bias, self.A_log, self.D, self.dt_bias)
    of_groups = self.n_groups * self.ssm_state_size
    mixed = call.convolved(mixed, steps)
    if not steps:
        mixed = masked(mixed.reshape(batch, tokens, -1), attention_mask)
    x, B, C = mixed.split((self.intermediate_size, of_groups, of_groups), -1)
    A = -torch.exp(self.A_log.to(wide_dtype(dtype)))
    # Falcon-H1 without its norm multiplies by the gate only.
    normed = not scaled or self.mamba_rms_norm
    z = None if normed else gate
    heads, groups = (self.num_heads, self.head_dim), (self.n_groups, self.ssm_state_size)
    if steps and state is not None:
        x, B, C = (each.view(batch, *shape) for each, shape in ((x, heads), (B, groups), (C, groups)))
        z = None if z is None else z.view(batch, *heads)
        y = ssd_step(
            state, x, dt.squeeze(1), A, B, C, self.D, z, self.dt_bias, dt_softplus=True, backend=backends["ssd_step"]
        )
    else:
        rows = (call.in_one_row(each.unflatten(-1, shape)) for each, shape in ((x, heads), (B, groups), (C, groups)))
        x, B, C = rows
        z = None if z is None else call.in_one_row(z.unflatten(-1, heads))
        # transformers has no limits in a step.
        limits = (0.0, float("inf")) if tokens == 1 and state is not None else self.time_step_limit
        found = ssd(
            x,
            call.in_one_row(dt),
            A,
            B,
            C,
            self.D,
            z,
            self.dt_bias,
            dt_softplus=True,
            dt_limit=tuple(limits),
            initial_states=None if state is None else state.to(wide_dtype(dtype)),
            return_final_states=call.cache is not None,
            cu_seqlens=call.totals,
            backend=backends["ssd"],
        )
        y, final = found if isinstance(found, tuple) else (found, None)
        call.keep(final)
    y = y.reshape(batch, tokens, -1)
    if normed:
        y = self.norm(y, gate)
    return layers.linear(y.to(dtype), self.out_proj)
