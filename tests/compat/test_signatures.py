"""The arguments of flash-linear-attention 0.6.0, mamba_ssm 2.3.2 and causal-conv1d 1.7.0 that the functions with their
names take: a table of names and defaults, in order."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from foundry_kernels import compat
from foundry_kernels.compat import fla
from foundry_kernels.compat.fla import Options

STATES = "scale=None initial_state=None output_final_state=False"
PACKED = "state_v_first=False cu_seqlens=None"
BETA = "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False"
GDN = f"use_gate_in_kernel=False A_log=None dt_bias=None {BETA} {PACKED}"
SCAN = "initial_states=None seq_idx=None"
LIMITS = "dt_limit=(0.0,inf) return_final_states=False"
FLA = {
    "chunk_gated_delta_rule": f"q k v g beta {STATES} use_qk_l2norm_in_kernel=False {BETA} {PACKED} "
    "cu_seqlens_cpu=None chunk_indices=None cp_context=None use_gate_in_kernel=False A_log=None dt_bias=None",
    "fused_recurrent_gated_delta_rule": f"q k v g=None gk=None gv=None beta=None {STATES} "
    f"use_qk_l2norm_in_kernel=False {GDN}",
    "chunk_delta_rule": f"q k v beta {STATES} use_qk_l2norm_in_kernel=False cu_seqlens=None cu_seqlens_cpu=None "
    "chunk_size=None",
    "fused_recurrent_delta_rule": f"q k v beta=None {STATES} use_qk_l2norm_in_kernel=False cu_seqlens=None",
    "chunk_kda": f"q k v g beta {STATES} use_qk_l2norm_in_kernel=False use_gate_in_kernel=False {BETA} "
    "safe_gate=False lower_bound=None disable_recompute=False return_intermediate_states=False "
    f"{PACKED} cu_seqlens_cpu=None cp_context=None use_graph=False max_num_seqs=None A_log=None dt_bias=None "
    "chunk_size=None",
    "fused_recurrent_kda": f"q k v g beta A_log=None dt_bias=None {STATES} use_qk_l2norm_in_kernel=False "
    f"use_gate_in_kernel=False {BETA} lower_bound=None {PACKED}",
    "chunk_gla": f"q k v g {STATES} {PACKED} cu_seqlens_cpu=None",
    "fused_recurrent_gla": f"q k v gk=None gv=None {STATES} reverse=False {PACKED}",
    "chunk_simple_gla": f"q k v g=None g_gamma=None {STATES} {PACKED} cu_seqlens_cpu=None chunk_size=None",
    "fused_recurrent_simple_gla": f"q k v g=None g_gamma=None {STATES} reverse=False {PACKED}",
    # A weight of None, and fla's own names of backends, are not supported.
    "causal_conv1d": "x weight bias=None residual=None initial_state=None output_final_state=False activation=None "
    "backend=auto cu_seqlens=None cu_seqlens_cpu=None chunk_indices=None cp_context=None",
    "ShortConvolution": "hidden_size kernel_size bias=False activation=silu backend=auto device=None dtype=None",
    "ShortConvolution.forward": "self x residual=None mask=None cache=None output_final_state=False cu_seqlens=None "
    "chunk_indices=None",
    "rms_norm_gated": "x g weight bias activation=swish residual=None prenorm=False residual_in_fp32=False eps=1e-06",
    "FusedRMSNormGated": "hidden_size elementwise_affine=True eps=1e-05 activation=swish device=None dtype=None",
    "FusedRMSNormGated.forward": "self x g residual=None prenorm=False residual_in_fp32=False",
}
MAMBA = {
    "mamba_chunk_scan_combined": f"x dt A B C chunk_size D=None z=None dt_bias=None {SCAN} cu_seqlens=None "
    f"dt_softplus=False {LIMITS} return_varlen_states=False",
    "mamba_split_conv1d_scan_combined": f"zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size {SCAN} {LIMITS} "
    "activation=silu rmsnorm_weight=None rmsnorm_eps=1e-06 outproj_weight=None outproj_bias=None headdim=None "
    "ngroups=1 norm_before_gate=True",
    "selective_state_update": "state x dt A B C D=None z=None dt_bias=None dt_softplus=False state_batch_indices=None",
    "rmsnorm_fn": "x weight bias z=None eps=1e-06 group_size=None norm_before_gate=True",
    "RMSNormGated": "hidden_size eps=1e-05 group_size=None norm_before_gate=True device=None dtype=None",
    "RMSNormGated.forward": "self x z=None",
    "causal_conv1d_fn": "x weight bias=None seq_idx=None initial_states=None return_final_states=False "
    "final_states_out=None activation=None",
    "causal_conv1d_update": "x conv_state weight bias=None activation=None cache_seqlens=None conv_state_indices=None",
}
TABLE = {("fla", name): arguments for name, arguments in FLA.items()}
TABLE |= {("mamba", name): arguments for name, arguments in MAMBA.items()}


@pytest.mark.parametrize(("where", "name"), TABLE)
def test_arguments_are_those_of_the_other_package(where: str, name: str) -> None:
    """Those that can be passed by position are the first of theirs, in their order; the others are taken by name."""
    function: Any = fla if where == "fla" else compat
    for part in name.split("."):
        function = getattr(function, part)
    theirs = [each.partition("=")[::2] for each in TABLE[where, name].replace("(0.0,inf)", "limits").split()]
    ours = inspect.signature(function).parameters.values()
    places = [each for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = {each.name for each in ours if each.kind is each.KEYWORD_ONLY}
    if any(each.kind is each.VAR_KEYWORD for each in ours):
        named |= set(Options.__annotations__)
    for our, (their, default) in zip(places, theirs, strict=False):
        value = "limits" if our.name == "dt_limit" else our.default
        assert (our.name, "" if value is our.empty else str(value)) == (their, default)
    missing = {their for their, _ in theirs} - {our.name for our in places} - named
    assert not missing
    assert len(places) <= len(theirs) + (name == "ShortConvolution.forward")


def test_the_table_has_all_names() -> None:
    aliases = {"chunk_gdn", "fused_recurrent_gdn"}
    assert {name for name in FLA if "." not in name} | aliases == set(fla.__all__)
    assert fla.chunk_gdn is fla.chunk_gated_delta_rule
    assert fla.fused_recurrent_gdn is fla.fused_recurrent_gated_delta_rule
