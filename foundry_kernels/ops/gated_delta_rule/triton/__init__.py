"""The gated delta rule in Triton: the operators and their gradient. `launch` launches the kernels.

Forward: `prepare` (all chunks at once), `states` (one chunk after another), `outputs` (all chunks). Backward: `prepare`
and `states` again, `dstates` (in reverse), `pairs`, `dqk`, `finish` (all chunks).

Bytes for each token and head of v between the kernels, for chunks of C tokens: 8 of sums of decays, 4 C of the inverse,
4 D_k D_v / C of states, 4 D_v of corrected values. With D_k = D_v = 128 and C = 64 these are 8, 256, 1024 and 512; the
inputs and the output have 1032 in 16 bits. Only the inverse is kept for the backward pass. There, the gradients of the
states and of the values r are as large as the states and the values, and pairs of tokens add 8 C, here 512.
"""

from __future__ import annotations

from foundry_kernels._triton.operators import define
from foundry_kernels.ops.gated_delta_rule.operators import BWD, FWD, STEP, make_backend
from foundry_kernels.ops.gated_delta_rule.triton.launch import empty_bwd, empty_fwd, launch_bwd, launch_fwd
from foundry_kernels.ops.gated_delta_rule.triton.step import empty_step, launch_step

_fwd = define(f"triton_{FWD}", launch_fwd, empty_fwd)
_bwd = define(f"triton_{BWD}", launch_bwd, empty_bwd)

gated_delta_rule = gated_linear_attention = make_backend("triton_", _fwd, _bwd)
gated_delta_rule_step = define(f"triton_{STEP}", launch_step, empty_step)
