"""A norm and an MLP that are recognised, and modules that differ from them in one detail, which must be left."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FLAG = False


class Norm(nn.Module):
    def __init__(self, width: int = 48, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Mlp(nn.Module):
    def __init__(self, width: int = 48, inner: int = 80) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def scale(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def made(base: type[nn.Module], forward: str, arguments: str = "x", **parts: Any) -> nn.Module:
    """A module of a class derived from `base`, whose forward is this, with these attributes besides."""
    home: dict[str, Any] = {"base": base, "torch": torch, "F": F, "time": time, "scale": scale, "FLAG": FLAG}
    exec(f"class Planted(base):\n    def forward(self, {arguments}):\n        {forward}", home)
    module: nn.Module = home["Planted"]()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


NORM = "return (x.float() * scale(x, self.eps)).to(x.dtype) * self.weight"
MLP = "return self.down(self.act(self.gate(x)) * self.up(x))"
#: Other forwards of a norm.
NORMS = {
    "eps outside of the root":
        "return (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype) * self.weight",
    "a root that is rounded": "return x * scale(x, self.eps).to(x.dtype) * self.weight",
    "never wide": "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight",
    "a float32 result": "return x.float() * scale(x, self.eps) * self.weight.float()",
    "an offset": NORM + " + 1e-3",
    "an offset of the weight": "return (x.float() * scale(x, self.eps) * (self.weight.float() + 1.001)).to(x.dtype)",
    "a clamp": f"y = {NORM[7:]}; return y.clamp(-20, 20)",
    "an eps that clamps":
        "return (x.float() * x.float().pow(2).mean(-1, keepdim=True).clamp_min(self.eps).rsqrt()).to(x.dtype)"
        " * self.weight",
    "a choice by value": f"y = {NORM[7:]}; return torch.where(x > 1e4, x, y)",
    "a residual": NORM + " + x",
    "the weight twice": NORM + " * self.weight",
    "another dimension, which of rows is the last":
        "return (x.float() * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + self.eps)).to(x.dtype) * self.weight",
    "all dimensions": "return (x.float() * torch.rsqrt(x.float().pow(2).mean() + self.eps)).to(x.dtype) * self.weight",
    "a sum":
        "return (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight",
    "the variance of a sample":
        "w = x.float(); y = (w - w.mean(-1, keepdim=True)) * torch.rsqrt(w.var(-1, keepdim=True) + self.eps);"
        " return (y * self.weight).to(x.dtype)",
    "a count": "self.calls = 1; return super().forward(x)",
    "a clock": "y = super().forward(x); return y if time.time() > 0 else -y",
    "a random number": "return super().forward(x) + 0 * torch.rand(())",
    "a flag": "return x if FLAG else super().forward(x)",
    "in place, of a float32 x": "y = x.float(); y *= scale(x, self.eps); return y.to(x.dtype) * self.weight",
    "a fixed width": "return (x.view(-1, 48).float() * scale(x, self.eps)).to(x.dtype) * self.weight",
    "a choice by size": "return x if x.shape[0] == 1000 else super().forward(x)",
    "a choice by a sum": "return x if x.sum() == 1000 else super().forward(x)",
    "another in training": "y = super().forward(x); return y * 2 if self.training else y",
    "no gradient of the root": "return (x.float() * scale(x, self.eps).detach()).to(x.dtype) * self.weight",
    "a dictionary": "return {'y': super().forward(x)}",
    "a loop": "for _ in range(1): x = super().forward(x)\n        return x",
}  # fmt: skip
#: Other forwards of an MLP.
MLPS = {
    "another by size": f"{MLP} if len(x) != 1 else self.down(self.up(x))",
    "both activated": "return self.down(self.act(self.gate(x)) * self.act(self.up(x)))",
    "the activation of a sum": "return self.down(self.act(self.gate(x) + self.up(x)) * self.up(x))",
    "a scale": MLP + " * 1.001",
    "a shifted factor": "return self.down(self.act(self.gate(x)) * (self.up(x) + 1e-3))",
    "a clamped gate": "return self.down(self.act(self.gate(x).clamp(max=20)) * self.up(x))",
    "the input added": "return x + self.down(self.act(self.gate(x)) * self.up(x))",
    "a dropout of its own": "return F.dropout(super().forward(x), 0.1, self.training)",
    "a layer that is not called": "return F.linear(self.act(self.gate(x)) * self.up(x), self.down.weight)",
    "another slope": "gate = self.gate(x); return self.down(gate * torch.sigmoid(1.01 * gate) * self.up(x))",
    "an attribute that is not there": MLP + " * self.multiplier",
    "two results": "return super().forward(x), x",
}


def hooked(module: nn.Module, part: str = "") -> nn.Module:
    module.get_submodule(part).register_forward_hook(lambda module, inputs, y: y + 1)
    return module


def buffered() -> nn.Module:
    module = Norm()
    module.register_buffer("seen", torch.zeros(()))
    return module


def replaced() -> nn.Module:
    module = Norm()
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


#: What is left: what makes a module of each.
LEFT: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(made, Norm, forward) for name, forward in NORMS.items()},
    **{name: partial(made, Mlp, forward) for name, forward in MLPS.items()},
    "a parameter that is not used": lambda: made(Norm, NORM, shift=nn.Parameter(torch.zeros(48))),
    "a buffer": buffered,
    "a tensor that is no parameter": lambda: made(Norm, "return super().forward(x) * self.ones", ones=torch.ones(48)),
    "a dropout where no form has one": lambda: made(
        Mlp, "return self.down(self.drop(self.act(self.gate(x))) * self.up(x))", drop=nn.Dropout(0.1)
    ),
    "a norm within": lambda: made(
        Mlp, "return self.down(self.norm(self.act(self.gate(x)) * self.up(x)))", norm=nn.LayerNorm(80)
    ),
    "two inputs": lambda: made(Mlp, MLP + " * scale", "x, scale=1.0"),
    "an activation that clamps": lambda: made(Mlp, MLP, act=nn.Hardtanh()),
    "hooks": lambda: hooked(Norm()),
    "hooks of an MLP": lambda: hooked(Mlp()),
    "hooks of an activation": lambda: hooked(Mlp(), "act"),
    "a forward of its own": replaced,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(Norm(), "weight", dim=0),
}
