"""RMSNorm and LayerNorm of the compiled extension: `csrc/torch/{rms,layer}_norm*.cpp` over kernels in
`csrc/{cpu,cuda}/rms_norm.*`."""

import torch

rms_norm = torch.ops.foundry_kernels.rms_norm.default
add_rms_norm = torch.ops.foundry_kernels.add_rms_norm.default
layer_norm = torch.ops.foundry_kernels.layer_norm.default
add_layer_norm = torch.ops.foundry_kernels.add_layer_norm.default

# Without this operator, an extension is recognised as older than dropout: see `foundry_kernels.core.extension`.
_dropout_bwd = torch.ops.foundry_kernels.rms_norm_dropout_bwd.default
