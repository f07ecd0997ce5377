"""The dimensions of the tensors of the kernels' operators."""

from foundry_kernels.ops._linear_loss.sharding import rules
from foundry_kernels.ops.linear_kl_div.loss import LOSS

OPERATORS, sharding = rules(
    LOSS, teacher_hidden="...e", teacher_weight="ve", teacher_bias="v", teacher_logits="...v", teacher_ids="...k",
    teacher_log_probs="...k",
)  # fmt: skip
