"""The model and the operations on several devices, with PyTorch's own tools.

Data parallelism needs nothing from this module: ``fully_shard`` and ``DistributedDataParallel`` take the model as it
is. This package holds the plan for tensor parallelism, expert parallelism, context parallelism with its ring attention,
and the rules by which DTensor runs the kernels' operators (`foundry_kernels.distributed.sharding`), registered by
importing it or by the first call with a DTensor.

    mesh = init_device_mesh("cuda", (8,))
    parallelize_module(model, mesh, tensor_parallel_plan(model, mesh))
"""

from foundry_kernels.distributed import sharding as sharding
from foundry_kernels.distributed.context import context_parallel
from foundry_kernels.distributed.experts import expert_parallel
from foundry_kernels.distributed.linear_attention import sharded_gated_delta_rule, sharded_short_conv1d, sharded_ssd
from foundry_kernels.distributed.plan import (
    HeadParallelNorm,
    SequenceParallelNorm,
    VocabularyParallel,
    tensor_parallel_plan,
)
from foundry_kernels.distributed.ring import ring_attention
from foundry_kernels.distributed.zigzag import gather_sequence, sequence_positions, shard_sequence

__all__ = [
    "HeadParallelNorm",
    "SequenceParallelNorm",
    "VocabularyParallel",
    "context_parallel",
    "expert_parallel",
    "gather_sequence",
    "ring_attention",
    "sequence_positions",
    "shard_sequence",
    "sharded_gated_delta_rule",
    "sharded_short_conv1d",
    "sharded_ssd",
    "tensor_parallel_plan",
]
