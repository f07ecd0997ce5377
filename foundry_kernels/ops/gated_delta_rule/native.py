"""The gated delta rule of the compiled extension: `csrc/torch/gated_delta_rule*.cpp` over
`csrc/cpu/gated_delta_rule*`."""

import torch

from foundry_kernels.ops.gated_delta_rule.operators import make_backend

gated_delta_rule = make_backend(
    "", torch.ops.foundry_kernels.gated_delta_rule_fwd.default, torch.ops.foundry_kernels.gated_delta_rule_bwd.default
)
gated_linear_attention = gated_delta_rule
gated_delta_rule_step = torch.ops.foundry_kernels.gated_delta_rule_step.default
