"""Log-probabilities of the compiled extension: `csrc/torch/log_probs*.cpp` over `csrc/cpu/log_probs.*`."""

import torch

from foundry_kernels.ops.log_probs.operators import make_backend

log_probs = make_backend(
    "", torch.ops.foundry_kernels.log_probs_fwd.default, torch.ops.foundry_kernels.log_probs_bwd.default
)
#: Makes logits of some of the classes their gradient, in place.
log_probs_bwd_classes_ = torch.ops.foundry_kernels.log_probs_bwd_classes_.default
