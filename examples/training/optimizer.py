"""The optimizer of `train.py` and its learning rate, both torch's own."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR


def make_optimizer(model: nn.Module, lr: float) -> AdamW:
    """AdamW with weight decay on matrices only; torch has its fused step on the CPU and on CUDA."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def make_schedule(optimizer: AdamW, steps: int, warm_up: int | None = None) -> SequentialLR:
    """Linear warm-up over so many of the steps (None: a tenth), then a cosine down to a tenth of the optimizer's rate,
    which the first step has where there is no warm-up."""
    warm_up, lr = max(1, steps // 10 if warm_up is None else warm_up), optimizer.defaults["lr"]
    rise = LinearLR(optimizer, start_factor=1.0 / warm_up, total_iters=warm_up - 1)
    fall = CosineAnnealingLR(optimizer, T_max=max(1, steps - warm_up), eta_min=0.1 * lr)
    return SequentialLR(optimizer, [rise, fall], milestones=[warm_up])
