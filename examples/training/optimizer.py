"""The optimizer and learning-rate schedule of `train.py`, both from torch."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR


def make_optimizer(model: nn.Module, lr: float) -> AdamW:
    """AdamW with weight decay on matrices only. torch's fused step supports CPU and CUDA."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def make_schedule(optimizer: AdamW, steps: int, warm_up: int | None = None) -> SequentialLR:
    """Linear warm-up over `warm_up` steps (None: a tenth) to the optimizer's rate, then cosine decay to a tenth of it.
    Without warm-up the first step has the full rate."""
    warm_up, lr = max(1, steps // 10 if warm_up is None else warm_up), optimizer.defaults["lr"]
    rise = LinearLR(optimizer, start_factor=1.0 / warm_up, total_iters=warm_up - 1)
    fall = CosineAnnealingLR(optimizer, T_max=max(1, steps - warm_up), eta_min=0.1 * lr)
    return SequentialLR(optimizer, [rise, fall], milestones=[warm_up])
