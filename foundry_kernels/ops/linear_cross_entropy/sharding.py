"""The dimensions of the tensors of the kernels' operators."""

from foundry_kernels.ops._linear_loss.sharding import rules
from foundry_kernels.ops.linear_cross_entropy.loss import LOSS

OPERATORS, sharding = rules(LOSS, class_weight="v")
UNSHARDED = ("accumulate_product_", "accumulate_product24_")
