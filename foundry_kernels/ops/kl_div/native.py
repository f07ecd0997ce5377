"""Divergences of the compiled extension: `csrc/torch/kl_div*.cpp` over `csrc/cpu/kl_div.*`."""

import torch

from foundry_kernels.ops.kl_div.operators import make_backend

kl_div = make_backend("", torch.ops.foundry_kernels.kl_div_fwd.default, torch.ops.foundry_kernels.kl_div_bwd.default)
#: Returns the losses, and makes the logits their gradient, in place.
kl_div_fwd_bwd_ = torch.ops.foundry_kernels.kl_div_fwd_bwd_.default
