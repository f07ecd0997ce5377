"""Log-probabilities of the compiled extension: `csrc/torch/log_probs*.cpp` over `csrc/cpu/log_probs.*`."""

import torch
from torch import Tensor

from foundry_kernels.ops.log_probs.options import LogProbsOptions

_OPERATOR = torch.ops.foundry_kernels.log_probs.default
#: Makes logits of some of the classes their gradient, in place.
log_probs_bwd_classes_ = torch.ops.foundry_kernels.log_probs_bwd_classes_.default


def log_probs(logits: Tensor, target: Tensor, options: LogProbsOptions) -> tuple[Tensor | None, ...]:
    wanted = (options.return_entropy, options.return_lse, options.return_stats)
    return options.requested(*_OPERATOR(logits, target, *options.operator_args(), *wanted))
