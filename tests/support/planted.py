"""Classes that equal a norm or an MLP but for one detail, which must be left; and forms that must be recognised."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FLAG = False


class Norm(nn.Module):
    """A norm that is recognised as it is; below, one detail of it is another."""

    def __init__(self, width: int = 48, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Mlp(nn.Module):
    """An MLP that is recognised as it is."""

    def __init__(self, width: int = 48, inner: int = 80) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def scale(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


class EpsOutside(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype) * self.weight


class RoundedFirst(Norm):
    """The root is rounded to the dtype of x before it multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        return x * scale(x, self.eps).to(x.dtype) * self.weight


class NeverWide(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Wide(Norm):
    """Its result is float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * scale(x, self.eps) * self.weight.float()


class Offset(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * scale(x, self.eps)).to(x.dtype) * self.weight + 1e-3


class WeightOffset(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * scale(x, self.eps) * (self.weight.float() + 1.001)).to(x.dtype)


class Clamped(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return ((x.float() * scale(x, self.eps)).to(x.dtype) * self.weight).clamp(-20, 20)


class ClampedEps(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * x.float().pow(2).mean(-1, keepdim=True).clamp_min(self.eps).rsqrt()).to(
            x.dtype
        ) * self.weight


class Where(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = (x.float() * scale(x, self.eps)).to(x.dtype) * self.weight
        return torch.where(x > 1e4, x, y)


class Residual(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * scale(x, self.eps)).to(x.dtype) * self.weight + x


class Twice(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * scale(x, self.eps)).to(x.dtype) * self.weight * self.weight


class OverAnotherDimension(Norm):
    """Of rows of two dimensions it is the norm."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class OverAll(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean() + self.eps)).to(x.dtype) * self.weight


class Summed(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Unbiased(Norm):
    """A LayerNorm with the variance of a sample."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y = (wide - wide.mean(-1, keepdim=True)) * torch.rsqrt(wide.var(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class Extra(Norm):
    """It has a parameter that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(48))


class Buffered(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))


class Counting(Norm):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Clock(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if time.time() > 0 else -y


class Random(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * torch.rand(())


class Flagged(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x if FLAG else super().forward(x)


class InPlace(Norm):
    """Of a float32 x, which `float` returns itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y *= scale(x, self.eps)
        return y.to(x.dtype) * self.weight


class Raising(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.view(-1, 48).float() * scale(x, self.eps)).to(x.dtype) * self.weight


class BySize(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == 1000 else super().forward(x)


class ByValue(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() == 1000 else super().forward(x)


class InTraining(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.training else y


class Detached(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * scale(x, self.eps).detach()).to(x.dtype) * self.weight


class Dictionary(Norm):
    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x)}


class Looping(Norm):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1):
            x = super().forward(x)
        return x


class Keeping(Norm):
    """It keeps a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.ones = torch.ones(48)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.ones


class SwappedBySize(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) if len(x) != 1 else self.down(self.up(x))


class Both(Mlp):
    """Both factors are activated."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.act(self.up(x)))


class OtherHalf(Mlp):
    """The activation is of another input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x) + self.up(x)) * self.up(x))


class Scaled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * 1.001


class ShiftedUp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * (self.up(x) + 1e-3))


class ClampedGate(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x).clamp(max=20)) * self.up(x))


class AddedInput(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.gate(x)) * self.up(x))


class DropsOut(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class DropsGate(Mlp):
    """A dropout where no form has one."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.gate(x))) * self.up(x))


class Normed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(80)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.act(self.gate(x)) * self.up(x)))


class OwnWeight(Mlp):
    """It does not call its layer, which may be wrapped."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.act(self.gate(x)) * self.up(x), self.down.weight)


class OtherSlope(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(1.01 * gate) * self.up(x))


class TwoResults(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class TwoInputs(Mlp):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * scale


class DeepActivation(Mlp):
    """Its activation clamps."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Hardtanh()  # type: ignore[assignment]


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def with_hooked_activation() -> nn.Module:
    module = Mlp()
    module.act.register_forward_hook(lambda module, inputs, y: y + 1)
    return module


def replaced() -> nn.Module:
    module = Norm()
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


#: What is left: a module each.
LEFT: dict[str, Any] = {
    **{cls.__name__: cls for base in (Norm, Mlp) for cls in base.__subclasses__()},
    "hooks": lambda: hooked(Norm()),
    "hooks of an MLP": lambda: hooked(Mlp()),
    "hooks of an activation": with_hooked_activation,
    "a forward of its own": replaced,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(Norm(), "weight", dim=0),
}
