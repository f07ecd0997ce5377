"""The dimensions of the tensors of the kernels' operators."""

from foundry_kernels.ops._linear_loss.sharding import rules
from foundry_kernels.ops.linear_log_probs.loss import LOSS

OPERATORS, sharding = rules(LOSS)
