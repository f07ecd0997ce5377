"""Cross-entropy of the compiled extension: `csrc/torch/cross_entropy.cpp` over `csrc/{cpu,cuda}/cross_entropy.*`."""

import torch

cross_entropy = torch.ops.foundry_kernels.cross_entropy.default
#: Makes logits of some of the classes their gradient, in place; on the CPU.
cross_entropy_bwd_classes_ = torch.ops.foundry_kernels.cross_entropy_bwd_classes_.default
